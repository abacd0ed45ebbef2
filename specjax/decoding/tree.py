"""Token trees: static shapes, ancestor masks, pointers for the walk. In a pass node i has index i + 1, the root 0.

Only parents describe a tree: a static one is a `TreeSpec`, a dynamic one is an array `[B, N]` that a drafter makes
anew in every step; both end as `Draft.parents`, and nothing behind a draft tells them apart.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.draft import Draft
from specjax.models import View, causal_view

MAX_NODES = 128
MAX_DEPTH = 16


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """A static tree: the same nodes under the root in every row and step. Hashable.

    Attributes:
        parents: of each node, -1 for children of the root; a parent comes before its children.
        child_ranks: which of its parent's candidates each node takes (0 the likeliest, or the first drawn); the place
            among its siblings when left empty.

    Raises:
        ValueError: a cycle, a child before its parent, a parent that is not there, more than 128 nodes, deeper than
            16, two siblings of one rank, or what is no whole number.
    """

    parents: tuple[int, ...]
    child_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parents = _listed("parents", self.parents, "a parent for each node, as in (-1, 0)")
        check_parents(parents)
        ranks: tuple[int, ...] = _listed(
            "child_ranks", self.child_ranks, "a rank for each node, as in (0, 1)"
        ) or _places(parents)
        if len(ranks) != len(parents):
            raise ValueError(f"child_ranks has {len(ranks)} entries for {len(parents)} nodes; expected one a node")
        taken: dict[tuple[int, int], int] = {}
        for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
            if not isinstance(rank, numbers.Integral) or rank < 0:
                raise ValueError(
                    f"node {node} has rank {rank!r} among its siblings; expected a whole number, 0 or more"
                )
            if (other := taken.setdefault((parent, rank), node)) != node:
                raise ValueError(f"nodes {other} and {node} both have rank {rank} under {parent}; expected one of each")
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "child_ranks", ranks)

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.parents)

    @cached_property
    def node_depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 for children of the root."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """D, the longest path."""
        return max(self.node_depths, default=0)

    @property
    def max_children(self) -> int:
        """Candidates that a node must offer: one more than the highest rank."""
        return max(self.child_ranks, default=-1) + 1

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes at depth 1, 2, ..., D, in index order."""
        return tuple(
            tuple(node for node, depth in enumerate(self.node_depths) if depth == level)
            for level in range(1, self.depth + 1)
        )

    @property
    def is_chain(self) -> bool:
        """Parents are -1, 0, 1, ..."""
        return self.parents == tuple(range(-1, self.num_nodes - 1))

    def on_paths(self, nodes: Iterable[int], ran: Sequence[int]) -> np.ndarray:
        """`[n, len(ran)]` bool: which of the nodes that ran lie on each node's path, itself included; -1 is the root.

        Args:
            nodes: the rows.
            ran: the columns, nodes that a drafter has run in this order.
        """
        column = {node: place for place, node in enumerate(ran)}
        rows = [int(node) for node in nodes]
        seen = np.zeros((len(rows), len(ran)), bool)
        for row, at in enumerate(rows):
            while at >= 0:
                if at in column:
                    seen[row, column[at]] = True
                at = self.parents[at]
        return seen

    def require_depth(self, most: int, why: str) -> None:
        """Raises ValueError when the tree is deeper than `most`; `why` says what sets the bound."""
        if self.depth > most:
            node = self.node_depths.index(self.depth)
            raise ValueError(f"node {node} lies at depth {self.depth}, but {why} allows depth {most}; cut the tree")

    def draft(
        self,
        tokens_bn: jax.Array,
        *,
        law: jax.Array | None = None,
        laws: jax.Array | None = None,
        vocab: jax.Array | None = None,
        siblings: Literal["iid", "without_replacement"] = "iid",
    ) -> Draft:
        """This tree with tokens; every node is a fixed choice unless `law` and `laws` say otherwise (see `Draft`)."""
        batch, nodes = tokens_bn.shape
        if nodes != self.num_nodes:
            raise ValueError(f"{nodes} tokens a row for a tree of {self.num_nodes} nodes; expected one a node")
        if (law is None) != (laws is None):
            raise ValueError("law and laws belong together: give both for drawn nodes, neither for fixed choices")
        return Draft(
            tokens=tokens_bn.astype(jnp.int32),
            parents=jnp.broadcast_to(jnp.asarray(self.parents, jnp.int32), (batch, nodes)),
            valid=jnp.ones((batch, nodes), bool),
            law=jnp.full((batch, nodes), -1, jnp.int32) if law is None else law,
            laws=jnp.zeros((batch, 0, 1), jnp.float32) if laws is None else laws,
            vocab=vocab,
            siblings=siblings,
            is_chain=self.is_chain,
        )


