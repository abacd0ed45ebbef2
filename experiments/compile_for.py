"""Compiles a decoding or training program for a TPU slice that is not here, and says whether it fits.

    python -m experiments.compile_for --config=configs/compile_for.py:llama3_8b,decode --topology=v5e:2x4

Needs libtpu (`pip install 'specjax[tpu]'`), no TPU and no weights: parameters are abstract. Per device: bytes held
against the chip's memory, bytes moved, collectives, copies of the cache (there should be none). Writes compiled.json.

Bytes that a decoding step moves to and from the device's memory are held against a bare forward pass over as many
tokens, compiled the same way, and the drafter's own weights once a pass of the draft.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import _main
from experiments._abstract import abstract_target, decode_drafter, ints, objective_of
from specjax import build
from specjax.decoding import Loop, Weights, draft_passes, make_sampling
from specjax.evaluation import results
from specjax.evaluation.compiled import CompiledProgram, describe_program
from specjax.models import Target, merge
from specjax.models.attention import causal_view
from specjax.parallel import AXES, Placement, batch_shardings, param_shardings, replicated, state_shardings
from specjax.parallel.slices import GIB, chip, slice_mesh, with_shardings
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import Batch
from specjax.training.online import online_taps

SCHEMA = "specjax.compiled/1"
TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x4", "slice to compile for: <chip>:<shape>")

# libtpu asks a metadata server what it runs on, unless it is told.
SLICE_ENV = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}


def main(config: ml_collections.ConfigDict) -> None:
    """Compiles, prints, writes."""
    for name, value in SLICE_ENV.items():
        os.environ.setdefault(name, value)
    console, topology = _main.console(), TOPOLOGY.value
    results.check_writable(_main.workdir())
    target = abstract_target(config.model, config.dtype)
    memory = chip(topology).memory
    placement = Placement(
        slice_mesh(topology, **{axis: config.mesh[axis] for axis in AXES}),
        config.mesh.target,
        config.mesh.drafter,
        target.config.head_dim,
    )
    programs = {"decode": decode_programs, "train": train_programs}[config.program](config, target, placement)
    table = Table(
        "program", "arguments GiB", "temporaries GiB", "peak GiB", "of memory", "bytes moved", box=SIMPLE_HEAD
    )
    rows: list[dict[str, Any]] = []
    bare: CompiledProgram | None = None
    for name, program in programs.items():
        started = time.monotonic()
        found = program.compile()
        bare = bare or found
        reference = bare.moved + program.drafting
        table.add_row(
            name,
            *(f"{x / GIB:.3f}" for x in (found.arguments, found.temporaries, found.peak)),
            f"{found.peak / memory:.0%}{'' if found.peak <= memory else ' DOES NOT FIT'}",
            f"{found.moved / reference:.2f} x",
        )
        rows.append(
            {"program": name, "seconds": time.monotonic() - started, **as_row(found, memory, reference, bare.accessed)}
        )
    console.print(table)
    for row in rows:
        kinds = ", ".join(f"{n} {kind} ({size / 1e6:.2f} MB)" for kind, (n, size) in row["collectives"].items())
        copies = (
            f"{len(row['cache_copies'])} copies of the cache in its loop"
            if row["cache_copies"]
            else "no copy of the cache in a loop"
        )
        console.print(f"{row['program']}: {kinds or 'no collectives'}; {copies}", highlight=False)
    meta = results.describe({**config.to_dict(), "topology": topology}, {"dtype": config.dtype}, SCHEMA)
    results.write_json(_main.workdir() / "compiled.json", {"meta": meta, "rows": rows})


def as_row(found: CompiledProgram, memory: int, moved: float, accessed: float) -> dict[str, Any]:
    """A row of compiled.json; the last two are what its bytes are held against."""
    return {
        **dataclasses.asdict(found),
        "peak": found.peak,
        "memory": memory,
        "fits": found.peak <= memory,
        "moved_ratio": found.moved / moved,
        "accessed_ratio": found.accessed / accessed,
    }


def abstract(tree: Any) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled.

    Attributes:
        compile: does it.
        drafting: bytes of the drafter's own weights on a device, once for every pass of the draft in a step.
    """

    compile: Callable[[], CompiledProgram]
    drafting: int = 0


