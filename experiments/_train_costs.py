"""What a training step costs: made-up rows, and one process a measurement, so that peak memory is that of one step."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments import _main, _torch_steps
from experiments._tight_loop import check_supported
from specjax import build
from specjax.checkpoints.drafters import target_head
from specjax.evaluation import results
from specjax.evaluation.compiled import describe_program
from specjax.models import Target, merge
from specjax.models.attention import rope_frequencies
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import Batch, Document, TextRows, lay_out
from specjax.training.objectives.registry import OBJECTIVES
from specjax.training.online import with_hidden_states

BATCH, START = "batch.npz", "start.npz"
PROMPT_SHARE = 4  # A quarter of each row carries no loss.


def trainer(config: ml_collections.ConfigDict, name: str, target: Target) -> Trainer:
    """A trainer of one objective of the config, without data."""
    options = config.objectives[name].to_dict()
    if config.draft_vocab:
        options["draft_vocab"] = config.draft_vocab
    objective = build.lookup(OBJECTIVES, options.pop("name"), "objective")(target, **options)
    empty = TextRows(lay_out([], config.row_length))
    return Trainer(
        target=target,
        objective=objective,
        tables={"vocab": jnp.arange(options["draft_vocab"], dtype=jnp.int32)},
        optimizer=OptimizerConfig(**config.optimizer.to_dict()),
        config=TrainerConfig(steps=1, batch=config.batch, best="", precision=config.precision),
        train=empty,
        held_out={},
    )


def taps(objective: Any) -> tuple[int, ...]:
    """Layer inputs that an objective reads beside the final hidden state."""
    found = getattr(getattr(objective, "config", None), "taps", ())
    return tuple(tap for tap in found if isinstance(tap, int))


def prepare(config: dict[str, Any], name: str, folder: str) -> None:
    """Writes the rows of one objective with the target's hidden states, rounded as a store rounds them."""
    _main.enable_compilation_cache()
    c = ml_collections.ConfigDict(config)
    target = build.target_from_config(c.target)
    made = trainer(c, name, target)
    rng = np.random.default_rng(c.seed)
    length = c.row_length
    # Of the draft vocabulary, so that every label counts.
    rows = [rng.integers(0, len(made.tables["vocab"]), length).astype(np.int32) for _ in range(c.batch)]
    batch = lay_out([[Document(row, length // PROMPT_SHARE)] for row in rows], length)
    kept = taps(made.objective)
    full = jax.jit(lambda params, b: with_hidden_states(merge(target.graph, params), b, kept))(target.params, batch)
    rounded = {f"tap_{tap}": full.taps[tap] for tap in full.taps} | {"normed": full.normed}
    arrays: dict[str, Any] = {
        k: np.asarray(v.astype(jnp.bfloat16).astype(jnp.float32)) for k, v in rounded.items() if v is not None
    }
    plain: dict[str, Any] = {
        k: np.asarray(getattr(full, k)) for k in ("tokens", "positions", "segments", "response", "lse")
    }
    np.savez(Path(folder) / BATCH, **plain, **arrays)


def measure(config: dict[str, Any], name: str, folder: str) -> dict[str, Any]:
    """Our step: seconds, memory, losses. Leaves the parameters that it began with for torch, where torch knows it."""
    _main.enable_compilation_cache()
    c = ml_collections.ConfigDict(config)
    target = build.target_from_config(c.target)
    made, batch = trainer(c, name, target), _read(folder)
    state = jax.block_until_ready(made.init())
    trained = sum(x.nbytes for x in jax.tree.leaves(state.params))
    if name in c.torch:
        check_supported(target.config)
        np.savez(Path(folder) / START, **_by_path(state.params))
    held, begun = resident(), time.perf_counter()
    program = made.lower(batch).compile()
    compiling = time.perf_counter() - begun
    losses, seconds = [], []
    for _ in range(1 + c.steps):
        begun = time.perf_counter()
        state, metrics = program(state, target.params, made.tables, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begun)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": seconds[1:],
        "losses": losses,
        "trained_bytes": trained,
        "compile_seconds": compiling,
        "program_bytes": describe_program(program).peak if program.memory_analysis() is not None else None,
        **_memory(held, memory.get("peak_bytes_in_use")),
    }


def measure_torch(config: dict[str, Any], name: str, folder: str) -> dict[str, Any]:
    """The same step in torch, on the same rows from the same parameters."""
    c = ml_collections.ConfigDict(config)
    target = build.target_from_config(c.target)
    made = trainer(c, name, target)
    vocab = made.tables["vocab"]
    with np.load(Path(folder) / BATCH) as stored:
        data = dict(stored)
    data |= {
        "vocab": np.asarray(vocab),
        "head": np.asarray(target_head(target.config, target.params, vocab)),
        "embed": np.asarray(target.params["embed"]["embedding"]),
    }
    shapes = torch_shapes(made, target)
    with np.load(Path(folder) / START) as stored:
        start = dict(stored)
    found = _torch_steps.run(name, start, data, shapes, c.optimizer.to_dict(), c.steps, resident)
    memory = _memory(found.pop("before"), found.pop("device_peak", None))
    return {**found, "trained_bytes": sum(x.nbytes for x in start.values()), **memory}


def torch_shapes(made: Trainer, target: Target) -> dict[str, Any]:
    """What `_torch_steps` needs to know of a target and an objective."""
    objective: Any = made.objective
    c = target.config
    layers = getattr(getattr(objective, "student", None), "layers", (c.num_layers - 1,))
    shapes: dict[str, Any] = {
        "heads": c.num_heads,
        "kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "scale": c.query_scale,
        "eps": c.norm_eps,
        "frequencies": [rope_frequencies(rope, c.head_dim).tolist() for i in layers if (rope := c.ropes[i])],
    }
    criterion = getattr(objective, "criterion", None)
    if criterion is not None:
        shapes |= {"decay": criterion.decay, "teacher": criterion.teacher}
        shapes |= {"num_heads": objective.config.num_heads}
    if hasattr(objective, "steps"):
        shapes |= {"steps": objective.steps, "decay": objective.decay, "taps": taps(objective)}
        shapes |= {name: getattr(objective.config, name) for name in ("norm_before_residual", "norm_output")}
    if hasattr(objective, "noise"):
        shapes |= {name: getattr(objective, name) for name in ("feature_weight", "law_weight", "noise")}
    return shapes


def resident() -> int:
    """Bytes that this process holds now (where the system does not say: the most so far)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return results.peak_memory()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(held: int, device_peak: int | None) -> dict[str, Any]:
    """The device's own count where it has one, else the process's."""
    if device_peak is not None:
        return {"peak_bytes": int(device_peak), "step_bytes": None, "memory_of": "device"}
    peak = results.peak_memory()
    return {"peak_bytes": peak, "step_bytes": max(peak - held, 0), "memory_of": "process"}


def _read(folder: str) -> Batch:
    with np.load(Path(folder) / BATCH) as stored:
        arrays = dict(stored)
    kept = {name.removeprefix("tap_"): arrays.pop(name) for name in list(arrays) if name.startswith("tap_")}
    half = {name: np.asarray(jnp.asarray(value, jnp.bfloat16)) for name, value in kept.items()}
    arrays["normed"] = np.asarray(jnp.asarray(arrays["normed"], jnp.bfloat16))
    return Batch(**arrays, taps=half)


def _by_path(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat |= _by_path(value, f"{path}/") if isinstance(value, Mapping) else {path: np.asarray(value)}
    return flat


__all__ = ["measure", "measure_torch", "prepare"]
