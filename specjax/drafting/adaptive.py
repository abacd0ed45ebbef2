"""Adaptive draft length: as many tokens as are likely to pay, by what each row accepted lately and by the draft itself.

The choice of a length from measured acceptance and costs follows the speedup formula of Leviathan et al. 2023
(Theorem 3.8); the running estimate is that of serving engines (SGLang's adaptive speculative length).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Drafter, Keys, Kind, Sampling, Scores, Verdict, draft_passes
from specjax.decoding.widths import fitting, switch_in_place
from specjax.drafting.any_context import any_context
from specjax.drafting.draft_model import DraftModel
from specjax.models import Decoder, KVCache, Tap

MAX_WIDTHS = 3  # Each is a branch of the compiled step, a target pass of its own.
PRIOR_WEIGHT = 2.0  # Positions that the prior counts for: a draft that is never right is given up after two steps.
LONGEST_REST = 16  # Times `probe_every`: rests grow to so many steps.
MATCH_REST = 8  # A long match cuts a rest to this part.
CATCH_UP = 16  # Tokens a pass by which a draft model takes in what it missed.


@flax.struct.dataclass
class AdaptiveState:
    """What is remembered of each row.

    Attributes:
        inner: the inner drafter's state.
        accepted: `[B]` float32, accepted tokens, older steps counting less.
        tried: `[B]` float32, positions tried, likewise; accepted / tried is the acceptance rate.
        idle: `[B]` int32 steps since this row was drafted for, or where that costs nothing, since it had a draft.
        rest: `[B]` int32 steps that it goes without one before it is given another chance.
        stale: `[B]` int32 steps since any row was.
        length: `[B]` int32 committed tokens when the last step began; a finished row's stand still.
    """

    inner: Any
    accepted: jax.Array
    tried: jax.Array
    idle: jax.Array
    rest: jax.Array
    stale: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Another drafter at one of at most three widths, plain decoding among them.

    Before drafting each row chooses the width w, of depth d, with the most expected tokens for the time,
    (1 + a + ... + a^d) / (passes(w) draft_cost + part (1 + w pass_cost)), a being its own acceptance rate of late,
    passes(w) the inner drafter's at that width, and part that of the target that verification runs (less than 1 where
    drafting has run the first layers). The batch drafts at the widest, and each row keeps the first nodes, as many as
    it chose. A row that chose none is drafted for again, at the smallest width, after `probe_every` steps, and each
    time that nothing comes of it after twice as many. After drafting, the target's pass takes the smallest width that
    holds every valid node: a drafter that stops by its own confidence, or by the length of a match, shortens the pass
    too.

    An inner drafter of draft_cost 0 is asked in every step: a rest then lasts until it has a draft, and a match that
    fills the widest draft ends it early, if the drafter says with an attribute `length_follows_match = True` that its
    drafts are as long as their matches.

    A row's nodes depend on that row alone, and on what it committed before, as long as a narrower draft is the
    beginning of a wider one, in tokens and parents: so it must be. A drafter that `any_context` holds of and whose
    passes do not grow with the width need not heed that: it is asked for its widest draft or for none. Verification is
    exact in any case; nothing drawn is dropped.

    In a step where no row is drafted for, the inner drafter's `propose` is left out and its `commit` is not. One that
    follows the text has a method `rest(params, tables, target, state, context) -> state`, called in place of
    `propose`, that keeps room for what `commit` will bring: heads need none, EAGLE's and Hydra++'s pending hidden
    states are run once in D such steps.

    Attributes:
        inner: a drafter without probes: a draft model, one that `any_context` holds of, or one with `rest` (Medusa,
            Hydra, ReDrafter, EAGLE). Narrower ones share its state; they are what its method `at_width(width)` says,
            else have another `num_nodes`.
        widths: 0 first, then growing; the last is the inner drafter's own.
        draft_cost: the time of a draft pass over that of a one-token target pass: c in a benchmark's row of the inner
            drafter.
        pass_cost: what each further token adds to a target pass, over a one-token pass: (t_ratio - 1) / num_nodes in a
            benchmark's row of a drafter that does not resume within the target.
        decay: weight of the past after each step.
        prior: acceptance rate that is assumed at first, with the weight of two positions.
        probe_every: steps after which a row without a draft is first given another chance.
    """

    inner: Drafter
    widths: tuple[int, ...]
    draft_cost: float = 0.05
    pass_cost: float = 0.1
    decay: float = 0.9
    prior: float = 0.5
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
        if self.inner.num_probes:
            raise ValueError(f"{name} makes probes in every step, so its length cannot adapt")
        fields = {field.name for field in dataclasses.fields(self.inner)}  # type: ignore[arg-type]
        if not hasattr(self.inner, "at_width") and "num_nodes" not in fields:
            raise ValueError(f"{name} has neither a method at_width nor a field num_nodes, so its length cannot adapt")
        for width in self.widths[1:-1]:
            try:
                narrow = self._at(width)
            except ValueError as error:
                raise ValueError(f"widths={self.widths}: {name} cannot draft {width} nodes ({error})") from error
            if narrow.depth == self.inner.depth:
                raise ValueError(
                    f"widths={self.widths}: {name} drafts {narrow.depth} deep at {width} nodes and at "
                    f"{self.num_nodes}; a row chooses by depth, so give it 0 and {self.num_nodes}"
                )
        if not isinstance(self.inner, DraftModel) and not any_context(self.inner) and not self._rests:
            raise ValueError(
                f"{name} keeps a state that would miss what is committed while nothing is drafted, so its length "
                "cannot adapt; a drafter of your own whose state allows it inherits Stateless, declares "
                "any_context = True or has a method rest"
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
        """The inner drafter's."""
        return self.inner.taps

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
        if not self._rests and jax.tree.leaves(whole) and any(shapes(self._at(width)) != whole for width in widths):
            name = type(self.inner).__name__
            raise ValueError(f"{name} keeps a state whose shape depends on num_nodes, so its length cannot adapt")
        return AdaptiveState(
            inner=self.inner.init_state(params, tables, target, batch, capacity),
            accepted=jnp.full((batch,), self.prior * PRIOR_WEIGHT, jnp.float32),
            tried=jnp.full((batch,), PRIOR_WEIGHT, jnp.float32),
            idle=jnp.zeros((batch,), jnp.int32),
            rest=jnp.full((batch,), self.probe_every, jnp.int32),
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

        def at(width: int, inner: Any, cache: KVCache) -> tuple[Draft, Any, KVCache]:
            draft, inner, cache = self._at(width).propose(params, tables, target, cache, inner, context, keys)
            return dataclasses.replace(draft, widths=None), inner, cache

        whole = jax.eval_shape(partial(at, self.num_nodes), state.inner, cache)[0]
        resume = whole.resume.layer if whole.resume is not None else 0
        best_b = self._best(state, 1 - resume / target.config.num_layers)
        open_b = context.length > state.length
        index_b = jnp.where(open_b, jnp.where((best_b == 0) & (state.idle >= state.rest), 1, best_b), 0)

        def padded(width: int) -> Any:
            def run(carry: tuple[Any, KVCache]) -> tuple[Draft, tuple[Any, KVCache]]:
                if not width:
                    inner = self._rest(params, tables, target, carry[0], context)
                    return _pad(None, whole), (inner, carry[1])
                draft, inner, cache = at(width, *carry)
                return _pad(draft, whole), (inner, cache)

            return run

        free = not self.draft_cost  # always drafted, and then cut
        widest = jnp.int32(1) if free else jnp.max(index_b)
        missed = jnp.where(widest > 0, jnp.max(state.stale), 0)
        inner = self._catch_up(params, tables, target, state.inner, context, missed)
        if free:
            draft, (inner, cache) = padded(self.num_nodes)((inner, cache))
        else:
            widths = (0, self.num_nodes) if self._asked_whole else self.widths
            branches = [padded(width) for width in widths]
            index = jnp.minimum(widest, len(widths) - 1)
            draft, (inner, cache) = switch_in_place(index, branches, (inner, cache))
        if free and getattr(self.inner, "length_follows_match", False):
            long_b = draft.valid.all(1) & (state.idle >= state.rest // MATCH_REST)
            index_b = jnp.where(open_b & long_b, jnp.maximum(index_b, 1), index_b)
        sizes = jnp.asarray(self.widths, jnp.int32)
        nodes = jnp.arange(self.num_nodes)
        valid = draft.valid & (nodes < sizes[index_b][:, None])
        # A draft that stopped at once was paid for, a lookup without a match was not.
        tried_b = valid.any(1) if free else index_b > 0
        longer_b = jnp.minimum(2 * state.rest, LONGEST_REST * self.probe_every)
        state = dataclasses.replace(
            state,
            inner=inner,
            idle=jnp.where(tried_b, 0, state.idle + 1),
            rest=jnp.where(tried_b & (best_b == 0), longer_b, state.rest),
            stale=jnp.where(widest > 0, 0, state.stale + 1),
        )
        return dataclasses.replace(draft, valid=valid, widths=fitting(valid, self.widths)), state, cache

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
        # Drafting that left nothing to verify counts as a position that was not accepted.
        reached = jnp.maximum((~jnp.isnan(verdict.overlap)).sum(1), state.idle == 0)
        keep = jnp.where(reached > 0, self.decay, 1.0)
        return dataclasses.replace(
            state,
            inner=inner,
            accepted=keep * state.accepted + verdict.num_accepted,
            tried=keep * state.tried + reached,
            rest=jnp.where(verdict.num_accepted > 0, self.probe_every, state.rest),
            length=context.length,
        )

    @property
    def _rests(self) -> bool:
        return hasattr(self.inner, "rest")

    @property
    def _asked_whole(self) -> bool:
        passes = draft_passes(self.inner)
        return any_context(self.inner) and all(draft_passes(self._at(w)) == passes for w in self.widths[1:])

    def _rest(self, params: Any, tables: Any, target: Decoder, inner: Any, context: Context) -> Any:
        return self.inner.rest(params, tables, target, inner, context) if self._rests else inner  # type: ignore[attr-defined]

    def _at(self, width: int) -> Drafter:
        if hasattr(self.inner, "at_width"):
            narrow: Drafter = self.inner.at_width(width)
            return narrow
        return dataclasses.replace(self.inner, num_nodes=width)  # type: ignore[type-var]

    def _best(self, state: AdaptiveState, verified: float) -> jax.Array:
        """`[B]` index of the width with the most tokens for the time; `verified`: the part of the target that runs."""
        rate = (state.accepted / jnp.maximum(state.tried, 1e-6))[:, None]
        powers = rate ** jnp.arange(self.depth + 1)
        sized = [self._at(width) for width in self.widths[1:]]
        expected = jnp.cumsum(powers, axis=1)[:, jnp.asarray([0, *(drafter.depth for drafter in sized)])]
        costs = [
            draft_passes(drafter) * self.draft_cost + verified * (1 + drafter.num_nodes * self.pass_cost)
            for drafter in sized
        ]
        return jnp.argmax(expected / jnp.asarray([1.0, *costs]), axis=1).astype(jnp.int32)

    def _catch_up(
        self, params: Any, tables: Any, target: Decoder, inner: Any, context: Context, missed: jax.Array
    ) -> Any:
        """A draft model's cache takes in what was committed in so many steps without a draft, a token in each."""
        if not isinstance(self.inner, DraftModel):
            return inner
        size = min(CATCH_UP, context.tokens.shape[1])
        passes = (missed + size - 1) // size

        def take_in(i: jax.Array, inner: Any) -> Any:
            start = jnp.maximum(context.length - 1 - (passes - i) * size, 0)
            positions = start[:, None] + jnp.arange(size)
            tokens = jnp.take_along_axis(context.tokens, positions, axis=1)
            valid = positions < context.length[:, None] - 1
            return self.inner.extend(params, tables, target, inner, tokens, positions, {}, valid)

        return jax.lax.fori_loop(0, passes, take_in, inner)


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
