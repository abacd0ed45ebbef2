"""The training program in two real processes: one drafter at the end, and a killed process does not hang the other."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from specjax.checkpoints import save_target
from specjax.checkpoints.rundir import RunDirectory
from specjax.testing import tiny_target
from specjax.training.data import read_answers
from tests.distributed.processes import Ended, finish, start_program
from tests.training import common

STEPS = 120


def start(folder: Path, run: str, *more: str, count: int = 2) -> list[subprocess.Popen[str]]:
    """Four devices in one process or in two."""
    arguments = [
        *(f"--config=configs/lm.py:{folder / 'target'}", f"--workdir={folder / run}"),
        *("--config.mesh.data=-1", "--config.objective.layers=(0,)"),
        *("--config.objective.draft_vocab=16", "--config.objective.intermediate_size=32", "--config.train.batch=4"),
        *(f"--config.data.text={folder / 'answers.jsonl'}", f"--config.data.held_out_text={folder / 'answers.jsonl'}"),
        *("--config.data.row_length=96", "--config.data.held_out_rows=4", "--config.data.temperature=-1.0"),
        *(f"--config.train.steps={STEPS}", "--config.optimizer.steps=200", "--config.train.eval_every=10"),
    ]
    given = {option.partition("=")[0] for option in more}
    arguments = [option for option in arguments if option.partition("=")[0] not in given] + list(more)
    return start_program("train", arguments, count=count, devices=4 // count)


def losses(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if "second" not in k} for row in RunDirectory(run).metrics()]


def final(run: Path) -> tuple[int, Any]:
    """Step and whole state of the newest checkpoint, as they were saved."""
    options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(run / "checkpoints", options=options, item_handlers=handler) as manager:
        step = manager.latest_step()
        assert step is not None
        shapes = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), manager.item_metadata(step).tree)
        return step, manager.restore(step, args=ocp.args.StandardRestore(shapes))


def prepare(folder: Path) -> None:
    """A target and text to train on."""
    save_target(tiny_target(layers=1, width=16), folder / "target")
    lines = [json.dumps(dataclasses.asdict(answer)) for answer in common.answers(60)]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    prepare(tmp_path)
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
    # The final state bit for bit, which the exported best parameters would not show.
    (step, expected), (again_at, found) = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert step == again_at == STEPS
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_one_process_goes_on_with_the_run_of_two(tmp_path: Path) -> None:
    prepare(tmp_path)
    for run, steps, count in (("moved", 20, 2), ("moved", 40, 1), ("whole", 40, 2)):
        ended = finish(start(tmp_path, run, f"--config.train.steps={steps}", count=count))
        assert {code for code, _, _ in ended} == {0}, ended[0][2]
    (step, expected), (again_at, found) = final(tmp_path / "whole"), final(tmp_path / "moved")
    assert step == again_at == 40
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_at_the_same_step(tmp_path: Path) -> None:
    """Long before the next step that is logged or evaluated."""
    prepare(tmp_path)
    rare = [f"--config.{name}=1000000" for name in ("train.steps", "train.log_every", "train.eval_every")]
    rare += ["--config.optimizer.steps=1000000", "--config.train.profile=(20, 1)"]
    started = start(tmp_path, "run", *rare)
    run, until = RunDirectory(tmp_path / "run"), time.monotonic() + 200
    while not run.profile.exists() and time.monotonic() < until and started[1].poll() is None:
        time.sleep(0.1)
    started[1].send_signal(signal.SIGTERM)
    ended = finish(started, timeout=200)
    assert [code for code, _, _ in ended] == [75, 75], ended[0][2] + ended[1][2]
    assert "interrupted, saved" in ended[0][1]
    assert run.checkpointed is not None and 20 < run.checkpointed < 1000000
    assert [row["step"] for row in run.metrics() if "greedy/match" in row] == [0]


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one(tmp_path: Path) -> None:
    save_target(tiny_target(layers=1, width=16), tmp_path / "target")
    lines = [json.dumps({"source": "s", "id": i, "prompt": f"prompt {i}"}) for i in range(7)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")

    def run(name: str, count: int, *more: str) -> list[Ended]:
        arguments = [
            *(f"--config=configs/regenerate.py:{tmp_path}/target", f"--config.prompts={tmp_path / 'prompts.jsonl'}"),
            *(f"--workdir={tmp_path / name}", "--config.layout=plain", "--config.decode.batch=2"),
            *("--config.decode.part=2", "--config.decode.max_new_tokens=8"),
        ]
        return finish(start_program("regenerate", [*arguments, *more], count=count, devices=2))

    both = run("two", 2, "--config.mesh.data=-1")  # each over its own two devices
    (alone,) = run("one", 1)
    assert [code for code, _, _ in (*both, alone)] == [0, 0, 0], both[0][2] + both[1][2] + alone[2]
    assert "by the first of 2 processes, 7 in all" in both[0][1] and "answers written" not in both[1][1]
    found = [sorted(read_answers(tmp_path / name / "answers"), key=lambda a: a.id) for name in ("one", "two")]
    assert found[0] == found[1] and len(found[0]) == 7
