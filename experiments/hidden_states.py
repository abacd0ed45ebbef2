"""Stores the target's hidden states: python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2.

Interrupted, the same command goes on. SPECJAX_DATA names the directory of the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import ml_collections
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import _main
from specjax import build
from specjax.evaluation import results
from specjax.training import write_store


def main(config: ml_collections.ConfigDict) -> None:
    """Writes the shards that are missing, store by store."""
    results.check_writable(_main.workdir())
    target = build.target_from_config(config.target)
    parts = build.store_parts(config, target, _main.data_dir())
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns) as progress:
        for name, (documents, store, max_shards) in parts.items():
            directory = Path(_main.workdir()) / name
            write_store(directory, target, documents, store, max_shards=max_shards, report=_reporter(progress, name))
    print(f"done: {_main.workdir()}")


def _reporter(progress: Progress, name: str) -> Callable[[int, int, int], None]:
    task, clock = progress.add_task(name, total=None), [time.monotonic()]

    def report(done: int, total: int, tokens: int) -> None:
        speed, clock[0] = tokens / (time.monotonic() - clock[0]), time.monotonic()
        progress.update(task, completed=done, total=total)
        progress.console.print(f"{name}: shard {done} of {total}, {tokens} tokens, {speed:.0f} tokens/s")

    return report


if __name__ == "__main__":
    _main.run(main, config="configs/hidden_states.py", workdir="runs/hidden/smollm2")
