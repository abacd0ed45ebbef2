from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from specjax.parallel import active_mesh, axis_sizes, describe, make_mesh, row_shards
from specjax.parallel.mesh import device_grid


def test_one_device_takes_every_axis_at_size_one() -> None:
    mesh = make_mesh(data=-1, devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(data=4, tensor=2), "data=4, fsdp=1, tensor=2 needs 8 devices, but there is 1"),
        (dict(data=-1, fsdp=-1), "only one axis can be -1, not data and fsdp"),
        (dict(data=0), "every axis has a positive size, or -1"),
        (dict(tensor=-2), "every axis has a positive size, or -1"),
        (dict(data=-1, tensor=2), "1 device cannot be split by 2"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes, devices=jax.devices()[:1])


def test_rows_are_shared_by_data_and_fsdp() -> None:
    mesh = AbstractMesh((2, 3, 4), ("data", "fsdp", "tensor"))
    assert row_shards(mesh) == 6
    assert describe(mesh) == "data=2, fsdp=3, tensor=4"


def test_other_axes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="has the axes data, fsdp, tensor, not data, model"):
        axis_sizes(AbstractMesh((2, 2), ("data", "model")))


def test_the_active_mesh() -> None:
    mesh = make_mesh(devices=jax.devices()[:1])
    assert isinstance(mesh, Mesh)
    assert active_mesh() is None
    with jax.set_mesh(mesh):
        inside = jax.jit(lambda x: x if active_mesh() is not None else x + 1)(0)
    assert int(inside) == 0
    assert active_mesh() is None


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device as the layout of meshes sees it."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0
    process_index: int = 0


def slices(count: int, x: int, y: int) -> list[Chip]:
    """Slices of v6e chips, x times y each."""
    places = [(s, (i, j, 0)) for s in range(count) for j in range(y) for i in range(x)]
    return [Chip(n, place, s) for n, (s, place) in enumerate(places)]


@pytest.mark.parametrize("shape", [(2, 1, 8), (8, 1, 2), (1, 16, 1), (1, 2, 8)])
def test_sizes_need_not_be_products_of_the_networks_axes(shape: tuple[int, int, int]) -> None:
    """jax.make_mesh has no layout of a 4x4 slice of v6e for 2 times 8."""
    grid = device_grid(shape, slices(1, 4, 4))
    assert grid.shape == shape and len({chip.id for chip in grid.flat}) == 16


@pytest.mark.parametrize(("shape", "across"), [((4, 1, 4), 0), ((1, 4, 4), 1), ((2, 2, 4), 0)])
def test_only_rows_are_spread_over_slices(shape: tuple[int, int, int], across: int) -> None:
    grid = device_grid(shape, slices(2, 2, 4))
    number = np.vectorize(lambda chip: chip.slice_index)(grid)
    assert (number.argmax(across) == shape[across] // 2).all()  # one half of the axis a slice, all else within


def test_four_slices_take_both_kinds_of_rows() -> None:
    number = np.vectorize(lambda chip: chip.slice_index)(device_grid((2, 4, 2), slices(4, 2, 2)))
    assert [[len(set(number[i, j : j + 2].flat)) for j in (0, 2)] for i in (0, 1)] == [[1, 1], [1, 1]]
    assert len(set(number.flat)) == 4


def test_slices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be laid over 2 slices: data \* fsdp is to be a multiple of 2"):
        device_grid((1, 1, 16), slices(2, 2, 4))
    with pytest.raises(ValueError, match="different numbers of devices"):
        device_grid((2, 3, 1), slices(2, 2, 2)[:6])
