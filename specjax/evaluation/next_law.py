"""The law of a next token as the target itself states it, and the outcomes that a test of it tells apart.

Nothing of the loop is in it: one causal pass over the context, penalties counted on the host, then the warps.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax.analysis import GreedyComparison, compare_greedy, top_with_rest
from specjax.analysis.gtest import MIN_EXPECTED
from specjax.decoding import Request, log_law, make_sampling
from specjax.evaluation.teacher import Teacher


def next_law(teacher: Teacher, request: Request, context: Sequence[int]) -> np.ndarray:
    """The law `[V]` float64 of the token behind a context.

    Args:
        teacher: the target.
        request: prompt and sampling parameters.
        context: the prompt's token ids, then what was emitted.
    """
    return warped(processed_logits(teacher, request, context), request)


def processed_logits(teacher: Teacher, request: Request, context: Sequence[int]) -> np.ndarray:
    """The logits `[V]` float64 behind a context with bias, suppression and penalties, before the warps."""
    emitted = context[len(request.prompt) :]
    logits_v = np.asarray(teacher.logits(context, (), 0), np.float64)
    for token, value in request.logit_bias.items():
        logits_v[token] += value
    logits_v[list(request.suppress_tokens)] = -np.inf
    for token in set(context):
        logits_v[token] *= request.repetition_penalty if logits_v[token] < 0 else 1 / request.repetition_penalty
    for token, times in Counter(emitted).items():
        logits_v[token] -= request.frequency_penalty * times + request.presence_penalty
    return logits_v


def compare_texts(
    teacher: Teacher,
    requests: Sequence[Request],
    baseline: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    bound: float,
) -> GreedyComparison:
    """Greedy texts against the baseline's, near-ties apart: those of the processed logits, which choose the tokens.

    Args:
        teacher: the target.
        requests: that both answered.
        baseline: what plain decoding emitted for each.
        other: what the method under test emitted.
        bound: see `specjax.evaluation.teacher.rounding_bound`.
    """

    def logits_at(row: int, position: int) -> np.ndarray:
        return processed_logits(teacher, requests[row], (*requests[row].prompt, *baseline[row][:position]))

    # A repetition penalty scales what rounding does to a logit.
    scale = max((max(r.repetition_penalty, 1 / r.repetition_penalty) for r in requests), default=1.0)
    texts = [np.asarray(t) for t in baseline], [np.asarray(t) for t in other]
    return compare_greedy(*texts, logits_at, bound * scale)


def warped(logits: np.ndarray, request: Request) -> np.ndarray:
    """The laws `[..., V]` float64 of processed logits: temperature, top-k, top-p, min-p."""
    warps = make_sampling([request.temperature], [request.top_k], [request.top_p], [request.min_p])
    laws = np.exp(np.asarray(log_law(jnp.asarray(logits[None], jnp.float32), warps)[0], np.float64))
    return laws / laws.sum(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Cells:
    """The outcomes of a test of one law: some tokens by themselves, the rest, and what the law never gives.

    Attributes:
        ids: `[K]` tokens that are cells of their own.
        never: `[V]` bool, tokens outside the support whichever way the logits are rounded.
    """

    ids: np.ndarray
    never: np.ndarray

    def sums(self, values_v: np.ndarray) -> np.ndarray:
        """A law or counts over the vocabulary as `[K + 2]`: the tokens, the rest, the impossible."""
        possible = top_with_rest(np.where(self.never, 0, values_v), self.ids)
        return np.append(possible, values_v[self.never].sum())


def at_edge(logits_v: np.ndarray, request: Request, bound: float) -> np.ndarray:
    """Which tokens `[V]` rounding may take into the support or out of it: top-k, top-p and min-p cut a law off.

    Any two logits may come closer or part by `bound` (before a repetition penalty scales them); each token is tried
    where that favours it most, and least. Bounds, so no token at the edge is missed, and some may be taken for it that
    are not.
    """
    scale = max(request.repetition_penalty, 1 / request.repetition_penalty)
    room, half = bound * scale / request.temperature, np.exp(bound * scale / request.temperature / 2)
    logits_v = (logits_v - logits_v.max()) / request.temperature
    falling_v = -np.sort(-logits_v)
    weights_v = np.exp(logits_v)
    mass_n = np.concatenate([[0.0], np.cumsum(np.exp(falling_v))])
    # Tokens that stand above one whatever rounding does, and those that may. Raised by `room`, it is not above itself;
    # lowered, it is.
    surely_v = np.searchsorted(-falling_v, -(logits_v + room), side="left")
    maybe_v = np.searchsorted(-falling_v, -(logits_v - room), side="right") - 1

    top_k = request.top_k or logits_v.size
    can_v, must_v = surely_v < top_k, maybe_v < top_k
    if request.top_p < 1:
        most, least = int(can_v.sum()), int(must_v.sum())
        above_v = mass_n[np.minimum(surely_v, least)]
        can_v &= above_v / half < request.top_p * (above_v / half + (mass_n[most] - above_v) * half)
        above_v = np.maximum(mass_n[np.minimum(maybe_v + 1, most)] - weights_v, 0)
        below_v = np.maximum(mass_n[least] - above_v, 0)
        must_v &= above_v * half < request.top_p * (above_v * half + below_v / half)
    if request.min_p:
        can_v &= logits_v + room >= np.log(request.min_p)
        must_v &= logits_v - room >= np.log(request.min_p)
    return can_v & ~must_v & np.isfinite(logits_v)


def make_cells(law_v: np.ndarray, edge_v: np.ndarray, draws: int, top: int) -> Cells:
    """The likeliest tokens, `top` at most, that expect draws enough and do not stand at the edge.

    Those at the edge belong to the rest. Where it would have no mass, the least likely of the others joins them.
    """
    sure_v = np.where(edge_v, 0, law_v)
    ids = np.argsort(-sure_v)[:top]
    ids = ids[sure_v[ids] * draws >= MIN_EXPECTED]
    if edge_v.any() and np.isclose(law_v[ids].sum(), law_v.sum(), rtol=1e-12):
        ids = ids[:-1]
    return Cells(ids, (law_v == 0) & ~edge_v)
