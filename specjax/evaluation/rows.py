"""From what was measured to the rows of `results.json`.

Each prompt weighs the same: tau, alpha, tokens per second and speedup of a row are means over its prompts, and their
intervals are bootstrapped over prompts. `alpha_by_position` and `tau_pooled` pool all passes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax import analysis
from specjax.evaluation.benchmark import Measured, Settings, Turn
from specjax.evaluation.contenders import BatchTime, Info
from specjax.evaluation.costs import Costs
from specjax.evaluation.next_law import compare_texts
from specjax.evaluation.teacher import Teacher

DEFINITIONS = {
    "tau": "tokens per target pass, the target's own token included; the prefill's token and nothing after an end of "
    "text counts; mean over prompts",
    "tau_pooled": "the same, all tokens over all passes",
    "alpha": "mean over verified draft tokens of sum min(p, q) (of p(x) for a chosen token); mean over prompts",
    "alpha_by_position": "the same at each draft position (of a tree, of the first child), all prompts pooled; null "
    "where no pass verified one",
    "accepted_histogram": "target passes by accepted draft tokens that were emitted, from 0",
    "acceptance_by_depth": "counted: passes that accepted a token at a depth over those that accepted all before, all "
    "prompts pooled",
    "acceptance_by_depth_unconditional": "the same over all passes",
    "acceptance_rate": "accepted tokens over draft tokens (of a tree, its nodes), all prompts pooled",
    "mbsu": "tau / (draft_passes * draft bytes / target bytes + 1), the speedup if passes cost the bytes they read",
    "draft_cost": "c, the time of a draft pass over that of a one-token target pass; null where the drafter chooses "
    "its width step by step, and with it the number of its passes",
    "t_ratio": "t(g + 1) / t(1), the verifying target pass over a one-token one; null where the drafter chooses its "
    "width step by step or may stop early, and so are the predicted speedups: they need the passes that ran",
    "tokens_per_second": "new tokens over the seconds of prefill and decoding; mean over prompts",
    "speedup": "tokens per second over those of the fastest plain decoding in the same run at the same temperature, "
    "prefill included in both; mean over prompts of the ratio",
    "baseline_over_this": "plain decoding's tokens per second over this row's; mean over prompts of the ratio",
    "speedup_decode": "the same without prefill",
    "live_rows": "rows at work, mean over the target passes; prompts are repeated up to a multiple of the batch",
    "decode_tokens_per_second": "of the loop, without prefill; mean over prompts. Above batch 1 of the stretches in "
    "which every row was at work",
    "speedup_predicted": "from the row's own acceptance and the costs of draft and target pass timed apart, "
    "E / (draft_passes * c + t_ratio), with the measured prefill added; mean over prompts. E is from the overlap "
    "of the laws for chains that are verified token by token, from counted acceptance for trees and other rules",
    "speedup_decode_predicted": "the same without prefill",
    "matches_baseline": "greedy text equals plain decoding's, or first parts from it at a near-tie (a gap of the two "
    "best logits below near_tie_bound)",
    "target_entropy": "nats, of the target's untempered law at the emitted positions; mean over prompts",
    "distinct_bigram_ratio": "distinct over all adjacent token pairs of a text; a low value means that it loops",
}

# Under these a chain's acceptance at a depth is the overlap of the two laws there.
TOKEN_BY_TOKEN = ("greedy", "one_hot", "recursive", "sequoia", "specinfer", "speculative")


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One contender on one prompt, all turns together.

    Attributes:
        category: of the prompt.
        new_tokens: emitted, the prefills' first tokens included.
        emitted: by target passes.
        steps: target passes.
        prefill: median seconds, NaN where not timed apart.
        decode: median seconds, NaN where not timed apart.
        seconds: median seconds of both, NaN where answers are not timed one by one.
        accepted: `[D + 1]` steps by accepted draft tokens.
        reached: `[D]` steps that verified a token at each depth.
        overlap: `[D]` summed overlap there.
        bigrams: distinct-bigram ratio, mean over turns.
        entropy: mean over turns.
    """

    category: str
    new_tokens: int
    emitted: int
    steps: int
    prefill: float
    decode: float
    seconds: float
    accepted: np.ndarray
    reached: np.ndarray
    overlap: np.ndarray
    bigrams: float
    entropy: float

    @property
    def tau(self) -> float:
        """NaN where the prefill's token was the only one."""
        return self.emitted / self.steps if self.steps else math.nan

    @property
    def alpha(self) -> float:
        """NaN where nothing was drafted."""
        return float(self.overlap.sum() / self.reached.sum()) if self.reached.sum() else math.nan


