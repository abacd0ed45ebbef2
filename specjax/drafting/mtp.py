"""Drafting with multi-token prediction heads (Gloeckle et al. 2024; DeepSeek-V3 2024; FastMTP 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import target_head
from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict, log_law
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, Tap, causal_view, merge, split
from specjax.models.mtp import Mtp, MtpConfig, copy_last_layer, init_mtp, init_mtp_cache, mtp_graph


@flax.struct.dataclass
class MtpState:
    """The layers' own cache, and the target's features at the last positions that it has seen.

    Depth k at position t reads token t + k: an entry is final once that token is committed, and until then written
    anew in every step. A window of 2 D positions holds all that are not.

    Attributes:
        cache: one layer a depth; its `length` is not used.
        features: `[B, 2 D, d]`, the last at position `length - 2`: the target has not seen the root.
        tokens: `[B, D]` the last tokens of the prompt so far.
    """

    cache: KVCache
    features: jax.Array
    tokens: jax.Array


@dataclasses.dataclass(frozen=True)
class MultiToken:
    """A chain, one token a depth.

    Independent heads draw each token without regard to the ones before it; sequential modules read them. Either way the
    law recorded is the one drawn from.

    Attributes:
        config: the layers.
        num_nodes: D, how many depths are used; 0 for all of them.
    """

    config: MtpConfig
    num_nodes: int = 0
    num_probes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_nodes <= self.config.depth:
            raise ValueError(
                f"num_nodes={self.num_nodes}, but there are heads for {self.config.depth} tokens beyond the next one; "
                f"expected 1 to {self.config.depth} (0 for all)"
            )
        if not self.num_nodes:
            object.__setattr__(self, "num_nodes", self.config.depth)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The feature."""
        return self.config.taps

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """One a depth."""
        return self.num_nodes

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones are drawn, one child a node."""
        return "fixed" if sampling.greedy else "iid"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """Copies of the target's last layer; where the draft vocabulary is reduced, its first ids."""
        own = split(target)[1]
        params = copy_last_layer(self.config, init_mtp(self.config, key), own)
        if self.config.head_size == self.config.vocab_size:
            return params, {}
        vocab = jnp.arange(self.config.head_size, dtype=jnp.int32)
        return {**params, "lm_head": {"kernel": target_head(target.config, own, vocab)}}, {"vocab": vocab}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> MtpState:
        """Nothing seen yet."""
        del params, tables, target
        layer, depth = self.config.layer, self.num_nodes
        return MtpState(
            cache=init_mtp_cache(self.config, depth, batch, capacity),
            features=jnp.zeros((batch, 2 * depth, layer.hidden_size), layer.dtype),
            tokens=jnp.zeros((batch, depth), jnp.int32),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: MtpState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> MtpState:
        """Runs all depths D positions behind the chunk's end: there the tokens that they read are known.

        The first chunk begins at 0 and leaves its last D positions unfinished; the next one, or the first draft, writes
        them again.
        """
        del tables
        net, depth, width = self._network(params), self.num_nodes, tokens.shape[1]
        fresh, count = taps[self.config.feature], valid.sum(-1)
        features = jnp.concatenate([state.features[:, -depth:], fresh], axis=1)
        following = jnp.concatenate([state.tokens, tokens], axis=1)
        skipped = jnp.where(positions[:, 0] == 0, depth, 0)
        index = skipped[:, None] + jnp.arange(width)
        view = causal_view(positions[:, 0] - depth + skipped, width)
        hidden = feature = _take(features, index)
        cache = state.cache
        for k in range(1, depth + 1):
            embedded = target.embed_tokens(_take(following, index + k)) if self._reads_tokens else None
            hidden, cache = net.cached(k, hidden if self._reads_tokens else feature, embedded, cache, view)
        return MtpState(
            cache=cache,
            features=_last(jnp.concatenate([state.features, fresh], axis=1), count, 2 * depth),
            tokens=_last(following, count, depth),
        )

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: MtpState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, MtpState, KVCache]:
        """One pass a depth, over the window."""
        net, vocab, depth = self._network(params), tables.get("vocab"), self.num_nodes
        rows, width = jnp.arange(context.length.shape[0]), 2 * depth
        # A text shorter than the window begins within it.
        unused = jnp.maximum(width - (context.length - 1), 0)
        view = causal_view(jnp.maximum(context.length - 1 - width, 0), width)
        hidden = feature = _take(state.features, unused[:, None] + jnp.arange(width))
        last = width - 1 - unused
        own, text = state.cache, context.tokens
        picks, tokens, laws = jnp.zeros((len(rows), depth), jnp.int32), [], []
        for k in range(1, depth + 1):
            embedded = target.embed_tokens(_take(text, view.positions + k)) if self._reads_tokens else None
            hidden, own = net.cached(k, hidden if self._reads_tokens else feature, embedded, own, view)
            normed = net.normed(k, hidden[rows, last], target)
            so_far = jnp.broadcast_to(jnp.arange(depth) < k - 1, (len(rows), 1, depth))
            logits = context.process(net.logits(normed, target)[:, None], picks, so_far, vocab)[:, 0]
            if context.sampling.greedy:
                pick = jnp.argmax(logits, -1).astype(jnp.int32)
            else:
                laws.append(log_law(logits, context.sampling))
                pick = keys.sample(DRAFT, k - 1, laws[-1])
            picks = picks.at[:, k - 1].set(pick)
            tokens.append(pick if vocab is None else vocab[pick])
            text = text.at[rows, context.length + k - 1].set(tokens[-1], mode="drop")
        draft = chain(jnp.stack(tokens, axis=1), laws=jnp.stack(laws, axis=1) if laws else None, vocab=vocab)
        return draft, dataclasses.replace(state, cache=own), cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: MtpState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> MtpState:
        """Moves the window over root and accepted path."""
        del params, tables, target, context, draft
        path = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
        fresh = _take(scores.taps[self.config.feature], jnp.maximum(path, 0))
        joined = jnp.concatenate([state.features, fresh], axis=1)
        return dataclasses.replace(state, features=_last(joined, verdict.num_accepted + 1, 2 * self.num_nodes))

    @property
    def _reads_tokens(self) -> bool:
        return self.config.kind == "sequential"

    def _network(self, params: Any) -> Mtp:
        return merge(mtp_graph(self.config)[0], params)


def _take(x: jax.Array, index_bt: jax.Array) -> jax.Array:
    """`[B, S, ...]` at indices `[B, T]`, clipped to the last."""
    index = jnp.minimum(index_bt, x.shape[1] - 1)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def _last(x: jax.Array, count_b: jax.Array, width: int) -> jax.Array:
    """The `width` entries that end `count` entries behind the first `width`."""
    return _take(x, count_b[:, None] + jnp.arange(width))
