"""Early exit: the target's first layers draft, its other layers verify (LayerSkip, Elhoushi et al. 2024)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from specjax.decoding import Context, Draft, Keys, Kind, Resume, Sampling, Stateless
from specjax.drafting.self_chain import check_chain, draft_chain
from specjax.models import Decoder, KVCache, Tap, View
from specjax.models.config import check_exit_layer


@dataclasses.dataclass(frozen=True)
class EarlyExit(Stateless):
    """A chain from layers 0..E-1, the target's final norm and head.

    It holds no second model and no second cache: drafting writes the early layers' keys and values into the slots
    where verification wants them, and verification starts at layer E from the hidden states that drafting left
    (section 4.3 of the paper). The last drafted token passes the early layers too, without the head.

    A target that was not trained for early exit (section 4.1) seldom agrees with its early layers.

    Attributes:
        exit_layer: E, how many layers draft.
        num_nodes: N, tokens to draft.
        min_confidence: stop where the likeliest token has less than this probability; 0 drafts all.
        max_entropy: stop where the law's entropy in nats is greater; infinity drafts all.
    """

    exit_layer: int
    num_nodes: int = 4
    min_confidence: float = 0.0
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0
    max_entropy: float = math.inf

    def __post_init__(self) -> None:
        check_chain(self.num_nodes, self.min_confidence, self.max_entropy)

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """Passes through the early layers in a step."""
        return self.num_nodes + 1

    def kind(self, sampling: Sampling) -> Kind:
        """Greedy drafts are choices; sampled ones are drawn, one child a node."""
        return "fixed" if sampling.greedy else "iid"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """No parameters, no tables: the target's are used.

        Raises:
            ValueError: the exit layer does not lie within the target.
        """
        check_exit_layer(self.exit_layer, target.config.num_layers)
        return super().init_params(key, target)

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: Any,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, Any, KVCache]:
        """N + 1 passes through layers 0..E-1; the draft's `resume` lets verification start at E."""
        del params, tables

        def part(tokens: jax.Array, cache: KVCache, view: View) -> tuple[jax.Array, jax.Array, KVCache]:
            out, cache = target.cached(tokens, cache, view, stop=self.exit_layer)
            return out.hidden, out.hidden, cache

        draft, hidden, cache = draft_chain(
            part,
            lambda hidden: target.logits(target.final_norm(hidden)),
            target,
            cache,
            context,
            keys,
            num_nodes=self.num_nodes,
            min_confidence=self.min_confidence,
            max_entropy=self.max_entropy,
            last_pass=True,
            head_size=target.config.head_size,
        )
        return dataclasses.replace(draft, resume=Resume(hidden, self.exit_layer)), state, cache
