"""A tiny target, a draft that often agrees with it, ragged requests, and placement on meshes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.decoding import Request, Weights
from specjax.models import ModelConfig, RopeConfig, graph
from specjax.parallel import param_shardings, replicated

VOCAB, HEAD_DIM, ROWS = 64, 8, 8
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def config(layers: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        head_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        max_position=512,
        norm_eps=1e-5,
        query_scale=HEAD_DIM**-0.5,
        windows=(None,) * layers,
        ropes=(RopeConfig(),) * layers,
    )


TARGET = DRAFT = config(1)


def random_params(seed: int, scale: float = 2.0) -> Any:
    """Drawn by numpy, which compiles nothing; larger than at initialisation, so that laws are peaked and ties rare."""
    rng = np.random.default_rng(seed)

    def leaf(x: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = scale * rng.normal(size=x.shape) * x.shape[0] ** -0.5 if len(x.shape) == 2 else np.ones(x.shape)
        return jnp.asarray(drawn, x.dtype)

    return jax.tree.map(leaf, graph(TARGET)[1])


def draft_params() -> Any:
    """The target with noise: right more often than not."""
    return jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, random_params(0), random_params(1))


def requests(temperature: float) -> list[Request]:
    """Eight ragged prompts and budgets; half of each prompt repeats the other half, for prompt lookup."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(ROWS):
        half = rng.integers(1, VOCAB, 3 + 2 * i).tolist()
        made.append(Request(tuple(half + half), max_new_tokens=12 + i, temperature=temperature * (i % 4), id=10 + i))
    return made


def place(weights: Weights, mesh: Mesh, preset: str, drafter: str) -> Weights:
    """Weights on a mesh: each tree under its preset, tables whole everywhere."""
    shardings = Weights(
        target=param_shardings(weights.target, mesh, preset, head_dim=HEAD_DIM),
        drafter=param_shardings(weights.drafter, mesh, drafter, head_dim=HEAD_DIM),
        tables=replicated(weights.tables, mesh),
    )
    return jax.device_put(weights, shardings)


def collectives(program: str) -> list[tuple[str, tuple[int, ...]]]:
    """Kind and largest operand shape of every collective in an optimised program."""
    found = []
    for match in re.finditer(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", program):
        shapes = [tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w+\[([\d,]*)\]", match[1])]
        found.append((match[2], max(shapes, key=lambda shape: int(np.prod(shape)))))
    return found


def bytes_on_one_device(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def max_steps(steps: int) -> jax.Array:
    return jnp.asarray(steps, jnp.int32)