def summarise(measured: Measured, settings: Settings, teacher: Teacher, bound: float) -> list[dict[str, Any]]:
    """The rows: every contender by category, over `all` prompts, and over `all_without_loops`.

    Args:
        measured: see `benchmark.measure`.
        settings: what it was measured with.
        teacher: the target, for entropies and near-ties.
        bound: rounding bound of a near-tie.
    """
    results = {
        (i, p): _prompt_result(measured.turns[i, p], prompt.category, teacher)
        for i in range(len(measured.infos))
        for p, prompt in enumerate(measured.prompts)
    }
    rows = []
    for i in range(len(measured.infos)):
        base = _baseline(measured, results, i)
        for category, chosen in _groups(measured, results, base, settings.loop_threshold).items():
            row = _row(measured, settings, i, [results[i, p] for p in chosen], [results[base, p] for p in chosen])
            row |= {"category": category, "baseline": measured.infos[base].label}
            row |= _equality(measured, i, base, chosen, teacher, bound)
            if settings.batch > 1:
                decode = row["speedup_decode_predicted"]
                row |= _batch_times(measured, i, base, decode) if category == "all" else {}
            rows.append(_clean(row))
    return rows


def _prompt_result(turns: Sequence[Turn], category: str, teacher: Teacher) -> PromptResult:
    done = [t.completion for t in turns]
    prefill, decode, seconds = _medians(turns)
    return PromptResult(
        category=category,
        new_tokens=sum(len(c.tokens) for c in done),
        emitted=sum(c.emitted for c in done),
        steps=sum(c.steps for c in done),
        prefill=prefill,
        decode=decode,
        seconds=seconds,
        accepted=np.sum([c.accepted for c in done], axis=0),
        reached=np.sum([c.reached for c in done], axis=0),
        overlap=np.sum([c.overlap for c in done], axis=0),
        bigrams=float(np.mean([analysis.distinct_bigram_ratio(c.tokens) for c in done])),
        entropy=float(np.mean([teacher.entropy(t.prompt, t.completion.tokens) for t in turns])),
    )


def _medians(turns: Sequence[Turn]) -> tuple[float, float, float]:
    """Median seconds of prefill, of decoding and of both, summed over turns."""
    prefill = decode = seconds = 0.0
    for turn in turns:
        if not turn.decode_seconds:
            return math.nan, math.nan, math.nan
        apart = [p for p in turn.prefill_seconds if p is not None]
        prefill += statistics.median(apart) if apart else math.nan
        decode += statistics.median(turn.decode_seconds) if apart else math.nan
        pairs = zip(turn.prefill_seconds, turn.decode_seconds, strict=True)
        seconds += statistics.median((p or 0.0) + d for p, d in pairs)
    return prefill, decode, seconds


def _baseline(measured: Measured, results: dict[tuple[int, int], PromptResult], i: int) -> int:
    """The fastest plain decoding at the contender's temperature."""
    temperature = measured.infos[i].temperature
    same = [j for j, b in enumerate(measured.infos) if b.is_baseline and b.temperature == temperature]

    def seconds(j: int) -> float:
        if measured.batch_times[j]:
            return statistics.median(t.seconds / t.new_tokens for t in measured.batch_times[j])
        return sum(results[j, p].seconds for p in range(len(measured.prompts)))

    return min(same, key=seconds)


def _groups(
    measured: Measured, results: dict[tuple[int, int], PromptResult], base: int, threshold: float
) -> dict[str, list[int]]:
    everything = list(range(len(measured.prompts)))
    groups = {"all": everything}
    groups["all_without_loops"] = [p for p in everything if results[base, p].bigrams >= threshold]
    for p in everything:
        groups.setdefault(measured.prompts[p].category, []).append(p)
    return {name: chosen for name, chosen in groups.items() if chosen}


