"""Draws from the weighted mean of the members' laws."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict, log_law
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import chain
from specjax.drafting.any_context import any_context
from specjax.drafting.ensemble.members import Members, per_member
from specjax.drafting.ensemble.vote import continued, proposed
from specjax.models import Decoder, KVCache, Tap

FLOOR = 1e-2  # No learned weight falls below: a member can always come back.


@flax.struct.dataclass
class MixtureState:
    """The members' states and each row's weights.

    Attributes:
        members: their states.
        weights: `[B, J]` float32, summing to 1.
    """

    members: Any
    weights: jax.Array


@dataclasses.dataclass(frozen=True)
class EnsembleMixture:
    """q = sum_j w_j q_j, drawn from in lockstep: exact as any draft is, for q is the law that was drawn from.

    A member that copies its token counts with all mass on it; one that proposes nothing leaves the mean. At
    temperature 0 the draft is the likeliest token of the mixture of the laws at temperature 1.

    Attributes:
        members: drafters of chains that read nothing of the target's pass; `tables["weights"]` `[J]` are theirs.
        num_nodes: tokens to draft.
        learning_rate: of exponentiated-gradient steps on each row's acceptance sum min(p, q), taken where the target
            verified; 0 keeps the weights of the tables.
    """

    members: Members
    num_nodes: int = 4
    learning_rate: float = 0.0
    num_probes: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.learning_rate < 0:
            raise ValueError(
                f"num_nodes={self.num_nodes}, learning_rate={self.learning_rate}; expected at least 1, and at least 0"
            )
        self.members.check_lockstep()
        self.members.resized(1)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Members in lockstep read none."""
        return ()

    @property
    def any_context(self) -> bool:
        """Whether it may be asked behind any text: its members may, and no weights are learned from step to step."""
        return not self.learning_rate and all(any_context(drafter) for drafter in self.members.drafters)

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """All members', one token at a time."""
        return self.num_nodes * self.members.resized(1).draft_passes

    def kind(self, sampling: Sampling) -> Kind:
        """Drawn, even where every member's own choice is fixed."""
        return "fixed" if sampling.greedy else "iid"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """The members', and equal weights."""
        params, tables = self.members.init_params(key, target)
        return params, self.tables(tables)

    def tables(self, members: tuple[Any, ...], weights: Sequence[float] | None = None) -> Any:
        """The ensemble's tables around those of its members; `weights` is one number a member, equal by default."""
        return {"members": members, "weights": per_member("weights", weights, self.members.count, 1.0)}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> MixtureState:
        """The tables' weights in every row."""
        weights = tables["weights"] / tables["weights"].sum()
        return MixtureState(
            members=self.members.init_state(params, tables["members"], target, batch, capacity),
            weights=jnp.broadcast_to(weights.astype(jnp.float32), (batch, self.members.count)),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: MixtureState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> MixtureState:
        """Every member takes the tokens in."""
        parts = (params, tables["members"], target, state.members)
        return dataclasses.replace(state, members=self.members.extend(*parts, tokens, positions, taps, valid))

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: MixtureState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, MixtureState, KVCache]:
        """One token at a time: the members' laws, their mean, a draw that all continue from."""
        members = self.members.resized(1)
        cold_b = context.sampling.temperature <= 0
        warm = jnp.where(cold_b, 1.0, context.sampling.temperature)
        sampling = dataclasses.replace(context.sampling, temperature=warm, greedy=False)

        def one_token(carry: tuple[Any, KVCache, Context], slot: jax.Array) -> tuple[Any, Any]:
            own, cache, here = carry
            drafts, own, cache = members.propose(params, tables["members"], target, cache, own, here, keys)
            laws_bjv = jnp.stack([_law(draft, target.config.head_size) for draft in drafts], axis=1)
            q_bv, any_b = mix(laws_bjv, state.weights)
            if context.sampling.greedy:
                law, token = None, jnp.argmax(q_bv, -1).astype(jnp.int32)
            else:
                best = jnp.arange(q_bv.shape[-1]) == jnp.argmax(q_bv, -1)[:, None]
                law = jnp.log(jnp.where(cold_b[:, None], best, q_bv))
                token = keys.sample(DRAFT, slot, law)
            single = laws_bjv if self.learning_rate else None
            return (own, cache, continued(here, token[:, None])), (token, any_b, law, single)

        start = (state.members, cache, dataclasses.replace(context, sampling=sampling))
        (own, cache, _), found = jax.lax.scan(one_token, start, jnp.arange(self.num_nodes))
        tokens, valid, mixed, singles = jax.tree.map(lambda x: x.swapaxes(0, 1), found)
        draft = chain(tokens, laws=mixed)
        draft = dataclasses.replace(draft, valid=jnp.cumprod(valid, axis=1).astype(bool))
        if self.learning_rate:
            # Rows behind those that nodes were drawn from: what `commit` learns from.
            rows = singles.reshape(singles.shape[0], -1, singles.shape[-1])
            kept = rows if mixed is None else jnp.concatenate([mixed, rows], axis=1)
            draft = dataclasses.replace(draft, laws=kept)
        return draft, dataclasses.replace(state, members=own), cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: MixtureState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> MixtureState:
        """A step on the weights towards higher sum min(p, q) at the depths that were verified."""
        parts = (params, tables["members"], target, state.members)
        members = self.members.commit(*parts, context, draft, scores, verdict)
        if not self.learning_rate:
            return dataclasses.replace(state, members=members)
        batch, depth, count = *draft.tokens.shape, self.members.count
        laws_bdjv = draft.laws[:, -depth * count :].reshape(batch, depth, count, -1)
        p_bdv = jnp.exp(log_law(scores.logits[:, :depth], context.sampling))
        reached_bd = (jnp.arange(depth) <= verdict.num_accepted[:, None]) & draft.valid
        gain_bdj = acceptance_gradient(p_bdv, laws_bdjv, state.weights)
        gain_bj = jnp.sum(jnp.where(reached_bd[..., None], gain_bdj, 0.0), axis=1)
        weights = state.weights * jnp.exp(self.learning_rate * gain_bj)
        weights = jnp.maximum(weights / weights.sum(-1, keepdims=True), FLOOR)
        return dataclasses.replace(state, members=members, weights=weights / weights.sum(-1, keepdims=True))


