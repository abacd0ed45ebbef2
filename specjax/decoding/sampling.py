"""Sampling parameters per row, the warped laws they define, and the keys every random choice is made with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# Purposes of a key. Never one uniform for two purposes.
DRAFT, ACCEPT, RESIDUAL, SAMPLE = range(4)


MAX_TOP_K = (1 << 31) - 1
# What is finite and above 0 in the loop's float32.
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
BIAS_BUCKET = 8  # Biased tokens a row are padded to multiples of this, so that few programs are compiled.


@flax.struct.dataclass
class Penalties:
    """Processors that look at a row's history (see `specjax.decoding.processors`).

    Attributes:
        repetition: `[B]` float32 > 0, 1 for none: positive logits of tokens in prompt or output are divided by it,
            negative ones multiplied (Keskar et al. 2019; Hugging Face).
        presence: `[B]` float32, 0 for none: taken once from the logit of every token in the output (OpenAI, vLLM).
        frequency: `[B]` float32, 0 for none: taken from a token's logit for each time it is in the output.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array


@flax.struct.dataclass
class Bias:
    """Additions to single tokens' logits.

    Attributes:
        tokens: `[B, K]` int32 target ids, -1 for none.
        values: `[B, K]` float32; -inf suppresses the token.
    """

    tokens: jax.Array
    values: jax.Array


@flax.struct.dataclass
class Sampling:
    """How each row's next token is drawn.

    The order is Hugging Face's: bias, repetition, then frequency and presence, then temperature, top-k, top-p, min-p.
    Suppression is a bias of -inf, which nothing after it changes. What no row uses is not in the program: `penalties`
    and `bias` are None, and `warps` names the rest.

    Attributes:
        temperature: `[B]` float32, 0 for greedy.
        top_k: `[B]` int32, 0 for all. Tokens tied with the k-th are kept.
        top_p: `[B]` float32 in (0, 1]. The smallest set of likeliest tokens with at least this mass; ties are kept.
        min_p: `[B]` float32 in [0, 1). Tokens below this share of the likeliest are dropped.
        penalties: None where no row has any.
        bias: None where no row has any.
        greedy: static; every row has temperature 0.
        warps: static; which of `top_k`, `top_p`, `min_p` any row uses.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    penalties: Penalties | None = None
    bias: Bias | None = None
    greedy: bool = flax.struct.field(pytree_node=False, default=True)
    warps: frozenset[str] = flax.struct.field(pytree_node=False, default=frozenset())


def make_sampling(
    temperature: Sequence[float],
    top_k: Sequence[int] | None = None,
    top_p: Sequence[float] | None = None,
    min_p: Sequence[float] | None = None,
    *,
    repetition_penalty: Sequence[float] | None = None,
    presence_penalty: Sequence[float] | None = None,
    frequency_penalty: Sequence[float] | None = None,
    logit_bias: Sequence[Mapping[int, float]] | None = None,
    suppress_tokens: Sequence[Sequence[int]] | None = None,
) -> Sampling:
    """Checks host-side values, one a row, and derives what is static.

    Raises:
        ValueError: a value out of range, or not one a row; names row and value.
    """
    rows = len(temperature)
    ts = _column("temperature", temperature, rows, 0.0, lambda t: 0 <= t <= LARGEST, "a number >= 0 (0 is greedy)")
    ks = _column(
        "top_k", top_k, rows, 0, lambda k: 0 <= k <= MAX_TOP_K and k == int(k), "an integer >= 0 (0 keeps all tokens)"
    )
    ps = _column("top_p", top_p, rows, 1.0, lambda p: 0 < p <= 1, "a number in (0, 1]")
    ms = _column("min_p", min_p, rows, 0.0, lambda m: 0 <= m < 1, "a number in [0, 1)")
    above = "a number > 0 (1 is none)"
    rs = _column("repetition_penalty", repetition_penalty, rows, 1.0, lambda r: SMALLEST <= r <= LARGEST, above)
    finite = "a finite number (0 is none)"
    prs = _column("presence_penalty", presence_penalty, rows, 0.0, _finite, finite)
    frs = _column("frequency_penalty", frequency_penalty, rows, 0.0, _finite, finite)
    used = {"top_k": any(ks), "top_p": any(p < 1 for p in ps), "min_p": any(ms)}
    penalised = any(r != 1 for r in rs) or any(prs) or any(frs)
    return Sampling(
        temperature=jnp.asarray(ts, jnp.float32),
        top_k=jnp.asarray(ks, jnp.int32),
        top_p=jnp.asarray(ps, jnp.float32),
        min_p=jnp.asarray(ms, jnp.float32),
        penalties=Penalties(*(jnp.asarray(x, jnp.float32) for x in (rs, prs, frs))) if penalised else None,
        bias=_make_bias(logit_bias, suppress_tokens, rows),
        greedy=not any(ts),
        warps=frozenset(name for name, on in used.items() if on),
    )


def _make_bias(
    logit_bias: Sequence[Mapping[int, float]] | None, suppress_tokens: Sequence[Sequence[int]] | None, rows: int
) -> Bias | None:
    biases = [{}] * rows if logit_bias is None else list(logit_bias)
    suppressed = [()] * rows if suppress_tokens is None else list(suppress_tokens)
    _one_a_row("logit_bias", biases, rows)
    _one_a_row("suppress_tokens", suppressed, rows)
    entries: list[dict[int, float]] = []
    for row, (bias, never) in enumerate(zip(biases, suppressed, strict=True)):
        for token, value in bias.items():
            if not (isinstance(token, numbers.Integral) and isinstance(value, numbers.Real)):
                raise ValueError(f"logit_bias has {token!r}: {value!r} in row {row}; expected a token id and a number")
            if not _finite(value):
                raise ValueError(
                    f"logit_bias of token {token} is {value} in row {row}; expected a finite number "
                    "(suppress_tokens rules a token out)"
                )
        if odd := [token for token in never if not isinstance(token, numbers.Integral)]:
            raise ValueError(f"suppress_tokens has {odd[0]!r} in row {row}; expected token ids")
        entries.append({**bias, **dict.fromkeys(never, -math.inf)})
        if outside := [token for token in entries[-1] if token < 0]:
            raise ValueError(f"token {outside[0]} is biased or suppressed in row {row}; expected ids >= 0")
    longest = max(map(len, entries), default=0)
    if not longest:
        return None
    width = -(-longest // BIAS_BUCKET) * BIAS_BUCKET
    tokens, values = np.full((rows, width), -1, np.int32), np.zeros((rows, width), np.float32)
    for row, entry in enumerate(entries):
        tokens[row, : len(entry)], values[row, : len(entry)] = list(entry), list(entry.values())
    return Bias(jnp.asarray(tokens), jnp.asarray(values))


def _column(
    name: str, given: Sequence[float] | None, rows: int, default: float, good: Callable[[Any], bool], expected: str
) -> list[Any]:
    values = [default] * rows if given is None else list(given)
    _one_a_row(name, values, rows)
    for row, value in enumerate(values):
        try:
            fits = np.ndim(value) == 0 and good(value)
        except (TypeError, ValueError, OverflowError):  # no number, or too large a one
            fits = False
        if not fits:
            raise ValueError(f"{name}={value} in row {row}; expected {expected}")
    return values


def _finite(value: float) -> bool:
    return -LARGEST <= value <= LARGEST


def _one_a_row(name: str, values: Sequence[object], rows: int) -> None:
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} values for {rows} rows; give one a row")


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


def no_law(logits: jax.Array) -> jax.Array:
    """`[..., V]` to bool `[...]`: some logit is NaN or plus infinity, or all are minus infinity."""
    # Not by the maximum: XLA's on CPUs drops a NaN where arrays are large. A comparison with one is false everywhere.
    return ~((logits < jnp.inf).all(-1) & (logits > -jnp.inf).any(-1))


def log_law(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The law that a row samples from: temperature, then top-k, top-p, min-p, then softmax.

    Args:
        logits: `[B, ..., V]` float32.
        sampling: one set of parameters a row; temperature 0 gives all mass to the first maximum, and so does any
            where the largest logit is not finite (a draft vocabulary that is suppressed throughout).

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
    top = jnp.max(logits, -1)
    # From the largest logit down: else the quotients overflow where a temperature is small, and the law is lost.
    # Of a temperature near the end of float32 the reciprocal is 0, which times -inf would be no law.
    divisor = jnp.minimum(jnp.where(temperature > 0, temperature, 1.0), 1e30)
    x = (logits - top[..., None]) / divisor[..., None]
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
    return jnp.where(((temperature > 0) & ~no_law(logits))[..., None], jax.nn.log_softmax(x, -1), one_hot)


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

    def sample_distinct(self, purpose: int, slot: jax.Array | int, log_law_bv: jax.Array, count: int) -> jax.Array:
        """Draws tokens `[B, count]` one after another, each from what the earlier ones leave of the law `[B, V]`.

        By Gumbel top-k (Kool et al. 2019, 1903.06059): the order of perturbed log-probabilities is that of draws
        without replacement. Where the law has fewer tokens, the last ones have no probability.
        """
        keys = self.at(purpose, self.length, slot)
        return jax.lax.top_k(log_law_bv + _gumbel(keys, log_law_bv.shape[-1]), count)[1].astype(jnp.int32)


def draw(keys_b: jax.Array, log_law_bv: jax.Array) -> jax.Array:
    """Gumbel-argmax draw `[B]` int32 from each row of log-probabilities `[B, V]`."""
    return jnp.argmax(log_law_bv + _gumbel(keys_b, log_law_bv.shape[-1]), -1).astype(jnp.int32)


def _gumbel(keys_b: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise `[B, V]`.

    JAX's default comes from 23 random bits: tokens less likely than 1e-7 would hardly ever be drawn, and with a
    vocabulary of 128,256 up to 0.8 % of a law may lie there. `high` takes 46.
    """
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="high"))(keys_b)


