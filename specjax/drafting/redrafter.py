"""ReDrafter (Cheng et al. 2024, 2403.09919): beam search in a recurrent network, verified as one tree.

Beams that begin alike share their nodes (the paper's dynamic tree attention, section 3.3). Here they are never apart: a
level of the search adds one node a beam, each another token behind another prefix, and what is verified are the nodes
from which a beam of the last level descends.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.drafters import target_head
from specjax.decoding import Context, Draft, Keys
from specjax.decoding.tree import chain, subtree
from specjax.drafting.heads import HeadsState, LastHidden, likeliest
from specjax.models import Decoder, KVCache, Tap, merge, split
from specjax.models.redrafter import Redrafter, RedrafterConfig, init_redrafter, redrafter_graph


@dataclasses.dataclass(frozen=True)
class RecurrentDrafter(LastHidden):
    """The `num_nodes` likeliest nodes of `beams` beams of `levels` tokens; a chain where there is one beam.

    Nodes are chosen by the network's law, not drawn, at every temperature. The law is the whole one: the authors' code
    first cuts it to its 50 likeliest tokens, which changes the order of few beams.

    Attributes:
        config: of the network.
        num_nodes: N; surplus ones, where the beams share much, are invalid.
        levels: D, passes of the network a step.
        beams: M.
        topology: for reports.
    """

    config: RedrafterConfig
    num_nodes: int = 8
    levels: int = 4
    beams: int = 3
    taps: tuple[Tap, ...] = ("normed",)
    num_probes: int = 0
    topology: str = "dynamic_tree"

    def __post_init__(self) -> None:
        if self.levels < 1 or self.beams < 1:
            raise ValueError(f"levels={self.levels}, beams={self.beams}; expected at least 1 each")
        if not self.levels <= self.num_nodes <= self.levels * self.beams:
            raise ValueError(
                f"num_nodes={self.num_nodes}; expected {self.levels} (one beam) to {self.levels * self.beams}, all "
                f"nodes of {self.beams} beams of {self.levels} tokens"
            )
        if self.beams > self.config.head_size:
            raise ValueError(f"beams={self.beams} exceeds the draft vocabulary of {self.config.head_size}")

    @property
    def depth(self) -> int:
        """D."""
        return self.levels

    @property
    def draft_passes(self) -> int:
        """Passes of a step."""
        return self.levels

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """What training starts from: a network that says what the target says, of the first Vd tokens."""
        vocab = jnp.arange(self.config.head_size, dtype=jnp.int32)
        params = init_redrafter(self.config, key)
        head = target_head(target.config, split(target)[1], vocab).astype(self.config.dtype)
        if self.config.own_head:
            head = jnp.pad(head, ((0, self.config.exit_dim), (0, 0)))[: self.config.exit_dim]
        return {**params, "lm_head": {"kernel": head}}, {"vocab": vocab}

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: HeadsState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, HeadsState, KVCache]:
        """One pass of the network a level, over all beams."""
        del keys
        network: Redrafter = merge(redrafter_graph(self.config)[0], params)
        vocab, batch = tables.get("vocab"), state.hidden.shape[0]
        # The beams: log-probability, last token, tokens so far in draft ids, recurrent state, place in the pool.
        worth, ids = jnp.zeros((batch, 1)), context.last(1)
        beams = jnp.zeros((batch, 1, 0), jnp.int32)
        recurrent = jnp.zeros((batch, 1, state.hidden.shape[-1]), state.hidden.dtype)
        places = jnp.full((batch, 1), -1, jnp.int32)
        tokens, scores, parents = [], [], []
        for level in range(self.levels):
            recurrent = network.advance(recurrent, target.embed(ids))
            hidden = jnp.broadcast_to(state.hidden[:, None], recurrent.shape)
            logits = network.logits(network(hidden, recurrent))
            count = logits.shape[1]
            own = np.repeat(np.eye(count, dtype=bool), level, axis=1)
            seen = jnp.broadcast_to(own, (batch, *own.shape))
            law = jax.nn.log_softmax(context.process(logits, beams.reshape(batch, -1), seen, vocab), axis=-1)
            # A row that failed may hold NaN, which would sort above its own parent.
            law = jnp.where(jnp.isnan(law), -jnp.inf, law)
            picks = likeliest(law, self.beams)
            ends = (worth[..., None] + jnp.take_along_axis(law, picks, axis=-1)).reshape(batch, -1)
            worth, best = jax.lax.top_k(ends, self.beams)
            owner, picked = best // self.beams, jnp.take_along_axis(picks.reshape(batch, -1), best, axis=1)
            beams = jnp.take_along_axis(beams, owner[..., None], axis=1)
            beams = jnp.concatenate([beams, picked[..., None]], axis=-1)
            recurrent = jnp.take_along_axis(recurrent, owner[..., None], axis=1)
            ids = picked if vocab is None else jnp.asarray(vocab)[picked]
            tokens.append(ids)
            scores.append(worth)
            parents.append(jnp.take_along_axis(places, owner, axis=1))
            places = jnp.broadcast_to(level * self.beams + jnp.arange(self.beams, dtype=jnp.int32), (batch, self.beams))
        draft = self._tree(*(jnp.concatenate(parts, axis=1) for parts in (tokens, scores, parents)))
        return dataclasses.replace(draft, vocab=vocab), state, cache

    def _tree(self, tokens_bc: jax.Array, scores_bc: jax.Array, parents_bc: jax.Array) -> Draft:
        """The N likeliest nodes that a beam of the last level descends from; closed under parents."""
        if self.beams == 1:
            return chain(tokens_bc, laws=None)
        alive, rows = jnp.zeros(tokens_bc.shape, bool), jnp.arange(len(tokens_bc))[:, None]
        places = jnp.broadcast_to(tokens_bc.shape[1] - self.beams + jnp.arange(self.beams), (len(rows), self.beams))
        for level in reversed(range(self.levels)):
            alive = alive.at[rows, places].set(True)
            if level:
                places = jnp.take_along_axis(parents_bc, places, axis=1)
        # The likeliest first: parents are worth no less, and come first among equals.
        kept = jax.lax.top_k(jnp.where(alive, scores_bc, -jnp.inf), self.num_nodes)[1]
        return Draft(
            tokens=jnp.take_along_axis(tokens_bc, kept, axis=1).astype(jnp.int32),
            parents=subtree(parents_bc, kept),
            valid=jnp.take_along_axis(alive, kept, axis=1),
            law=jnp.full(kept.shape, -1, jnp.int32),
            laws=jnp.zeros((len(kept), 0, 1), jnp.float32),
        )
