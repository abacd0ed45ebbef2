"""From text to heads that decode: the programs that store, train and export, then the drafters by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import specjax
from specjax.checkpoints import drafters
from specjax.testing import tiny_target
from tests.experiments import programs
from tests.training import common

TEXT = "answers.jsonl"


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text, its store, and runs that trained Medusa and Hydra on it."""
    folder = tmp_path_factory.mktemp("heads")
    lines = [json.dumps(dataclasses.asdict(answer)) for answer in common.answers(40)]
    (folder / TEXT).write_text("\n".join(lines) + "\n")
    store = [
        f"--config=configs/hidden_states.py:{tiny / 'target'}",
        f"--workdir={folder / 'store'}",
        "--config.store.row_length=96",
        "--config.store.pass_rows=2",
        *(f"--config.parts.{part}.text={folder / TEXT}" for part in ("greedy", "sampled", "train")),
        *(f"--config.parts.{part}.shard_rows=4" for part in ("greedy", "sampled", "train")),
    ]
    [outcome] = programs.run_all("experiments.hidden_states", [store], folder)
    assert outcome.code == 0, outcome.err
    runs = [
        [
            f"--config=configs/{name}.py:{tiny / 'target'}",
            f"--workdir={folder / name}",
            f"--config.data.text={folder / TEXT}",
            f"--config.data.store={folder / 'store' / 'train'}",
            *(f"--config.data.held_out.{part}={folder / 'store' / part}" for part in ("greedy", "sampled")),
            "--config.objective.draft_vocab=16",
            "--config.objective.ranks=3",
            "--config.train.steps=4",
            "--config.train.eval_every=2",
        ]
        for name in ("medusa", "hydra")
    ]
    for outcome in programs.run_all("experiments.train", runs, folder):
        assert outcome.code == 0, outcome.err
        assert "drafter/ is step" in outcome.out
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_calibration_behind_training_counts_the_same(trained: Path, tiny: Path, name: str, tmp_path: Path) -> None:
    case = [
        f"--config=configs/calibrate.py:{tiny / 'target'}",
        f"--config.source={trained / name}",
        f"--config.to={tmp_path / 'to'}",
        f"--config.store={trained / 'store' / 'greedy'}",
        "--config.ranks=3",
    ]
    [outcome] = programs.run_all("experiments.calibrate", [case], tmp_path)
    assert outcome.code == 0, outcome.err
    target = tiny_target(layers=1, width=16)
    mine, theirs = (
        drafters.load_drafter(folder, target).tables["accuracy"] for folder in (tmp_path / "to", trained / name)
    )
    np.testing.assert_allclose(mine, theirs, atol=0.03)  # the saved heads are rounded


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_trained_heads_decode_by_name(trained: Path, name: str) -> None:
    target = tiny_target(layers=1, width=16)
    saved = drafters.load_drafter(trained / name, target)
    assert saved.method == name and saved.config.ranks == 3
    assert saved.info["held_out"]["greedy/match_0"] == pytest.approx(float(saved.tables["accuracy"][0, 0]), rel=1e-2)
    plain = specjax.load_drafter("autoregressive", target)
    expected = specjax.generate(target, plain, "the tree runs", max_new_tokens=24).completion.tokens
    for options in ({}, {"tree": "calibrated", "nodes": 6}, {"tree": "choices", "choices": [(0,), (1,), (1, 0)]}):
        drafter = specjax.load_drafter(str(trained / name), target, **options)
        assert drafter.name == name
        assert specjax.generate(target, drafter, "the tree runs", max_new_tokens=24).completion.tokens == expected
    with pytest.raises(ValueError, match=f"is a head of method '{name}', not"):
        other = {"medusa": "hydra", "hydra": "medusa"}[name]
        specjax.load_drafter(other, target, source=str(trained / name))


def test_a_store_that_cannot_be_written_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ["--config=configs/hidden_states.py:/nowhere", f"--workdir={tmp_path / 'file' / 'x'}"]
    [outcome] = programs.run_all("experiments.hidden_states", [command], tmp_path)
    assert outcome.code == 2 and "file/x cannot be written" in outcome.err and "another --workdir" in outcome.err
