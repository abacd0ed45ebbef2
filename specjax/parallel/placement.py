"""Where a run's arrays lie: one mesh, and a preset each for the target and for the drafter that is small beside it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.parallel.mesh import ROWS
from specjax.parallel.rules import batch_shardings, param_shardings, replicated


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
