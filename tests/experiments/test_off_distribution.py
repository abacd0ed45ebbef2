"""Degraded drafts: what is degraded, how fluency is counted, and the study as a whole on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import off_distribution
from experiments._degraded import fluency, noisy_draft_model
from specjax import build
from specjax.checkpoints import load_target
from specjax.decoding import make_sampling
from specjax.models import Target, merge


def config(tiny: Path, **more):
    options = {"target.source": f"{tiny}/target", "layout": "plain", "max_new_tokens": 8}
    return build.load_config("configs/off_distribution.py", f"quick,{tiny}/draft", options | more)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return load_target(f"{tiny}/target")


def test_noise_spares_what_the_draft_shares(tiny: Path, target: Target) -> None:
    good = build.make_drafter("draft_model", target, source=f"{tiny}/draft", num_nodes=2)
    noisy = noisy_draft_model(target, f"{tiny}/draft", noise=0.4, num_nodes=2)
    assert noisy.drafter == good.drafter and noisy.name == "draft_model"
    for name in ("embed", "lm_head"):
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), noisy.params[name], good.params[name]))
    ratios = [
        np.std(a - b) / np.std(b)
        for a, b in zip(jax.tree.leaves(noisy.params["layers"]), jax.tree.leaves(good.params["layers"]), strict=True)
        if b.ndim == 2
    ]
    assert ratios and all(ratio == pytest.approx(0.4, rel=0.2) for ratio in ratios)
    with pytest.raises(ValueError, match="noise=-1; expected a number of at least 0"):
        noisy_draft_model(target, f"{tiny}/draft", noise=-1)


def test_perplexity_is_that_of_a_full_pass(tiny: Path, target: Target) -> None:
    drafting = build.make_drafter("draft_model", target, source=f"{tiny}/draft", num_nodes=2)
    loop, weights = build.make_loop(target, drafting, make_sampling([0.0]))
    texts = [((5, 6, 7), (8, 9)), ((11,), (12, 13, 14, 15))]
    losses = []
    for prompt, tokens in texts:
        ids = np.array([[*prompt, *tokens]])
        network = merge(drafting.drafter.graph, drafting.params)
        out = network.full(ids, np.arange(ids.size)[None], np.ones_like(ids), taps=("normed",))
        law = jax.nn.log_softmax(network.logits(out.taps["normed"])[0])
        losses += [-law[len(prompt) + i - 1, token] for i, token in enumerate(tokens)]
    found = fluency(loop, weights, texts)
    assert found.perplexity == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-4) and found.coverage == 1.0


def test_conditions(tiny: Path) -> None:
    whole = build.load_config("configs/off_distribution.py", str(tiny / "draft"))
    settings, lineup = build.settings_from_config(whole), build.lineup_from_config(whole)
    found = list(off_distribution.conditions(whole, settings, lineup))
    assert [(s.template, row.temperatures) for _, s, row in found] == [
        ("chat", (0.0,)), ("chat", (1.0,)), ("plain", (0.0,)), ("plain", (1.0,)),
        ("vicuna", (0.0,)), ("vicuna", (1.0,)),
    ]  # fmt: skip
    greedy, sampled, plain, *_ = (set(row.kept) for _, _, row in found)
    assert sampled - greedy == {"draft T 50%", "draft T 150%", "draft T 200%"} and greedy > {"noise 5%", "draft"}
    assert plain == {"autoregressive", "draft"} and "corpus" not in sampled


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"templates": {"plain": ("darft",)}}, "templates.plain names 'darft'; there are the rows autoregressive"),
        ({"batches": (1, 2)}, "takes one of each"),
        ({"tokens": (2, 3)}, "expected 1 and rising numbers"),
    ],
)
def test_settings_out_of_range(tiny: Path, change: dict, says: str) -> None:
    wrong = config(tiny).unlock()
    for name, value in change.items():
        wrong[name] = value
    with pytest.raises(ValueError, match=says):
        off_distribution.check(wrong)


def row(label: str, speedup: float, nodes: int | None) -> dict:
    return {"label": label, "temperature": 0.0, "speedup": speedup, "planned_nodes": nodes, "draft_perplexity": 9.9}


def test_findings() -> None:
    rows = [row("plain", 1.0, None), row("good", 1.3, 4), row("bad", 0.8, 0), row("early", 0.9, 2)]
    assert off_distribution.findings(rows) == [
        "bad at T = 0: 0.80x with perplexity 9.9; the planner picks no speculation",
        "early at T = 0: 0.90x with perplexity 9.9; the planner would draft 2 tokens",
    ]
    assert off_distribution.findings(rows[:2]) == ["every draft was faster than plain decoding"]


def test_the_verdict() -> None:
    good = row("good", 1.3, 4) | {"draft_perplexity": 5.0, "matches_baseline": True}
    slow = good | {"label": "slow", "speedup": 0.9, "planned_nodes": 0, "draft_perplexity": 9.9}
    babble = slow | {"label": "babble", "draft_perplexity": 500.0}
    plain = row("plain", 1.0, None) | {"draft_perplexity": None, "matches_baseline": True}
    found = off_distribution.judge([plain, good, slow, babble])
    assert found["holds"] and found["fluent_up_to"] == 10.0 and [c["label"] for c in found["cases"]] == ["slow"]
    for wrong in ({"matches_baseline": False}, {"planned_nodes": 2}):
        assert not off_distribution.judge([plain, good, slow | wrong])["holds"]
    assert off_distribution.judge([plain])["cases"] == []


@pytest.mark.slow
def test_the_study(tiny: Path, in_workdir: Path) -> None:
    study = config(tiny).unlock()
    study.templates = {"chat": (), "plain": ("autoregressive", "draft")}
    off_distribution.main(study)
    found = json.loads((in_workdir / "results.json").read_text())
    rows = {r["label"]: r for r in found["rows"] if r["category"] == "all"}
    assert set(rows) == {
        "autoregressive", "draft", "noise 40%", "autoregressive, plain template", "draft, plain template",
    }  # fmt: skip
    assert rows["noise 40%"]["alpha"] < rows["draft"]["alpha"]
    assert rows["noise 40%"]["draft_perplexity"] > rows["draft"]["draft_perplexity"] > 1
    assert all(r["matches_baseline"] for r in rows.values())
    # What pays hangs on measured times; that the planner drafts only where it predicts a gain does not.
    for label in ("draft", "noise 40%", "draft, plain template"):
        assert (rows[label]["planned_nodes"] > 0) == (rows[label]["planned_speedup"] > 1)
    assert set(off_distribution.DEFINED) <= set(found["meta"]["definitions"])
