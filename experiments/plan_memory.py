"""What a device of a TPU slice would hold, and the smallest slice that fits, before anything is compiled.

    python -m experiments.plan_memory --config=configs/papers/eagle3.py:llama3_8b

For the config's model and the 70B beside it: training of the config's EAGLE-3 head with the target in the step, and
decoding with a chain of 8 and a tree of 60 drafted tokens, on v5e, v6e and v5p slices. Parameters, optimizer and caches
are exact under the shardings that a run would use; temporaries are an estimate. `experiments.compile_for` compiles the
program for a slice and has the compiler's own figures. Needs neither weights nor accelerator nor libtpu. Writes
memory.json.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _main
from experiments._abstract import abstract_target, decode_drafter, ints, objective_of
from specjax.decoding import Drafter
from specjax.evaluation import results
from specjax.evaluation.memory import (
    Footprint,
    abstract_mesh,
    bytes_per_device,
    decoding_temporaries,
    training_temporaries,
)
from specjax.models import Target, init_cache, merge
from specjax.parallel import axis_sizes, param_shardings, replicated, state_shardings
from specjax.parallel.slices import GIB, SLICES, chip, chips_of
from specjax.training import OptimizerConfig, make_optimizer
from specjax.training.step import as_kept

SCHEMA = "specjax.memory/1"
ALL = flags.DEFINE_boolean("all", False, "also show slices that do not fit, or that are larger than the smallest")

# Of a slice of so many chips: meshes in words and the bytes under each, the one to be preferred first.
Planned = Callable[[int], list[tuple[str, Footprint]]]


def main(config: ml_collections.ConfigDict) -> None:
    """Plans every program of every model on every chip, prints, writes."""
    console = _main.console()
    console = console if console.is_terminal else Console(width=160)
    results.check_writable(_main.workdir())
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "program", "slice", "mesh"):
        table.add_column(name, no_wrap=name != "program")
    for name in ("weights", "drafter", "optimizer", "cache", "temporaries", "GiB", "of memory"):
        table.add_column(name, justify="right")
    rows = plan(config)
    for row in rows:
        shown = row["smallest"] or (row["largest"] and not row["fits"])
        if ALL.value or shown:
            style = "bold" if row["smallest"] else "dim"
            table.add_row(row["model"], row["program"], *_cells(row), style=style)
    console.print(table)
    console.print("GiB a chip; temporaries are estimated, the rest is exact. Bold: the smallest slice that fits.")
    meta = results.describe(config.to_dict(), {"dtype": config.dtype}, SCHEMA)
    results.write_json(_main.workdir() / "memory.json", {"meta": meta, "rows": rows})


def plan(config: ml_collections.ConfigDict) -> list[dict[str, Any]]:
    """A row for every program of every model on every slice that takes it."""
    rows = []
    # Smallest heads first: a ConfigDict is ordered by name.
    for model, width in sorted(config.memory.models.items(), key=lambda item: item[1]):
        config.objective.intermediate_size = width
        target = abstract_target(model, config.dtype)
        for program, planned in programs(config, target).items():
            for kind in config.memory.chips:
                rows += [{"model": model, "program": program, **row} for row in fitting(kind, planned)]
    return rows


def programs(config: ml_collections.ConfigDict, target: Target) -> dict[str, Planned]:
    """What is planned: the update of a head, and decoding with it."""
    objective = objective_of(config, target)
    made: dict[str, Planned] = {
        f"train {config.objective.name}": functools.partial(training, config, target, objective)
    }
    for options in config.memory.decode:
        drafter = decode_drafter({**options}, target, objective)
        name = f"decode, {options['topology']} of {drafter.num_nodes}"
        made[name] = functools.partial(decoding, config, target, drafter)
    return made


def fitting(kind: str, planned: Planned) -> list[dict[str, Any]]:
    """A row for each slice of a chip, by size; the first that fits is `smallest`. Slices too large for it are left out.

    Raises:
        ValueError: no slice of the chip can hold the program's rows at all.
    """
    rows: list[dict[str, Any]] = []
    for topology in SLICES[kind]:
        try:
            layouts = planned(chips_of(topology))
        except ValueError as error:  # Heads or rows that do not divide.
            refusal = error
            continue
        memory = chip(topology).memory
        mesh, held = next((x for x in layouts if x[1].total <= memory), layouts[-1])
        fits = held.total <= memory
        first = fits and not any(row["fits"] for row in rows)
        rows.append(
            {
                "slice": topology,
                "mesh": mesh,
                **dataclasses.asdict(held),
                "total": held.total,
                "memory": memory,
                "fits": fits,
                "smallest": first,
                "largest": False,
            }
        )
    if not rows:
        raise ValueError(f"no {kind} slice takes this program: {refusal}")
    rows[-1]["largest"] = True
    return rows


def training(
    config: ml_collections.ConfigDict, target: Target, objective: Any, chips: int
) -> list[tuple[str, Footprint]]:
    """An update under full sharding: rows and weights over all chips."""
    mesh = abstract_mesh(fsdp=chips)
    rows = config.train.batch // config.train.accumulate
    if rows % chips:
        raise ValueError(f"{rows} rows are not divisible by {chips} chips")
    tables = {"vocab": ints(config.objective.draft_vocab)}
    start = functools.partial(objective.init, jax.random.key(0))
    computed = jax.eval_shape(lambda p, t: start(merge(target.graph, p), t), target.params, tables)
    params = jax.eval_shape(as_kept, computed)
    optimizer = OptimizerConfig(**config.optimizer.to_dict())
    moments = jax.eval_shape(make_optimizer(optimizer).init, params)
    held = {
        name: bytes_per_device(tree, param_shardings(tree, mesh, "fsdp", head_dim=target.config.head_dim))
        for name, tree in (
            ("weights", target.params),
            ("drafter", params),
            ("optimizer", moments),
            ("computed", computed),
        )
    }
    # What is computed in less than float32 is a copy.
    copy = held.pop("computed") if any(x.dtype != jnp.float32 for x in jax.tree.leaves(computed)) else 0
    layer = objective.config.layer
    held["temporaries"] = training_temporaries(
        target.config,
        layer,
        axis_sizes(mesh),
        rows=rows,
        length=config.data.row_length,
        steps=getattr(objective, "steps", 1),
        taps=len(objective.config.taps),
        gradients=2 * held["drafter"] + copy,
        remat=config.train.remat,
    )
    return [(f"fsdp={chips}", Footprint(**held, cache=0))]


def decoding(
    config: ml_collections.ConfigDict, target: Target, drafter: Drafter, chips: int
) -> list[tuple[str, Footprint]]:
    """The loop with heads over as many chips as there are key heads, and rows over the rest.

    Where whole weights a group of heads are too much, they are split over the rest as well, and gathered in every pass.
    """
    shapes, batch = target.config, config.decode.batch
    tensor = min(chips, shapes.num_kv_heads)
    rest = chips // tensor
    slots = config.decode.buffer + drafter.num_nodes + drafter.num_probes + 1
    fresh = functools.partial(drafter.init_params, jax.random.key(0))
    params, tables = jax.eval_shape(lambda p: fresh(merge(target.graph, p)), target.params)

    def state(target_params: Any, params: Any, tables: Any) -> Any:
        network = merge(target.graph, target_params)
        own = drafter.init_state(params, tables, network, batch, slots)
        return {"cache": init_cache(shapes, batch, slots), "drafter": own}

    states = jax.eval_shape(state, target.params, params, tables)
    width = max(drafter.num_nodes + 1, PREFILL)

    def held(preset: str, **sizes: int) -> tuple[str, Footprint]:
        mesh = abstract_mesh(**sizes)
        weights = param_shardings(target.params, mesh, preset, head_dim=shapes.head_dim)
        words = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        return words or "one chip", Footprint(
            weights=bytes_per_device(target.params, weights),
            drafter=sum(bytes_per_device(tree, replicated(tree, mesh)) for tree in (params, tables)),
            optimizer=0,
            cache=bytes_per_device(states, state_shardings(states, mesh, preset)),
            temporaries=decoding_temporaries(shapes, axis_sizes(mesh), rows=batch, width=width, slots=slots),
        )

    whole = held("tp", data=rest, tensor=tensor)
    return [whole] if rest == 1 else [whole, held("fsdp_tp", fsdp=rest, tensor=tensor)]


PREFILL = 64  # tokens of a prompt that a pass takes, see `Loop.chunk`


def _cells(row: dict[str, Any]) -> list[str]:
    parts = [row[name] for name in ("weights", "drafter", "optimizer", "cache", "temporaries", "total")]
    share = f"{row['total'] / row['memory']:.0%}{'' if row['fits'] else ' DOES NOT FIT'}"
    return [row["slice"], row["mesh"], *(f"{part / GIB:.2f}" for part in parts), share]


if __name__ == "__main__":
    _main.run(main, config="configs/papers/eagle3.py", workdir="runs/memory")