def _row(
    measured: Measured, settings: Settings, i: int, mine: Sequence[PromptResult], base: Sequence[PromptResult]
) -> dict[str, Any]:
    info, preparation, costs = measured.infos[i], measured.preparations[i], measured.costs[i]
    tau, tau_ci = _estimate([r.tau for r in mine])
    alpha, alpha_ci = _estimate([r.alpha for r in mine])
    ratios = [(r.new_tokens / r.seconds) / (b.new_tokens / b.seconds) for r, b in zip(mine, base, strict=True)]
    decode = [_decode_rate(r) / _decode_rate(b) for r, b in zip(mine, base, strict=True)]
    speedup, speedup_ci = _estimate(ratios)
    inverse, inverse_ci = _estimate([1 / ratio for ratio in ratios])
    speedup_decode, speedup_decode_ci = _estimate(decode)
    reached = np.sum([r.reached for r in mine], axis=0)
    overlap = np.sum([r.overlap for r in mine], axis=0)
    steps = sum(r.steps for r in mine)
    return {
        **dataclasses.asdict(info),
        "batch": settings.batch,
        "seed": settings.seed,
        "prompts": len(mine),
        "new_tokens": sum(r.new_tokens for r in mine),
        "tau": tau,
        "tau_ci": tau_ci,
        "tau_pooled": sum(r.emitted for r in mine) / steps if steps else math.nan,
        "alpha": alpha,
        "alpha_ci": alpha_ci,
        "live_rows": 1.0 if settings.batch == 1 else math.nan,
        "alpha_by_position": [o / n if n else None for o, n in zip(overlap, reached, strict=True)],
        **_counted(info, np.sum([r.accepted for r in mine], axis=0), tau),
        "draft_cost": costs.draft_cost if costs else math.nan,
        "t_ratio": costs.t_ratio if costs else math.nan,
        "one_token_pass_seconds": costs.one_token if costs else math.nan,
        "tokens_per_second": _mean([r.new_tokens / r.seconds for r in mine]),
        "decode_tokens_per_second": _mean([_decode_rate(r) for r in mine]),
        "prefill_seconds": _mean([r.prefill for r in mine]),
        "step_seconds": sum(r.decode for r in mine) / steps if steps else math.nan,
        "speedup": speedup,
        "speedup_ci": speedup_ci,
        "baseline_over_this": inverse,
        "baseline_over_this_ci": inverse_ci,
        "speedup_decode": speedup_decode,
        "speedup_decode_ci": speedup_decode_ci,
        **_predicted(info, costs, mine, base),
        "distinct_bigram_ratio": _mean([r.bigrams for r in mine]),
        "target_entropy": _mean([r.entropy for r in mine]),
        "kv_bytes_target": preparation.kv_bytes_target,
        "kv_bytes_draft": preparation.kv_bytes_draft,
        "compile_seconds": preparation.compile_seconds,
        "skipped_turns": measured.skipped_turns[i],
        "repeatable": measured.repeatable[i],
    }


def _counted(info: Info, accepted: np.ndarray, tau: float) -> dict[str, Any]:
    """What the histogram `[D + 1]` of passes by accepted tokens says, beside the laws' overlap."""
    found: dict[str, Any] = {"accepted_histogram": accepted.tolist(), "acceptance_rate": math.nan, "mbsu": math.nan}
    found |= {"acceptance_by_depth": [], "acceptance_by_depth_unconditional": []}
    if not info.num_nodes or len(accepted) < 2 or not accepted.sum():
        return found
    positions = analysis.acceptance_by_position_from_histogram(accepted)
    found["acceptance_by_depth"] = positions.conditional.tolist()
    found["acceptance_by_depth_unconditional"] = positions.unconditional.tolist()
    found["acceptance_rate"] = positions.accepted.sum() / (positions.passes * info.num_nodes)
    if info.target_param_bytes:
        found["mbsu"] = analysis.mbsu(tau, info.draft_param_bytes / info.target_param_bytes, info.draft_passes)
    return found


def depth_acceptance(info: Info, accepted: np.ndarray, overlap: np.ndarray) -> np.ndarray:
    """Acceptance `[D]` of the passes that came to each depth; one that has no draft token there accepts none.

    The overlap of the laws, which is less noisy than what was drawn, where it says all: a tree's further candidates are
    not in it, nor what other rules accept beyond it.

    Args:
        info: rule and topology.
        accepted: `[D + 1]` passes by accepted draft tokens.
        overlap: `[D]` summed overlap.
    """
    at_least = accepted[::-1].cumsum()[::-1]
    by_laws = info.topology == "chain" and info.rule in TOKEN_BY_TOKEN
    passed, came = overlap if by_laws else at_least[1:], at_least[:-1]
    return np.clip(np.divide(passed, came, out=np.zeros(len(came)), where=came > 0), 0.0, 1.0)


