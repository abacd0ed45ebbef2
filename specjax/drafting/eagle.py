"""Drafting on the target's features: what EAGLE-1, 2 and 3 share, and the chain (Li et al. 2024, 2401.15077)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
from specjax.decoding.sampling import DRAFT, log_law
from specjax.decoding.tree import chain
from specjax.decoding.widths import switch_in_place
from specjax.drafting.pending import path_nodes, still_pending
from specjax.models import Decoder, KVCache, Tap, causal_view, init_cache
from specjax.models.eagle import (
    EagleConfig,
    FeatureConfig,
    FeatureLayer,
    assemble,
    head_rows,
    init_feature_layer,
)


@flax.struct.dataclass
class FeatureState:
    """The draft's own cache, and what the target has said since the draft last ran.

    Pair t is (feature t, token t + 1), at slot and position t of the cache. The next draft begins with the pending
    pairs, whose last is that of the root: it can only be made once the root is known.

    Attributes:
        cache: of the draft; its `length` is not used, every pass says where it starts.
        features: `[B, D + 1, d]` of the pending pairs, in order.
        count: `[B]` how many are pending, at least 1.
        ran: `[B]` how many of them the draft has run since the last verdict: all, or none in a step without a draft.
    """

    cache: KVCache
    features: jax.Array
    count: jax.Array
    ran: jax.Array


@dataclasses.dataclass(frozen=True)
class FeatureDrafter:
    """The part of a drafter that follows the target: prompts and accepted paths as pairs of feature and token.

    Attributes:
        config: the network, of EAGLE-1 or EAGLE-3.
        num_nodes: N.
    """

    config: FeatureConfig
    num_nodes: int = 4
    num_probes: int = 0

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What features are made from."""
        return self.config.taps

    @property
    def depth(self) -> int:
        """The longest path."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """Passes of the draft in a step, the one over the pending pairs included."""
        return self.depth

    @property
    def scratch(self) -> int:
        """Cache slots that a draft needs behind the committed pairs."""
        return self.num_nodes

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """A random layer; where the draft vocabulary is reduced, its first ids, with the target's head rows."""
        params, layer = init_feature_layer(self.config, key), self.config.layer
        if layer.head_size == layer.vocab_size:
            return params, {}
        vocab = jnp.arange(layer.head_size, dtype=jnp.int32)
        return {**params, "lm_head": {"kernel": head_rows(target, vocab)}}, {"vocab": vocab}

    def network(self, params: Any, tables: Any, target: Decoder) -> FeatureLayer:
        """The network; embedding and head that `params` lacks are the target's."""
        return assemble(self.config, params, target, tables.get("vocab"))

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> FeatureState:
        """An empty cache, nothing pending but the place for the first pair."""
        del params, tables, target
        layer = self.config.layer
        return FeatureState(
            cache=init_cache(layer, batch, capacity + self.scratch),
            features=jnp.zeros((batch, self.depth + 1, layer.hidden_size), layer.dtype),
            count=jnp.ones((batch,), jnp.int32),
            ran=jnp.zeros((batch,), jnp.int32),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: FeatureState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> FeatureState:
        """Runs the pairs that a prompt chunk completes; its last feature waits for the token behind it.

        The chunk's first token completes the pair that the last chunk left open. The very first token has none: there
        the pairs begin one later, and the last is a placeholder that the next pass overwrites.
        """
        net = self.network(params, tables, target)
        fresh = net.fuse(taps)
        width = tokens.shape[1]
        first = (positions[:, :1] == 0).astype(jnp.int32)
        index = jnp.arange(width) + first
        features = jnp.concatenate([state.features[:, :1], fresh], axis=1)
        features = jnp.take_along_axis(features, index[..., None], axis=1)
        following = jnp.take_along_axis(tokens, jnp.minimum(index, width - 1), axis=1)
        start = positions[:, 0] - 1 + first[:, 0]
        _, _, cache = net.cached(following, features, state.cache, causal_view(start, width))
        count = valid.sum(-1)
        last = jnp.take_along_axis(fresh, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        pending = jnp.where((count > 0)[:, None], last, state.features[:, 0])
        return dataclasses.replace(state, cache=cache, features=state.features.at[:, 0].set(pending))

    def catch_up(
        self, net: FeatureLayer, state: FeatureState, context: Context
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Runs the pending pairs; the cache then holds `length - 1` pairs.

        Returns:
            The feature after the root `[B, d]`, what the head reads there `[B, d]`, and the cache.
        """
        width = state.features.shape[1]
        # Finished rows have emitted fewer tokens than they accepted; nothing is read of them.
        start = jnp.maximum(context.length - 1 - state.count, 0)
        slots = jnp.minimum(start[:, None] + 1 + jnp.arange(width), context.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(context.tokens, slots, axis=1)
        features, hidden, cache = net.cached(tokens, state.features, state.cache, causal_view(start, width))
        last = (state.count - 1)[:, None, None]
        feature = jnp.take_along_axis(features, last, axis=1)[:, 0]
        return feature, jnp.take_along_axis(hidden, last, axis=1)[:, 0], cache

    def rest(self, params: Any, tables: Any, target: Decoder, state: FeatureState, context: Context) -> FeatureState:
        """A step without a draft: the pair that it leaves joins the pending ones, which are run when they fill up."""
        net = self.network(params, tables, target)

        def run(cache: KVCache) -> tuple[jax.Array, KVCache]:
            return state.count, self.catch_up(net, dataclasses.replace(state, cache=cache), context)[2]

        full = jnp.any(state.count >= state.features.shape[1]).astype(jnp.int32)
        ran, cache = switch_in_place(full, [lambda cache: (jnp.zeros_like(state.count), cache), run], state.cache)
        return dataclasses.replace(state, cache=cache, ran=ran)

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: FeatureState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> FeatureState:
        """Keeps the target's features of root and accepted path: with the tokens behind them, the next pairs."""
        del context, draft
        index = path_nodes(verdict)
        kept = {tap: jnp.take_along_axis(x, index[..., None], axis=1) for tap, x in scores.taps.items()}
        fresh = self.network(params, tables, target).fuse(kept)
        features, count = still_pending(state.features, state.count, state.ran, fresh, verdict.num_accepted + 1)
        return dataclasses.replace(state, features=features, count=count, ran=jnp.zeros_like(count))


@dataclasses.dataclass(frozen=True)
class EagleChain(FeatureDrafter):
    """A chain: greedy choices at temperature 0, tokens drawn from the draft's law above it."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; expected at least 1 token to draft")

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones are drawn, one child a node."""
        return "fixed" if sampling.greedy else "iid"

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: FeatureState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, FeatureState, KVCache]:
        """The pending pairs in one pass, then a pass a token: the draft's own feature and the token drafted from it."""
        net, vocab = self.network(params, tables, target), tables.get("vocab")
        prefix = context.length - 1

        def draw(hidden_bd: jax.Array, picks: jax.Array, slot: jax.Array | int) -> tuple[Any, ...]:
            so_far = jnp.broadcast_to(jnp.arange(self.num_nodes) < slot, (picks.shape[0], 1, self.num_nodes))
            logits = context.process(net.logits(hidden_bd)[:, None], picks, so_far, vocab)[:, 0]
            if context.sampling.greedy:
                law, pick = None, jnp.argmax(logits, -1).astype(jnp.int32)
            else:
                law = log_law(logits, context.sampling)
                pick = keys.sample(DRAFT, slot, law)
            return picks.at[:, slot].set(pick), pick if vocab is None else vocab[pick], law

        feature, hidden, own = self.catch_up(net, state, context)
        # What was drafted so far, in draft ids: penalties count it.
        picks = jnp.zeros((feature.shape[0], self.num_nodes), jnp.int32)
        picks, first, first_law = draw(hidden, picks, 0)

        def body(carry: Any, slot: jax.Array) -> tuple[Any, Any]:
            own, feature, picks, token = carry
            view = causal_view(prefix + slot - 1, 1)
            features, hidden, own = net.cached(token[:, None], feature[:, None], own, view)
            picks, token, law = draw(hidden[:, 0], picks, slot)
            return (own, features[:, 0], picks, token), (token, law)

        start: Any = (own, feature, picks, first)
        (own, *_), (tokens, laws) = jax.lax.scan(body, start, jnp.arange(1, self.num_nodes))
        tokens_bn = jnp.concatenate([first[:, None], tokens.T], axis=1)
        if first_law is not None:
            laws = jnp.concatenate([first_law[:, None], laws.swapaxes(0, 1)], axis=1)
        return chain(tokens_bn, laws=laws, vocab=vocab), dataclasses.replace(state, cache=own, ran=state.count), cache


__all__ = ["EagleChain", "EagleConfig", "FeatureDrafter", "FeatureState"]
