"""What Medusa and Hydra share: heads on the target's last hidden state, and static trees of their likeliest tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.drafters import target_head
from specjax.decoding import Context, Draft, Kind, Sampling, Scores, Verdict
from specjax.decoding.tree import TreeSpec, from_choices
from specjax.models import Decoder, Tap, split
from specjax.models.medusa import HeadsConfig, heads_graph, init_heads


@flax.struct.dataclass
class HeadsState:
    """The target's hidden state `[B, d]`, after its last norm, at the last position of its cache: before the root."""

    hidden: jax.Array


class LastHidden:
    """The part of a drafter that drafts choices from the target's last hidden state alone, to inherit from."""

    def kind(self, sampling: Sampling) -> Kind:
        """The likeliest tokens, whatever the temperature."""
        del sampling
        return "fixed"

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> HeadsState:
        """Zero; a prompt always comes first."""
        del params, tables, capacity
        return HeadsState(jnp.zeros((batch, target.config.hidden_size), target.config.dtype))

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: HeadsState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> HeadsState:
        """Keeps the hidden state of the last valid token, if there is one."""
        del params, tables, target, tokens, positions
        count = valid.sum(-1)
        last = jnp.take_along_axis(taps["normed"], jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        return HeadsState(jnp.where((count > 0)[:, None], last, state.hidden))

    def rest(self, params: Any, tables: Any, target: Decoder, state: Any, context: Context) -> Any:
        """A step without a draft: nothing to do, `commit` keeps what the next one reads."""
        del params, tables, target, context
        return state

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: HeadsState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> HeadsState:
        """Keeps the hidden state of the last accepted node, or of the root: the next root is the token behind it."""
        del params, tables, target, state, context, draft
        path = jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1)
        node = jnp.take_along_axis(path, verdict.num_accepted[:, None], axis=1) + 1
        return HeadsState(jnp.take_along_axis(scores.taps["normed"], node[..., None], axis=1)[:, 0])


@dataclasses.dataclass(frozen=True)
class HeadsDrafter(LastHidden):
    """All of a drafter with heads but the proposal.

    A node at depth i + 1 takes one of the likeliest tokens of head i: a choice, so that nothing about how it was found
    matters to exactness.

    Attributes:
        config: of the heads.
        tree: which of each head's candidates are drafted; at most as deep as there are heads.
    """

    config: HeadsConfig
    tree: TreeSpec
    taps: tuple[Tap, ...] = ("normed",)
    num_probes: int = 0

    def __post_init__(self) -> None:
        if not self.tree.num_nodes:
            raise ValueError("the tree has no nodes; heads draft at least 1 token")
        self.tree.require_depth(self.config.num_heads, f"num_heads={self.config.num_heads}")
        if self.tree.max_children > self.config.head_size:
            raise ValueError(
                f"a node has {self.tree.max_children} children, the draft vocabulary only "
                f"{self.config.head_size} tokens; expected fewer children"
            )

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.tree.num_nodes

    @property
    def depth(self) -> int:
        """D, how many heads are used."""
        return self.tree.depth

    def at_width(self, width: int) -> Self:
        """The same heads with the first nodes of their tree."""
        return dataclasses.replace(self, tree=first_nodes(self.tree, width))

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """What training starts from: heads that say what the target says, of the first Vd tokens."""
        vocab = jnp.arange(self.config.head_size, dtype=jnp.int32)
        params = init_heads(self.config, key)
        head = {"kernel": target_head(target.config, split(target)[1], vocab).astype(self.config.dtype)}
        if not self.config.own_head:
            return {**params, "lm_head": head}, {"vocab": vocab}
        spare = heads_graph(self.config)[1]["heads"]
        for i, own in params["heads"].items():
            own["lm_head"] = {name: jnp.zeros(x.shape, x.dtype) for name, x in spare[i]["lm_head"].items()} | head
        return params, {"vocab": vocab}


