"""Where arrays lie: one mesh, and a preset each for the target and for the drafter that is small beside it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.parallel.mesh import AXES, ROWS, make_mesh, row_shards
from specjax.parallel.rules import batch_shardings, check_preset, param_shardings, replicated


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the presets of the two parameter trees; hashable, so that a compiled step can depend on it.

    Attributes:
        mesh: with the axes `data`, `fsdp`, `tensor`.
        target: preset of the target's parameters, see `PRESETS`.
        drafter: preset of the drafter's parameters and of what an optimizer keeps for them.
        head_dim: width of an attention head; heads are never cut.
    """

    mesh: Mesh
    target: str = "dp"
    drafter: str = "dp"
    head_dim: int | None = None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the mesh is in place: traces spread rows over it."""
        return jax.set_mesh(self.mesh)

    def target_params(self, params: Any) -> Any:
        """The target's parameters, on the mesh."""
        return jax.device_put(params, self.target_shardings(params))

    def target_shardings(self, params: Any) -> Any:
        """Where the target's parameters lie; also of abstract trees."""
        return param_shardings(params, self.mesh, self.target, head_dim=self.head_dim)

    def drafter_params(self, params: Any) -> Any:
        """The drafter's parameters (or an optimizer's state for them), on the mesh."""
        return jax.device_put(params, self.drafter_shardings(params))

    def drafter_shardings(self, params: Any) -> Any:
        """Where the drafter's parameters lie; also of abstract trees."""
        return param_shardings(params, self.mesh, self.drafter, head_dim=self.head_dim)

    def hold_drafter(self, params: Any) -> Any:
        """Holds a tree of the drafter's to its place inside a trace, so that a step returns it where it took it."""
        return jax.lax.with_sharding_constraint(params, self.drafter_shardings(params))

    def everywhere(self, tree: Any) -> Any:
        """Tables and whatever is small: whole on every device."""
        return jax.device_put(tree, replicated(tree, self.mesh))

    def rows(self, load: Callable[[np.ndarray], Any], rows: np.ndarray) -> Any:
        """A batch spread over the mesh; every process loads the rows of its own devices alone.

        Args:
            load: gives the arrays, rows first, of some rows.
            rows: ids `[B]` of the rows of the whole batch, the same on every process.

        Raises:
            ValueError: B does not divide; names the sizes.
        """
        places = batch_shardings(rows, self.mesh)
        slices: Any = places.addressable_devices_indices_map(rows.shape)
        mine = sorted({i for part in slices.values() for i in range(len(rows))[part[0]]})
        here = {row: at for at, row in enumerate(mine)}
        loaded = load(rows[mine])

        def spread(x: np.ndarray) -> jax.Array:
            whole = (len(rows), *x.shape[1:])
            sharding = NamedSharding(self.mesh, PartitionSpec(ROWS))

            def part(index: Any) -> np.ndarray:
                return x[[here[i] for i in range(len(rows))[index[0]]]]

            return jax.make_array_from_callback(whole, sharding, part)

        return jax.tree.map(spread, loaded)


def make_placement(
    mesh: Mapping[str, Any], head_dim: int | None, devices: Sequence[jax.Device] | None = None
) -> Placement | None:
    """A placement over devices from what a config says; None for a mesh of one device, which needs no placing.

    Args:
        mesh: sizes of the axes `data`, `fsdp`, `tensor` (1 where they are not named, -1 for one of them: the devices
            that the others leave), and the presets `target` (split over all of these by default) and `drafter` (whole
            everywhere by default).
        head_dim: see `Placement`.
        devices: to lay the mesh over; those of all processes by default.

    Raises:
        ValueError: no mapping, an unknown axis or preset, or sizes that do not fit the devices.
    """
    if not isinstance(mesh, Mapping):
        raise ValueError(f"mesh={mesh!r}; expected sizes and presets, such as {{'tensor': 8, 'target': 'tp'}}")
    if unknown := [name for name in mesh if name not in (*AXES, "target", "drafter")]:
        raise ValueError(
            f"mesh.{unknown[0]}={mesh[unknown[0]]!r}: a mesh has no such axis; expected sizes of {', '.join(AXES)}, "
            "and the presets target and drafter"
        )
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    presets = {"target": mesh.get("target", "fsdp_tp"), "drafter": mesh.get("drafter", "dp")}
    for name in presets.values():
        check_preset(name)
    count = jax.device_count() if devices is None else len(devices)
    if set(sizes.values()) == {1} or (count == 1 and set(sizes.values()) <= {1, -1}):
        return None
    return Placement(make_mesh(**sizes, devices=devices), **presets, head_dim=head_dim)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that a tree of arrays lies on; None for one device, and for abstract arrays."""
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return None
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    return None


def on_mesh_of(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which the mesh that these arrays lie on is in place (see `Placement.active`)."""
    mesh = mesh_of(tree)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def beside(tree: Any, placed: Any) -> Any:
    """Small arrays, whole on every device that `placed` lies on."""
    mesh = mesh_of(placed)
    return tree if mesh is None else jax.device_put(tree, replicated(tree, mesh))


def whole_shares(rows: int, placed: Any) -> int:
    """So many rows, rounded up to what the devices that `placed` lies on divide; a single row is whole on each."""
    mesh = mesh_of(placed)
    shares = 1 if mesh is None or rows == 1 else row_shards(mesh)
    return -(-rows // shares) * shares


def to_host(tree: Any) -> Any:
    """Copies of arrays as NumPy's. Where their parts lie on several hosts, every process is to call this at once."""

    def copy(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.array(x)

    return jax.tree.map(copy, tree)
