"""Runs a sweep: every point that the config file's `sweep()` names, each in a directory of its own.

    python -m experiments.sweep --config=configs/distill.py:smollm2 --workdir=runs/sweep

`sweep()` (or `sweep(arg)`) stands beside `get_config` and returns a grid `{"optimizer.learning_rate": (1e-3, 2e-3),
"train.seed": (0, 1)}` or a list of points. Every point is checked against the config before the first one starts. What
else is on the command line (`--config.train.steps=100`, `--wandb=offline`) goes to every run.

    --as=local    one after another here (the default); started again, it skips what is finished and resumes the rest
    --as=list     prints the commands, one a line
    --as=slurm    an array job; further options are those of experiments.launch.slurm, `--dry-run` for one
    --as=report   prints what has come of the runs so far; the other ways end with it where they have run anything

The report has one row a point, with the fields that vary, best held-out figure (`config.train.best`) first; runs that
differ in their seed alone are one row, mean and standard deviation. It is also written to sweep.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ml_collections
from etils import epath

from experiments import _main
from experiments._arguments import Parser
from experiments.launch import slurm
from specjax import build
from specjax.checkpoints.rundir import RunDirectory
from specjax.evaluation import results, sweeps

SCHEMA = "specjax.sweep/1"
WAYS = ("local", "list", "slurm", "report")


def main(arguments: Sequence[str]) -> int:
    """Expands the sweep and runs, submits, lists or reports it.

    Returns:
        Exit code: 0, 1 when a run failed, or what asks to be started again.

    Raises:
        ValueError: the config has no sweep, or a point that does not fit it.
    """
    options, rest = _parser().parse_known_args(arguments)
    runs = plan(options, rest)
    if options.run is not None:
        if not 0 <= options.run < len(runs):
            raise ValueError(f"--run={options.run}: the sweep has the runs 0 to {len(runs) - 1}")
        command = runs[options.run].command
        os.execv(command[0], command)  # A scheduler's signals reach the program itself.
    if options.way == "list":
        for run in runs:
            print(shlex.join(run.command))
        return 0
    if options.way == "slurm":
        submit(options, rest, len(runs))
        return 0
    code = run_all(runs) if options.way == "local" else 0
    report(runs, epath.Path(options.workdir), options)
    return code


@dataclasses.dataclass(frozen=True)
class Run:
    """One point, with its config, its directory and the command that runs it."""

    name: str
    point: sweeps.Point
    config: ml_collections.ConfigDict
    directory: RunDirectory
    command: list[str]

    def outcome(self) -> sweeps.Outcome:
        """What its directory says."""
        train = self.config.train
        return sweeps.outcome(self.name, self.point, self.directory, train.best, train.steps)


def plan(options: argparse.Namespace, rest: Sequence[str]) -> list[Run]:
    """The runs of the sweep, every one of them checked.

    Raises:
        ValueError: see `main`.
    """
    module, arg = build.config_module(options.config)
    if not hasattr(module, "sweep"):
        raise ValueError(f"{options.config} defines no sweep(): return {{field: values}} or a list of points from it")
    takes = inspect.signature(module.sweep).parameters
    points = sweeps.expand(module.sweep(arg) if takes and arg is not None else module.sweep())
    shared = [word for word in rest if word.startswith("--config.")]
    runs = []
    for name, point in zip(sweeps.run_names(points), points, strict=True):
        config = build.load_config(options.config, overrides=[word.removeprefix("--") for word in shared])
        build.override(config, point)
        if "train" not in config:
            raise ValueError(f"{options.config} trains nothing: a sweep is compared by its config.train.best")
        command = [sys.executable, "-m", options.program, f"--config={options.config}", *rest]
        command += [f"--config.{field}={_word(value)}" for field, value in point.items()]
        directory = RunDirectory(epath.Path(options.workdir) / name)
        runs.append(Run(name, point, config, directory, [*command, f"--workdir={directory.path}"]))
    return runs


def run_all(runs: Sequence[Run]) -> int:
    """One run after another; what is finished is left alone. A run that fails does not keep the others from starting.

    Returns:
        0, 1 when a run failed, or the code of an interrupted run, after which nothing more is started.
    """
    child: list[subprocess.Popen[bytes]] = []
    before = signal.signal(signal.SIGTERM, lambda *_: child[-1].terminate() if child else sys.exit(_main.RESTART))
    failed = []
    try:
        for number, run in enumerate(runs, 1):
            if run.outcome().finished:
                print(f"{number} of {len(runs)}: {run.name} is finished", flush=True)
                continue
            print(f"{number} of {len(runs)}: {run.name}", flush=True)
            child.append(subprocess.Popen(run.command))
            code = child[-1].wait()
            if code == _main.RESTART:
                return code
            if code:
                failed.append(run.name)
    finally:
        signal.signal(signal.SIGTERM, before)
    for name in failed:
        print(f"error: the run {name} failed; the same command tries it again", file=sys.stderr)
    return 1 if failed else 0


def submit(options: argparse.Namespace, rest: Sequence[str], count: int) -> None:
    """An array job whose every task is one run of the sweep."""
    own = slurm.options_parser()
    taken, left = own.parse_known_args([*rest, f"--command={options.program}", *_name(rest)])
    command = ["python", "-m", "experiments.sweep", f"--config={options.config}", f"--workdir={options.workdir}"]
    command += [f"--program={options.program}", *left]
    limit = f"%{options.at_once}" if options.at_once else ""
    taken.command = f"{shlex.join(command)} --run=$SLURM_ARRAY_TASK_ID"
    taken.sbatch = [*taken.sbatch, f"--array=0-{count - 1}{limit}"]
    slurm.submit(taken)


def report(runs: Sequence[Run], workdir: epath.Path, options: argparse.Namespace) -> None:
    """Prints and writes what has come of the runs."""
    metric = runs[0].config.train.best
    rows = sweeps.summary([run.outcome() for run in runs])
    console = _main.console()
    console.print(sweeps.table(rows, metric))
    if rows[0]["best"]:
        console.print(f"best: {workdir / rows[0]['best']}", highlight=False, soft_wrap=True)
    results.check_writable(workdir)
    meta = results.describe({"config": options.config, "program": options.program}, {"metric": metric}, SCHEMA)
    results.write_json(workdir / "sweep.json", {"meta": meta, "rows": rows})


def _name(rest: Sequence[str]) -> list[str]:
    return [] if any(word.startswith("--name") for word in rest) else ["--name=sweep"]


def _word(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else repr(value)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m experiments.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", required=True, help="a file with get_config and sweep, `file.py:arg`")
    parser.add_argument("--workdir", required=True, help="directory of the runs, local or gs://")
    parser.add_argument("--program", default="experiments.train")
    parser.add_argument("--as", dest="way", choices=WAYS, default="local")
    parser.add_argument("--at_once", type=int, default=0, help="tasks of an array job that run at a time; 0 for all")
    parser.add_argument("--run", type=int, help="this run of the sweep alone, by number from 0")
    return parser


if __name__ == "__main__":
    with _main.one_line_errors():
        code = main(sys.argv[1:])
    sys.exit(code)
