"""SuffixDecoding's tree: the commonest continuations of the text's end in prompt and output (Oliaro et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.decoding.tree import MAX_DEPTH, MAX_NODES
from specjax.drafting.prefix_tree import counted_prefix_tree
from specjax.drafting.suffix import match_lengths
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class SuffixTree(Stateless):
    """A tree of what followed earlier occurrences of the text's last p tokens, for the p that promises most.

    A node is worth the share of the occurrences that go on along its path, the product of the paper's conditional
    frequencies. For every p the worthiest nodes are taken, at most `factor` p of them, and the p of the greatest total
    is drafted (section 3.2; of equals the longest). The paper grows a tree by repeated choice from a suffix tree; as no
    node is worth more than its parent, ordering all prefixes by their counts gives the same nodes in fixed shapes.
    Nothing is kept between steps: the occurrences are found as in `Suffix`.

    Attributes:
        num_nodes: N, nodes of the tree at most.
        depth: D, tokens taken from an occurrence.
        max_match: greatest p.
        min_match: least p.
        factor: nodes for each matched token (alpha of the paper).
        min_frequency: a node is left out where a smaller share of the occurrences goes on so.
        candidates: C, the latest occurrences of each suffix, whose continuations are counted.
    """

    num_nodes: int = 12
    depth: int = 6
    max_match: int = 16
    min_match: int = 1
    factor: float = 1.0
    min_frequency: float = 0.1
    candidates: int = 32
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"min_match={self.min_match} and max_match={self.max_match}; expected 1 <= min_match <= max_match"
            )
        if not 1 <= self.depth <= self.num_nodes <= self.depth * self.candidates:
            raise ValueError(
                f"depth={self.depth}, num_nodes={self.num_nodes} and candidates={self.candidates}; "
                "expected 1 <= depth <= num_nodes <= depth * candidates"
            )
        if self.depth > MAX_DEPTH or self.num_nodes > MAX_NODES:
            raise ValueError(
                f"depth={self.depth} and num_nodes={self.num_nodes}; expected at most {MAX_DEPTH} and {MAX_NODES}"
            )
        if not self.factor * self.max_match >= 1:
            raise ValueError(f"factor={self.factor} proposes nothing even for {self.max_match} matched tokens")
        if not 0 <= self.min_frequency <= 1:
            raise ValueError(f"min_frequency={self.min_frequency}; expected a share in [0, 1]")

    @property
    def topology(self) -> str:
        """The text decides the tree in every step."""
        return "dynamic_tree"

    def kind(self, sampling: Sampling) -> Kind:
        """Copied tokens are chosen, not drawn."""
        del sampling
        return "fixed"

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
        """A tree for each suffix, and the best of them; without a match all nodes are invalid."""
        del params, tables, target, keys
        tokens_bl, (batch, buffer) = context.tokens, context.tokens.shape
        sizes_p = jnp.arange(self.max_match, self.min_match - 1, -1)  # the longest first
        matched = match_lengths(tokens_bl, context.length, self.max_match)
        occurs_bpl = matched[:, None] >= sizes_p[:, None]
        slots_bpl = jnp.where(occurs_bpl, jnp.arange(buffer), -1)
        short = max(self.candidates - buffer, 0)
        slots_bpl = jnp.pad(slots_bpl, [(0, 0), (0, 0), (0, short)], constant_values=-1)
        starts, _ = jax.lax.top_k(slots_bpl, self.candidates)  # the latest
        places_bpcj = starts[..., None] + jnp.arange(self.depth)
        valid = (starts >= 0)[..., None] & (places_bpcj < context.length[:, None, None, None])
        index = jnp.clip(places_bpcj, 0, buffer - 1).reshape(batch, -1)
        found = jnp.take_along_axis(tokens_bl, index, axis=1)
        shape = (batch * len(sizes_p), self.candidates, self.depth)
        drafts, counts = counted_prefix_tree(found.reshape(shape), valid.reshape(shape), self.num_nodes)
        counts_bpn = counts.reshape(batch, -1, self.num_nodes)
        share = counts_bpn / jnp.maximum((starts >= 0).sum(-1, keepdims=True), 1)
        allowed = jnp.floor(self.factor * sizes_p)[:, None] > jnp.arange(self.num_nodes)
        kept_bpn = allowed & (share >= self.min_frequency) & (counts_bpn > 0)
        best_b = jnp.argmax(jnp.where(kept_bpn, share, 0.0).sum(-1), axis=1)
        chosen = jnp.arange(batch) * len(sizes_p) + best_b
        draft = jax.tree.map(lambda x: x[chosen], drafts)
        valid_bn = jnp.take_along_axis(kept_bpn, best_b[:, None, None], axis=1)[:, 0]
        return dataclasses.replace(draft, valid=valid_bn), state, cache
