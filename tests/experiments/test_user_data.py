"""The programs on a data set of one's own: what is shown before training, and training on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specjax.testing import tiny_target
from tests.experiments import programs

WORDS = "the tree runs a loop and drafts some tokens that it then verifies".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"go {i}"},
                {"role": "assistant", "content": " ".join(WORDS[i % 7 : i % 7 + 4])},
                {"role": "user", "content": "on"},
                {"role": "assistant", "content": "x" * 60 if i == 3 else WORDS[i % 13]},
            ]
        }
        for i in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny_target().tokenizer
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    return [
        f"--config=configs/user_data.py:{folder / 'chats.jsonl'}",
        f"--config.target.source={folder / 'tokenizer'}",
        "--config.data.row_length=96",
        "--config.data.held_out_rows=2",
        f"--config.data.cache={folder / 'tokens'}",
        *more,
    ]


def test_what_is_trained_on_is_shown_with_its_loss_mask(folder: Path) -> None:
    wrong = arguments(folder, "--config.data.dataset.field=text")
    shown, refused = programs.run_all("experiments.inspect_data", [arguments(folder), wrong], folder)
    assert shown.code == 0, shown.err
    assert "40 documents, " in shown.out
    assert "1 of 40 (2.5%) are longer than a row of 96 tokens" in shown.out
    assert shown.out.count("example ") == 3
    # No colours here: brackets around every answer, the role's tag outside, the end of turn inside. One of the three
    # is the conversation that is cut, within its last answer.
    assert shown.out.count("<|start|>assistant\n⟦") == shown.out.count("⟧") == 6
    assert shown.out.count("<|end|>⟧") == 5 and "xx⟧" in shown.out
    assert refused.code == 2 and "has no field 'text'; it has messages" in refused.err
    assert len(list((folder / "tokens").glob("*.npz"))) == 1


@pytest.mark.slow
def test_a_head_trains_on_it_with_the_target_in_the_step(folder: Path, tiny: Path) -> None:
    train = arguments(
        folder,
        f"--config.target.source={tiny / 'target'}",
        f"--workdir={folder / 'run'}",
        "--config.objective.taps=(0,)",
        "--config.objective.intermediate_size=32",
        "--config.objective.draft_vocab=16",
        "--config.objective.steps=2",
        "--config.train.steps=4",
        "--config.train.eval_every=2",
        "--config.train.batch=2",
        "--wandb=offline",
        "--tensorboard",
        "--config.train.profile=(2, 2)",
    )
    [done] = programs.run_all("experiments.train", [train], folder)
    assert done.code == 0, done.err
    assert (folder / "run" / "drafter" / "config.json").exists()
    assert list((folder / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert json.loads((folder / "run" / "wandb.json").read_text())["sent"] == 4
    assert [path.name[-1] for path in sorted((folder / "run" / "tensorboard").iterdir())] == ["0", "2", "4"]
    assert list((folder / "run" / "profile").rglob("*.xplane.pb"))
    assert "no MFU is given: the peak of 'cpu' is not known" in done.out
    assert set(json.loads((folder / "run" / "target.json").read_text())) == {
        "target", "target_config", "tokenizer", "chat_template", "rows", "draft_vocab",
    }  # fmt: skip
