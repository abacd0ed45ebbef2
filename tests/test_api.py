"""The short calls that measure and train; those that decode are tested in tests/decoding and tests/evaluation."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specjax
from specjax.checkpoints import save_target
from specjax.drafting import DraftModel
from specjax.drafting.registry import Drafting
from specjax.models import Target
from specjax.testing import noisy_draft, tiny_target
from tests.training import common


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=1, width=16)


@pytest.fixture(scope="module")
def drafting(target: Target) -> Drafting:
    return Drafting("draft_model", DraftModel(target.config, 2), noisy_draft(target, 0.1), {})


def test_benchmark(target: Target, drafting: Drafting, capsys: pytest.CaptureFixture[str]) -> None:
    rows = specjax.benchmark(target, {"mine": drafting}, ["Say hello."], max_new_tokens=8, repeats=1)
    found = {row["label"]: row for row in rows if row["category"] == "all"}
    assert set(found) == {"autoregressive", "mine"}
    assert found["mine"]["method"] == "draft_model" and found["mine"]["rule"] == "greedy"
    assert found["mine"]["matches_baseline"] and found["mine"]["tau"] > 1 and found["mine"]["speedup"] > 0
    assert {row["category"] for row in rows} >= {"all", "own"}
    assert "mine" in capsys.readouterr().out


def test_benchmark_with_penalties_and_suppression(target: Target, drafting: Drafting) -> None:
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {40: 3.0}, "suppress_tokens": (0, 41)}
    rows = specjax.benchmark(
        target, {"mine": drafting}, ["Say hello."], max_new_tokens=8, repeats=1, show=False, **options
    )
    (found,) = (row for row in rows if row["label"] == "mine" and row["category"] == "all")
    assert found["matches_baseline"] and found["repetition_penalty"] == 1.2 and found["suppress_tokens"] == [0, 41]
    # No end of sequence: it is suppressed.
    assert found["new_tokens"] == 8


def test_benchmark_refuses(target: Target, drafting: Drafting) -> None:
    with pytest.raises(ValueError, match="expected at least one, and none labelled 'autoregressive'"):
        specjax.benchmark(target, {"autoregressive": drafting})
    with pytest.raises(ValueError, match="expected at least one"):
        specjax.benchmark(target, {})
    with pytest.raises(ValueError, match="no prompts named 'shiped'.*did you mean 'shipped'"):
        specjax.benchmark(target, drafting, "shiped")
    with pytest.raises(ValueError, match="suppress_tokens=5; expected token ids"):
        specjax.benchmark(target, drafting, ["x"], suppress_tokens=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="repeats=0; expected at least 1"):
        specjax.benchmark(target, drafting, ["x"], repeats=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"draftings": None}, "draftings=None; expected what load_drafter returns, or several by label"),
        ({"draftings": {"mine": 5}}, "the drafter 'mine' is 5; expected what load_drafter returns"),
        ({"prompts": 5}, "prompts=5; expected user turns, or the name of a set of prompts"),
        ({"repeats": 1.5}, "repeats=1.5; expected at least 1, a whole number"),
        ({"batch": "2"}, "batch='2'; expected at least 1, a whole number"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5; expected at least 1, a whole number"),
        ({"target": "smollm2"}, "the target is 'smollm2'; expected what load_target returns"),
        ({"long_prompts": "cut"}, "long_prompts='cut'; expected one of error, skip"),
        ({"prompts": ["word " * 1000]}, "or set long_prompts='skip' to leave such prompts out"),
    ],
)
def test_benchmark_of_what_is_none(changes: dict, says: str, target: Target, drafting: Drafting) -> None:
    asked = {"target": target, "draftings": drafting, "prompts": ["x"]} | changes
    with pytest.raises(ValueError, match=re.escape(says)):
        specjax.benchmark(**asked)


def test_benchmark_skips_long_prompts_where_it_is_told_to(target: Target, drafting: Drafting) -> None:
    prompts = ["Say hello.", "word " * 1000]
    rows = specjax.benchmark(target, drafting, prompts, max_new_tokens=2, repeats=1, long_prompts="skip", show=False)
    assert {row["prompts"] for row in rows if row["category"] == "all"} == {1}


def test_what_is_no_target_no_drafter_and_no_seed(target: Target, drafting: Drafting) -> None:
    with pytest.raises(ValueError, match="the target is 'smollm2'; expected what load_target returns"):
        specjax.generate("smollm2", drafting, "a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the drafter is 'prompt_lookup'; expected what load_drafter returns"):
        specjax.generate(target, "prompt_lookup", "a")  # type: ignore[arg-type]
    for name in ("prompt_lookup", "smollm2-135m-distilled"):
        with pytest.raises(ValueError, match="the target is 'smollm2'; expected what load_target returns"):
            specjax.load_drafter(name, "smollm2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mesh='tp'; expected sizes and presets"):
        specjax.load_target("no/such/model", mesh="tp")  # type: ignore[arg-type]
    for seed in (-1, 1.5, None, 1 << 32):
        with pytest.raises(ValueError, match=f"seed={seed}; expected a whole number in 0..4294967295"):
            specjax.generate(target, drafting, "a", seed=seed)  # type: ignore[arg-type]
    for prompts, said in (
        (None, "prompts=None; expected a text, or a list of them"),
        ([3], "the prompt is 3; expected a text, or messages like"),
        ([[{"content": "a"}]], "expected a text, or messages like"),
        ([[]], "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=said):
            specjax.generate(target, drafting, prompts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stop=None; expected strings that end the text"):
        specjax.generate(target, drafting, "a", stop=None)  # type: ignore[arg-type]
    for budget in ("8", None, float("inf"), 1.5):
        with pytest.raises(ValueError, match="max_new_tokens=.* for prompt 0; expected at least 1, a whole number"):
            specjax.generate(target, drafting, "a", max_new_tokens=budget)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logit_bias of prompt 0 names token 'a'; expected ids in 0.."):
        specjax.generate(target, drafting, "a", logit_bias={"a": 1.0})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="logit_bias has 1: 'b' in row 0; expected a token id and a number"):
        specjax.generate(target, drafting, "a", logit_bias={1: "b"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="logit_bias of token 1 is 1000.* in row 0; expected a finite number"):
        specjax.generate(target, drafting, "a", logit_bias={1: 10**400})
    with pytest.raises(ValueError, match=r"batch=1.5; expected a whole number of rows, at least 1"):
        specjax.generate(target, drafting, "a", batch=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"draws=1.5; expected a whole number"):
        specjax.certify(target, drafting, draws=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"temperature='1'; expected more than 0"):
        specjax.certify(target, drafting, temperature="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tv=2, draws=0, rows=0; expected tv in \(0, 1\]"):
        specjax.certify(target, drafting, tv=2)
    for tv in ("a", None):
        with pytest.raises(ValueError, match=f"tv={tv!r}, draws=0, rows=0; expected tv in .0, 1."):
            specjax.certify(target, drafting, tv=tv)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no such model: None; expected smollm2"):
        specjax.load_target(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logit_bias": [1]}, r"logit_bias=\[1\]; expected numbers by token id"),
        ({"logit_bias": 5}, "logit_bias=5; expected numbers by token id"),
        ({"suppress_tokens": 5}, "suppress_tokens=5; expected token ids"),
        ({"suppress_tokens": None}, "suppress_tokens=None; expected token ids"),
        ({"top_k": np.array([1, 2])}, r"top_k=\[1 2\] in row 0; expected an integer >= 0"),
        ({"temperature": np.array([1.0, 2.0])}, r"temperature=.*; expected"),
        ({"rule_options": 5}, "rule_options=5 of rule .*; expected options by name"),
        ({"rule": "math:sqrt"}, "rule 'math:sqrt' makes a float"),
        ({"seed": (-1,)}, "seed=.*-1.*; expected a whole number in 0"),
    ],
)
def test_what_every_call_refuses(target: Target, drafting: Drafting, options: dict[str, Any], said: str) -> None:
    # Nothing is taken from the stream: the call itself refuses.
    for call in (specjax.generate, specjax.stream, specjax.certify):
        prompt = (
            {"prompts": ["a"]} if call is specjax.certify else {"prompt" if call is specjax.stream else "prompts": "a"}
        )
        with pytest.raises(ValueError, match=said):
            call(target, drafting, **prompt, **options)


def test_a_stream_refuses_at_the_call(target: Target, drafting: Drafting) -> None:
    with pytest.raises(ValueError, match="temperature=-1 in row 0; expected a number >= 0"):
        specjax.stream(target, drafting, "a", temperature=-1)
    with pytest.raises(ValueError, match="seed=.1, 2.; expected a whole number in 0"):
        specjax.stream(target, drafting, "a", seed=[1, 2])  # type: ignore[arg-type]


def test_certificates_go_to_a_file_that_can_be_written(target: Target, drafting: Drafting, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "x.json"
    for path, said in (
        (5, "path=5; expected the path of a file to write"),
        (tmp_path, f"path='{tmp_path}' is a directory; give the path of a file"),
        (str(below), f"path='{below}' cannot be written .*; give another path"),
    ):
        with pytest.raises(ValueError, match=said):
            specjax.certify(target, drafting, prompts=["a"], path=path)  # type: ignore[arg-type]


def test_overrides_belong_to_a_path(tmp_path: Path) -> None:
    loaded = specjax.load_config("configs/lm.py", "smollm2")
    with pytest.raises(ValueError, match="overrides are for a config given by its path"):
        specjax.train(loaded, tmp_path / "run", data=tmp_path, overrides={"train.steps": 1})


@pytest.mark.slow
def test_a_draft_is_trained_and_drafts(tmp_path: Path) -> None:
    target = tiny_target(layers=2, width=16)
    save_target(target, tmp_path / "target")
    lines = [json.dumps(dataclasses.asdict(answer)) for answer in common.answers(40)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    changes = {
        "data.text": "answers.jsonl",
        "data.held_out_text": "answers.jsonl",
        "data.held_out_rows": 4,
        "data.row_length": 64,
        "objective.layers": (0, 1),
        "objective.intermediate_size": 32,
        "objective.draft_vocab": 16,
        "train.steps": 4,
        "train.eval_every": 2,
    }
    told: list[int] = []
    made = specjax.train(
        f"configs/lm.py:{tmp_path / 'target'}",
        tmp_path / "run",
        data=tmp_path,
        overrides=changes,
        report=lambda step, values: told.append(step),
    )
    assert made.name == "draft_model" and told[-1] == 4
    plain = specjax.load_drafter("autoregressive", target)
    expected = specjax.generate(target, plain, "the tree runs", max_new_tokens=12).completion.tokens
    assert specjax.generate(target, made, "the tree runs", max_new_tokens=12).completion.tokens == expected
