"""A draft model with a tokenizer of its own drafts a chain (token-level intersection, Timor et al. 2025, 2502.05202).

It drafts from the tokens that both vocabularies have: its law over them, renormalised, is a law over target ids, and
whatever rule verifies it keeps the target's law; what the draft cannot say is never accepted, and comes from the
target. The draft reads each target token spelt in its own ids, by a table made once, so nothing is tokenised in the
loop.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from specjax.checkpoints.drafters import target_head
from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
from specjax.decoding.loop import emitted_block
from specjax.decoding.sampling import DRAFT, log_law
from specjax.decoding.tree import chain
from specjax.models import (
    Decoder,
    KVCache,
    ModelConfig,
    Tap,
    causal_view,
    graph,
    init_cache,
    init_decoder,
    merge,
)

FED = 2  # stream ids a catch-up pass takes; a step leaves one or two, unless the target's token is spelt with more


@flax.struct.dataclass
class StreamState:
    """The committed text in draft ids, and how far the draft has read it.

    Attributes:
        cache: the draft's own; its `length` is not used, every pass says where it starts.
        stream: `[B, R]` int32 draft ids; slot and position of an id in the cache are its place here.
        length: `[B]` int32 ids in the stream. It counts on where the room ends; such rows draft nothing.
        seen: `[B]` int32 target tokens that are in it.
        fed: `[B]` int32 ids whose cache entries are final.
        drafted: `[B, N]` int32 target ids of the last draft: behind `length` the cache holds their spelling.
    """

    cache: KVCache
    stream: jax.Array
    length: jax.Array
    seen: jax.Array
    fed: jax.Array
    drafted: jax.Array


@dataclasses.dataclass(frozen=True)
class OtherTokenizer:
    """A chain from a decoder with other token ids than the target's.

    `tables` are those of a `TokenMap`: `vocab` and `draft_ids` `[Vs]` of the shared tokens, `pieces` `[V, K]` and
    `counts` `[V]` for the stream. A drafted token is one draft id, so a draft moves the stream by one id a node.

    Attributes:
        config: the draft network; its head has a row for each shared token (see `restrict`).
        num_nodes: gamma.
        expansion: draft ids that there is room for, a target token. A row that needs more, or more than the draft's
            context, is decoded plainly from there on.
        bos: draft id that begins every text of the draft, in front of the target's; -1 for none. A target's text that
            begins with it itself is left as it is.
    """

    config: ModelConfig
    num_nodes: int = 4
    expansion: float = 2.0
    bos: int = -1
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; a draft model drafts at least 1 token")
        if not 0 < self.expansion < math.inf:
            raise ValueError(f"expansion={self.expansion}; expected a number above 0, draft ids a target token")
        if not -1 <= self.bos < self.config.vocab_size:
            raise ValueError(
                f"bos={self.bos}; expected one of the draft's {self.config.vocab_size} ids, or -1 for none"
            )

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """Passes of the draft in a step, a single catch-up pass counted."""
        return self.num_nodes

    @property
    def graph(self) -> nnx.GraphDef[Decoder]:
        """The draft network's static graph."""
        return graph(self.config)[0]

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones are drawn, one child a node."""
        return "fixed" if sampling.greedy else "iid"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """A random network that shares its first ids with the target."""
        vocab = jnp.arange(self.config.head_size, dtype=jnp.int32)
        pieces = jnp.arange(target.config.vocab_size, dtype=jnp.int32)[:, None] % self.config.vocab_size
        counts = jnp.ones((target.config.vocab_size,), jnp.int32)
        return init_decoder(self.config, key), {"vocab": vocab, "draft_ids": vocab, "pieces": pieces, "counts": counts}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> StreamState:
        """An empty stream, but for the token that begins a text."""
        del params, tables, target
        begin = int(self.bos >= 0)
        room = max(min(math.ceil(self.expansion * capacity) + begin, self.config.max_position), FED)
        # Passes over a prompt take as many ids as a chunk has tokens, which is at most the capacity.
        cache = init_cache(self.config, batch, max(room, capacity) + self.num_nodes)
        none = jnp.zeros((batch,), jnp.int32)
        drafted = jnp.full((batch, self.num_nodes), -1, jnp.int32)
        stream = jnp.full((batch, room), max(self.bos, 0), jnp.int32)
        return StreamState(cache, stream, none + begin, none, none, drafted)

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: StreamState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> StreamState:
        """Spells a prompt chunk, and runs the draft over it."""
        del target, positions, taps
        state = append(self._begun(state, tables, tokens, valid), tables, tokens, valid)
        return feed(merge(self.graph, params), state, tokens.shape[1])[1]

    def _begun(self, state: StreamState, tables: Any, tokens_bt: jax.Array, valid_bt: jax.Array) -> StreamState:
        """Without the first id where the target's text brings it along."""
        if self.bos < 0:
            return state
        same = (tables["pieces"][tokens_bt[:, 0], 0] == self.bos) & valid_bt[:, 0] & (state.seen == 0)
        return dataclasses.replace(state, length=jnp.where(same, 0, state.length))

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: StreamState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, StreamState, KVCache]:
        """Spells and reads what was committed since, then makes one pass a drafted token."""
        del target
        network, batch = merge(self.graph, params), context.tokens.shape[0]
        slots = state.seen[:, None] + jnp.arange(self.depth + 1)
        fresh = jnp.take_along_axis(context.tokens, jnp.minimum(slots, context.tokens.shape[1] - 1), axis=1)
        state = append(state, tables, fresh, slots < context.length[:, None])
        hidden, state = feed(network, state, FED, at_least=1)
        room = state.stream.shape[1]
        # Rows without room draft into slots that nothing reads, and are not listened to.
        start = jnp.minimum(state.length, room)

        def draw(hidden_bd: jax.Array, picks: jax.Array, slot: jax.Array | int) -> tuple[Any, ...]:
            so_far = jnp.broadcast_to(jnp.arange(self.num_nodes) < slot, (batch, 1, self.num_nodes))
            raw = network.logits(network.final_norm(hidden_bd))[:, None]
            logits = context.process(raw, picks, so_far, tables["vocab"])[:, 0]
            if context.sampling.greedy:
                law, pick = None, jnp.argmax(logits, -1).astype(jnp.int32)
            else:
                law = log_law(logits, context.sampling)
                pick = keys.sample(DRAFT, slot, law)
            return picks.at[:, slot].set(pick), pick, law

        def body(carry: Any, slot: jax.Array) -> tuple[Any, Any]:
            own, picks, pick = carry
            out, own = network.cached(tables["draft_ids"][pick][:, None], own, causal_view(start + slot - 1, 1))
            picks, pick, law = draw(out.hidden[:, 0], picks, slot)
            return (own, picks, pick), law

        # What was drafted so far, as places in the shared vocabulary: penalties count it.
        picks, first, first_law = draw(hidden, jnp.zeros((batch, self.num_nodes), jnp.int32), 0)
        init = (state.cache, picks, first)
        (own, picks, _), laws = jax.lax.scan(body, init, jnp.arange(1, self.num_nodes))
        if first_law is not None:
            laws = jnp.concatenate([first_law[:, None], laws.swapaxes(0, 1)], axis=1)
        draft = chain(tables["vocab"][picks], laws=laws, vocab=tables["vocab"])
        fits = state.length <= room
        draft = dataclasses.replace(draft, valid=jnp.broadcast_to(fits[:, None], picks.shape))
        return draft, dataclasses.replace(state, cache=own, drafted=draft.tokens), cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: StreamState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> StreamState:
        """Accepted tokens of its own are in the cache already, all but the last one drafted: it was never read.

        In an ensemble the accepted path may leave this draft; what follows there is read anew.
        """
        del params, tables, target, context, scores
        block_bn = emitted_block(draft, verdict)[:, : self.num_nodes]
        accepted = jnp.arange(self.num_nodes) < verdict.num_accepted[:, None]
        own_b = jnp.cumprod(accepted & (block_bn == state.drafted), axis=1).sum(1)
        return dataclasses.replace(state, fed=state.length + jnp.minimum(own_b, self.num_nodes - 1))


