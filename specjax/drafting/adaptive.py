"""Adaptive draft length: as many tokens as are likely to pay, by what each row accepted lately and by the draft itself.

The choice of a length from measured acceptance and costs follows the speedup formula of Leviathan et al. 2023
(Theorem 3.8); the running estimate is that of serving engines (SGLang's adaptive speculative length).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Drafter, Keys, Kind, Sampling, Scores, Verdict, Widths, draft_passes
from specjax.drafting.any_context import any_context
from specjax.drafting.draft_model import DraftModel
from specjax.models import Decoder, KVCache, Tap

MAX_WIDTHS = 3  # Each is a branch of the compiled step, a target pass of its own.


@flax.struct.dataclass
class AdaptiveState:
    """What is remembered of each row.

    Attributes:
        inner: the inner drafter's state.
        accepted: `[B]` float32, accepted tokens, older steps counting less.
        tried: `[B]` float32, positions tried, likewise; accepted / tried is the acceptance rate.
        idle: `[B]` int32 steps since this row was drafted for.
        stale: `[B]` int32 steps since any row was.
        length: `[B]` int32 committed tokens when the last step began; a finished row's stand still.
    """

    inner: Any
    accepted: jax.Array
    tried: jax.Array
    idle: jax.Array
    stale: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Another drafter at one of at most three widths, plain decoding among them.

    Before drafting each row chooses the width w, of depth d, with the most expected tokens for the time,
    (1 + a + ... + a^d) / (1 + w (draft_cost + pass_cost)), a being its own acceptance rate of late; the batch drafts at
    the widest. A row that chose none is drafted for again, at the smallest width, after `probe_every` steps. After
    drafting, the target's pass takes the smallest width that holds every valid node: a drafter that stops by its own
    confidence, or by the length of a match, shortens the pass too.

    A row's nodes depend on that row alone, and on what it committed before: rows do not affect each other, and
    verification stays exact. Nothing drawn is dropped.

    Attributes:
        inner: a drafter with a field `num_nodes` that reads no taps and makes no probes, and whose state does not
            depend on `num_nodes`: a draft model, or one that `any_context` holds of.
        widths: 0 first, then growing; the last is the inner drafter's own.
        draft_cost: c, the time of drafting a token over that of a one-token target pass.
        pass_cost: what each further token adds to a target pass, over a one-token pass.
        decay: weight of the past after each step.
        prior: acceptance rate that is assumed at first, with the weight of four positions.
        probe_every: steps after which a row without a draft is given another chance.
    """

    inner: Drafter
    widths: tuple[int, ...]
    draft_cost: float = 0.05
    pass_cost: float = 0.1
    decay: float = 0.9
    prior: float = 0.7
    probe_every: int = 32

    def __post_init__(self) -> None:
        if (
            not 2 <= len(self.widths) <= MAX_WIDTHS
            or self.widths[0] != 0
            or list(self.widths) != sorted({*self.widths})
        ):
            raise ValueError(
                f"widths={self.widths}; expected 0 and one or two greater numbers, in order: "
                f"each of at most {MAX_WIDTHS} is a branch of the compiled step"
            )
        if self.widths[-1] != self.inner.num_nodes:
            raise ValueError(
                f"widths={self.widths} end with another number than the draft's {self.inner.num_nodes} nodes"
            )
        name = type(self.inner).__name__
        if self.inner.taps or self.inner.num_probes:
            raise ValueError(f"{name} reads taps or makes probes in every step, so its length cannot adapt")
        if "num_nodes" not in {field.name for field in dataclasses.fields(self.inner)}:  # type: ignore[arg-type]
            raise ValueError(f"{name} has no field num_nodes, so its length cannot adapt")
        if not isinstance(self.inner, DraftModel) and not any_context(self.inner):
            raise ValueError(
                f"{name} keeps a state that would miss what is committed while nothing is drafted, so its length "
                "cannot adapt; a drafter of your own whose state allows it inherits Stateless or declares "
                "any_context = True"
            )
        if min(self.draft_cost, self.pass_cost) < 0:
            raise ValueError(f"draft_cost={self.draft_cost} and pass_cost={self.pass_cost}; expected no negative cost")
        for key, value in (("decay", self.decay), ("prior", self.prior)):
            if not 0 <= value <= 1:
                raise ValueError(f"{key}={value}; expected a number in [0, 1]")
        if self.probe_every < 1:
            raise ValueError(f"probe_every={self.probe_every}; expected at least 1 step")

    @property
    def taps(self) -> tuple[Tap, ...]:
        """None."""
        return ()

    @property
    def num_nodes(self) -> int:
        """N of the widest draft."""
        return self.inner.num_nodes

    @property
    def num_probes(self) -> int:
        """None."""
        return 0

    @property
    def depth(self) -> int:
        """D of the widest draft."""
        return self.inner.depth

    @property
    def topology(self) -> str:
        """The inner drafter's, where it is no chain."""
        return getattr(self.inner, "topology", "static_tree")

    @property
    def draft_passes(self) -> int:
        """At most so many as the inner drafter makes."""
        return draft_passes(self.inner)

    def kind(self, sampling: Sampling) -> Kind:
        """The inner drafter's."""
        return self.inner.kind(sampling)

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """The inner drafter's."""
        return self.inner.init_params(key, target)

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> AdaptiveState:
        """The inner state, and nothing accepted yet.

        Raises:
            ValueError: the inner state depends on the width.
        """

        def shapes(drafter: Drafter) -> Any:
            state = jax.eval_shape(lambda: drafter.init_state(params, tables, target, batch, capacity))
            return jax.tree.map(lambda x: (x.shape, x.dtype), state)

        # Where there is no middle width, one beyond the last tells too.
        whole, widths = shapes(self.inner), (*self.widths[1:-1], self.num_nodes + 1)
        if jax.tree.leaves(whole) and any(shapes(self._at(width)) != whole for width in widths):
            name = type(self.inner).__name__
            raise ValueError(f"{name} keeps a state whose shape depends on num_nodes, so its length cannot adapt")
        weight = 4.0
        return AdaptiveState(
            inner=self.inner.init_state(params, tables, target, batch, capacity),
            accepted=jnp.full((batch,), self.prior * weight, jnp.float32),
            tried=jnp.full((batch,), weight, jnp.float32),
            idle=jnp.zeros((batch,), jnp.int32),
            stale=jnp.zeros((batch,), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: AdaptiveState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> AdaptiveState:
        """Hands the prompt on."""
        inner = self.inner.extend(params, tables, target, state.inner, tokens, positions, taps, valid)
        return dataclasses.replace(state, inner=inner)

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: AdaptiveState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, AdaptiveState, KVCache]:
        """Drafts at the width that pays, then fits the pass to the valid nodes."""
        index_b = self._wanted(state, context)

        def branch(width: int) -> Any:
            def run(inner: Any, cache: KVCache) -> tuple[Draft, Any, KVCache]:
                inner = self._catch_up(params, tables, target, inner, context, state.stale)
                return self._at(width).propose(params, tables, target, cache, inner, context, keys)

            return run

        whole = jax.eval_shape(branch(self.num_nodes), state.inner, cache)[0]

        def padded(width: int) -> Any:
            def run(inner: Any, cache: KVCache) -> tuple[Draft, Any, KVCache]:
                if not width:
                    return _pad(None, whole), inner, cache
                draft, inner, cache = branch(width)(inner, cache)
                return _pad(draft, whole), inner, cache

            return run

        widest = jnp.max(index_b)
        branches = [padded(width) for width in self.widths]
        draft, inner, cache = jax.lax.switch(widest, branches, state.inner, cache)
        sizes = jnp.asarray(self.widths, jnp.int32)
        nodes = jnp.arange(self.num_nodes)
        valid = draft.valid & (nodes < sizes[index_b][:, None])
        needed = jnp.max(jnp.where(valid, nodes + 1, 0))
        choice = jnp.sum(sizes < needed).astype(jnp.int32)
        state = dataclasses.replace(
            state,
            inner=inner,
            idle=jnp.where(index_b > 0, 0, state.idle + 1),
            stale=jnp.where(widest > 0, 0, state.stale + 1),
        )
        return dataclasses.replace(draft, valid=valid, widths=Widths(choice, self.widths)), state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: AdaptiveState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> AdaptiveState:
        """Counts what was tried and accepted."""
        inner = self.inner.commit(params, tables, target, state.inner, context, draft, scores, verdict)
        reached = (~jnp.isnan(verdict.overlap)).sum(1)
        keep = jnp.where(reached > 0, self.decay, 1.0)
        return dataclasses.replace(
            state,
            inner=inner,
            accepted=keep * state.accepted + verdict.num_accepted,
            tried=keep * state.tried + reached,
            length=context.length,
        )

    def _at(self, width: int) -> Drafter:
        return dataclasses.replace(self.inner, num_nodes=width)  # type: ignore[type-var]

    def _wanted(self, state: AdaptiveState, context: Context) -> jax.Array:
        """`[B]` index of the width each row would choose; finished rows choose none."""
        rate = (state.accepted / jnp.maximum(state.tried, 1e-6))[:, None]
        powers = rate ** jnp.arange(self.depth + 1)
        depths = [self._at(width).depth if width else 0 for width in self.widths]
        expected = jnp.cumsum(powers, axis=1)[:, jnp.asarray(depths)]
        cost = 1 + jnp.asarray(self.widths) * (self.draft_cost + self.pass_cost)
        best = jnp.argmax(expected / cost, axis=1).astype(jnp.int32)
        best = jnp.where((best == 0) & (state.idle >= self.probe_every), 1, best)
        return jnp.where(context.length > state.length, best, 0)

    def _catch_up(
        self, params: Any, tables: Any, target: Decoder, inner: Any, context: Context, stale_b: jax.Array
    ) -> Any:
        """A draft model's cache takes in what was committed while nothing was drafted."""
        if not isinstance(self.inner, DraftModel):
            return inner
        span = self.probe_every + self.depth + 1

        def take_in(inner: Any) -> Any:
            positions = jnp.maximum(context.length[:, None] - 1 - span, 0) + jnp.arange(span)
            tokens = jnp.take_along_axis(context.tokens, positions, axis=1)
            valid = positions < context.length[:, None] - 1
            return self.inner.extend(params, tables, target, inner, tokens, positions, {}, valid)

        return jax.lax.cond(jnp.any(stale_b > 0), take_in, lambda inner: inner, inner)


def _pad(draft: Draft | None, whole: Draft) -> Draft:
    """A narrower draft, or none, in the shapes of the whole one; the nodes that it lacks are invalid."""
    if draft is None:
        padded, width = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole), 0
    else:

        def pad(x: jax.Array, like: jax.Array) -> jax.Array:
            return jnp.pad(x, [(0, large - small) for small, large in zip(x.shape, like.shape, strict=True)])

        # The statics are those of the whole draft, also where a small tree happens to be a chain.
        leaves = [pad(x, like) for x, like in zip(jax.tree.leaves(draft), jax.tree.leaves(whole), strict=True)]
        padded, width = jax.tree.unflatten(jax.tree.structure(whole), leaves), draft.num_nodes
    nodes = jnp.arange(whole.num_nodes, dtype=jnp.int32)
    missing = nodes - 1 if whole.is_chain else jnp.full_like(nodes, -1)
    return dataclasses.replace(padded, parents=jnp.where(nodes < width, padded.parents, missing))
