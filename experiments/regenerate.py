"""Lets the target answer prompts: python -m experiments.regenerate --config=configs/regenerate.py:smollm2.

The same command resumes. SPECJAX_DATA names the directory of the prompts. Started as several processes (the hosts of a
slice, a SLURM job), each answers its share of the prompts and writes parts of its own into the common run directory.
`config.mesh` is of one process: its own devices share the rows of its batch, or the target's weights.
"""

from __future__ import annotations

import jax
import ml_collections
from jax.experimental import multihost_utils
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import _main
from specjax import build
from specjax.checkpoints.rundir import RunDirectory
from specjax.parallel import AXES
from specjax.training.regenerate import RegenerateConfig, read_prompts, regenerate

# What does not change the answers of a run.
FREE = (
    *("max_prompts", "layout", "decode.batch", "decode.part"),
    *(f"mesh.{name}" for name in (*AXES, "target", "drafter")),
)


def main(config: ml_collections.ConfigDict) -> None:
    """Answers what has no answer yet."""
    prompts = read_prompts(_main.data_dir() / config.prompts)
    prompts = prompts[: config.max_prompts or None]
    decode = RegenerateConfig(**config.decode.to_dict())
    share, workdir = (jax.process_index(), jax.process_count()), _main.workdir()
    if share[0] == 0:
        RunDirectory(workdir).claim(config.to_dict(), free=FREE)
    multihost_utils.sync_global_devices("claimed")  # Nobody answers for a directory of another config.
    target = build.placed_target(config, jax.local_devices())
    loop, weights = build.regeneration_loop(config, target, decode.temperature)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, disable=share[0] > 0) as progress:
        of = "" if share[1] == 1 else f" a share, one of {share[1]}"
        task = progress.add_task(f"answering{of}", total=len(prompts))

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        written = regenerate(prompts, target, loop, weights, workdir / "answers", decode, report, share)
    multihost_utils.sync_global_devices("answered")  # The first to end waits for the last.
    if share[0] == 0:
        by = "" if share[1] == 1 else f" by the first of {share[1]} processes"
        print(f"done: {written} answers written{by}, {len(prompts)} in all: {workdir}/answers")


if __name__ == "__main__":
    _main.run(main, config="configs/regenerate.py", workdir="runs/regenerate")
