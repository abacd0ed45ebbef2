"""Lets the target answer prompts: python -m experiments.regenerate --config=configs/regenerate.py:smollm2.

The same command resumes. SPECJAX_DATA names the directory of the prompts.
"""

from __future__ import annotations

import os
from pathlib import Path

import ml_collections
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import _main
from specjax import build
from specjax.checkpoints.rundir import RunDirectory
from specjax.training.regenerate import RegenerateConfig, read_prompts, regenerate


def main(config: ml_collections.ConfigDict) -> None:
    """Answers what has no answer yet."""
    prompts = read_prompts(Path(os.environ.get("SPECJAX_DATA", "../shared/data")) / config.prompts)
    prompts = prompts[: config.max_prompts or None]
    decode = RegenerateConfig(**config.decode.to_dict())
    RunDirectory(_main.workdir()).claim(config.to_dict(), free=("max_prompts", "layout", "decode.batch", "decode.part"))
    target = build.target_from_config(config.target)
    loop, weights = build.regeneration_loop(config, target, decode.temperature)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns) as progress:
        task = progress.add_task("answering", total=len(prompts))

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        written = regenerate(prompts, target, loop, weights, _main.workdir() / "answers", decode, report)
    print(f"done: {written} answers written, {len(prompts)} in all: {_main.workdir()}/answers")


if __name__ == "__main__":
    _main.run(main, config="configs/regenerate.py", workdir="runs/regenerate")
