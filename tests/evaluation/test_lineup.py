from __future__ import annotations

import dataclasses

import jax
import pytest

from specjax import build
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.lineup import Lineup
from specjax.models import Target

ROWS = {
    "autoregressive": {"name": "autoregressive"},
    "draft": {"name": "draft_model", "source": "", "num_nodes": (1, 2)},
    "lookup": {"name": "prompt_lookup", "num_nodes": (2, 5), "max_ngram": 2, "rule": ""},
}


def enlisted(target: Target, **options) -> list[LoopContender]:
    return build.contenders(Lineup(rows=ROWS, **options), target)  # type: ignore[return-value]


def test_rows_are_swept_over_lengths_and_temperatures(target: Target) -> None:
    found = enlisted(target, temperatures=(0.0, 1.0), top_k=9)
    labels = ["autoregressive T=0", "autoregressive T=1"]
    labels += [f"lookup {n} T={t}" for t in (0, 1) for n in (2, 5)]
    assert [c.info.label for c in found] == labels
    assert [c.info.rule for c in found] == ["greedy", "one_hot", "greedy", "greedy", "one_hot", "one_hot"]
    assert [c.loop.drafter.num_nodes for c in found] == [0, 0, 2, 5, 2, 5]
    assert all(c.info.top_k == 9 for c in found)
    assert found[2].loop.drafter.max_ngram == 2


def test_one_name_where_nothing_is_swept(target: Target) -> None:
    rows = {"lookup": {"name": "prompt_lookup", "num_nodes": (3,)}}
    (found,) = build.contenders(Lineup(rows=rows), target)
    assert found.info.label == "lookup" and found.info.num_nodes == 3


def test_a_lossy_rule_is_asked_for_and_says_so(target: Target) -> None:
    row = {"name": "prompt_lookup", "num_nodes": 3, "rule": "threshold", "rule_options": {"bar": 0.5}}
    with pytest.raises(ValueError, match="rule 'threshold' is lossy; use 'greedy'"):
        build.contenders(Lineup(rows={"lookup": row}), target)
    (found,) = build.contenders(Lineup(rows={"lookup": row | {"lossless": False}}), target)
    assert found.info.rule == "threshold (lossy)" and found.loop.rule.bar == 0.5  # type: ignore[attr-defined]


def test_every_row_is_asked_with_penalties_and_biases(target: Target) -> None:
    more = {"min_p": 0.1, "frequency_penalty": 0.5, "logit_bias": ((7, 1.5),), "suppress_tokens": (3,)}
    for found in enlisted(target, temperatures=(0.0, 1.0), **more):
        request = found.info.request((5,), 4, 2)
        assert (request.min_p, request.frequency_penalty, request.logit_bias) == (0.1, 0.5, {7: 1.5})
        assert (request.suppress_tokens, request.id, request.max_new_tokens) == ((3,), 2, 4)
    with pytest.raises(ValueError, match="suppress_tokens of prompt 0 names token 999"):
        enlisted(target, suppress_tokens=(999,))
    peers = Lineup(rows=ROWS | {"hf": {"name": "transformers_greedy"}}, **more)
    with pytest.raises(ValueError, match="the rows hf are transformers', which is asked for plain greedy texts"):
        build.contenders(peers, target)


def test_the_target_is_laid_out_once_for_all(target: Target) -> None:
    found = enlisted(target, layout="packed")
    first = jax.tree.leaves(found[0].weights.target)
    for other in found[1:]:
        assert all(a is b for a, b in zip(first, jax.tree.leaves(other.weights.target), strict=True))
    plain = jax.tree.leaves(enlisted(target)[0].weights.target)
    assert [a.ndim for a in first] != [a.ndim for a in plain]


def test_rows_without_a_source_are_left_out_and_named() -> None:
    lineup = Lineup(rows=ROWS)
    assert lineup.left_out == ["draft"]
    assert list(lineup.kept) == ["autoregressive", "lookup"]
    narrow = dataclasses.replace(lineup, only=("lookup",))
    assert list(narrow.kept) == ["lookup"] and narrow.left_out == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"only": ("lokup",)}, "only names 'lokup'; there are the rows autoregressive, draft, lookup"),
        ({"temperatures": (-0.5,)}, "temperature=-0.5"),
        ({"temperatures": ()}, "temperatures is empty"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"min_p": 1.0}, "min_p=1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"logit_bias": (5, 1.0)}, "logit_bias=.5, 1.0.; expected pairs"),
    ],
)
def test_lineups_out_of_range(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Lineup(rows=ROWS, **wrong)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"name": "promt_lookup"}, "unknown drafter 'promt_lookup'; did you mean 'prompt_lookup'"),
        ({"name": "prompt_lookup", "max_gram": 3}, "drafter 'prompt_lookup' does not take these options"),
        ({"name": "prompt_lookup", "num_nodes": (0,)}, "num_nodes=0"),
        ({"name": "prompt_lookup", "rule": "gready"}, "unknown rule 'gready'; did you mean 'greedy'"),
    ],
)
def test_rows_that_cannot_be_made(target: Target, row: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build.contenders(Lineup(rows={"x": row}), target)


def test_settings_and_lineup_come_from_one_config() -> None:
    config = build.load_config("configs/quickstart.py", "quick", {"seed": 5, "batch": 2})
    settings, lineup = build.settings_from_config(config), build.lineup_from_config(config)
    assert (settings.seed, settings.batch, settings.max_new_tokens) == (5, 2, 16)
    assert lineup.seed == 5 and lineup.layout == "packed" and set(lineup.rows) >= {"autoregressive", "prompt_lookup"}
