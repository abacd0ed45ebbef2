"""Work that each device does on its own rows of a batch: loops over positions, which no partitioner can spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.parallel.mesh import ROWS, active_mesh, axis_sizes, row_shards

Anywhere = Callable[[jax.Array], jax.Array]  # bool of any shape: whether it is so on any device


def on_own_rows(fn: Callable[..., tuple[Any, Any]], *trees: Any) -> tuple[Any, Any]:
    """Calls `fn(anywhere, *trees)` on every device with that device's rows alone.

    A loop over the positions of a whole batch runs in full on every device, whatever its arrays' shardings. Under a
    mesh that splits rows (`jax.set_mesh`), each device runs it over its own rows here, on `data` and `fsdp` by hand;
    `tensor` stays the compiler's. What `fn` closes over is whole on those axes: weights that `fsdp` splits are gathered
    once, before the loop. Without such a mesh, or where B does not divide, `fn` is called once with everything.

    Args:
        fn: gives two trees: sums over its rows, which are added up over the devices, and arrays of its rows, B first.
            Whether to do something may only depend on rows by way of `anywhere`: all devices must do the same.
        trees: arrays with B first.

    Returns:
        The sums, the same on every device, and the arrays of all rows.
    """
    mesh = active_mesh()
    rows = jax.tree.leaves(trees)[0].shape[0]
    if mesh is None or row_shards(mesh) == 1 or rows % row_shards(mesh):
        return fn(lambda flag: flag, *trees)
    axes = tuple(axis for axis in ROWS if axis_sizes(mesh)[axis] > 1)

    def own(*parts: Any) -> tuple[Any, Any]:
        sums, kept = fn(lambda flag: jax.lax.pmax(flag.astype(jnp.int32), axes) > 0, *parts)
        return jax.tree.map(lambda x: jax.lax.psum(x, axes), sums), kept

    split = PartitionSpec(axes)
    spread = jax.shard_map(
        own, in_specs=split, out_specs=(PartitionSpec(), split), axis_names=set(axes), check_vma=False
    )
    return spread(*trees)
