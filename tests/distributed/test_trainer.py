"""The trainer on eight devices: the losses of one device, checkpoints that go from one mesh to another."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from specjax.checkpoints.rundir import RunDirectory
from specjax.parallel import Placement, make_mesh
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import TextRows, lay_out, pack
from specjax.training.objectives import LanguageModel
from tests.training import common

MESHES = {"dp": (8, 1, 1), "fsdp": (1, 8, 1), "tp": (4, 1, 2), "fsdp_tp": (2, 2, 2)}
CONFIG = {"what": "a test"}


def trainer(preset: str | None, steps: int = 4, **changes: object) -> Trainer:
    target = tiny_target()
    rows, _ = pack(common.documents(target, 120), 96)
    train, held = lay_out(rows[6:], 96), lay_out(rows[:6], 96)
    made = Trainer(
        target=target,
        objective=LanguageModel(common.student(target)),
        tables={"vocab": common.vocabulary()},
        optimizer=OptimizerConfig(learning_rate=1e-2, steps=20, warmup=1),
        config=TrainerConfig(steps=steps, batch=8, seed=1, log_every=1, eval_every=2, best="held/match", **changes),
        train=TextRows(train),
        held_out={"held": TextRows(held)},
    )
    if preset is None:
        return made
    # The tiny target's vocabulary of bytes is odd: it is split over fsdp alone.
    of_target = {"fsdp_tp": "fsdp"}.get(preset, preset)
    placement = Placement(make_mesh(*MESHES[preset]), of_target, preset, target.config.head_dim)
    params = placement.target_params(target.params)
    return dataclasses.replace(
        made,
        target=dataclasses.replace(target, params=params),
        tables=placement.everywhere(made.tables),
        placement=placement,
    )


def losses(run: object) -> dict[int, list[float]]:
    rows = RunDirectory(run).metrics()
    names = ("train/loss", "held/loss", "held/match")
    return {i: [row[name] for name in names if name in row] for i, row in enumerate(rows)}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    state = trainer(None).run(directory, CONFIG)
    return losses(directory), jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize(
    "preset", ["dp", "fsdp_tp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "tp"))]
)
def test_losses_of_one_device(preset, one_device, tmp_path):
    state = trainer(preset).run(tmp_path, CONFIG)
    expected, end = one_device
    found = losses(tmp_path)
    for i, values in expected.items():
        np.testing.assert_allclose(found[i], values, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(end), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-3, atol=1e-5)
    kernel = state.params["layers"][0]["attn"]["q"]["kernel"]
    share = kernel.size // kernel.addressable_shards[0].data.size
    assert share == {"dp": 1, "fsdp": 8, "fsdp_tp": 4}[preset]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert moments
    assert {x.size // x.addressable_shards[0].data.size for x in moments} == {share}


def test_a_run_of_one_mesh_goes_on_with_another(one_device, tmp_path):
    trainer("fsdp", steps=2).run(tmp_path, CONFIG)
    state = trainer("dp").run(tmp_path, CONFIG)
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(one_device[1]), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-3, atol=1e-5)


def test_accumulation_on_a_mesh(one_device, tmp_path):
    """Eight rows in two parts of four: spread over four devices, two replicas of each."""
    placement = dataclasses.replace(trainer("dp").placement, mesh=make_mesh(4, 1, 2))
    made = dataclasses.replace(trainer("dp", accumulate=2), placement=placement)
    target = dataclasses.replace(made.target, params=placement.target_params(tiny_target().params))
    made = dataclasses.replace(made, target=target, tables=placement.everywhere({"vocab": common.vocabulary()}))
    made.run(tmp_path, CONFIG)
    for i, values in losses(tmp_path).items():
        np.testing.assert_allclose(values, one_device[0][i], rtol=1e-5)
