"""The pretraining program at its smallest, from corpus to a target and a drafter that decode together."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import pretrain
from specjax import build
from specjax.checkpoints import load_target
from specjax.decoding import Request, generate, make_sampling
from specjax.evaluation.prompts import prompt_file


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    rng = np.random.default_rng(0)
    words = "the old house stood by a river and nobody had been there for years".split()
    text = " ".join(rng.choice(words, 6000))
    (folder / "text" / "made.txt").write_text(text)
    return folder


@pytest.mark.slow
def test_it_pretrains_exports_and_drafts(prose: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECJAX_DATA", str(prose))
    config = build.load_config("configs/mtp.py", "tiny,heads=3", {"model.hidden_size": 32, "train.steps": 30})
    pretrain.main(config)
    target = load_target(str(in_workdir / "target"), dtype="float32")
    assert target.config.num_layers == 2 and target.tokenizer.decode(target.tokenizer.encode("def f():")) == "def f():"
    prompts = prompt_file(in_workdir / "prompts.jsonl")
    assert {p.category for p in prompts} == {"code", "prose"}
    drafting = build.make_drafter("mtp", target, source=str(in_workdir))
    assert drafting.drafter.num_nodes == 2 and drafting.drafter.config.kind == "independent"
    requests = [Request(tuple(target.tokenizer.encode(p.turns[0])), 24, id=i) for i, p in enumerate(prompts[:2])]
    found = []
    for own in (build.make_drafter("autoregressive", target), drafting):
        loop, weights = build.make_loop(target, own, make_sampling([0.0]))
        found.append(generate(loop, weights, requests, context=target.context, vocab=target.config.vocab_size))
    assert [c.tokens for c in found[0]] == [c.tokens for c in found[1]]
    assert sum(c.emitted for c in found[1]) == sum(c.emitted for c in found[0])


@pytest.mark.parametrize("heads", [1, 4])
def test_the_config_describes_a_small_model(heads: int) -> None:
    config = build.load_config("configs/mtp.py", f"small,heads={heads}")
    shapes = pretrain.model_config(config.model)
    tree = jax.tree.leaves(pretrain.graph(shapes)[1])
    assert sum(int(np.prod(x.shape)) for x in tree) <= 6e6 and config.objective.heads == heads


def test_configs_of_multi_token_prediction_name_what_they_take() -> None:
    with pytest.raises(ValueError, match="unknown argument 'layers=2' of configs/mtp.py; known: small, tiny"):
        build.load_config("configs/mtp.py", "small,layers=2")
    assert build.load_config("configs/mtp.py", "smollm2").objective.name == "mtp"
    assert build.load_config("configs/mtp_benchmark.py", "runs/a,quick").target.source == "runs/a/target"
    with pytest.raises(ValueError, match="unknown argument 'fast' of configs/mtp_benchmark.py; known: quick"):
        build.load_config("configs/mtp_benchmark.py", "runs/a,fast")


@pytest.mark.parametrize("argument", ["", "quick", "runs/a,quick"])
def test_the_config_of_ensembles(argument: str) -> None:
    config = build.load_config("configs/ensembles.py", argument or None)
    lineup = build.lineup_from_config(config)
    assert {"autoregressive", "draft_1", "lookup", "union", "vote", "mixture", "proxy"} <= lineup.kept.keys()
    assert all(row["members"][0]["name"] == "draft_model" for row in lineup.kept.values() if "members" in row)
