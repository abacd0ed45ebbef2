"""The program that holds a checkpoint against transformers sees agreement, and sees faults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import ml_collections
import pytest
from etils import epath

from experiments import _main, check_target
from specjax import build
from specjax.checkpoints import load_target
from specjax.models import graph
from specjax.models.target import Target
from tests.models import tiny

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "check_target.py"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.model("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ml_collections.ConfigDict:
    monkeypatch.setattr(_main, "workdir", lambda: epath.Path(tmp_path))
    made = build.load_config(CONFIG, str(directory))
    made.new_tokens = 8
    made.max_tokens = 64
    (tmp_path / "mine.txt").write_text("The lighthouse keeper had not spoken to anyone in eleven days. " * 20)
    with made.unlocked():
        made.corpora = {"mine": str(tmp_path / "mine.txt"), "shipped": "shipped", "absent": "$SPECJAX_DATA/x.txt"}
    made.corpus_windows = 2
    monkeypatch.delenv("SPECJAX_DATA", raising=False)
    return made


def test_a_good_checkpoint_agrees(
    config: ml_collections.ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_target.main(config)
    assert "agrees with transformers (tolerance 0.0001)" in " ".join(capsys.readouterr().out.split())
    content = json.loads((tmp_path / "check_target.json").read_text())
    assert len(content["rows"]) == 4 and content["meta"]["schema"] == check_target.SCHEMA
    for row in content["rows"]:
        assert row["same_ids"] and row["full"] < 1e-4 and row["cached"] < 1e-4
        assert row["greedy"] in ("equal", "near_tie")
        assert row["perplexity"] == pytest.approx(row["perplexity_transformers"], rel=1e-3)
    sets = {row["set"]: row for row in content["sets"]}
    assert set(sets) == {"mine", "shipped"}  # the third lies where no directory is named
    for row in sets.values():
        assert row["tokens"] == 2 * 63 and row["ratio"] == pytest.approx(1, abs=1e-3) and row["perplexity"] > 1
    assert check_target.set_faults(content["sets"], 1e-3) == []
    spoilt = [sets["mine"] | {"ratio": 1.002}, sets["shipped"] | {"ratio": float("nan")}]
    assert len(check_target.set_faults(spoilt, 1e-3)) == 2


def test_a_tolerance_that_is_not_met_ends_the_program(config: ml_collections.ConfigDict) -> None:
    config.tolerance = 1e-12
    with pytest.raises(ValueError, match="does not compute what transformers does: text 0: logits of the full pass"):
        check_target.main(config)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"target.source": "/no/model"}, FileNotFoundError, "no such model"),
        ({"texts": ("",)}, ValueError, "texts: expected at least one"),
        ({"new_tokens": 0}, ValueError, "new_tokens=0"),
        ({"corpus_windows": 0}, ValueError, "corpus_windows=0"),
        ({"corpora.mine": "/no/such.txt"}, FileNotFoundError, "/no/such.txt"),
    ],
)
def test_bad_settings(
    changes: dict[str, Any], kind: type[Exception], message: str, config: ml_collections.ConfigDict
) -> None:
    config.update_from_flattened_dict(changes)
    with pytest.raises(kind, match=message):
        check_target.main(config)


def test_faults_are_seen(directory: Path, config: ml_collections.ConfigDict) -> None:
    right = load_target(str(directory))
    reference = check_target.Reference(str(directory), right)
    text = config.texts[0]
    ids = right.tokenizer.encode(text)[: config.max_tokens]

    def row(target: Target) -> dict[str, Any]:
        return check_target.compare_text(target, reference, text, ids, config) | {"greedy": "equal"}

    assert check_target.faults([row(right)], 1e-4) == []
    assert check_target.faults([row(right) | {"same_ids": False}], 1e-4) == ["text 0 is cut into other ids"]

    # A rotary base that is off, as a wrong reading of a config would leave it.
    rope = dataclasses.replace(right.config.ropes[0], theta=5000.0)
    spoilt = dataclasses.replace(right.config, ropes=(rope,) * 3)
    seen = check_target.faults([row(dataclasses.replace(right, config=spoilt, graph=graph(spoilt)[0]))], 1e-4)
    assert len(seen) == 2 and "logits of the full pass" in seen[0] and "logits of the cached pass" in seen[1]

    # Weights that are off.
    doubled = dataclasses.replace(right, params=jax.tree.map(lambda leaf: leaf * 2, right.params))
    rows = [row(right)]
    check_target.compare_greedy(doubled, reference, [ids], rows, config)
    assert rows[0]["greedy"] == "different"
    assert "text 0: greedy text parts at token" in check_target.faults(rows, 1e-4)[0]


def test_an_unknown_precision_is_refused_before_anything_is_loaded(
    config: ml_collections.ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "target_from_config", lambda _: pytest.fail("loaded"))
    config.precision = "foo"
    with pytest.raises(ValueError, match="precision='foo'; expected 'float32' or 'default'"):
        check_target.main(config)
