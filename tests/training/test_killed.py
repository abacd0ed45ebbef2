"""Training killed at random moments, some of them within the writing of a checkpoint, ends where it would have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLS = 300, 20

# Imports once, then forks a child for every start: JAX itself starts in the child.
DRIVER = f"""
import os, random, select, signal, sys, time
from pathlib import Path
import numpy as np
import jax
from tests.training.test_trainer import CONFIG, trainer
from specjax.testing import tiny_target

folder, random_delay = Path(sys.argv[1]), random.Random(0)

def start(run, out):
    ready, begun = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            made = trainer(tiny_target(), steps={STEPS}, eval_every=4, log_every=4)
            said = []
            def report(step, values):
                if "train/loss" in values and not said:
                    said.append(os.write(begun, b"x"))
            state = made.run(run, CONFIG, report=report)
            leaves = jax.tree.leaves(state)
            np.savez(out, *[np.asarray(x) for x in leaves])
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(code)
    os.close(begun)
    return child, ready

def ended(child):
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code

assert ended(start(folder / "whole", folder / "whole.npz")[0]) == 0
kills = 0
while kills < {KILLS}:
    child, ready = start(folder / "killed", folder / "killed.npz")
    select.select([ready], [], [], 300)  # It trains now.
    time.sleep(random_delay.uniform(0.0, 0.4))
    os.kill(child, signal.SIGKILL)
    code = ended(child)
    if code == 0:
        break
    kills += 1
    left = [p.name for p in (folder / "killed" / "checkpoints").iterdir()]
    print("left", left, flush=True)
assert ended(start(folder / "killed", folder / "killed.npz")[0]) == 0
print(kills)
"""


@pytest.mark.slow
def test_killed_training_is_training(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) == KILLS, run.stdout
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "killed.npz") as killed:
        assert whole.files == killed.files and len(whole.files) > 10
        for name in whole.files:
            np.testing.assert_array_equal(whole[name], killed[name])
    rows = [
        [{k: v for k, v in row.items() if "second" not in k} for row in RunDirectory(tmp_path / name).metrics()]
        for name in ("whole", "killed")
    ]
    assert rows[0] == rows[1] and rows[0][-1]["step"] == STEPS