def first_nodes(tree: TreeSpec, count: int) -> TreeSpec:
    """The first nodes of a tree, a tree as well: parents come before their children."""
    return TreeSpec(tree.parents[:count], tree.child_ranks[:count])


def likeliest(logits: jax.Array, count: int) -> jax.Array:
    """Indices `[..., count]` int32 of the largest logits, in order; of equals the lower comes first."""
    if count == 1:
        return jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return jax.lax.top_k(logits, count)[1]


def best_tree(accuracy_kr: Sequence[Sequence[float]] | np.ndarray, nodes: int) -> TreeSpec:
    """The static tree with the most accepted tokens to expect (Cai et al. 2024, section 2.3.3), grown greedily.

    Accuracies of different heads are taken as independent: a node is worth the product along its path.

    Args:
        accuracy_kr: probability that the token to come has rank r at head k.
        nodes: N.

    Raises:
        ValueError: accuracies are no probabilities, or the heads have fewer candidates than nodes.
    """
    accuracy = np.asarray(accuracy_kr, np.float64)
    if accuracy.ndim != 2 or not ((accuracy >= 0) & (accuracy <= 1)).all():
        raise ValueError(f"accuracies of shape {accuracy.shape}: expected probabilities by head and rank")
    heads, ranks = accuracy.shape
    most = sum(ranks**d for d in range(1, heads + 1))
    if not 1 <= nodes <= most:
        raise ValueError(f"nodes={nodes}: {heads} heads with {ranks} ranks give 1 to {most}")
    worth: dict[tuple[int, ...], float] = {(): 1.0}
    open_paths: dict[tuple[int, ...], float] = {(r,): accuracy[0, r] for r in range(ranks)}
    while len(worth) <= nodes:
        # Of equals the shallower, then the likelier.
        best = min(open_paths, key=lambda path: (-open_paths[path], len(path), path))
        worth[best] = open_paths.pop(best)
        if len(best) < heads:
            open_paths |= {(*best, r): worth[best] * accuracy[len(best), r] for r in range(ranks)}
    return from_choices([path for path in worth if path])


def expected_length(accuracy_kr: Sequence[Sequence[float]] | np.ndarray, tree: TreeSpec) -> float:
    """tau to expect of a tree under the same independence: 1 plus every node's worth."""
    accuracy = np.asarray(accuracy_kr, np.float64)
    worth: list[float] = []
    for parent, rank, depth in zip(tree.parents, tree.child_ranks, tree.node_depths, strict=True):
        worth.append((worth[parent] if parent >= 0 else 1.0) * float(accuracy[depth - 1, rank]))
    return 1.0 + math.fsum(worth)


def choose_tree(
    config: HeadsConfig, accuracy: Any | None, *, tree: str, nodes: int, choices: Sequence[Sequence[int]]
) -> TreeSpec:
    """The tree that a drafter's options ask for.

    Args:
        config: of the heads.
        accuracy: `tables["accuracy"]` of a calibrated drafter, or None.
        tree: `chain`, `calibrated` or `choices`.
        nodes: of a chain (0 for one a head) or a calibrated tree.
        choices: paths of ranks, see `from_choices`.

    Raises:
        ValueError: options that do not go together, or a calibrated tree of heads without calibration.
    """
    if (tree == "choices") != bool(choices):
        raise ValueError(f"tree={tree!r} with {len(choices)} choices; give paths with tree='choices', and only there")
    if tree == "choices":
        return from_choices(choices)
    if tree == "chain":
        return TreeSpec(tuple(range(-1, (nodes or config.num_heads) - 1)))
    if tree != "calibrated":
        raise ValueError(f"tree={tree!r}; expected 'chain', 'calibrated' or 'choices'")
    if accuracy is None:
        raise ValueError("these heads are not calibrated (no table `accuracy`); use tree='choices' or 'chain'")
    return best_tree(np.asarray(accuracy, np.float64), nodes)
