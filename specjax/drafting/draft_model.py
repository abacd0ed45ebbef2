"""A smaller language model drafts a chain (Leviathan et al. 2023; Chen et al. 2023; DistillSpec drafts)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
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

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; a draft model drafts at least 1 token")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} of a draft model; expected a factor above 0")
        if self.window < 2:
            raise ValueError(f"window={self.window} of a draft model; expected at least 2 tokens, the root among them")

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """One a token."""
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
        """gamma passes: one over the last committed tokens, then one a drafted token."""
        network = self.network(params, target)
        vocab = tables.get("vocab")

        # What was drafted so far, in draft ids: penalties count it.
        picks = jnp.zeros((context.tokens.shape[0], self.num_nodes), jnp.int32)

        def run(own: KVCache, tokens_bt: jax.Array, start_b: jax.Array) -> tuple[jax.Array, KVCache]:
            out, own = network.cached(tokens_bt, own, causal_view(start_b, tokens_bt.shape[1]), taps=("normed",))
            return out.taps["normed"], own

        def draw(normed_b1d: jax.Array, picks: jax.Array, slot: jax.Array | int) -> tuple[Any, ...]:
            so_far = jnp.broadcast_to(jnp.arange(self.num_nodes) < slot, (*picks.shape[:1], 1, self.num_nodes))
            logits = context.process(network.logits(normed_b1d), picks, so_far, vocab)[:, 0]
            if context.sampling.greedy:
                law, pick = None, jnp.argmax(logits, -1).astype(jnp.int32)
            else:
                law = log_law(logits / self.temperature, context.sampling)
                pick = keys.sample(DRAFT, slot, law)
            return picks.at[:, slot].set(pick), pick if vocab is None else vocab[pick], law

        # A text shorter than the window begins within it; what follows the root there is overwritten before it is read.
        start = jnp.maximum(context.length - self.window, 0)
        fed = jnp.take_along_axis(context.tokens, start[:, None] + jnp.arange(self.window), axis=1)
        normed, own = run(state.cache, fed, start)
        root = jnp.take_along_axis(normed, (context.length - 1 - start)[:, None, None], axis=1)
        picks, first, first_law = draw(root, picks, 0)

        def body(carry: tuple[KVCache, jax.Array, jax.Array], slot: jax.Array) -> tuple[Any, Any]:
            own, picks, token = carry
            normed, own = run(own, token[:, None], context.length + slot - 1)
            picks, token, law = draw(normed, picks, slot)
            return (own, picks, token), (token, law)

        (own, _, _), (tokens, laws) = jax.lax.scan(body, (own, picks, first), jnp.arange(1, self.num_nodes))
        tokens_bn = jnp.concatenate([first[:, None], tokens.T], axis=1)
        if first_law is not None:
            laws = jnp.concatenate([first_law[:, None], laws.swapaxes(0, 1)], axis=1)
        return chain(tokens_bn, laws=laws, vocab=vocab), DraftModelState(own), cache