def append(state: StreamState, tables: Any, tokens_bt: jax.Array, valid_bt: jax.Array) -> StreamState:
    """Puts the spelling of target tokens behind the stream; the valid ones come first in each row."""
    room, width = state.stream.shape[1], tables["pieces"].shape[1]
    counts = jnp.where(valid_bt, tables["counts"][tokens_bt], 0)
    ends = state.length[:, None] + jnp.cumsum(counts, axis=1)
    places = (ends - counts)[..., None] + jnp.arange(width)
    places = jnp.where(jnp.arange(width) < counts[..., None], places, room)  # an index that is dropped

    def row(stream: jax.Array, at: jax.Array, ids: jax.Array) -> jax.Array:
        return stream.at[at.reshape(-1)].set(ids.reshape(-1), mode="drop")

    stream = jax.vmap(row)(state.stream, places, tables["pieces"][tokens_bt])
    seen = state.seen + jnp.sum(valid_bt, axis=1, dtype=jnp.int32)
    return dataclasses.replace(state, stream=stream, length=ends[:, -1], seen=seen)


def feed(network: Decoder, state: StreamState, width: int, at_least: int = 0) -> tuple[jax.Array, StreamState]:
    """Runs the draft over what it has not read yet, `width` ids a pass, in as many passes as the longest row needs.

    A row that needs fewer reads its last ids again, which changes nothing.

    Returns:
        Hidden states `[B, d]` at the stream's end, before the final norm (of `width` ids or more, and a pass at least);
        the state.
    """
    room = state.stream.shape[1]
    end = jnp.minimum(state.length, room)
    passes = jnp.maximum(jnp.max(end - state.fed + width - 1) // width, at_least)

    def body(i: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        cache, _ = carry
        start = jnp.minimum(state.fed + i * width, jnp.maximum(end - width, 0))
        places = jnp.minimum(start[:, None] + jnp.arange(width), room - 1)
        ids = jnp.take_along_axis(state.stream, places, axis=1)
        out, cache = network.cached(ids, cache, causal_view(start, width))
        return cache, out.hidden[:, -1]

    hidden = jnp.zeros((end.shape[0], network.config.hidden_size), network.config.dtype)
    cache, hidden = jax.lax.fori_loop(0, passes, body, (state.cache, hidden))
    return hidden, dataclasses.replace(state, cache=cache, fed=end)


def restrict(config: ModelConfig, params: Any, draft_ids: jax.Array) -> tuple[ModelConfig, Any]:
    """A draft whose head says nothing but shared tokens: its config and parameters with the head rows of these ids."""
    head = target_head(config, params, draft_ids)
    restricted = dataclasses.replace(config, head_size=len(draft_ids), tie_embeddings=False)
    return restricted, {**params, "lm_head": {"kernel": head}}