def from_choices(choices: Sequence[Sequence[int]]) -> TreeSpec:
    """Medusa's way to write a tree: each node by its path of ranks, `(0, 2)` the third child of the first.

    Nodes are numbered by depth, then by path.

    Raises:
        ValueError: an empty path, a path given twice, one whose parent is not given, or what is no path of whole
            numbers.
    """
    expected = "paths of ranks, as in ((0,), (1,), (0, 0))"
    given = [_listed("path", path, expected) for path in _listed("choices", choices, expected)]
    for path in given:
        if odd := [rank for rank in path if not isinstance(rank, numbers.Integral)]:
            raise ValueError(f"path {path} has rank {odd[0]!r}; expected whole numbers, 0 or more")
    paths = sorted((tuple(map(int, path)) for path in given), key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate(paths)}
    for path in paths:
        if not path:
            raise ValueError("an empty path is the root itself; expected paths of one rank or more")
        if len(path) > 1 and path[:-1] not in index:
            raise ValueError(f"path {path} is given without its parent {path[:-1]}; add it")
    if len(index) != len(paths):
        twice = next(path for a, path in enumerate(paths) if index[path] != a)
        raise ValueError(f"path {twice} is given twice; expected each once")
    return TreeSpec(
        parents=tuple(index[path[:-1]] if len(path) > 1 else -1 for path in paths),
        child_ranks=tuple(path[-1] for path in paths),
    )


def from_branching(branching: Sequence[int]) -> TreeSpec:
    """Every node at depth d has `branching[d]` children: `(3, 2, 1)` is 3 + 6 + 6 nodes, numbered by depth.

    Raises:
        ValueError: a count below 1, or none.
    """
    parents: list[int] = []
    level = [-1]
    expected = "how many children a node has at each depth, as in (3, 2, 1)"
    counts: tuple[int, ...] = _listed("branching", branching, expected)
    if not counts:
        raise ValueError(f"branching={branching!r}; expected {expected}")
    for depth, children in enumerate(counts):
        if not isinstance(children, numbers.Integral) or children < 1:
            raise ValueError(
                f"branching={counts}: {children!r} children at depth {depth}; expected a whole number, at least 1"
            )
        if len(parents) + len(level) * children > MAX_NODES:
            raise ValueError(f"branching={counts} makes more than {MAX_NODES} nodes; make it smaller")
        start = len(parents)
        parents += [parent for parent in level for _ in range(children)]
        level = list(range(start, len(parents)))
    return TreeSpec(tuple(parents))


def check_parents(parents: Sequence[int]) -> None:
    """Checks one row's parents on the host, those of a dynamic tree for instance.

    Raises:
        ValueError: see `TreeSpec`; names the node.
    """
    nodes = len(parents)
    if nodes > MAX_NODES:
        raise ValueError(f"the tree has {nodes} nodes; expected at most {MAX_NODES}")
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not isinstance(parent, numbers.Integral) or not -1 <= parent < nodes:
            raise ValueError(f"node {node} has parent {parent!r}; expected -1 (the root) or a node in 0..{nodes - 1}")
        if parent >= node:
            if _in_cycle(parents, node):
                raise ValueError(f"node {node} is its own ancestor (parents {tuple(parents)}); expected a tree")
            raise ValueError(f"node {node} comes before its parent {parent}; number parents before their children")
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths[-1] > MAX_DEPTH:
            raise ValueError(f"node {node} lies at depth {depths[-1]}; expected at most {MAX_DEPTH}")


