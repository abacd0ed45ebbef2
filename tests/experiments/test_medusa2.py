"""Medusa-2 through the programs: a small target, then target and heads together, decoded with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from experiments import _main, pretrain
from specjax import build
from specjax.checkpoints import load_target
from specjax.decoding import Request, generate, make_sampling


@pytest.mark.slow
def test_a_new_target_with_its_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    words = "the old house stood by a river and nobody had been there for years".split()
    (tmp_path / "text" / "made.txt").write_text(" ".join(np.random.default_rng(0).choice(words, 6000)))
    monkeypatch.setenv("SPECJAX_DATA", str(tmp_path))
    narrow = {"model.hidden_size": 32, "train.steps": 20, "optimizer.steps": 20}
    folders = {name: tmp_path / name for name in ("tiny", "medusa2")}
    for name, config in (
        ("tiny", build.load_config("configs/mtp.py", "tiny", narrow)),
        ("medusa2", build.load_config("configs/medusa2.py", "tiny", narrow | {"init_from": str(folders["tiny"])})),
    ):
        monkeypatch.setattr(_main, "workdir", lambda name=name: epath.Path(folders[name]))
        pretrain.main(config)
    rows = json.loads((folders["medusa2"] / "results.json").read_text())["rows"]
    assert {row["set"] for row in rows} == {"code", "prose"}
    for row in rows:
        assert 1 < row["perplexity_after"] < 1.1 * row["perplexity_before"]
    old, new = (load_target(str(folder / "target"), dtype="float32") for folder in folders.values())
    assert not np.array_equal(old.params["embed"]["embedding"], new.params["embed"]["embedding"])
    choices = ((0,), (1,), (0, 0), (0, 0, 0))
    drafting = build.make_drafter("medusa", new, source=str(folders["medusa2"]), tree="choices", choices=choices)
    texts = [new.tokenizer.encode(text) for text in ("the old house", "def f(x):")]
    requests = [Request(tuple(ids), 16, id=i) for i, ids in enumerate(texts)]
    found = []
    for own in (build.make_drafter("autoregressive", new), drafting):
        loop, weights = build.make_loop(new, own, make_sampling([0.0]))
        found.append(generate(loop, weights, requests, context=new.context, vocab=new.config.vocab_size))
    assert [c.tokens for c in found[0]] == [c.tokens for c in found[1]]


def test_the_config_says_who_is_trained_how() -> None:
    config = build.load_config("configs/medusa2.py")
    assert (config.init_from, config.objective.warmup, config.optimizer.rates) == ("runs/tiny", 10, (("heads", 4.0),))
    assert config.train.steps > config.objective.warmup and config.optimizer.weight_decay == 0.0
    frozen = build.load_config("configs/medusa2.py", "smollm2")
    assert frozen.target.source == "smollm2" and frozen.train.best == "greedy/accepted"
