r"""Submits a program to SLURM by submitit (`pip install 'specjax[launch]'`), one process a GPU.

    python -m experiments.launch.submitit --name=eagle3 --nodes=2 --gpus=8 --hours=24 --slurm=partition=h100 \
        --dry-run \
        --command="python -m experiments.train --config=configs/eagle3.py:smollm2,pod --workdir=/shared/eagle3"

Ahead of the time limit submitit has the program save, and puts the job back into the queue; the same command then
resumes. --cluster=local runs the same job on this machine, without SLURM, and waits for its end.
With --command=- the commands are read from standard input, one a line, and are the tasks of an array job:

    python -m experiments.sweep --config=configs/distill.py:smollm2 --workdir=/shared/rates --as=list \
        | python -m experiments.launch.submitit --name=rates --command=- --at-once=4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from experiments.launch import _recipe
from experiments.launch._job import ProgramJob

CLUSTERS = ("slurm", "local", "debug")
# A proxy that catches the processes' talk with each other makes them wait forever.
SETUP = ["unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY"]


def commands(options: argparse.Namespace) -> list[str]:
    """The programs, one a task.

    Raises:
        ValueError: see `_recipe.check`; or none on standard input.
    """
    given = [options.command] if options.command != "-" else [line for line in sys.stdin.read().splitlines() if line]
    if not given:
        raise ValueError("--command=- found nothing on standard input: expected commands, one a line")
    for command in given:
        _recipe.check(options.name, command)
    platform = " --require_platform=gpu" if options.cluster == "slurm" else ""
    return [command.strip() + platform for command in given]


def parameters(options: argparse.Namespace) -> dict[str, Any]:
    """What `submitit.AutoExecutor.update_parameters` is given.

    Raises:
        ValueError: a count or time below what can be run, several nodes on one machine, or a setting that is no pair.
    """
    here = options.cluster != "slurm"  # where a program takes all GPUs, or none
    if min(options.nodes, options.gpus + here, options.at_once) < 1 or options.restarts < 0:
        raise ValueError(
            f"nodes={options.nodes}, gpus={options.gpus}, at_once={options.at_once}, restarts={options.restarts}: "
            "expected at least 1 of each, and no negative number of restarts"
        )
    if not options.hours * 3600 > options.grace > 0:
        raise ValueError(f"hours={options.hours:g}, grace={options.grace}: expected seconds within so many hours")
    if here and options.nodes > 1:
        raise ValueError(f"cluster={options.cluster!r} is this machine, nodes={options.nodes}: expected 1")
    if unpaired := [setting for setting in options.slurm if not setting.partition("=")[0]]:
        raise ValueError(f"slurm={unpaired[0]!r}: expected a setting of sbatch, such as partition=h100")
    pairs = {name: value if sign else True for name, sign, value in (s.partition("=") for s in options.slurm)}
    return {
        "name": options.name,
        "timeout_min": round(options.hours * 60),
        "nodes": options.nodes,
        "tasks_per_node": 1 if here else options.gpus,
        "gpus_per_node": options.gpus,
        "slurm_array_parallelism": options.at_once,
        "slurm_signal_delay_s": options.grace,
        "slurm_setup": SETUP,
        "slurm_srun_args": ["--kill-on-bad-exit=1"],
        "slurm_additional_parameters": {"requeue": True, **pairs},
    }


def folder(options: argparse.Namespace) -> str:
    """Where submitit keeps logs and jobs."""
    return options.folder or f"runs/submitit/{options.name}"


def submit(options: argparse.Namespace) -> list[Any]:
    """Prints what is submitted, and submits it unless told not to.

    Returns:
        submitit's jobs.

    Raises:
        ValueError: see `commands`, `parameters`.
        ImportError: submitit is missing; says how to get it.
        RuntimeError: submitit finds no SLURM here.
    """
    given, settings = commands(options), parameters(options)
    print(f"cluster: {options.cluster}\nfolder: {folder(options)}\nmax_num_timeout: {options.restarts}")
    for name, value in settings.items():
        print(f"{name}: {value}")
    for command in given:
        print(f"task: {command}")
    if options.dry_run:
        return []
    try:
        import submitit
    except ImportError as error:
        raise ImportError(f"submitit is not installed ({error}): pip install 'specjax[launch]'") from error
    restarts = {f"{options.cluster}_max_num_timeout": options.restarts} if options.cluster != "debug" else {}
    executor = submitit.AutoExecutor(folder(options), cluster=options.cluster, **restarts)
    executor.update_parameters(**settings)
    with executor.batch():  # several are one array job
        jobs = [executor.submit(ProgramJob(command)) for command in given]
    for job in jobs:
        print(f"submitted: {job.job_id}, {job.paths.stdout}")
    return jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Renders and submits; on this machine, waits for the end."""
    parser = _recipe.parser("submit a program by submitit")
    parser.add_argument("--cluster", choices=CLUSTERS, default="slurm", help="local: this machine; debug: in here")
    parser.add_argument("--folder", default="", help="of logs and jobs, on a disk that all nodes see")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="a node; one process each")
    parser.add_argument("--hours", type=float, default=24.0, help="time limit")
    parser.add_argument("--grace", type=int, default=120, help="seconds between submitit's signal and the end")
    parser.add_argument("--restarts", type=int, default=50, help="times that the time limit may be met")
    parser.add_argument("--at-once", type=int, default=256, help="tasks of an array job that run at a time")
    parser.add_argument("--slurm", action="append", default=[], help="a setting of sbatch; may be repeated")
    options = parser.parse_args(arguments)
    try:
        jobs = submit(options)
    except (ValueError, ImportError, RuntimeError) as error:
        parser.error(str(error))
    if options.cluster != "slurm":
        for job in jobs:
            job.results()


if __name__ == "__main__":
    main()
