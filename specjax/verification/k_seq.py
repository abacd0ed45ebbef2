"""SpecTr's k-SEQ: the k independent children of a node are tried under one bar, which the target's law is exact for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import Keys, Sampling
from specjax.verification.laws import normalised
from specjax.verification.walk import walk_down

RHO_TOLERANCE = 2.0**-16


@dataclasses.dataclass(frozen=True)
class KSeq:
    """Each of the k children of a node is accepted with probability min(1, p / (rho q)), strictly u < p / (rho q).

    rho in [1, k] is the smallest with `1 - (1 - beta)^k <= rho beta`, `beta = sum min(q, p / rho)`; every larger one is
    exact too, and accepts less. If all children fail, the next token comes from the normalised positive part of
    `p - min(q, p / rho) (1 - (1 - beta)^k) / beta`. At k = 1 this is speculative sampling. The children must be drawn
    independently from one law (Sun et al. 2023, SpecTr, Algorithm 3; (1 - 1/e)-optimal for one level by its Theorem 3).

    Attributes:
        depth: D of the drafter.
    """

    depth: int
    exact_for: frozenset[Kind] = frozenset({"iid"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        return walk_down(draft, scores, sampling, keys, self.depth, _OneBar())


@dataclasses.dataclass(frozen=True)
class _OneBar:
    """The `Trial`: scale is rho, and p changes only after the last child."""

    def scale(
        self, draft: Draft, node_b: jax.Array, needed_b: jax.Array, p_bv: jax.Array, q_bv: jax.Array
    ) -> jax.Array:
        return smallest_rho(p_bv, q_bv, jnp.where(needed_b, _children(draft, node_b), 1))

    def left(
        self,
        draft: Draft,
        node_b: jax.Array,
        last_b: jax.Array,
        scale_b: jax.Array,
        p_bv: jax.Array,
        q_bv: jax.Array,
    ) -> jax.Array:
        share = jnp.minimum(q_bv, p_bv / scale_b[:, None])
        beta = share.sum(-1)
        taken = _any_of(beta, _children(draft, node_b)) / jnp.where(beta > 0, beta, 1.0)
        left = normalised(jnp.maximum(p_bv - share * taken[:, None], 0.0), p_bv)
        return jnp.where(last_b[:, None], left, p_bv)


def smallest_rho(p_bv: jax.Array, q_bv: jax.Array, k_b: jax.Array) -> jax.Array:
    """The smallest valid rho `[B]` in [1, k], from above, to within 2^-16 of itself; 1 where k is 1.

    By bisection: with rho the left side of `1 - (1 - beta)^k <= rho beta` falls and the right side grows.
    """

    def valid(rho_b: jax.Array) -> jax.Array:
        beta = jnp.minimum(q_bv, p_bv / rho_b[:, None]).sum(-1)
        return _any_of(beta, k_b) <= rho_b * beta

    def body(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        good = valid(middle)
        return jnp.where(good, low, middle), jnp.where(good, middle, high)

    def unsettled(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = bounds
        return jnp.any(high - low > RHO_TOLERANCE * high)

    one, k = jnp.ones(k_b.shape, jnp.float32), k_b.astype(jnp.float32)
    # At p = q, rho = 1 itself is valid, and a bisection only comes near it.
    return jax.lax.while_loop(unsettled, body, (one, jnp.where(valid(one), one, k)))[1]


def _any_of(beta_b: jax.Array, k_b: jax.Array) -> jax.Array:
    """1 - (1 - beta)^k without cancellation."""
    return -jnp.expm1(k_b * jnp.log1p(-jnp.minimum(beta_b, 1.0)))


def _children(draft: Draft, node_b: jax.Array) -> jax.Array:
    """`[B]` int32 valid children of a node."""
    return (draft.valid & (draft.parents == node_b[:, None])).sum(-1).astype(jnp.int32)
