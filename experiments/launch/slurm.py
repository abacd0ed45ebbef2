r"""Writes a batch script that starts a program under SLURM, one process a GPU, and submits it.

    python -m experiments.launch.slurm --name=eagle3 --nodes=2 --gpus=8 --time=24:00:00 \
        --dry-run \
        --command="python -m experiments.train --config=configs/eagle3.py:smollm2,pod --workdir=/shared/eagle3"

Before the time limit SLURM sends SIGTERM; the program saves and ends with exit code 75, and the script puts the job
back into the queue. The same command then resumes.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Sequence

from experiments import _main
from experiments.launch import _recipe

# One process a GPU, all GPUs visible to all: JAX takes the GPU of its local rank. `--gpus-per-task=1` would hide them.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
#SBATCH --signal=TERM@{grace}
{extra}
set -uo pipefail
# A proxy that catches the processes' talk with each other makes them wait forever.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY
cd {directory} || exit 1
source {venv}/bin/activate || exit 1

srun --kill-on-bad-exit=1 {command} --require_platform=gpu
status=$?
if [ "$status" -eq {restart} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def script(options: argparse.Namespace) -> str:
    """The batch script.

    Raises:
        ValueError: see `_recipe.check`; or a count or time that SLURM would refuse.
    """
    _recipe.check(options.name, options.command)
    if options.nodes < 1 or options.gpus < 1:
        raise ValueError(f"nodes={options.nodes}, gpus={options.gpus}: expected at least 1 of each")
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", options.time):
        raise ValueError(f"time {options.time!r}: expected hours:minutes:seconds, or days-hours")
    return SCRIPT.format(
        name=options.name,
        nodes=options.nodes,
        gpus=options.gpus,
        time=options.time,
        grace=options.grace,
        extra="".join(f"#SBATCH {line}\n" for line in options.sbatch),
        directory=shlex.quote(options.directory),
        venv=shlex.quote(options.venv),
        command=options.command,
        restart=_main.RESTART,
    )


def options_parser() -> argparse.ArgumentParser:
    """What the recipe takes."""
    parser = _recipe.parser("start a program under SLURM")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="a node; one process each")
    parser.add_argument("--time", default="24:00:00")
    parser.add_argument("--grace", type=int, default=120, help="seconds between SIGTERM and the end")
    parser.add_argument("--directory", default=".", help="of the repository, on a disk that all nodes see")
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--sbatch", action="append", default=[], help="a further #SBATCH line; may be repeated")
    return parser


def submit(options: argparse.Namespace) -> None:
    """Prints the script, and hands it to SLURM unless told not to."""
    text = script(options)
    print(text, end="")
    if not options.dry_run:
        subprocess.run(["sbatch"], input=text, text=True, check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Renders and submits."""
    parser = options_parser()
    options = parser.parse_args(arguments)
    try:
        submit(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
