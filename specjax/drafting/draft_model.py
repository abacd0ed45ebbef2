"""A smaller language model drafts a chain (Leviathan et al. 2023; Chen et al. 2023; DistillSpec drafts)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
from specjax.decoding.sampling import DRAFT, log_law
from specjax.decoding.tree import chain
from specjax.decoding.widths import fitting, stop_widths
from specjax.drafting.self_chain import check_stop, stops_early, sure
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
    split,
)


@flax.struct.dataclass
class DraftModelState:
    """The draft's own KV cache; its `length` is not used: every pass says where it starts."""

    cache: KVCache


class DraftNetwork:
    """A decoder of its own that drafts: network, KV cache and prompt. Its drafters are frozen dataclasses."""

    config: ModelConfig
    shares: tuple[str, ...]

    @property
    def graph(self) -> nnx.GraphDef[Decoder]:
        """The draft network's static graph."""
        return graph(self.config)[0]

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """A random network without the shared groups; an identity draft vocabulary."""
        del target
        params = {name: group for name, group in init_decoder(self.config, key).items() if name not in self.shares}
        return params, {}

    def network(self, params: Any, target: Decoder) -> Decoder:
        """The draft network, shared groups taken from the target."""
        borrowed = {name: split(getattr(target, name))[1] for name in self.shares}
        return merge(self.graph, {**params, **borrowed})

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> DraftModelState:
        """An empty cache."""
        del params, tables, target
        return DraftModelState(init_cache(self.config, batch, capacity))

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: DraftModelState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> DraftModelState:
        """Runs the draft over a prompt chunk."""
        del tables, taps, valid
        view = causal_view(positions[:, 0], tokens.shape[1])
        _, cache = self.network(params, target).cached(tokens, state.cache, view)
        return DraftModelState(cache)

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: DraftModelState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> DraftModelState:
        """Nothing to do: the next step feeds the last committed tokens, wherever they stand."""
        del params, tables, target, context, draft, scores, verdict
        return state


@flax.struct.dataclass
class _Carry:
    """What goes from pass to pass; `slot` is the node to be drawn next."""

    slot: jax.Array
    cache: KVCache
    token: jax.Array  # [B] the last one drawn, in target ids
    alive: jax.Array  # [B] no node was given up yet
    picks: jax.Array  # [B, N] in draft ids: penalties count them
    valid: jax.Array  # [B, N]
    laws: jax.Array  # [N, B, Vd], or [0, B, Vd] when greedy


@dataclasses.dataclass(frozen=True)
class DraftModel(DraftNetwork):
    """A chain from a decoder of its own.

    The first pass of a step feeds the last two committed tokens: after a fully accepted chain the cache lacks the
    last drafted one, otherwise the rewrite changes nothing. One shape serves both. Where the accepted path may be
    another drafter's, as in an ensemble, it feeds as many tokens as a step may have committed, over its own.

    Attributes:
        config: the draft network; `head_size` below the target's vocabulary means a reduced draft vocabulary, whose
            target ids are `tables["vocab"]` `[Vd]`.
        num_nodes: gamma.
        temperature: times the request's own gives the draft's temperature, above temperature 0. The recorded law is
            the one drawn from, so that verification stays exact; acceptance is highest where the laws are closest.
        shares: parameter groups taken from the target by reference (`embed`).
        min_confidence: stop where the likeliest token has less than this probability, at temperature 1; 0 drafts all.
        max_entropy: stop where the law's entropy in nats, at temperature 1, is greater; infinity drafts all.
        window: committed tokens that the first pass of a step feeds; one more than the longest path that another
            drafter may have drafted.
    """

    config: ModelConfig
    num_nodes: int = 4
    temperature: float = 1.0
    shares: tuple[str, ...] = ()
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0
    window: int = 2
    min_confidence: float = 0.0
    max_entropy: float = math.inf

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; a draft model drafts at least 1 token")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} of a draft model; expected a factor above 0")
        check_stop(self.min_confidence, self.max_entropy)
        if self.window < 2:
            raise ValueError(f"window={self.window} of a draft model; expected at least 2 tokens, the root among them")

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """One a token; at most, with a confidence at which it stops."""
        return self.num_nodes

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones are drawn, one child a node."""
        return "fixed" if sampling.greedy else "iid"

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: DraftModelState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, DraftModelState, KVCache]:
        """gamma passes at most: one over the last committed tokens, then one a drafted token.

        A node whose law is not sure enough is left out, and all behind it: that depends on the law and on earlier
        tokens alone, so verification stays exact.
        """
        network = self.network(params, target)
        vocab = tables.get("vocab")

        batch, nodes = context.tokens.shape[0], self.num_nodes
        greedy, stops = context.sampling.greedy, stops_early(self.min_confidence, self.max_entropy)

        def run(own: KVCache, tokens_bt: jax.Array, start_b: jax.Array) -> tuple[jax.Array, KVCache]:
            out, own = network.cached(tokens_bt, own, causal_view(start_b, tokens_bt.shape[1]), taps=("normed",))
            return out.taps["normed"], own

        def draw(normed_b1d: jax.Array, own: KVCache, c: _Carry) -> _Carry:
            so_far = jnp.broadcast_to(jnp.arange(nodes) < c.slot, (batch, 1, nodes))
            logits = context.process(network.logits(normed_b1d), c.picks, so_far, vocab)[:, 0]
            if greedy:
                laws, pick = c.laws, jnp.argmax(logits, -1).astype(jnp.int32)
            else:
                law = log_law(logits / self.temperature, context.sampling)
                laws = jax.lax.dynamic_update_index_in_dim(c.laws, law, c.slot, 0)
                pick = keys.sample(DRAFT, c.slot, law)
            alive = c.alive & sure(logits, self.min_confidence, self.max_entropy)
            return _Carry(
                slot=c.slot + 1,
                cache=own,
                token=pick if vocab is None else vocab[pick],
                alive=alive,
                picks=c.picks.at[:, c.slot].set(pick),
                valid=c.valid.at[:, c.slot].set(alive),
                laws=laws,
            )

        # A text shorter than the window begins within it; what follows the root there is overwritten before it is read.
        start = jnp.maximum(context.length - self.window, 0)
        fed = jnp.take_along_axis(context.tokens, start[:, None] + jnp.arange(self.window), axis=1)
        normed, own = run(state.cache, fed, start)
        root = jnp.take_along_axis(normed, (context.length - 1 - start)[:, None, None], axis=1)
        begin = _Carry(
            slot=jnp.zeros((), jnp.int32),
            cache=own,
            token=context.last(1)[:, 0],
            alive=jnp.ones((batch,), bool),
            picks=jnp.zeros((batch, nodes), jnp.int32),
            valid=jnp.zeros((batch, nodes), bool),
            laws=jnp.zeros((0 if greedy else nodes, batch, self.config.head_size), jnp.float32),
        )

        def more(c: _Carry) -> jax.Array:
            return (c.slot < nodes) & jnp.any(c.alive) if stops else c.slot < nodes

        def body(c: _Carry) -> _Carry:
            normed, own = run(c.cache, c.token[:, None], context.length + c.slot - 1)
            return draw(normed, own, c)

        done = jax.lax.while_loop(more, body, draw(root, own, begin))
        tokens = done.picks if vocab is None else vocab[done.picks]
        draft = chain(tokens, laws=None if greedy else done.laws.swapaxes(0, 1), vocab=vocab)
        if stops:
            draft = dataclasses.replace(
                draft, valid=done.valid, widths=fitting(done.valid, stop_widths(nodes, plain=True))
            )
        return draft, DraftModelState(done.cache), cache
