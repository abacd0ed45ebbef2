"""Lookahead decoding: Jacobi iterations gather n-grams in the pass that verifies earlier ones (Fu et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Kind, Probes, Sampling, Scores, Verdict
from specjax.decoding.loop import emitted_block
from specjax.decoding.sampling import DRAFT
from specjax.drafting.ngram_pool import Pool, init_pool, look_up, put_all
from specjax.drafting.prefix_tree import prefix_tree
from specjax.models import Decoder, KVCache, Tap


@flax.struct.dataclass
class LookaheadState:
    """The window and the pool.

    Attributes:
        window: `[B, N - 1, W]` int32; row r, column c is a guess at the token `r + c` behind the root, oldest
            iteration first. The root itself is row 0, column 0, so that entry is not read.
        steps: `[B]` int32 steps taken; 0 means that the window is still empty.
        tail: `[B, N - 1]` int32 last tokens of the prompt so far, while it is taken in.
        pool: n-grams by first token.
    """

    window: jax.Array
    steps: jax.Array
    tail: jax.Array
    pool: Pool


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """The W x (N - 1) window of Jacobi guesses and up to G n-grams of the pool ride one target pass.

    Window entry (r, c) follows (r - 1, c), and (0, c) follows (0, c - 1): the window's entries are probes. What the
    target says behind the last row completes W n-grams, which enter the pool, and becomes the next last row; the
    others move up, and left by the number of accepted tokens; the columns that come free start from the guesses of
    those that left, which are text by now. The pool's n-grams that begin with the root are the draft, a tree in which
    common prefixes are merged.

    The window starts with random tokens of the text (Algorithm 2 of the paper); n-grams enter the pool once all rows
    but the oldest hold guesses, after N - 2 steps.

    Attributes:
        window: W, columns.
        ngram: N, tokens of an n-gram.
        guesses: G, n-grams to verify in a step, and entries of a bucket of the pool.
        pool_from_prompt: whether the n-grams of the prompt and of the output enter the pool too.
        buckets: of the pool; first tokens that share one share its entries.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    pool_from_prompt: bool = True
    buckets: int = 1024
    taps: tuple[Tap, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least, why in (
            ("window", self.window, 1, "W, columns of the window"),
            ("ngram", self.ngram, 2, "N, a token and at least one that follows it"),
            ("guesses", self.guesses, 1, "G, n-grams to verify"),
            ("buckets", self.buckets, 1, "of the pool"),
        ):
            if value < least:
                raise ValueError(f"{name}={value}; expected at least {least} ({why})")

    @property
    def depth(self) -> int:
        """The tokens of an n-gram behind its first."""
        return self.ngram - 1

    @property
    def num_nodes(self) -> int:
        """G n-grams without their first token."""
        return self.guesses * self.depth

    @property
    def num_probes(self) -> int:
        """The window without the root."""
        return self.window * self.depth - 1

    @property
    def topology(self) -> str:
        """The pool decides the tree in every step."""
        return "dynamic_tree"

    def kind(self, sampling: Sampling) -> Kind:
        """n-grams are looked up, not drawn."""
        del sampling
        return "fixed"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """No parameters, no tables."""
        del key, target
        return {}, {}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> LookaheadState:
        """An empty pool; the window is filled in the first step."""
        del params, tables, target, capacity
        return LookaheadState(
            window=jnp.zeros((batch, self.depth, self.window), jnp.int32),
            steps=jnp.zeros((batch,), jnp.int32),
            tail=jnp.zeros((batch, self.depth), jnp.int32),
            pool=init_pool(batch, self.buckets, self.guesses, self.depth),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: LookaheadState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> LookaheadState:
        """Puts the prompt's n-grams into the pool."""
        del params, tables, target, taps
        if not self.pool_from_prompt:
            return state
        text = jnp.concatenate([state.tail, tokens], axis=1)
        pool = put_all(state.pool, self._grams(text), valid & (positions >= self.depth))
        last = valid.sum(1)[:, None] + jnp.arange(self.depth)
        return dataclasses.replace(state, tail=jnp.take_along_axis(text, last, axis=1), pool=pool)

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: LookaheadState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, LookaheadState, KVCache]:
        """The pool's n-grams behind the root, with the window as probes."""
        del params, tables, target
        window = jax.lax.cond(
            jnp.any(state.steps == 0),
            lambda: jnp.where((state.steps == 0)[:, None, None], self._first_window(context, keys), state.window),
            lambda: state.window,
        )
        rest, there = look_up(state.pool, context.last(1)[:, 0])
        draft = prefix_tree(rest, jnp.broadcast_to(there[..., None], rest.shape), self.num_nodes)
        state = dataclasses.replace(state, window=window)
        if not self.num_probes:
            return draft, state, cache
        batch = window.shape[0]
        tokens = window.reshape(batch, -1)[:, 1:]
        parents = jnp.broadcast_to(self._probe_parents(), tokens.shape)
        return dataclasses.replace(draft, probes=Probes(tokens, parents)), state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: LookaheadState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> LookaheadState:
        """Takes n-grams from window and output, then moves the window on."""
        del params, tables, target
        root = context.last(1)
        grid = state.window.at[:, 0, 0].set(root[:, 0])
        said = jnp.concatenate([scores.argmax[:, :1], scores.argmax[:, self.num_nodes + 1 :]], axis=1)
        fresh = said.reshape(grid.shape)[:, -1]  # the target's guesses behind the window's last row
        grown = jnp.concatenate([grid, fresh[:, None]], axis=1)  # [B, N, W]
        warm = state.steps >= self.ngram - 2
        wanted = jnp.broadcast_to(warm[:, None], fresh.shape)
        pool = put_all(state.pool, grown.swapaxes(1, 2), wanted)
        if self.pool_from_prompt:
            pool = self._take_output(pool, context, draft, verdict)
        columns = (jnp.arange(self.window) + verdict.num_accepted[:, None]) % self.window
        moved = jnp.take_along_axis(grown[:, 1:], columns[:, None], axis=2)
        return dataclasses.replace(state, window=moved, steps=state.steps + 1, pool=pool)

    def _take_output(self, pool: Pool, context: Context, draft: Draft, verdict: Verdict) -> Pool:
        """Puts in the n-grams that end in the root or in a token of this step."""
        slots = context.length[:, None] - self.ngram + jnp.arange(self.ngram)
        before = jnp.take_along_axis(context.tokens, jnp.maximum(slots, 0), axis=1)
        text = jnp.concatenate([before, emitted_block(draft, verdict)], axis=1)  # [B, 2 N]
        ends = jnp.arange(self.ngram + 1)
        whole = context.length[:, None] - 1 + ends >= self.depth
        return put_all(pool, self._grams(text), whole & (ends <= verdict.num_accepted[:, None] + 1))

    def _grams(self, text_bt: jax.Array) -> jax.Array:
        """`[B, T - N + 1, N]`: all n-grams of consecutive tokens."""
        starts = jnp.arange(text_bt.shape[1] - self.depth)
        return text_bt[:, starts[:, None] + jnp.arange(self.ngram)]

    def _first_window(self, context: Context, keys: Keys) -> jax.Array:
        """Random tokens of the text."""

        def row(key: jax.Array, length: jax.Array, tokens: jax.Array) -> jax.Array:
            return tokens[jax.random.randint(key, (self.depth, self.window), 0, length)]

        return jax.vmap(row)(keys.at(DRAFT, keys.length, 0), context.length, context.tokens)

    def _probe_parents(self) -> np.ndarray:
        """`[P]`: entry (r, c) is probe r * W + c - 1; the root takes the place of (0, 0)."""
        index = np.arange(self.depth * self.window).reshape(self.depth, self.window)
        above = np.concatenate([np.arange(-1, self.window - 1)[None], index[:-1]]).reshape(-1)[1:]
        return np.where(above == 0, -1, self.num_nodes + above - 1).astype(np.int32)