def _predicted(
    info: Info, costs: Costs | None, mine: Sequence[PromptResult], base: Sequence[PromptResult]
) -> dict[str, float]:
    """Predicted speedups, with the measured prefill of both and without."""
    if costs is None or not info.num_nodes:
        return {"speedup_predicted": math.nan, "speedup_decode_predicted": math.nan}
    whole, decode = [], []
    for r, b in zip(mine, base, strict=True):
        rates = depth_acceptance(info, r.accepted, r.overlap)
        faster = analysis.expected_tokens(rates, len(rates)) / (costs.drafting / costs.one_token + costs.t_ratio)
        decode.append(faster if r.steps else math.nan)
        if b.emitted and r.steps:
            seconds = r.prefill + b.decode * (r.emitted / b.emitted) / faster
            whole.append((r.new_tokens / seconds) / (b.new_tokens / b.seconds))
    return {"speedup_predicted": _mean(whole), "speedup_decode_predicted": _mean(decode)}


def _decode_rate(result: PromptResult) -> float:
    return result.emitted / result.decode if result.steps else math.nan


def _equality(
    measured: Measured, i: int, base: int, chosen: Sequence[int], teacher: Teacher, bound: float
) -> dict[str, Any]:
    """Greedy rows against the baseline. A later turn is compared where both were asked the same."""
    if measured.infos[i].temperature > 0:
        return {"matches_baseline": None, "near_ties": None, "divergences": []}
    pairs, where, apart = [], [], 0
    for p in chosen:
        for number, (mine, theirs) in enumerate(zip(measured.turns[i, p], measured.turns[base, p], strict=False)):
            if mine.prompt != theirs.prompt:
                apart += 1
                continue
            pairs.append((mine.prompt, theirs.completion.tokens, mine.completion.tokens))
            where.append((measured.prompts[p].id, number))
    requests = [measured.infos[base].request(prompt, 1, 0) for prompt, _, _ in pairs]
    result = compare_texts(teacher, requests, [b for _, b, _ in pairs], [c for _, _, c in pairs], bound)
    return {
        "matches_baseline": result.matches,
        "near_ties": len(result.near_ties),
        "turns_not_compared": apart,
        "divergences": [
            {"prompt": where[d.row][0], "turn": where[d.row][1], "near_tie": kind, **dataclasses.asdict(d)}
            for kind, found in ((True, result.near_ties), (False, result.different))
            for d in found
        ],
    }


def _batch_times(measured: Measured, i: int, base: int, faster: float) -> dict[str, Any]:
    """Above batch 1 only all prompts together have a time; intervals are the ranges of the repeats' ratios.

    Args:
        measured: see `benchmark.measure`.
        i: the contender.
        base: its baseline.
        faster: predicted speedup of decoding; NaN where there is none.
    """
    mine, theirs = measured.batch_times[i], measured.batch_times[base]
    whole = [(m.new_tokens / m.seconds) / (t.new_tokens / t.seconds) for m, t in zip(mine, theirs, strict=True)]
    decode = _known([m.decode_rate / t.decode_rate for m, t in zip(mine, theirs, strict=True)])
    predicted = [_with_prefill(m, t, faster) for m, t in zip(mine, theirs, strict=True)]
    return {
        "live_rows": _mean([m.live_rows for m in mine]),
        "tokens_per_second": statistics.median(m.new_tokens / m.seconds for m in mine),
        "decode_tokens_per_second": _mean([m.decode_rate for m in mine]),
        "prefill_seconds": _mean([m.prefill_seconds for m in mine]),
        "speedup": statistics.median(whole),
        "speedup_ci": [min(whole), max(whole)],
        "speedup_decode": statistics.median(decode) if decode else math.nan,
        "speedup_decode_ci": [min(decode), max(decode)] if decode else None,
        "speedup_predicted": _mean(predicted),
    }


def _with_prefill(mine: BatchTime, base: BatchTime, faster: float) -> float:
    """Predicted speedup with the measured prefills of both, those of refilled rows included."""
    if not (mine.emitted and base.emitted):
        return math.nan
    seconds = mine.prefill_seconds + base.decode_seconds * (mine.emitted / base.emitted) / faster
    return (mine.new_tokens / seconds) / (base.new_tokens / base.seconds)


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    """Mean over the prompts that have a value."""
    kept = _known(values)
    return statistics.fmean(kept) if kept else math.nan


def _estimate(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """Mean and bootstrap interval over the prompts that have a value."""
    kept = _known(values)
    if not kept:
        return math.nan, None
    found = analysis.bootstrap_interval(kept, seed=0)
    return found.estimate, None if math.isnan(found.low) else [found.low, found.high]


def _clean(value: Any) -> Any:
    """Plain JSON values; NaN becomes None."""
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value
