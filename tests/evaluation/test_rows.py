"""Rows from hand-made measurements, where every number can be worked out on paper."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from specjax.decoding import Completion, Segment
from specjax.evaluation.benchmark import Measured, Settings, Turn
from specjax.evaluation.contenders import BatchTime, Info, Preparation
from specjax.evaluation.costs import Costs
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.results import best_rows, select
from specjax.evaluation.rows import DEFINITIONS, summarise

GAMMA_3 = {"num_nodes": 3, "draft_passes": 3}
FIELDS = (
    "method", "rule", "topology", "temperature", "category", "batch", "seed", "prompts", "new_tokens", "tau", "tau_ci",
    "alpha", "alpha_ci", "alpha_by_position", "draft_cost", "tokens_per_second", "speedup", "speedup_ci",
    "speedup_predicted", "matches_baseline", "near_ties", "distinct_bigram_ratio", "target_entropy",
    "draft_param_bytes", "kv_bytes_target", "kv_bytes_draft",
)  # fmt: skip


class Teacher:
    """Says that every law has one nat, and that two tokens are the likeliest of all."""

    def entropy(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        return 1.0

    def logits(self, prompt: tuple[int, ...], tokens: tuple[int, ...], position: int) -> np.ndarray:
        out = np.zeros(50)
        out[5] = out[6] = 9.0  # tie everywhere
        return out


def turn(
    tokens: list[int], prefill: list, decode: list, accepted: list[int], reached: list[int], overlap: list
) -> Turn:
    steps = sum(accepted)
    completion = Completion(
        tuple(tokens),
        "length",
        steps,
        len(tokens) - 1,
        np.array(accepted),
        np.array(reached),
        np.array(overlap, float),
        2,
    )
    return Turn((1, 2), completion, prefill, decode)


def plain(tokens: list[int], prefill: list, decode: list) -> Turn:
    return turn(tokens, prefill, decode, [len(tokens) - 1], [], [])


def batch_time(seconds: float, full: float, rest: float) -> BatchTime:
    """29 tokens of two requests in batches of 2: 20 in `full` seconds, then 7 in `rest`."""
    return BatchTime(seconds, 29, 2, (Segment(full, 10, 2, 20), Segment(rest, 7, 1, 7)))


def varied(count: int) -> list[int]:
    return list(range(10, 10 + count))


@pytest.fixture
def measured() -> Measured:
    """Two prompts. Plain: 10 then 20 tokens/s; the draft (gamma 3) accepts 0, 2 and 3 on the first prompt."""
    first = varied(9)
    looping = [11, 12] * 10
    return Measured(
        prompts=(Prompt("a", "writing", ("x",)), Prompt("b", "code", ("y",))),
        infos=[
            Info("plain", "autoregressive", "greedy"),
            Info("slow", "autoregressive", "greedy"),
            Info("draft", "draft_model", "greedy", draft_param_bytes=7, target_param_bytes=70, **GAMMA_3),
        ],
        preparations=[Preparation(kv_bytes_target=100, kv_bytes_draft=d) for d in (0, 0, 10)],
        turns={
            (0, 0): [plain(first, [0.1, 0.1, 9.0], [0.8, 0.8, 0.8])],
            (0, 1): [plain(looping, [0.1], [0.9])],
            (1, 0): [plain(first, [0.1], [1.7])],
            (1, 1): [plain(looping, [0.1], [1.9])],
            # passes that accept 0, 2, 3 and add one each: 1 + 3 + 4 tokens, after the prefill's own
            (2, 0): [turn(first, [0.1], [0.35], [1, 0, 1, 1], [3, 2, 2], [2.0, 2.0, 1.0])],
            (2, 1): [turn(looping, [0.1], [0.4], [0, 0, 1, 4], [5, 5, 5], [5.0, 5.0, 4.0])],
        },
        batch_times=[[], [], []],
        costs=[Costs(1.0, 1.0, 0.0, 0), Costs(1.0, 1.0, 0.0, 0), Costs(1.0, 1.2, 0.3, 3)],
        skipped_turns=[0, 0, 0],
        repeatable=[True, True, True],
    )


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    return summarise(measured, Settings(max_new_tokens=32), Teacher(), 1e-3)  # type: ignore[arg-type]


def test_every_row_has_the_stable_fields_and_is_json(measured: Measured) -> None:
    rows = rows_of(measured)
    for row in rows:
        assert set(FIELDS) <= set(row), set(FIELDS) - set(row)
    json.dumps(rows, allow_nan=False)
    assert set(DEFINITIONS) <= set(rows[0])


@pytest.mark.pitfall("vllm#16035", "vllm#9565", "EAGLE#160", "EAGLE#195", "EAGLE#147", "sglang#8228")
def test_tau_and_alpha_are_those_of_the_glossary(measured: Measured) -> None:
    (row,) = select(rows_of(measured), label="draft", category="writing")
    assert row["tau"] == pytest.approx(8 / 3)  # 8 tokens in 3 passes, bonus included
    assert row["alpha_by_position"] == pytest.approx([2 / 3, 1.0, 0.5])
    assert row["alpha"] == pytest.approx(5 / 7)
    (everything,) = select(rows_of(measured), label="draft", category="all")
    assert everything["tau"] == pytest.approx((8 / 3 + 19 / 5) / 2), "each prompt weighs the same"
    assert everything["tau_pooled"] == pytest.approx(27 / 8)
    assert everything["tau_ci"][0] <= everything["tau"] <= everything["tau_ci"][1]
    (base,) = select(rows_of(measured), label="plain", category="all")
    assert base["tau"] == 1.0 and base["alpha"] is None and base["alpha_by_position"] == []


def test_acceptance_is_counted_too(measured: Measured) -> None:
    (row,) = select(rows_of(measured), label="draft", category="all")
    # Passes by accepted tokens: 1, 0, 1, 1 on the first prompt, 0, 0, 1, 4 on the second.
    assert row["accepted_histogram"] == [1, 0, 2, 5]
    assert row["acceptance_by_depth"] == pytest.approx([7 / 8, 1.0, 5 / 7])
    assert row["acceptance_by_depth_unconditional"] == pytest.approx([7 / 8, 7 / 8, 5 / 8])
    assert sum(row["acceptance_by_depth_unconditional"]) == pytest.approx(row["tau_pooled"] - 1)
    assert row["acceptance_rate"] == pytest.approx(19 / 24)
    assert row["mbsu"] == pytest.approx(row["tau"] / (3 * 0.1 + 1))
    (base,) = select(rows_of(measured), label="plain", category="all")
    assert base["acceptance_by_depth"] == [] and base["acceptance_rate"] is None and base["mbsu"] is None


def test_speedup_is_the_mean_of_ratios_against_the_fastest_plain_decoding(measured: Measured) -> None:
    rows = rows_of(measured)
    (row,) = select(rows, label="draft", category="all")
    assert row["baseline"] == "plain"
    assert row["speedup"] == pytest.approx((0.9 / 0.45 + 1.0 / 0.5) / 2)
    assert row["tokens_per_second"] == pytest.approx((9 / 0.45 + 20 / 0.5) / 2)
    assert row["speedup_decode"] == pytest.approx((0.8 / 0.35 + 0.9 / 0.4) / 2)
    assert row["step_seconds"] == pytest.approx(0.75 / 8)
    (slow,) = select(rows, label="slow", category="all")
    assert slow["speedup"] == pytest.approx((0.9 / 1.8 + 1.0 / 2.0) / 2)
    assert slow["baseline_over_this"] == pytest.approx(2.0)
    (base,) = select(rows, label="plain", category="all")
    assert base["speedup"] == 1.0 and base["speedup_predicted"] is None
    assert base["tokens_per_second"] == pytest.approx((9 / 0.9 + 20 / 1.0) / 2), "the third repeat is no median"


def test_the_prediction_uses_acceptance_and_costs_but_not_the_row_s_own_time(measured: Measured) -> None:
    (row,) = select(rows_of(measured), label="draft", category="writing")
    expected = 1 + 2 / 3 + 2 / 3 * 1.0 + 2 / 3 * 1.0 * 0.5
    decode = expected / (3 * 0.1 + 1.2)
    assert row["draft_cost"] == pytest.approx(0.1) and row["t_ratio"] == pytest.approx(1.2)
    assert row["speedup_decode_predicted"] == pytest.approx(decode)
    assert row["speedup_predicted"] == pytest.approx(0.9 / (0.1 + 0.8 / decode))
    measured.turns[2, 0][0].decode_seconds = [35.0]
    (slower,) = select(rows_of(measured), label="draft", category="writing")
    assert slower["speedup_predicted"] == pytest.approx(row["speedup_predicted"])
    assert slower["speedup"] < row["speedup"]


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, (1 / 3, 0.5, 0.25)),
        # What these accept is not what the laws of first candidates say.
        ({"rule": "block"}, (2 / 3, 1.0, 0.5)),
        ({"rule": "recursive", "topology": "static_tree"}, (2 / 3, 1.0, 0.5)),
    ],
)
def test_trees_and_other_rules_are_predicted_from_what_they_accept(
    measured: Measured, changes: dict, rates: tuple[float, ...]
) -> None:
    measured.turns[2, 0] = [turn(varied(9), [0.1], [0.35], [1, 0, 1, 1], [3, 2, 2], [1.0, 1.0, 0.5])]
    measured.infos[2] = dataclasses.replace(measured.infos[2], **changes)
    (row,) = select(rows_of(measured), label="draft", category="writing")
    assert row["speedup_decode_predicted"] == pytest.approx((1 + np.cumprod(rates).sum()) / (3 * 0.1 + 1.2))


def test_a_width_that_is_chosen_step_by_step_has_no_prediction(measured: Measured) -> None:
    measured.costs[2] = Costs(1.0, math.nan, 0.3, 3)
    (row,) = select(rows_of(measured), label="draft", category="all")
    assert row["t_ratio"] is row["speedup_predicted"] is row["speedup_decode_predicted"] is None
    assert row["speedup"] == pytest.approx(2.0)


def test_passes_without_a_draft_count_against_the_prediction(measured: Measured) -> None:
    """Lookup that finds nothing in half of its passes cannot expect what the other half accepts."""
    measured.turns[2, 0] = [turn(varied(9), [0.1], [0.35], [2, 0, 0, 2], [2, 2, 2], [2.0, 2.0, 2.0])]
    (row,) = select(rows_of(measured), label="draft", category="writing")
    assert row["alpha"] == 1.0 and row["alpha_by_position"] == [1.0, 1.0, 1.0]
    assert row["speedup_decode_predicted"] == pytest.approx((1 + 3 * 0.5) / (3 * 0.1 + 1.2))


def test_looping_prompts_are_set_apart(measured: Measured) -> None:
    rows = rows_of(measured)
    assert [r["category"] for r in select(rows, label="draft")] == ["all", "all_without_loops", "writing", "code"]
    (without,) = select(rows, label="draft", category="all_without_loops")
    (writing,) = select(rows, label="draft", category="writing")
    assert without["prompts"] == 1 and without["speedup"] == writing["speedup"]
    (code,) = select(rows, label="draft", category="code")
    assert code["distinct_bigram_ratio"] == pytest.approx(2 / 19)


@pytest.mark.parametrize(("token", "matches", "near"), [(6, True, 1), (9, False, 0)])
def test_a_different_token_is_a_near_tie_or_a_fault(measured: Measured, token: int, matches: bool, near: int) -> None:
    same = [5, 5, 5, 5, 5, 5, 5, 5, 5]
    measured.turns[0, 0] = [plain(same, [0.1], [0.8])]
    measured.turns[2, 0] = [turn([5, 5, token, *same[3:]], [0.1], [0.35], [1, 0, 1, 1], [3, 2, 2], [2.0, 2.0, 1.0])]
    rows = rows_of(measured)
    (row,) = select(rows, label="draft", category="all")
    assert (row["matches_baseline"], row["near_ties"]) == (matches, near)
    (found,) = row["divergences"]
    assert (found["prompt"], found["position"], found["other"], found["near_tie"]) == ("a", 2, token, matches)
    (other,) = select(rows, label="draft", category="code")
    assert other["matches_baseline"] is True and other["near_ties"] == 0


def test_later_turns_are_compared_only_where_both_were_asked_the_same(measured: Measured) -> None:
    import dataclasses

    second = turn([9, 9], [0.1], [0.1], [1, 0, 0, 0], [1, 0, 0], [0.0, 0.0, 0.0])
    measured.turns[0, 0].append(plain([8, 8], [0.1], [0.1]))
    measured.turns[1, 0].append(plain([8, 8], [0.1], [0.1]))
    measured.turns[2, 0].append(dataclasses.replace(second, prompt=(1, 2, 3)))
    (row,) = select(rows_of(measured), label="draft", category="all")
    assert row["matches_baseline"] is True and row["turns_not_compared"] == 1
    measured.turns[2, 0][1] = second
    (row,) = select(rows_of(measured), label="draft", category="all")
    assert row["matches_baseline"] is False and row["turns_not_compared"] == 0


def test_sampled_rows_claim_no_equality(measured: Measured) -> None:
    import dataclasses

    measured.infos = [dataclasses.replace(info, temperature=1.0) for info in measured.infos]
    (row,) = select(rows_of(measured), label="draft", category="all")
    assert row["matches_baseline"] is None and row["near_ties"] is None


def test_times_in_one_piece_have_no_decode_speed(measured: Measured) -> None:
    measured.turns[2, 0] = [plain(varied(9), [None], [0.45])]
    measured.turns[2, 1] = [plain([11, 12] * 10, [None], [0.5])]
    measured.costs[2] = None
    (row,) = select(rows_of(measured), label="draft", category="all")
    assert row["speedup"] == pytest.approx(2.0)
    assert row["prefill_seconds"] is None and row["speedup_decode"] is None and row["draft_cost"] is None


def test_above_batch_1_only_all_prompts_have_a_time(measured: Measured) -> None:
    for turns in measured.turns.values():
        for t in turns:
            t.prefill_seconds, t.decode_seconds = [], []
    # By contender and repeat: seconds in all and in the loop; while both rows are at work, and with one left.
    measured.batch_times = [
        [batch_time(2.0, 1.2, 0.3), batch_time(4.0, 2.4, 0.6)],
        [batch_time(5.0, 4.0, 0.5), batch_time(5.0, 4.0, 0.5)],
        [batch_time(1.0, 0.4, 0.1), batch_time(1.0, 0.6, 0.1)],
    ]
    rows = summarise(measured, Settings(max_new_tokens=32, batch=2), Teacher(), 1e-3)  # type: ignore[arg-type]
    (row,) = select(rows, label="draft", category="all")
    assert row["speedup"] == pytest.approx(3.0) and row["speedup_ci"] == [2.0, 4.0]
    assert row["tokens_per_second"] == pytest.approx(29.0) and row["baseline"] == "plain"
    assert row["decode_tokens_per_second"] == pytest.approx((20 / 0.4 + 20 / 0.6) / 2)
    assert row["speedup_decode"] == pytest.approx((3.0 + 4.0) / 2) and row["speedup_decode_ci"] == [3.0, 4.0]
    assert row["live_rows"] == pytest.approx((2 * 10 + 1 * 7) / 17)
    # Prefills as measured, the loop as fast as acceptance and costs say.
    decode = row["speedup_decode_predicted"]
    expected = [2.0 / (0.5 + 1.5 / decode), 4.0 / (0.3 + 3.0 / decode)]
    assert row["speedup_predicted"] == pytest.approx(sum(expected) / 2)
    (writing,) = select(rows, label="draft", category="writing")
    assert writing["speedup"] is None and writing["tau"] == pytest.approx(8 / 3)


@pytest.mark.pitfall("vllm#56101")
def test_a_prompt_that_ends_with_the_prefill_has_no_passes_to_count(measured: Measured) -> None:
    for i, nodes in ((0, 0), (1, 0), (2, 3)):
        measured.turns[i, 0] = [turn([3], [0.1], [0.001], [0] * (nodes + 1), [0] * nodes, [0.0] * nodes)]
    (row,) = select(rows_of(measured), label="draft", category="all")
    assert row["tau"] == pytest.approx(19 / 5) and row["new_tokens"] == 21
    (writing,) = select(rows_of(measured), label="draft", category="writing")
    assert writing["tau"] is None and writing["alpha"] is None and writing["speedup"] == pytest.approx(1.0)


def test_the_best_row_of_each_method(measured: Measured) -> None:
    import dataclasses

    measured.infos.append(dataclasses.replace(measured.infos[2], label="longer", num_nodes=3))
    measured.preparations.append(measured.preparations[2])
    measured.costs.append(measured.costs[2])
    measured.batch_times.append([])
    measured.skipped_turns.append(0)
    measured.repeatable.append(True)
    for p in (0, 1):
        (t,) = measured.turns[2, p]
        measured.turns[3, p] = [dataclasses.replace(t, decode_seconds=[t.decode_seconds[0] / 2])]
    (best,) = best_rows(rows_of(measured))
    assert best["label"] == "longer"
