"""The device mesh: `data` spreads rows, `fsdp` spreads rows and weights, `tensor` spreads heads, MLP and vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # The axes that rows of a batch are spread over, under every preset.


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices, or those given.

    Args:
        data: replicas that each take a share of the rows.
        fsdp: the same, with every weight matrix split over them as well.
        tensor: devices that split attention heads, MLP columns and the vocabulary.
        devices: all of all processes by default.

    At most one size is -1: the devices that the others leave. Where the devices are several slices, which only a
    slower network connects, `data` is what goes across them, and `fsdp` as far as `data` does not.

    Raises:
        ValueError: a size that is neither positive nor -1, more than one -1, sizes whose product is not the number of
            devices, or whose rows do not divide over the slices.
    """
    chosen = list(jax.devices() if devices is None else devices)
    shape = _fill({"data": data, "fsdp": fsdp, "tensor": tensor}, len(chosen))
    # Auto: the axes are hints to XLA's partitioner. JAX's own default, Explicit, types every array by its sharding.
    return Mesh(device_grid(shape, chosen), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def device_grid(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in the shape of a mesh, neighbours where axes talk most: `tensor` innermost, slices outermost.

    Raises:
        ValueError: several slices that `data` and `fsdp` do not divide over, or that are not of one size; or a shape
            that the devices' network cannot take.
    """
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    count = len(set(slices))
    asked = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
    data, fsdp, tensor = shape
    across = math.gcd(data, count)
    if fsdp % (count // across):
        raise ValueError(
            f"mesh {asked} cannot be laid over {count} slices: data * fsdp is to be a multiple of {count}, and tensor "
            f"to stay within a slice of {len(devices) // count} devices"
        )
    if len({slices.count(number) for number in slices}) > 1:
        raise ValueError(f"mesh {asked}: the slices have different numbers of devices; expected slices of one size")
    # Axes of the network are split where there is no other way: sizes need not be products of its axes.
    split = {"allow_split_physical_axes": True}
    try:
        if count == 1:
            return mesh_utils.create_device_mesh(shape, devices, **split)
        outer = across, count // across, 1
        inner = tuple(size // over for size, over in zip(shape, outer, strict=True))
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, **split)
    except NotImplementedError as error:
        raise ValueError(f"mesh {asked} cannot be laid over these devices ({error}): choose other sizes") from error


def axis_sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """The size of each axis.

    Raises:
        ValueError: the mesh does not have exactly the axes `data`, `fsdp` and `tensor`; names those it has.
    """
    if set(mesh.axis_names) != set(AXES):
        raise ValueError(f"a mesh has the axes {', '.join(AXES)}, not {', '.join(mesh.axis_names)}: use make_mesh")
    return dict(mesh.shape)


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """How many shares the rows of a batch are split into."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[axis] for axis in ROWS)


def describe(mesh: Mesh | AbstractMesh) -> str:
    """`data=4, fsdp=1, tensor=2`."""
    return ", ".join(f"{axis}={size}" for axis, size in axis_sizes(mesh).items())


def active_mesh() -> AbstractMesh | None:
    """The mesh that `jax.set_mesh` put in place, inside a trace or outside; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _fill(sizes: dict[str, int], count: int) -> tuple[int, ...]:
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    plural = "" if count == 1 else "s"
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh {asked}: every axis has a positive size, or -1 for the devices that the others leave")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh {asked}: only one axis can be -1, not {' and '.join(open_axes)}")
    product = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and count % product:
        raise ValueError(
            f"mesh {asked}: {count} device{plural} cannot be split by {product}; choose sizes that divide {count}"
        )
    if not open_axes and product != count:
        raise ValueError(
            f"mesh {asked} needs {product} devices, but there {'is' if count == 1 else 'are'} {count}; give sizes "
            f"whose product is {count}, -1 for one of them, or the devices to use"
        )
    return tuple(count // product if size == -1 else size for size in sizes.values())
