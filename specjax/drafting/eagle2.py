"""EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): grown where the draft is confident, anew in every row and step.

A node is worth the product of the draft's probabilities along its path, an estimate of how likely it is to be accepted.
Each level expands the worthiest nodes of the level before; of all candidates the worthiest are verified. Nodes are
chosen, not drawn: they are `fixed`, exact under the one-hot law of the recursive rule and under one-hot verification.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling
from specjax.decoding.tree import subtree
from specjax.drafting.eagle import FeatureDrafter, FeatureState
from specjax.models import Decoder, KVCache, View


@flax.struct.dataclass
class _Pool:
    """All candidates so far, parents before children.

    Attributes:
        tokens: `[B, C]` in draft ids.
        scores: `[B, C]` log-probability along the path.
        parents: `[B, C]` index in the pool, -1 for the root.
    """

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array

    def add(self, more: _Pool) -> _Pool:
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, more)

    def take(self, index_bk: jax.Array) -> _Pool:
        return jax.tree.map(lambda x: jnp.take_along_axis(x, index_bk, axis=1), self)


@dataclasses.dataclass(frozen=True)
class EagleTree(FeatureDrafter):
    """A tree of `num_nodes` nodes, re-ranked over all candidates.

    Attributes:
        config: the network, of EAGLE-1 or EAGLE-3.
        num_nodes: N, nodes that are verified.
        levels: D; the draft makes one pass a level, the first over the pending pairs.
        top_k: candidates of a node, and nodes that a level expands.
        topology: for reports.
    """

    num_nodes: int = 24
    levels: int = 5
    top_k: int = 4
    topology: str = "dynamic_tree"

    def __post_init__(self) -> None:
        if self.levels < 1 or self.top_k < 1:
            raise ValueError(f"levels={self.levels}, top_k={self.top_k}; expected at least 1 each")
        most = self.top_k + (self.levels - 1) * self.top_k**2
        if not self.levels <= self.num_nodes <= most:
            raise ValueError(
                f"num_nodes={self.num_nodes}; expected {self.levels} (one a level) to {most}, all candidates of "
                f"{self.levels} levels with top_k={self.top_k}"
            )
        if self.top_k > self.config.head_size:
            raise ValueError(f"top_k={self.top_k} exceeds the draft vocabulary of {self.config.head_size}")

    @property
    def depth(self) -> int:
        """D."""
        return self.levels

    @property
    def scratch(self) -> int:
        """All levels but the last are run through the draft."""
        return self.levels * self.top_k

    def kind(self, sampling: Sampling) -> Kind:
        """Nodes are chosen by the draft's law, at every temperature."""
        del sampling
        return "fixed"

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
        """One pass a level, then the re-ranking."""
        del keys
        net, vocab = self.network(params, tables, target), tables.get("vocab")
        k, prefix, batch = self.top_k, context.length - 1, context.tokens.shape[0]
        feature, hidden, own = self.catch_up(net, state, context)
        logits = context.process(net.logits(hidden)[:, None], vocab=vocab)
        pool = self._candidates(logits, jnp.zeros((batch, 1)), jnp.full((batch, 1), -1, jnp.int32))
        # The nodes of the last level: their place in the pool, the feature each reads, what each sees of the scratch.
        places = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
        features = jnp.broadcast_to(feature[:, None], (batch, k, feature.shape[-1]))
        seen = jnp.zeros((batch, k, 0), bool)
        drafted = jnp.zeros((batch, 0), jnp.int32)
        for level in range(1, self.levels):
            nodes = pool.take(places)
            seen = jnp.concatenate([seen, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], axis=-1)
            drafted = jnp.concatenate([drafted, nodes.tokens], axis=1)
            depths = jnp.broadcast_to(jnp.repeat(jnp.arange(level), k), (batch, level * k)).astype(jnp.int32)
            ids = nodes.tokens if vocab is None else vocab[nodes.tokens]
            made, hidden, own = net.cached(ids, features, own, View(prefix, seen, depths))
            logits = context.process(net.logits(hidden), drafted, seen, vocab)
            fresh = self._candidates(logits, nodes.scores, places)
            # Of k candidates each, the k worthiest are the next level's nodes.
            chosen = jax.lax.top_k(fresh.scores, k)[1].astype(jnp.int32)
            places = pool.scores.shape[1] + chosen
            parents = (chosen // k)[..., None]
            features = jnp.take_along_axis(made, parents, axis=1)
            seen = jnp.take_along_axis(seen, parents, axis=1)
            pool = pool.add(fresh)
        return self._draft(pool, vocab), dataclasses.replace(state, cache=own, ran=state.count), cache

    def _candidates(self, logits_bmv: jax.Array, scores_bm: jax.Array, places_bm: jax.Array) -> _Pool:
        """The `top_k` likeliest tokens behind each node, node by node."""
        log_q, tokens = jax.lax.top_k(jax.nn.log_softmax(logits_bmv, axis=-1), self.top_k)
        # A row that failed may hold NaN, which would sort above its own parent.
        log_q = jnp.where(jnp.isnan(log_q), -jnp.inf, log_q)
        return _Pool(
            tokens=_flat(tokens.astype(jnp.int32)),
            scores=_flat(scores_bm[..., None] + log_q),
            parents=_flat(jnp.broadcast_to(places_bm[..., None], tokens.shape)),
        )

    def _draft(self, pool: _Pool, vocab: jax.Array | None) -> Draft:
        """The N worthiest candidates, the worthiest first: a smaller tree is the beginning of a larger one.

        They are closed under parents, which are worth no less and lie before their children in the pool.
        """
        kept = jax.lax.top_k(pool.scores, self.num_nodes)[1]
        nodes = pool.take(kept)
        batch = kept.shape[0]
        return Draft(
            tokens=nodes.tokens if vocab is None else vocab[nodes.tokens],
            parents=subtree(pool.parents, kept),
            valid=jnp.ones(kept.shape, bool),
            law=jnp.full(kept.shape, -1, jnp.int32),
            laws=jnp.zeros((batch, 0, 1), jnp.float32),
            vocab=vocab,
        )


def _flat(x_bmk: jax.Array) -> jax.Array:
    return x_bmk.reshape(x_bmk.shape[0], -1)
