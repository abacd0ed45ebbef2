"""Where arrays lie on a mesh: roles by the path of a leaf, presets from what a dimension is to a mesh axis.

A role says what the dimensions of a weight are (`hidden`, `heads`, ...); a preset says which of them are split, and
over which axis. Only paths and shapes are looked at: parameters, optimizer states and abstract trees go the same way.
Rows of a batch are spread over `data` and `fsdp` under every preset.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from specjax.parallel.mesh import ROWS, active_mesh, axis_sizes, describe, row_shards

# What a dimension is -> the mesh axis that splits it. What is not named is whole on every device.
_FSDP = {"hidden": "fsdp"}
_TENSOR = {"heads": "tensor", "kv_heads": "tensor", "intermediate": "tensor", "vocab": "tensor"}
PRESETS: Mapping[str, Mapping[str, str]] = {"dp": {}, "fsdp": _FSDP, "tp": _TENSOR, "fsdp_tp": _FSDP | _TENSOR}

# How messages call what cannot be divided.
_WORDS = {
    "hidden": "hidden units",
    "heads": "heads",
    "kv_heads": "kv heads",
    "intermediate": "MLP columns",
    "vocab": "vocabulary entries",
}


@dataclasses.dataclass(frozen=True)
class Role:
    """What the dimensions of some leaves are.

    Attributes:
        pattern: regular expression for the end of a leaf's path, whole names: `q/kernel` is found in
            `layers/0/attn/q/kernel`.
        dims: per dimension `hidden`, `heads`, `kv_heads`, `intermediate`, `vocab`, or None for one that is never split.
    """

    pattern: str
    dims: tuple[str | None, ...]

    def __post_init__(self) -> None:
        unknown = [dim for dim in self.dims if dim is not None and dim not in _WORDS]
        if unknown:
            raise ValueError(
                f"role {self.pattern!r} has the dimension {unknown[0]!r}; known: {', '.join(_WORDS)}, None"
            )

    def matches(self, path: str) -> bool:
        """Whether a path such as `layers/0/attn/q/kernel` has this role."""
        return re.search(rf"(^|/)({self.pattern})$", path) is not None


# The first that matches counts. Kernels are [in, out].
ROLES = (
    Role("embedding", ("vocab", "hidden")),
    Role("lm_head/kernel", ("hidden", "vocab")),
    Role("q/kernel", ("hidden", "heads")),
    Role("[kv]/kernel", ("hidden", "kv_heads")),
    Role("o/kernel", ("heads", "hidden")),
    Role("(gate|up)/kernel", ("hidden", "intermediate")),
    Role("down/kernel", ("intermediate", "hidden")),
    Role("kernel", ("hidden", None)),
    Role("lm_head/bias", ("vocab",)),
    Role("q/bias", ("heads",)),
    Role("[kv]/bias", ("kv_heads",)),
    Role("(gate|up)/bias", ("intermediate",)),
    Role("bias|weight", (None,)),
)


def param_shardings(
    params: Any, mesh: Mesh | AbstractMesh, preset: str, *, head_dim: int | None = None, roles: Sequence[Role] = ()
) -> Any:
    """Where parameters lie: a tree of `NamedSharding` like `params`.

    An optimizer state is taken as well: its moments end in the paths of the parameters. A leaf with fewer dimensions
    than its role, or of one element (a count, a factored moment), is whole everywhere. A drafter that is small beside
    its target is best whole everywhere too: preset `dp`.

    Args:
        params: arrays or `ShapeDtypeStruct`s; kernels `[in, out]`, embeddings `[V, d]`.
        mesh: with the axes `data`, `fsdp`, `tensor`.
        preset: a name in `PRESETS`.
        head_dim: width of an attention head; heads stay whole. Needed where `tensor` splits attention.
        roles: looked at before `ROLES`, for networks with names of their own.

    Raises:
        ValueError: unknown preset or mesh axes, or leaves that do not fit; one message lists all that do not.
    """
    rules, sizes, misfits = check_preset(preset), axis_sizes(mesh), _Misfits()

    def leaf(keys: tuple[Any, ...], x: Any) -> NamedSharding:
        path, shape = _path(keys), np.shape(x)
        dims = _dims(path, shape, (*roles, *ROLES), misfits) if rules and math.prod(shape) > 1 else ()
        pairs = zip(dims, shape, strict=bool(dims))
        return NamedSharding(mesh, _spec([_axis(path, d, n, head_dim, rules, sizes, misfits) for d, n in pairs], sizes))

    shardings = jax.tree_util.tree_map_with_path(leaf, params)
    misfits.report(f"preset {preset!r}", mesh)
    return shardings


def state_shardings(state: Any, mesh: Mesh | AbstractMesh, preset: str, *, drafter: str = "dp") -> Any:
    """Where a decoding state lies: rows over `data` and `fsdp`, key and value heads over `tensor`.

    Args:
        state: a `DecodeState`, or any tree whose leaves have B first; caches hold `k` and `v` `[B, S, K, H]`.
        mesh: with the axes `data`, `fsdp`, `tensor`.
        preset: of the target's parameters.
        drafter: preset of the drafter's parameters, for what lies under `drafter`.

    Raises:
        ValueError: as `param_shardings`.
    """
    presets, sizes, misfits = {True: check_preset(drafter), False: check_preset(preset)}, axis_sizes(mesh), _Misfits()

    def leaf(keys: tuple[Any, ...], x: Any) -> NamedSharding:
        path, shape = _path(keys), np.shape(x)
        split: list[Any] = [_rows(path, shape, sizes, misfits)]
        if path.split("/")[-1] in ("k", "v") and len(shape) == 4:
            rules = presets[path.startswith("drafter/")]
            split += [None, _axis(path, "kv_heads", shape[2], 1, rules, sizes, misfits)]
        return NamedSharding(mesh, _spec(split, sizes))

    shardings = jax.tree_util.tree_map_with_path(leaf, state)
    misfits.report("a decoding state", mesh)
    return shardings


def batch_shardings(batch: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Where a batch lies, whose leaves have B first: rows over `data` and `fsdp`.

    Raises:
        ValueError: B is not divisible by them; names the sizes.
    """
    sizes, misfits = axis_sizes(mesh), _Misfits()

    def leaf(keys: tuple[Any, ...], x: Any) -> NamedSharding:
        return NamedSharding(mesh, _spec([_rows(_path(keys), np.shape(x), sizes, misfits)], sizes))

    shardings = jax.tree_util.tree_map_with_path(leaf, batch)
    misfits.report("a batch", mesh)
    return shardings


