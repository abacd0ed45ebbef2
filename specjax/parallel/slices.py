"""Meshes of TPU slices that are not here: programs compile for them on any machine that has libtpu.

What such a compilation says is exact: bytes per device, collectives, copies. What it cannot say is time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.parallel.mesh import make_mesh

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
        memory: bytes of high-bandwidth memory.
        bandwidth: of that memory, bytes a second.
        flops: dense bfloat16 operations a second.
    """

    memory: int
    bandwidth: float
    flops: float


# Cloud TPU documentation, system architecture pages.
CHIPS = {
    "v4": Chip(32 * GIB, 1.2e12, 275e12),
    "v5e": Chip(16 * GIB, 0.82e12, 197e12),
    "v5p": Chip(95 * GIB, 2.765e12, 459e12),
    "v6e": Chip(32 * GIB, 1.64e12, 918e12),
}


# Slices that can be had, by size.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
SLICES = {
    "v5e": tuple(f"v5e:{shape}" for shape in _FLAT),
    "v6e": tuple(f"v6e:{shape}" for shape in _FLAT),
    "v5p": tuple(f"v5p:{shape}" for shape in _CUBES),
}


def chips_of(topology: str) -> int:
    """How many chips a slice such as `v5e:2x4` has."""
    return math.prod(int(side) for side in topology.partition(":")[2].split("x"))


def chip(topology: str) -> Chip:
    """The chip of a slice such as `v5e:2x4`.

    Raises:
        ValueError: no chip of that name; lists those that are known.
    """
    name, _, shape = topology.partition(":")
    if name not in CHIPS or not shape:
        raise ValueError(
            f"topology {topology!r} is unknown: expected <chip>:<shape>, such as v5e:2x4, v6e:16x16 or v5p:4x4x4, "
            f"with a chip of {', '.join(CHIPS)}"
        )
    return CHIPS[name]


def slice_mesh(topology: str, data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over the devices of a slice, to compile for; nothing can run on it.

    Args:
        topology: such as `v5e:16x16`.
        data: size of the axis; at most one of the three is -1.
        fsdp: size of the axis.
        tensor: size of the axis.

    Raises:
        ValueError: an unknown topology, or sizes that do not fit it.
        ImportError: libtpu is missing; says how to get it.
    """
    from jax.experimental import topologies

    chip(topology)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        if "libtpu" in text or "not found" in text.lower():
            raise ImportError(
                f"compiling for {topology} needs libtpu ({text.splitlines()[0]}): pip install 'specjax[tpu]', on any "
                "Linux machine"
            ) from error
        raise ValueError(f"libtpu knows no slice {topology!r}: {text.splitlines()[0]}") from error
    return make_mesh(data, fsdp, tensor, devices=described.devices)


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Abstract arrays with places: what a compilation takes instead of arrays."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, shardings)
