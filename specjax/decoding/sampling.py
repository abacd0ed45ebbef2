"""Sampling parameters per row, the warped laws they define, and the keys every random choice is made with."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

# Purposes of a key. Never one uniform for two purposes.
DRAFT, ACCEPT, RESIDUAL, SAMPLE = range(4)


@flax.struct.dataclass
class Sampling:
    """How each row's next token is drawn.

    Attributes:
        temperature: `[B]` float32, 0 for greedy.
        top_k: `[B]` int32, 0 for all. Tokens tied with the k-th are kept.
        top_p: `[B]` float32 in (0, 1]. The smallest set of likeliest tokens with at least this mass; ties are kept.
        min_p: `[B]` float32 in [0, 1). Tokens below this share of the likeliest are dropped.
        greedy: static; every row has temperature 0.
        warps: static; which of `top_k`, `top_p`, `min_p` any row uses.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    greedy: bool = flax.struct.field(pytree_node=False, default=True)
    warps: frozenset[str] = flax.struct.field(pytree_node=False, default=frozenset())


def make_sampling(
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
) -> Sampling:
    """Checks host-side values, one a row, and derives the statics.

    Raises:
        ValueError: a value out of range; names row and value.
    """
    rows = len(temperature)
    ks, ps, ms = top_k or [0] * rows, top_p or [1.0] * rows, min_p or [0.0] * rows
    for name, values in (("top_k", ks), ("top_p", ps), ("min_p", ms)):
        if len(values) != rows:
            raise ValueError(f"{name} has {len(values)} values for {rows} rows; give one a row")
    for row, (t, k, p, m) in enumerate(zip(temperature, ks, ps, ms, strict=True)):
        if not 0 <= t < float("inf"):
            raise ValueError(f"temperature={t} in row {row}; expected a number >= 0 (0 is greedy)")
        if k < 0 or k != int(k):
            raise ValueError(f"top_k={k} in row {row}; expected an integer >= 0 (0 keeps all tokens)")
        if not 0 < p <= 1:
            raise ValueError(f"top_p={p} in row {row}; expected a number in (0, 1]")
        if not 0 <= m < 1:
            raise ValueError(f"min_p={m} in row {row}; expected a number in [0, 1)")
    used = {"top_k": any(ks), "top_p": any(p < 1 for p in ps), "min_p": any(ms)}
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(ks, jnp.int32),
        top_p=jnp.asarray(ps, jnp.float32),
        min_p=jnp.asarray(ms, jnp.float32),
        greedy=not any(temperature),
        warps=frozenset(name for name, on in used.items() if on),
    )


def _ordered(x: jax.Array) -> jax.Array:
    """Float32 to int32 with the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _threshold(x: jax.Array, weight: jax.Array, least: jax.Array) -> jax.Array:
    """The largest value t of `x` with `sum(weight[x >= t]) >= least`, by bisection over float order.

    No sort over the vocabulary: 32 comparisons of the whole axis at most, fewer when the range is narrow.

    Args:
        x: `[..., V]` float32.
        weight: `[..., V]`.
        least: `[...]`.

    Returns:
        bool `[..., V]`: `x >= t`. All True where even the whole axis does not reach `least`.
    """
    order = _ordered(x)
    low, high = order.min(-1), order.max(-1)

    def enough(t: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order >= t[..., None], weight, 0), -1) >= least

    def body(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lo, hi = bounds  # enough(lo) holds, or lo is the minimum
        mid = (lo | hi) - ((lo ^ hi) >> 1)  # the ceiling of the mean, without overflow
        good = enough(mid)
        return jnp.where(good, mid, lo), jnp.where(good, hi, mid - 1)

    low, _ = jax.lax.while_loop(lambda b: jnp.any(b[0] < b[1]), body, (low, high))
    return order >= low[..., None]


def log_law(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The law that a row samples from: temperature, then top-k, top-p, min-p, then softmax.

    Args:
        logits: `[B, ..., V]` float32.
        sampling: one set of parameters a row; temperature 0 gives all mass to the first maximum.

    Returns:
        float32 log-probabilities `[B, ..., V]`, -inf outside the support.
    """

    def row(x_b: jax.Array) -> jax.Array:
        return x_b.reshape(x_b.shape + (1,) * (logits.ndim - 2))

    vocab = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    best = jnp.argmax(logits, -1)
    one_hot = jnp.where(vocab == best[..., None], 0.0, -jnp.inf)
    if sampling.greedy:
        return one_hot
    temperature = row(sampling.temperature)
    x = logits / jnp.where(temperature > 0, temperature, 1.0)[..., None]
    if "top_k" in sampling.warps:
        k = jnp.where(row(sampling.top_k) > 0, row(sampling.top_k), x.shape[-1])
        x = jnp.where(_threshold(x, jnp.ones_like(x), k.astype(x.dtype)), x, -jnp.inf)
    if "top_p" in sampling.warps:
        p = row(sampling.top_p)
        kept = _threshold(x, jax.nn.softmax(x, -1), p) | (p >= 1)[..., None]
        x = jnp.where(kept, x, -jnp.inf)
    if "min_p" in sampling.warps:
        floor = jnp.max(x, -1) + jnp.log(row(sampling.min_p))
        x = jnp.where(x >= floor[..., None], x, -jnp.inf)
    return jnp.where((temperature > 0)[..., None], jax.nn.log_softmax(x, -1), one_hot)


