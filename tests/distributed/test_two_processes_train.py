"""The training program in two real processes: one drafter at the end, and a killed process does not hang the other."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints import save_target
from specjax.checkpoints.rundir import RunDirectory
from specjax.testing import tiny_target
from tests.distributed.test_two_processes import ROOT, free_port
from tests.training import common

STEPS = 120


def start(folder: Path, run: str) -> list[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_DEFAULT_MATMUL_PRECISION": "float32"}
    port = free_port()
    command = [
        *(sys.executable, "-m", "experiments.train", f"--config=configs/lm.py:{folder / 'target'}"),
        *(f"--workdir={folder / run}", "--distributed=explicit", f"--coordinator=127.0.0.1:{port}"),
        *("--num_processes=2", "--config.mesh.data=-1", "--config.objective.layers=(0,)"),
        *("--config.objective.draft_vocab=16", "--config.objective.intermediate_size=32", "--config.train.batch=4"),
        *(f"--config.data.text={folder / 'answers.jsonl'}", f"--config.data.held_out_text={folder / 'answers.jsonl'}"),
        *("--config.data.row_length=96", "--config.data.held_out_rows=4", "--config.data.temperature=-1.0"),
        *(f"--config.train.steps={STEPS}", "--config.optimizer.steps=200", "--config.train.eval_every=10"),
    ]
    return [
        subprocess.Popen(
            [*command, f"--process_id={index}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def finish(started: list[subprocess.Popen[str]], timeout: float = 300) -> list[tuple[int, str, str]]:
    try:
        done = [process.communicate(timeout=timeout) for process in started]
        return [(p.returncode, out, err) for p, (out, err) in zip(started, done, strict=True)]
    finally:
        for process in started:
            process.kill()


def losses(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if "second" not in k} for row in RunDirectory(run).metrics()]


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    save_target(tiny_target(layers=1, width=16), tmp_path / "target")
    lines = [json.dumps(dataclasses.asdict(answer)) for answer in common.answers(60)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    whole = finish(start(tmp_path, "whole"))
    assert [code for code, _, _ in whole] == [0, 0], whole[0][2] + whole[1][2]
    # The first process speaks and exports for all.
    said = [line for line in whole[1][1].splitlines() if line and not line.startswith("[Gloo]")]
    assert "drafter/ is step" in whole[0][1] and not said
    assert (tmp_path / "whole" / "drafter" / "config.json").exists()

    started = start(tmp_path, "killed")
    mark = tmp_path / "killed" / "checkpoints" / "20"
    until = time.monotonic() + 200
    while not mark.exists() and time.monotonic() < until and started[1].poll() is None:
        time.sleep(0.02)
    assert mark.exists()
    started[1].kill()
    (code, _, _), _ = finish(started, timeout=200)
    assert code != 0
    assert not (tmp_path / "killed" / "drafter").exists()
    again = finish(start(tmp_path, "killed"))
    assert [code for code, _, _ in again] == [0, 0], again[0][2]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    files = [sorted((tmp_path / run / "drafter").glob("*.safetensors")) for run in ("whole", "killed")]
    for a, b in zip(*files, strict=True):
        assert np.array_equal(np.frombuffer(a.read_bytes(), np.uint8), np.frombuffer(b.read_bytes(), np.uint8))
