"""The trainer on eight devices: the losses of one device, checkpoints that go from one mesh to another."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specjax import build
from specjax.checkpoints import save_target
from specjax.checkpoints.rundir import RunDirectory
from specjax.models import merge
from specjax.parallel import Placement, batch_shardings, make_mesh, row_shards
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig, online
from specjax.training.data import TextRows, lay_out, pack
from specjax.training.objectives import LanguageModel
from specjax.training.objectives.base import masked_sum, over_positions_with
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
    # The tiny target's vocabulary of bytes is odd: the tensor axis cannot split it.
    of_target = {"fsdp_tp": "fsdp", "tp": "dp"}.get(preset, preset)
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
    assert share == {"dp": 1, "fsdp": 8, "tp": 2, "fsdp_tp": 4}[preset]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert moments
    assert {x.size // x.addressable_shards[0].data.size for x in moments} == {share}


def test_a_run_of_eight_devices_goes_on_with_four(one_device, tmp_path):
    trainer("fsdp", steps=2).run(tmp_path, CONFIG)
    four = Placement(make_mesh(4, devices=jax.devices()[:4]))
    made = dataclasses.replace(trainer(None), placement=four, tables=four.everywhere({"vocab": common.vocabulary()}))
    target = dataclasses.replace(made.target, params=four.target_params(made.target.params))
    state = dataclasses.replace(made, target=target).run(tmp_path, CONFIG)
    assert jax.tree.leaves(state.params)[0].sharding.device_set == set(jax.devices()[:4])
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


def test_a_target_is_read_into_its_shards(tmp_path):
    plain = tiny_target()
    save_target(plain, tmp_path / "target")
    config = build.load_config("configs/distill.py", str(tmp_path / "target"))
    config.mesh.update({"data": 2, "fsdp": 4, "target": "fsdp"})
    found = build.placed_target(config)
    places = found.placement.target_shardings(plain.params)
    for ours, theirs, place in zip(*map(jax.tree.leaves, (found.params, plain.params, places)), strict=True):
        assert ours.sharding == place
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    kernel = found.params["layers"][0]["attn"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


def work(program: object) -> float:
    """Operations of one device: those of a loop's body times its turns."""
    compiled = program.compile()
    turns = [int(n) for n in re.findall(r'known_trip_count"?:\{"n":"(\d+)"', compiled.as_text())]
    return compiled.cost_analysis()["flops"] * max(turns)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_every_device_goes_through_its_own_positions_alone(sizes, monkeypatch):
    """Head and loss are the largest part of training a small draft; a loop over all positions would not be spread."""
    jax.config.update("jax_disable_most_optimizations", False)  # The compiler counts turns when it optimises.
    monkeypatch.setattr(online, "CHUNK", 16)
    rng = np.random.default_rng(0)
    target, mask = tiny_target(), jnp.asarray(rng.random((8, 64)) < 0.6)
    x = jnp.asarray(rng.normal(size=(8, 64, target.config.hidden_size)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(x.shape[-1], 128)), jnp.float32)

    def chunk(x, labels, mask, w, later):
        nll = -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], -1)[:, 0]
        return masked_sum(nll, mask), masked_sum(jnp.abs(later(1) - labels).astype(jnp.float32), mask)

    def loss(x, w, labels, mask):
        return over_positions_with(w, chunk, x, labels, mask, 16, labels)

    def lse(params, x):
        return online._log_sum_exp(merge(target.graph, params), x)

    labels = jnp.asarray(rng.integers(0, 128, (8, 64)))
    mask = mask.at[:, -1].set(False)  # What lies behind the last row is anything.
    programs = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)), jax.jit(lse)
    plain = [p.lower(*a) for p, a in zip(programs, ((x, head, labels, mask), (target.params, x)), strict=True)]
    expected = programs[0](x, head, labels, mask), programs[1](target.params, x)
    mesh = make_mesh(*sizes)
    placement = Placement(mesh, "fsdp", "fsdp", target.config.head_dim)
    rows = jax.device_put((x, labels, mask), batch_shardings((x, labels, mask), mesh))
    split = jax.device_put(head, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    arguments = (rows[0], split, *rows[1:]), (placement.target_params(target.params), rows[0])
    with placement.active():
        for p, on_one, given, want in zip(programs, plain, arguments, expected, strict=True):
            assert work(p.lower(*given)) < 1.3 * work(on_one) / row_shards(mesh)
            for ours, theirs in zip(jax.tree.leaves(p(*given)), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(np.asarray(ours), theirs, rtol=2e-5, atol=1e-5)