def next_token(logits_bv: jax.Array, sampling: Sampling, keys: Keys, position_b: jax.Array) -> jax.Array:
    """The token `[B]` at an absolute position: argmax, or a draw with the key of that position.

    Autoregressive decoding and the one-hot rule both pick tokens so; hence their equality token for token.
    """
    if sampling.greedy:
        return jnp.argmax(logits_bv, -1).astype(jnp.int32)
    return draw(keys.at(SAMPLE, position_b, 0), log_law(logits_bv, sampling))


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that is no whole number in 0..2^32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 1 << 32:
        raise ValueError(f"seed={seed!r}; expected a whole number in 0..{(1 << 32) - 1}")


def request_keys(seed: int | Sequence[int], requests: Sequence[int]) -> jax.Array:
    """Key data `[B, 2]` uint32 of each request id under a seed, or each under its own.

    Raises:
        ValueError: a seed that `check_seed` refuses, or not one a request.
    """
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * len(requests)
    if len(seeds) != len(requests):
        raise ValueError(f"seed has {len(seeds)} values for {len(requests)} prompts; give one a prompt, or one for all")
    for one in seeds:
        check_seed(one)
    # One call for all: thousands of requests would otherwise be as many operands of one program.
    fold = jax.vmap(lambda seed, request: jax.random.fold_in(jax.random.key(seed), request))
    return jax.random.key_data(fold(*(jnp.asarray(np.asarray(x, np.uint32)) for x in (seeds, requests))))