def replicated(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Every leaf whole on every device: tables, and whatever is small."""
    axis_sizes(mesh)
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)


def rows_are_spread() -> bool:
    """Whether `jax.set_mesh` put a mesh in place that splits rows."""
    mesh = active_mesh()
    return mesh is not None and row_shards(mesh) > 1


def spread_rows(tree: Any) -> Any:
    """Holds the first dimension of every leaf to `data` and `fsdp` inside a trace; the others are XLA's choice.

    Without a mesh in place nothing happens. A single row, such as a request on its way into a running batch, is whole
    on every device.

    Raises:
        ValueError: as `batch_shardings`.
    """
    mesh = active_mesh()
    if mesh is None or not rows_are_spread():
        return tree
    sizes, misfits = axis_sizes(mesh), _Misfits()

    def leaf(keys: tuple[Any, ...], x: jax.Array) -> PartitionSpec:
        axes = None if x.shape[0] == 1 else _rows(_path(keys), x.shape, sizes, misfits)
        (rows,) = _spec([axes], sizes) or (None,)
        return PartitionSpec(rows, *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1))

    specs = jax.tree_util.tree_map_with_path(leaf, tree)
    misfits.report("a batch", mesh)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def whole_vectors(table: jax.Array) -> jax.Array:
    """Holds the last dimension of a table `[V, d]` whole inside a trace; how V is split is XLA's choice.

    Before a lookup: XLA otherwise looks up slices of vectors, and replicates the rows of a batch to put them together.
    Without a mesh in place that splits rows nothing happens.
    """
    if not rows_are_spread():
        return table
    rest = (PartitionSpec.UNCONSTRAINED,) * (table.ndim - 1)
    return jax.lax.with_sharding_constraint(table, PartitionSpec(*rest, None))


class _Misfits:
    """What does not fit, gathered so that one error names all of it."""

    def __init__(self) -> None:
        self._paths: dict[str, list[str]] = {}

    def add(self, what: str, path: str) -> None:
        self._paths.setdefault(what, []).append(path)

    def report(self, subject: str, mesh: Mesh | AbstractMesh) -> None:
        """Raises the error, if there is anything to report."""
        if not self._paths:
            return
        lines = []
        for what, paths in self._paths.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            lines.append(f"  {what}: {paths[0] or 'the array'}{more}")
        raise ValueError(f"{subject} does not fit the mesh ({describe(mesh)}):\n" + "\n".join(lines))


def check_preset(name: str) -> Mapping[str, str]:
    """What a preset splits, and over which axis.

    Raises:
        ValueError: there is no such preset.
    """
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown sharding preset {name!r}; {hint}known: {', '.join(PRESETS)}")


def _path(keys: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _dims(path: str, shape: tuple[int, ...], roles: Sequence[Role], misfits: _Misfits) -> tuple[str | None, ...]:
    """What each dimension of a leaf is; empty where it is whole everywhere."""
    role = next((role for role in roles if role.matches(path)), None)
    if role is not None and len(shape) == len(role.dims):
        return role.dims
    if len(shape) < (2 if role is None else len(role.dims)):
        return ()
    dims = "x".join(map(str, shape))
    if role is None:
        misfits.add(f"no role says what the dimensions {dims} are (give it in `roles`)", path)
    else:
        expected = f"{len(role.dims)} dimension{'' if len(role.dims) == 1 else 's'}"
        misfits.add(f"{expected} expected, not {dims} (packed weights are for one CPU device: use them plain)", path)
    return ()


def _axis(
    path: str,
    dim: str | None,
    size: int,
    head_dim: int | None,
    rules: Mapping[str, str],
    sizes: Mapping[str, int],
    misfits: _Misfits,
) -> str | None:
    """The mesh axis that splits a dimension, or None."""
    axis = None if dim is None else rules.get(dim)
    if dim is None or axis is None or sizes[axis] == 1:
        return None
    unit = 1
    if dim in ("heads", "kv_heads"):
        if head_dim is None:
            misfits.add(f"head_dim is needed to split {_WORDS[dim]} over {axis}={sizes[axis]}", path)
            return None
        unit = head_dim
    if size % unit:
        misfits.add(f"{size} columns are not whole heads of head_dim={unit}", path)
    elif (size // unit) % sizes[axis]:
        misfits.add(f"{size // unit} {_WORDS[dim]} are not divisible by {axis}={sizes[axis]}", path)
    return axis


def _rows(path: str, shape: tuple[int, ...], sizes: Mapping[str, int], misfits: _Misfits) -> tuple[str, ...] | None:
    """The mesh axes that rows are spread over."""
    shards = math.prod(sizes[axis] for axis in ROWS)
    if not shape or shards == 1:
        return None
    if shape[0] % shards:
        product = "*".join(f"{axis}={sizes[axis]}" for axis in ROWS)
        misfits.add(f"{shape[0]} rows are not divisible by {product}", path)
    return ROWS


def _spec(split: Sequence[str | tuple[str, ...] | None], sizes: Mapping[str, int]) -> PartitionSpec:
    """The form in which XLA hands shardings back: no axes of size 1, no None at the end.

    Another form of the same sharding would compile the same step twice.
    """
    entries: list[Any] = []
    for axes in split:
        named = (axes,) if isinstance(axes, str) else axes or ()
        kept = tuple(axis for axis in named if sizes[axis] > 1)
        entries.append(None if not kept else kept[0] if len(kept) == 1 else kept)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
