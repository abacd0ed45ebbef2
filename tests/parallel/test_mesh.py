from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from specjax.parallel import active_mesh, axis_sizes, describe, make_mesh, row_shards


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