@flax.struct.dataclass
class Keys:
    """The randomness of one step: a function of (request, committed length, purpose, slot).

    Attributes:
        request: `[B, 2]` uint32 key data of each row's request, so results do not depend on the batch slot.
        length: `[B]` int32 committed tokens at the step's start.
    """

    request: jax.Array
    length: jax.Array

    def at(self, purpose: int, position_b: jax.Array, slot: jax.Array | int) -> jax.Array:
        """Keys `[B]` of a purpose at an absolute position and slot."""

        def one(data: jax.Array, position: jax.Array, slot: jax.Array) -> jax.Array:
            key = jax.random.wrap_key_data(data)
            for part in (position, purpose, slot):
                key = jax.random.fold_in(key, part)
            return key

        slots = jnp.broadcast_to(jnp.asarray(slot, jnp.int32), position_b.shape)
        return jax.vmap(one)(self.request, position_b, slots)

    def uniform(self, purpose: int, slot: jax.Array | int) -> jax.Array:
        """`[B]` uniforms in [0, 1)."""
        return jax.vmap(jax.random.uniform)(self.at(purpose, self.length, slot))

    def sample(self, purpose: int, slot: jax.Array | int, log_law_bv: jax.Array) -> jax.Array:
        """Draws one token a row `[B]` from log-probabilities `[B, V]`."""
        return draw(self.at(purpose, self.length, slot), log_law_bv)


def draw(keys_b: jax.Array, log_law_bv: jax.Array) -> jax.Array:
    """Gumbel-argmax draw `[B]` int32 from each row of log-probabilities `[B, V]`."""
    gumbel = jax.vmap(lambda k: jax.random.gumbel(k, log_law_bv.shape[-1:], jnp.float32))(keys_b)
    return jnp.argmax(log_law_bv + gumbel, -1).astype(jnp.int32)


def next_token(logits_bv: jax.Array, sampling: Sampling, keys: Keys, position_b: jax.Array) -> jax.Array:
    """The token `[B]` at an absolute position: argmax, or a draw with the key of that position.

    Autoregressive decoding and the one-hot rule both pick tokens so; hence their equality token for token.
    """
    if sampling.greedy:
        return jnp.argmax(logits_bv, -1).astype(jnp.int32)
    return draw(keys.at(SAMPLE, position_b, 0), log_law(logits_bv, sampling))


def request_keys(seed: int, requests: list[int]) -> jax.Array:
    """Key data `[B, 2]` uint32 of each request id under a seed."""
    base = jax.random.key(seed)
    return jnp.stack([jax.random.key_data(jax.random.fold_in(base, r)) for r in requests])
