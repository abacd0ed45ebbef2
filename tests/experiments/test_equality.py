from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import equality
from specjax import build
from specjax.evaluation.contenders import LoopContender


def tiny_config(tiny: Path, **more):
    options = {
        "target.source": f"{tiny}/target",
        "rows.draft.source": f"{tiny}/draft",
        "rows.draft.num_nodes": 2,
        "prompts.shipped.source": "shipped:writing",
        "only": ("autoregressive", "draft"),
        "batches": (1, 3),
        "max_new_tokens": 8,
        "layout": "plain",
    }
    return build.load_config("configs/equality.py", "quick", options | more)


def test_equal_texts_are_stored_as_such(
    tiny: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPECJAX_DATA", raising=False)
    equality.main(tiny_config(tiny))
    assert "SPECJAX_DATA is not set: the prompts 'spec_bench' are left out" in capsys.readouterr().out
    found = json.loads((in_workdir / "equality.json").read_text())
    assert found["meta"]["schema"] == "specjax.equality/1"
    assert [(r["label"], r["batch"]) for r in found["rows"]] == [("draft", 1), ("autoregressive", 3), ("draft", 3)]
    for row in found["rows"]:
        assert (row["prompts"], row["equal"], row["near_ties"], row["different"]) == (2, 2, [], [])
        assert row["tokens"] == 16


def test_a_wrong_token_is_found_stored_and_an_error(
    tiny: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    honest = LoopContender.complete_all

    def planted(self, requests, batch):
        done, took = honest(self, requests, batch)
        if self.info.label == "draft":
            tokens = list(done[1].tokens)
            tokens[3] = (tokens[3] + 1) % 250
            done[1] = dataclasses.replace(done[1], tokens=tuple(tokens))
        return done, took

    monkeypatch.setattr(LoopContender, "complete_all", planted)
    monkeypatch.delenv("SPECJAX_DATA", raising=False)
    with pytest.raises(ValueError, match="greedy text differs .*: draft at batch 1 on shipped"):
        equality.main(tiny_config(tiny, batches=(1,)))
    (row,) = json.loads((in_workdir / "equality.json").read_text())["rows"]
    assert row["equal"] == 1
    (fault,) = row["different"]
    assert fault["prompt"] == "writing-02" and fault["position"] == 3 and fault["gap"] > 1e-3


def test_settings_are_checked(tiny: Path, in_workdir: Path) -> None:
    with pytest.raises(ValueError, match="batches="):
        equality.main(tiny_config(tiny, batches=(0,)))
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        equality.main(tiny_config(tiny, max_new_tokens=0))
    with pytest.raises(ValueError, match="no row of the drafter autoregressive"):
        equality.main(tiny_config(tiny, only=("draft",)))