def mix(laws_bjv: jax.Array, weights_bj: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted mean of laws given as log-probabilities, and whether any member has one.

    A member whose law is -inf throughout has none; the others share its weight. Without any the mean is uniform.

    Returns:
        `(q [B, V], any [B])`.
    """
    q_bjv = jnp.exp(laws_bjv)
    mass_b = jnp.sum(weights_bj * has_law(laws_bjv), axis=1)
    any_b = mass_b > 0
    mean_bv = jnp.einsum("bj,bjv->bv", weights_bj, q_bjv) / jnp.where(any_b, mass_b, 1.0)[:, None]
    return jnp.where(any_b[:, None], mean_bv, 1 / laws_bjv.shape[-1]), any_b


def has_law(laws: jax.Array) -> jax.Array:
    """`[..., V]` to `[...]`: some token has mass."""
    return jnp.max(laws, axis=-1) > -jnp.inf


def acceptance_gradient(p_bdv: jax.Array, laws_bdjv: jax.Array, weights_bj: jax.Array) -> jax.Array:
    """`[B, D, J]`: the derivative of sum_v min(p, q) by each weight, sum of q_j over tokens with q < p.

    A member without a law gets the weighted mean of the others: it neither gains nor loses.
    """
    has_bdj = has_law(laws_bdjv)
    weights_bdj = weights_bj[:, None] * has_bdj
    mass_bd1 = jnp.maximum(weights_bdj.sum(-1, keepdims=True), 1e-30)
    q_bdjv = jnp.exp(laws_bdjv)
    mean_bdv = jnp.einsum("bdj,bdjv->bdv", weights_bdj / mass_bd1, q_bdjv)
    gain_bdj = jnp.sum(jnp.where((mean_bdv < p_bdv)[:, :, None], q_bdjv, 0.0), axis=-1)
    neutral_bd1 = jnp.sum(weights_bdj * gain_bdj, axis=-1, keepdims=True) / mass_bd1
    return jnp.where(has_bdj, gain_bdj, neutral_bd1)


def _law(draft: Draft, vocab: int) -> jax.Array:
    """`[B, V]`: the law of a member's first token; all mass on a chosen one, none where nothing is proposed."""
    token_b1 = proposed(draft)[:, :1]
    chosen = jnp.arange(vocab) == token_b1
    law = jnp.where(chosen, 0.0, -jnp.inf)
    if draft.laws.shape[1]:
        drawn = jnp.take_along_axis(draft.laws, jnp.maximum(draft.law[:, :1], 0)[..., None], axis=1)[:, 0]
        law = jnp.where(draft.law[:, :1] >= 0, drawn, law)
    return jnp.where(token_b1 >= 0, law, -jnp.inf)
