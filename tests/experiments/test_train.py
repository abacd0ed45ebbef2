"""The training program as it is called: relative paths, and mistakes that are found before anything is claimed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import ml_collections
import pytest
from absl import flags
from etils import epath

import specjax
from experiments import _main, train
from specjax import build
from specjax.checkpoints import load_target
from specjax.checkpoints.rundir import RunDirectory
from tests.experiments.programs import ROOT
from tests.training import common


@pytest.fixture
def here(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a target and text; `runs/x` in it is the run directory."""
    shutil.copytree(tiny / "target", tmp_path / "target")
    lines = [json.dumps(dataclasses.asdict(answer)) for answer in common.answers(40)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECJAX_DATA", str(tmp_path))
    monkeypatch.setattr(_main, "workdir", lambda: epath.Path("runs/x"))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train"])
    return tmp_path


def config(**changes: object) -> ml_collections.ConfigDict:
    small = {
        "data.text": "answers.jsonl",
        "data.held_out_text": "answers.jsonl",
        "data.held_out_rows": 2,
        "data.row_length": 64,
        "objective.layers": (0,),
        "objective.intermediate_size": 16,
        "objective.draft_vocab": 16,
        "train.batch": 2,
        "train.steps": 2,
        "train.eval_every": 1,
        "optimizer.steps": 8,
        "optimizer.warmup": 1,
    }
    fields = {name.replace("__", "."): value for name, value in changes.items()}
    return build.load_config(f"{ROOT}/configs/lm.py", "target", overrides=small | fields)


def test_a_relative_workdir_is_trained_in_resumed_started_from_and_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.main(config())
    run = RunDirectory(here / "runs" / "x")
    assert run.checkpointed == 2 and (run.path / "drafter" / "config.json").exists()
    train.main(config(train__steps=4))
    assert run.checkpointed == 4
    assert [row["step"] for row in run.metrics() if "greedy/loss" in row] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(_main, "workdir", lambda: epath.Path("runs/y"))
    train.main(config(init_from="runs/x"))
    first, best = RunDirectory("runs/y").metrics()[0], build.best_params("runs/x")[1]
    assert first["greedy/loss"] == pytest.approx(best["greedy/loss"])
    target = load_target("target")
    assert specjax.load_drafter("runs/x", target).name == "draft_model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__best": "greedy/foo"}, "best='greedy/foo' names no figure of 'greedy'; it has greedy/loss, greedy/m"),
        ({"train__best": "foo/match"}, "best='foo/match' names no held-out set"),
        ({"train__precision": "foo"}, "precision='foo'; expected 'float32' or 'default'"),
        ({"init_from": "nope"}, "nope is no run directory: it has no config.json"),
        ({"init_from": "failed"}, "init_from='failed' has no finished checkpoint: give a run that was trained"),
        ({"optimizer__rates": (("nope", 0.1),)}, "rates: no parameter lies at 'nope'; there are final_norm/weight"),
        ({"optimizer__clip": -1.0}, "clip=-1.0; expected a finite number of 0 or more"),
        ({"data__held_out_rows": 0}, "held_out_rows=0; expected at least 1"),
        ({"data__held_out_rows": -1}, "held_out_rows=-1; expected at least 1"),
        ({"data__row_length": 1}, "row_length=1; expected at least 2"),
        ({"data__row_length": -5}, "row_length=-5; expected at least 2"),
        ({"data__row_length": 3}, "no position of the rows to train on .* carries loss"),
    ],
)
def test_a_mistake_is_found_before_the_directory_is_claimed(here: Path, changes: dict, message: str) -> None:
    RunDirectory("failed").claim({})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train.main(config(**changes))
    assert not list((here / "runs" / "x").iterdir())


def test_a_start_that_failed_after_the_claim_leaves_the_directory_to_the_corrected_command(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("specjax.training.trainer.Trainer._save", lambda *_: (_ for _ in ()).throw(MemoryError()))
        train.main(config(optimizer__learning_rate=1e9))
    assert RunDirectory("runs/x").config()["optimizer"]["learning_rate"] == 1e9
    train.main(config())
    assert RunDirectory("runs/x").config()["optimizer"]["learning_rate"] != 1e9
    with pytest.raises(ValueError, match="optimizer.learning_rate: run has"):
        train.main(config(optimizer__learning_rate=1e9))


def test_a_workdir_that_cannot_be_written_is_found_before_any_text_is_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "file").write_text("")
    monkeypatch.setattr(_main, "workdir", lambda: epath.Path("file/x"))
    message = "the workdir file/x cannot be written .*give another --workdir"
    with pytest.raises(PermissionError, match=message):
        train.main(config(data__text="nowhere.jsonl"))
    with pytest.raises(PermissionError, match=message):
        specjax.train(config(data__text="nowhere.jsonl"), "file/x", data=here)
    with pytest.raises(ValueError, match="workdir is empty"):
        specjax.train(config(), "", data=here)
