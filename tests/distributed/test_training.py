"""A distillation step on eight devices: the losses of one device, with parameters and moments really split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from specjax.models import graph, merge
from specjax.parallel import batch_shardings, make_mesh, param_shardings, replicated
from tests.distributed.common import (
    HEAD_DIM,
    ROWS,
    TARGET,
    VOCAB,
    bytes_on_one_device,
    collectives,
    random_params,
)

STEPS, LENGTH = 5, 16
OPTIMIZER = optax.adam(3e-3)
GRAPH = graph(TARGET)[0]
MESHES = {"dp": (8, 1, 1), "fsdp": (1, 8, 1), "tp": (4, 1, 2), "fsdp_tp": (2, 2, 2)}


def loss(params: Any, target: Any, tokens_bt: jax.Array) -> jax.Array:
    """Forward KL of the draft to the target, a mean over all positions."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens_bt.shape)
    segments = jnp.zeros_like(tokens_bt)

    def log_laws(weights: Any) -> jax.Array:
        network = merge(GRAPH, weights)
        out = network.full(tokens_bt, positions, segments, taps=("normed",))
        return jax.nn.log_softmax(network.logits(out.taps["normed"]))

    p, q = jax.lax.stop_gradient(log_laws(target)), log_laws(params)
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1))


def step(params: Any, moments: Any, target: Any, tokens_bt: jax.Array) -> tuple[Any, Any, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, target, tokens_bt)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, value


def inputs() -> tuple[Any, Any, Any]:
    """The draft's parameters, its optimizer state, the target's parameters; on the host."""
    draft = jax.tree.map(np.asarray, random_params(1, scale=0.5))
    moments = jax.tree.map(np.asarray, OPTIMIZER.init(draft))
    return draft, moments, jax.tree.map(np.asarray, random_params(0))


def batch(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(1, VOCAB, (ROWS, LENGTH)).astype(np.int32)


@functools.cache
def on_one_device() -> tuple[list[float], Any]:
    params, moments, target = inputs()
    compiled, losses = jax.jit(step), []
    for i in range(STEPS):
        params, moments, value = compiled(params, moments, target, batch(i))
        losses.append(float(value))
    return losses, jax.tree.map(np.asarray, params)


def placements(mesh: Mesh, preset: str) -> tuple[Any, ...]:
    trees = inputs()
    return (
        *(param_shardings(tree, mesh, preset, head_dim=HEAD_DIM) for tree in trees),
        batch_shardings(batch(0), mesh),
    )


@pytest.mark.parametrize("preset", MESHES)
def test_losses_of_one_device(preset: str) -> None:
    mesh = make_mesh(*MESHES[preset])
    shardings = placements(mesh, preset)
    trees = jax.device_put(inputs(), shardings[:3])
    params, moments, target = trees
    with jax.set_mesh(mesh):
        out = (shardings[0], shardings[1], replicated(0.0, mesh))
        lowered = jax.jit(step, in_shardings=shardings, out_shardings=out, donate_argnums=(0, 1)).lower(
            *trees, batch(0)
        )
        compiled, losses = lowered.compile(), []
        for i in range(STEPS):
            before = jax.tree.leaves((params, moments))
            tokens = jax.device_put(batch(i), shardings[3])
            params, moments, value = compiled(params, moments, target, tokens)
            assert all(x.is_deleted() for x in before)
            losses.append(float(value))

    expected, end = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(end), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-3, atol=1e-5)
    check_split(preset, params, moments, compiled)


def check_split(preset: str, params: Any, moments: Any, compiled: Any) -> None:
    sizes = dict(zip(("data", "fsdp", "tensor"), MESHES[preset], strict=True))
    shares = {"dp": 1, "fsdp": sizes["fsdp"], "tp": sizes["tensor"], "fsdp_tp": sizes["fsdp"] * sizes["tensor"]}[preset]
    for tree in (params, moments[0].mu, moments[0].nu):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            split = x.size // x.addressable_shards[0].data.size
            assert split == (shares if x.ndim == 2 else 1), jax.tree_util.keystr(path)
    # What the step gives back lies in the buffers that it was given.
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_on_one_device((params, moments))
    if preset == "fsdp":
        # Rows stay where they are and weights come to them; of the rows only their token ids travel.
        gathered = [shape for kind, shape in collectives(compiled.as_text()) if kind == "all-gather"]
        assert (TARGET.hidden_size, TARGET.intermediate_size) in gathered
        assert [shape for shape in gathered if len(shape) > 2 and np.prod(shape) > ROWS * LENGTH] == []
