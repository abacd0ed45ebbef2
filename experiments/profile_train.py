"""What training costs here: python -m experiments.profile_train --config=configs/profile_train.py

Tokens a second and peak memory of one step of each objective, beside the same step in torch for those that are stated
there. Peak memory is the device's own count on accelerators, and on a CPU the resident size of a process that does
nothing else; `step` is what it grew by from just before the first step, compilation included. Writes results.json.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_collections
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _main, _torch_steps, _train_costs
from specjax.evaluation import results
from specjax.evaluation.lineup import several_hint

SCHEMA = "specjax.profile_train/1"


def main(config: ml_collections.ConfigDict) -> None:
    """Measures, prints, writes."""
    console, workdir = _main.console(), _main.workdir()
    names = check(config)
    results.check_writable(workdir)
    plain, rows = config.to_dict(), []
    for name in names:
        with tempfile.TemporaryDirectory() as folder, console.status("") as status:
            status.update(f"{name}: hidden states")
            alone(_train_costs.prepare, plain, name, folder)
            status.update(f"{name}: ours")
            rows.append(row(config, name, "jax", alone(_train_costs.measure, plain, name, folder)))
            if name in config.torch:
                status.update(f"{name}: torch")
                rows.append(row(config, name, "torch", alone(_train_costs.measure_torch, plain, name, folder)))
    show(console, config, rows)
    meta = results.describe(plain, {"dtype": config.target.dtype, "matmul": config.precision}, SCHEMA)
    results.write_json(workdir / "results.json", {"meta": meta, "rows": rows})
    console.print(f"written to {workdir / 'results.json'}", highlight=False)


def check(config: ml_collections.ConfigDict) -> list[str]:
    """The objectives to measure.

    Raises:
        ValueError: a name that is not there, or a number out of range.
        ImportError: torch is asked for and not installed.
    """
    unknown = [name for name in config.only if name not in config.objectives]
    if unknown:
        raise ValueError(
            f"only={unknown[0]!r} is no objective of the config; it has {', '.join(config.objectives)}"
            f"{several_hint(unknown[0])}"
        )
    names = [name for name in config.objectives if name in config.only or not config.only]
    stated = [name for name in config.torch if name not in _torch_steps.STEPS]
    if stated:
        raise ValueError(
            f"torch={stated[0]!r} is not stated in torch; expected some of {', '.join(_torch_steps.STEPS)}"
        )
    # What torch's step leaves out would be another step, measured beside ours as if it were the same.
    for name, field, only in (("distill", "divergence", "forward_kl"), ("hydra", "prefix", False)):
        if name in config.torch and name in names and config.objectives[name][field] != only:
            raise ValueError(
                f"objectives.{name}.{field}={config.objectives[name][field]!r} is not stated in torch, {only!r} is: "
                f"take {name} out of config.torch, or set it back"
            )
    if "name" in config.optimizer and config.optimizer.name != "adamw" and config.torch:
        raise ValueError(f"optimizer.name={config.optimizer.name!r} is not stated in torch, adamw is")
    if min(config.batch, config.steps) < 1 or config.row_length < 16:
        raise ValueError(
            f"batch={config.batch}, steps={config.steps}, row_length={config.row_length}; expected at least 1, 1 and 16"
        )
    if any(name in names for name in config.torch) and importlib.util.find_spec("torch") is None:
        raise ImportError("the comparison needs torch: pip install 'specjax[torch]', or --config.torch=\"()\"")
    return names


def alone(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a process of its own, which ends with it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(fn, *arguments).result()


def row(config: ml_collections.ConfigDict, name: str, framework: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """One measurement as results.json has it."""
    seconds = statistics.median(found["seconds"])
    return {
        "objective": name,
        "framework": framework,
        "tokens_per_second": config.batch * config.row_length / seconds,
        "step_seconds": seconds,
        "step_seconds_all": found["seconds"],
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
        **{
            key: found.get(key)
            for key in ("trained_bytes", "peak_bytes", "step_bytes", "program_bytes", "compile_seconds", "memory_of")
        },
    }


def show(console: Console, config: ml_collections.ConfigDict, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table; torch's rows say how often ours is as fast."""
    title = f"a training step on {config.batch} rows of {config.row_length} tokens, {config.target.source}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("objective")
    table.add_column("in")
    for name in ("tokens/s", "ours is", "trained MB", "peak MB", "step MB", "program MB", "loss", "after", "compile s"):
        table.add_column(name, justify="right")
    ours = {r["objective"]: r["tokens_per_second"] for r in rows if r["framework"] == "jax"}
    for r in rows:
        faster = "" if r["framework"] == "jax" else f"{ours[r['objective']] / r['tokens_per_second']:.2f} x"
        sizes = [_megabytes(r[key]) for key in ("trained_bytes", "peak_bytes", "step_bytes", "program_bytes")]
        losses = [f"{r[key]:.4f}" for key in ("first_loss", "last_loss")]
        compiling = f"{r['compile_seconds']:.1f}" if r["compile_seconds"] is not None else ""
        speed = f"{r['tokens_per_second']:.0f}"
        table.add_row(r["objective"], r["framework"], speed, faster, *sizes, *losses, compiling)
    console.print(table)


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"


if __name__ == "__main__":
    _main.run(main, config="configs/profile_train.py", workdir="runs/profile_train")