def subtree(parents_bm: jax.Array, chosen_bn: jax.Array) -> jax.Array:
    """Parents `[B, N]` of a dynamic tree made of N out of M candidates.

    Args:
        parents_bm: int32 parents among the candidates, -1 for the root.
        chosen_bn: int32 candidate indices; with a candidate all its ancestors are chosen, and come before it.
    """
    parents = jnp.take_along_axis(parents_bm, chosen_bn, axis=1)
    place = jnp.argmax(chosen_bn[:, None, :] == parents[:, :, None], axis=-1)
    return jnp.where(parents < 0, -1, place).astype(jnp.int32)


def ancestors(parents_bm: jax.Array) -> jax.Array:
    """`[B, M + 1, M + 1]` bool: row i sees column j when j is i, or an ancestor of i; index 0 is the root.

    Pointers are doubled: after k rounds a row sees its nearest 2^k - 1 ancestors.

    Args:
        parents_bm: -1 for the root, else an earlier node (a parent comes before its children).
    """
    batch, nodes = parents_bm.shape
    jump = jnp.concatenate([jnp.zeros((batch, 1), parents_bm.dtype), parents_bm + 1], axis=1)
    mask = jnp.broadcast_to(jnp.eye(nodes + 1, dtype=bool), (batch, nodes + 1, nodes + 1))
    rows = jax.vmap(lambda array, index: array[index])
    for _ in range(nodes.bit_length()):
        mask, jump = mask | rows(mask, jump), rows(jump, jump)
    return mask


def depths(parents_bm: jax.Array) -> jax.Array:
    """`[B, M + 1]` int32: distance from the root of the root and each node."""
    return ancestors(parents_bm).sum(-1).astype(jnp.int32) - 1


def draft_view(draft: Draft, prefix_b: jax.Array) -> View:
    """What root, nodes and probes see in the scoring pass, with the root at slot `prefix`."""
    if draft.is_chain and draft.probes is None:
        return causal_view(prefix_b, draft.num_nodes + 1)
    parents = draft.parents
    if draft.probes is not None:
        parents = jnp.concatenate([parents, draft.probes.parents], axis=1)
    mask = ancestors(parents)
    return View(prefix=prefix_b, mask=mask, depths=mask.sum(-1).astype(jnp.int32) - 1)


def pointers(draft: Draft) -> tuple[jax.Array, jax.Array]:
    """`first_child` `[B, N + 1]` (index 0: the root's) and `next_sibling` `[B, N]`; -1 for none.

    Invalid nodes are left out; siblings keep their order.
    """
    if not draft.num_nodes:
        return jnp.full((draft.tokens.shape[0], 1), -1, jnp.int32), draft.parents
    parents = jnp.where(draft.valid, draft.parents, -2)
    index = jnp.arange(draft.num_nodes)
    owner = jnp.arange(-1, draft.num_nodes)
    mine = parents[:, None, :] == owner[None, :, None]  # [B, N + 1, N]
    first = jnp.where(mine.any(-1), jnp.argmax(mine, -1), -1)
    later = (parents[:, :, None] == parents[:, None, :]) & (index[None, :] > index[:, None])[None]
    following = jnp.where(later.any(-1), jnp.argmax(later, -1), -1)
    return first.astype(jnp.int32), jnp.where(draft.valid, following, -1).astype(jnp.int32)


def chain(tokens_bn: jax.Array, *, laws: jax.Array | None, vocab: jax.Array | None = None) -> Draft:
    """A chain draft; node i was drawn from `laws[:, i]`, or chosen when `laws` is None."""
    batch, nodes = tokens_bn.shape
    index = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    return Draft(
        tokens=tokens_bn.astype(jnp.int32),
        parents=index - 1,
        valid=jnp.ones((batch, nodes), bool),
        law=jnp.full_like(index, -1) if laws is None else index,
        laws=jnp.zeros((batch, 0, 1), jnp.float32) if laws is None else laws,
        vocab=vocab,
        is_chain=True,
    )


def _listed(name: str, given: Any, expected: str) -> tuple[Any, ...]:
    try:
        return tuple(given)
    except TypeError:
        raise ValueError(f"{name}={given!r}; expected {expected}") from None


def _places(parents: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(earlier == parent for earlier in parents[:node]) for node, parent in enumerate(parents))


def _in_cycle(parents: Sequence[int], node: int) -> bool:
    at = node
    for _ in parents:
        at = parents[at]
        if at == node:
            return True
        if not 0 <= at < len(parents):
            return False
    return False