def decode_programs(config: ml_collections.ConfigDict, target: Target, at: Placement) -> dict[str, Program]:
    """A bare pass, and the loop over passes of as many tokens with the same weights and cache."""
    batch, buffer = config.decode.batch, config.decode.buffer
    drafter = decode_drafter(config.drafter.to_dict(), target, objective_of(config, target))
    drawn = make_sampling([config.decode.temperature] * batch)
    rule = build.make_rule(config.decode.rule or None, drafter, drawn)
    loop = Loop(target.graph, drafter, rule, target.eos_ids, precision=config.precision)
    sampling = abstract(drawn)
    fresh = functools.partial(drafter.init_params, jax.random.key(0))
    params, tables = jax.eval_shape(lambda p: fresh(merge(target.graph, p)), target.params)
    weights = Weights(
        with_shardings(target.params, param_shardings(target.params, at.mesh, at.target, head_dim=at.head_dim)),
        with_shardings(params, at.drafter_shardings(params)),
        with_shardings(tables, replicated(tables, at.mesh)),
    )
    steps = with_shardings(ints(), replicated(ints(), at.mesh))
    with at.active():
        keys = jax.ShapeDtypeStruct((batch, 2), jnp.uint32)
        state = jax.eval_shape(loop.prefill, weights, ints(batch, buffer), ints(batch), ints(batch), sampling, keys)
    state = with_shardings(state, state_shardings(state, at.mesh, at.target, drafter=at.drafter))
    # The target's keys and values, and the drafter's own.
    shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state) if x.ndim == 4 and x.shape[1] >= buffer]

    def bare(params: Any, tokens: jax.Array, cache: Any) -> Any:
        network = merge(target.graph, params)
        out, cache = network.cached(tokens, cache, causal_view(cache.length, tokens.shape[1]), taps=("normed",))
        return jnp.argmax(network.logits(out.taps["normed"]), -1), cache

    tokens = ints(batch, drafter.num_nodes + 1)
    tokens = with_shardings(tokens, batch_shardings(tokens, at.mesh))

    def compile_bare() -> CompiledProgram:
        with at.active(), jax.default_matmul_precision(config.precision):
            lowered = jax.jit(bare, donate_argnums=2).lower(weights.target, tokens, state.cache)
        return describe_program(lowered.compile(), shapes)

    def compile_loop() -> CompiledProgram:
        with at.active():
            lowered = Loop.run.lower(loop, weights, state, steps)
        return describe_program(lowered.compile(), shapes)

    drafting = draft_passes(drafter) * device_bytes(weights.drafter)
    return {
        "bare forward pass": Program(compile_bare),
        f"decoding with {config.drafter.name}": Program(compile_loop, drafting),
    }


def device_bytes(tree: Any) -> int:
    """Bytes that arrays with shardings hold on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def train_programs(config: ml_collections.ConfigDict, target: Target, at: Placement) -> dict[str, Program]:
    """One update of the objective, with the target running in the step."""
    objective, name = objective_of(config, target), config.objective.name
    rows, length = config.train.batch, config.data.row_length
    tables = {"vocab": ints(config.objective.draft_vocab)}
    trainer = Trainer(
        target=dataclasses.replace(
            target,
            params=with_shardings(
                target.params, param_shardings(target.params, at.mesh, at.target, head_dim=at.head_dim)
            ),
        ),
        objective=objective,
        tables=with_shardings(tables, replicated(tables, at.mesh)),
        optimizer=OptimizerConfig(learning_rate=1e-4, steps=1000),
        config=TrainerConfig(
            steps=1000,
            batch=rows,
            best="none",
            precision=config.precision,
            accumulate=config.train.accumulate,
            remat=config.train.remat,
        ),
        train=NoRows(),
        held_out={},
        placement=at,
        online=online_taps(objective),
    )
    flags_bt = jax.ShapeDtypeStruct((rows, length), jnp.bool_)
    batch = Batch(ints(rows, length), ints(rows, length), ints(rows, length), flags_bt)

    def compile_step() -> CompiledProgram:
        with at.active():
            lowered = trainer.lower(with_shardings(batch, batch_shardings(batch, at.mesh)))
        return describe_program(lowered.compile())

    return {f"training step of {name}": Program(compile_step)}


class NoRows:
    """A source for a trainer that only compiles."""

    rows = 0

    def batch(self, rows: Any) -> Batch:
        """There are none."""
        raise LookupError("a trainer that only compiles has no rows")


if __name__ == "__main__":
    _main.run(main, config="configs/compile_for.py", workdir="runs/compiled")
