"""What the parts of a step cost: a target pass by width and a draft, each apart from the loop, and a plain step in it.

These are the terms of the predicted speedup, E / (draft_passes * c + t(g + 1) / t(1)). t(1) is what a speedup is held
against, a step of plain decoding: taken apart like the others, its pass has measured 7 to 12 % slower than in the loop,
which a pass over four tokens did not. Everything is timed in rounds that take each part once, so that a machine whose
speed drifts does so for all of them alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decoding import Context, DecodeState, Draft, Drafter, Keys, Loop, Request, Weights, score
from specjax.decoding.tree import chain
from specjax.evaluation.contenders import LoopContender
from specjax.models import Decoder, KVCache, Tap, merge
from specjax.parallel import to_host


@dataclasses.dataclass(frozen=True)
class Costs:
    """Medians over rounds, in seconds.

    Attributes:
        one_token: a step of plain decoding, a target pass over one token a row.
        scoring: the target pass that verifies this contender's draft; NaN where drafting stops early or chooses a width
            step by step.
        drafting: all draft passes of one step, of a drafter that stops early when it does not; NaN where a width is
            chosen.
        draft_passes: how many they are.
    """

    one_token: float
    scoring: float
    drafting: float
    draft_passes: int

    @property
    def t_ratio(self) -> float:
        """t(g + 1) / t(1)."""
        return self.scoring / self.one_token

    @property
    def draft_cost(self) -> float:
        """c, a draft pass over a one-token target pass; 0 where nothing is drafted."""
        return self.drafting / self.draft_passes / self.one_token if self.draft_passes else 0.0


@partial(jax.jit, static_argnames=("graph", "taps", "precision"), donate_argnames=("cache",))
def target_passes(
    graph: nnx.GraphDef[Decoder],
    taps: tuple[Tap, ...],
    precision: str,
    params: Any,
    cache: KVCache,
    context: Context,
    draft: Draft,
    repeat: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Scores a draft `repeat` times; each pass is fed the argmax of the one before, so that none can be skipped.

    Args:
        graph: the target's.
        taps: activations that the drafter asks for.
        precision: of matrix products.
        params: the target's.
        cache: written in place behind `context.length - 1`, never committed.
        context: what is committed.
        draft: any draft; only its shape matters.
        repeat: int32.

    Returns:
        The cache, and the last argmax `[B, N + 1]`.
    """
    with jax.default_matmul_precision(precision):
        target = merge(graph, params)

        def body(_: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, tokens = carry
            here = dataclasses.replace(context, tokens=_with_root(context, tokens[:, 0]))
            scores, cache = score(target, cache, dataclasses.replace(draft, tokens=tokens[:, 1:]), here, taps)
            return cache, scores.argmax[:, : tokens.shape[1]]

        first = jnp.concatenate([context.last(1), draft.tokens], axis=1)
        return jax.lax.fori_loop(0, repeat, body, (cache, first))


@partial(jax.jit, static_argnames=("loop",), donate_argnames=("cache", "state"))
def drafts(
    loop: Loop, weights: Weights, cache: KVCache, state: Any, context: Context, request: jax.Array, repeat: jax.Array
) -> tuple[KVCache, Any, Draft]:
    """Drafts `repeat` times, each time from a root that the draft before it ended in."""
    with jax.default_matmul_precision(loop.precision):
        target = merge(loop.graph, weights.target)
        keys = Keys(request, context.length)

        def propose(cache: KVCache, state: Any, root: jax.Array) -> tuple[Draft, Any, KVCache]:
            here = dataclasses.replace(context, tokens=_with_root(context, root))
            return loop.drafter.propose(weights.drafter, weights.tables, target, cache, state, here, keys)

        def body(_: jax.Array, carry: tuple[KVCache, Any, Draft, jax.Array]) -> tuple[KVCache, Any, Draft, jax.Array]:
            draft, state, cache = propose(carry[0], carry[1], carry[3])
            return cache, state, draft, draft.tokens[:, -1]

        root = context.last(1)[:, 0]
        shape = jax.eval_shape(propose, cache, state, root)[0]
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        return jax.lax.fori_loop(0, repeat, body, (cache, state, empty, root))[:3]


def unstopped(drafter: Drafter) -> Drafter:
    """The drafter that makes all its passes in every step; itself where it always does."""
    never = {"min_confidence": 0.0, "max_entropy": math.inf}
    changes = {name: value for name, value in never.items() if getattr(drafter, name, value) != value}
    return dataclasses.replace(drafter, **changes) if changes else drafter  # type: ignore[type-var]


def _with_root(context: Context, root_b: jax.Array) -> jax.Array:
    rows = jnp.arange(root_b.shape[0])
    return context.tokens.at[rows, context.length - 1].set(root_b)


class CostMeter:
    """Times the parts of some contenders' steps in the middle of one request's text."""

    def __init__(self, contenders: Sequence[LoopContender], request: Request, *, batch: int = 1, repeat: int = 8):
        """Compiles one program a width and one a drafter.

        Args:
            contenders: prepared; plain decoding among them.
            request: whose context is used, in every row.
            batch: rows.
            repeat: passes between two readings of the clock.
        """
        self._baseline = baseline = next(c for c in contenders if c.info.is_baseline)
        self._drafters = [c for c in contenders if c is not baseline]
        self._start = partial(baseline.prefill, request, batch)
        state = baseline.run(self._start(), jnp.int32(max(1, request.max_new_tokens // 2)))
        # Sampling parameters are one's own, context and cache are shared: a cache apiece would fill the memory.
        self._graph, self._precision = baseline.loop.graph, baseline.loop.precision
        self._params = baseline.weights.target
        self._cache, self._context, self._request = state.cache, state.context, state.request
        self._repeat, self._passes = repeat, jnp.int32(repeat)
        self._states: dict[str, Any] = {}
        self._sampling: dict[str, Any] = {}
        self._drafts: dict[str, Draft] = {}
        for contender in self._drafters:
            own = contender.prefill(request, batch)
            self._states[contender.info.label] = own.drafter
            self._sampling[contender.info.label] = own.sampling
        self._plain: DecodeState | None = None
        self._one_token: list[float] = []
        self._scoring: dict[Any, list[float]] = {}
        self._drafting: dict[str, list[float]] = {}

    def round(self) -> None:
        """Times every part once; the first call compiles and warms up."""
        for _ in range(1 if self._one_token else 2):
            plain = self._time_plain()
            self.draft_round()
            widths = {self._width(c): c for c in self._drafters}
            scoring = {width: self._time_scoring(contender) for width, contender in widths.items()}
        self._one_token.append(plain)
        for width, seconds in scoring.items():
            self._scoring.setdefault(width, []).append(seconds)

    def draft_round(self) -> None:
        """Times every draft once; the first call compiles and warms up."""
        for contender in self._drafters:
            label = contender.info.label
            for _ in range(1 if label in self._drafting else 2):
                seconds = self._time_draft(contender)
            self._drafting.setdefault(label, []).append(seconds)

    def drafting(self, contender: LoopContender) -> float:
        """Seconds of all draft passes of a step, see `Costs`; 0 for plain decoding.

        Raises:
            ValueError: no round was taken, or the contender is not one of those given.
        """
        if contender is self._baseline:
            return 0.0
        label = contender.info.label
        if label not in self._drafting:
            raise ValueError(f"no round has timed {label!r}")
        return math.nan if self._drafts[label].widths is not None else statistics.median(self._drafting[label])

    def costs(self, contender: LoopContender) -> Costs:
        """Medians over the rounds so far.

        Raises:
            ValueError: no round was taken, or the contender is not one of those given.
        """
        if not self._one_token:
            raise ValueError(f"no round has timed {contender.info.label!r}")
        one_token, drafting = statistics.median(self._one_token), self.drafting(contender)
        if contender is self._baseline:
            return Costs(one_token, one_token, drafting, contender.info.draft_passes)
        varies = math.isnan(drafting) or unstopped(contender.loop.drafter) is not contender.loop.drafter
        scoring = math.nan if varies else statistics.median(self._scoring[self._width(contender)])
        return Costs(one_token, scoring, drafting, contender.info.draft_passes)

    def _time_plain(self) -> float:
        """A step of plain decoding, further along the answer in every round; NaN where the answer has none."""
        seconds, steps = math.nan, 0
        for _ in range(2):
            if self._plain is None or to_host(self._plain.done).all():
                self._plain = self._start()
            before = to_host(self._plain.statistics.steps).max()
            start = time.perf_counter()
            self._plain = jax.block_until_ready(self._baseline.run(self._plain, self._passes))
            seconds = time.perf_counter() - start
            steps = int(to_host(self._plain.statistics.steps).max() - before)
            if steps == self._repeat:  # else the answer ended: few steps would bear the cost of the whole call
                break
        return seconds / steps if steps else math.nan

    def _time_draft(self, contender: LoopContender) -> float:
        label = contender.info.label
        context = dataclasses.replace(self._context, sampling=self._sampling[label])
        # Where drafting might stop early, the number of its passes would be unknown.
        loop = dataclasses.replace(contender.loop, drafter=unstopped(contender.loop.drafter))
        start = time.perf_counter()
        self._cache, self._states[label], draft = jax.block_until_ready(
            drafts(
                loop,
                contender.weights,
                self._cache,
                self._states[label],
                context,
                self._request,
                self._passes,
            )
        )
        seconds = time.perf_counter() - start
        # A plain chain's pass depends on nothing but its width: one program for all drafters.
        bare = draft.is_chain and draft.probes is None and draft.resume is None
        self._drafts[label] = chain(draft.tokens, laws=None) if bare else draft
        return seconds / self._repeat

    def _time_scoring(self, contender: LoopContender) -> float:
        draft, taps = self._drafts[contender.info.label], contender.loop.drafter.taps
        start = time.perf_counter()
        self._cache, _ = jax.block_until_ready(
            target_passes(
                self._graph,
                taps,
                self._precision,
                self._params,
                self._cache,
                self._context,
                draft,
                self._passes,
            )
        )
        return (time.perf_counter() - start) / self._repeat

    def _width(self, contender: LoopContender) -> Any:
        """What a scoring pass depends on: the shapes of the draft and the taps."""
        draft = self._drafts[contender.info.label]
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(draft))
        return jax.tree.structure(draft), shapes, contender.loop.drafter.taps
