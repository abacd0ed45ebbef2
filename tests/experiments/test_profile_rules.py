from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from experiments import profile_rules
from specjax import build
from specjax.decoding.tree import from_branching
from specjax.models import graph
from specjax.testing import tiny_target
from tests.training import common


@pytest.mark.slow
def test_every_rule_and_processor_is_timed(in_workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"target.source": "", "vocabularies": (64,), "step_ms": (2.0,), "rules": ("recursive", "block")}
    config = build.load_config("configs/profile_rules.py", "quick", options)
    with config.unlocked():
        config.trees = {"0": (), "3": (1, 1, 1), "4": (2, 1)}
    profile_rules.main(config)
    found = json.loads((in_workdir / "profile_rules.json").read_text())
    assert found["meta"]["schema"] == "specjax.profile_rules/1"
    named = {(row["nodes"], row["kind"], row["name"]) for row in found["rows"]}
    assert (3, "rule", "block") in named and (4, "rule", "block") not in named
    assert (4, "rule", "recursive") in named and (0, "rule", "recursive") in named
    assert {(4, "processor", name) for name in profile_rules.PROCESSORS} <= named
    for row in found["rows"]:
        assert row["seconds"] > 0 and row["share"] == pytest.approx(row["seconds"] / 2e-3)
    assert "of a step" in capsys.readouterr().out


@pytest.mark.parametrize("tie", [False, True])
def test_a_step_is_measured_with_every_vocabulary(tie: bool) -> None:
    target = tiny_target(layers=1, width=16)
    target = common.tied(target) if tie else target
    config = build.load_config("configs/profile_rules.py", "quick", {"layout": "plain", "valid_length": 4})
    for vocab in (300, 100):
        larger = profile_rules.with_vocabulary(target, vocab)
        assert larger.config.head_size == vocab
        shapes = jax.tree.map(lambda x: x.shape, larger.params)
        assert shapes == jax.tree.map(lambda x: x.shape, graph(larger.config)[1])
    assert profile_rules.step_case(config, profile_rules.with_vocabulary(target, 300), from_branching((1,)))() > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rules": ("recursiv",)}, "unknown name 'recursiv' in rules; known: block"),
        ({"step_ms": (1.0, 2.0)}, "expected a time >= 0 for each of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, message, in_workdir: Path) -> None:
    with pytest.raises(ValueError, match=message):
        profile_rules.main(build.load_config("configs/profile_rules.py", "quick", overrides))
