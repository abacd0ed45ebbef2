"""Kangaroo: the target's first layers and a small adapter draft, its other layers verify (Liu et al. 2024).

Double early exit: out of the target after layer E, and out of drafting where the adapter is unsure.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import target_head
from specjax.decoding import Context, Draft, Keys, Kind, Resume, Sampling, Stateless
from specjax.drafting.self_chain import check_chain, draft_chain
from specjax.models import Decoder, KVCache, Tap, View, causal_view, init_cache, merge, split
from specjax.models.config import check_exit_layer
from specjax.models.kangaroo import Adapter, KangarooConfig, init_adapter, kangaroo_graph, with_head


@flax.struct.dataclass
class AdapterState:
    """The adapter's own KV cache; its `length` is not used: every pass says where it starts."""

    cache: KVCache


@dataclasses.dataclass(frozen=True)
class Kangaroo(Stateless):
    """A chain from layers 0..E-1, the adapter and the target's head.

    The target's layers share their cache with verification, which starts at layer E, as in `EarlyExit`. The adapter
    also runs over the last drafted token, without the head: so its cache never lacks an accepted one.

    Attributes:
        config: the adapter.
        num_nodes: N, tokens to draft at most (gamma).
        min_confidence: stop where the likeliest token has less than this probability (eta); 0 drafts all.
        max_entropy: stop where the law's entropy in nats is greater; infinity drafts all.
    """

    config: KangarooConfig
    num_nodes: int = 6
    min_confidence: float = 0.6
    num_probes: int = 0
    max_entropy: float = math.inf

    def __post_init__(self) -> None:
        check_chain(self.num_nodes, self.min_confidence, self.max_entropy)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the adapter reads."""
        return self.config.taps

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """Passes through the early layers and the adapter in a step."""
        return self.num_nodes + 1

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones are drawn, one child a node."""
        return "fixed" if sampling.greedy else "iid"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """The attention that comes next in the target; where the draft vocabulary is reduced, its first ids.

        Raises:
            ValueError: the exit layer does not lie within the target.
        """
        del key
        check_exit_layer(self.config.exit_layer, target.config.num_layers)
        own = split(target)[1]
        params = init_adapter(self.config, own)
        if self.config.head_size == self.config.vocab_size:
            return params, {}
        vocab = jnp.arange(self.config.head_size, dtype=jnp.int32)
        return with_head(self.config, params, target_head(target.config, own, vocab)), {"vocab": vocab}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> AdapterState:
        """An empty cache."""
        del params, tables, target
        return AdapterState(init_cache(self.config.layer, batch, capacity))

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: AdapterState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> AdapterState:
        """Runs the adapter over a prompt chunk."""
        del tables, target, valid
        view = causal_view(positions[:, 0], tokens.shape[1])
        return AdapterState(self._network(params).cached(taps[self.config.exit_layer], state.cache, view)[1])

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: AdapterState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, AdapterState, KVCache]:
        """At most N + 1 passes through layers 0..E-1 and the adapter; the draft's `resume` starts verification at E."""
        net = self._network(params)

        def part(tokens: jax.Array, caches: Any, view: View) -> tuple[jax.Array, jax.Array, Any]:
            out, early = target.cached(tokens, caches[0], view, stop=self.config.exit_layer)
            read, own = net.cached(out.hidden, caches[1], view)
            return out.hidden, read, (early, own)

        draft, hidden, (cache, own) = draft_chain(
            part,
            lambda read: net.logits(read, target),
            target,
            (cache, state.cache),
            context,
            keys,
            num_nodes=self.num_nodes,
            min_confidence=self.min_confidence,
            max_entropy=self.max_entropy,
            last_pass=True,
            head_size=self.config.head_size,
            vocab=tables.get("vocab"),
        )
        draft = dataclasses.replace(draft, resume=Resume(hidden, self.config.exit_layer))
        return draft, AdapterState(own), cache

    def _network(self, params: Any) -> Adapter:
        return merge(kangaroo_graph(self.config)[0], params)
