r"""Starts a program on every host of a Cloud TPU VM slice (v4 to v6e), by gcloud.

    python -m experiments.launch.tpu_vm --name=eagle3 --type=v5litepod-256 --zone=us-west4-a --repository=<git url> \
        --command="python -m experiments.train --config=configs/eagle3.py --workdir=gs://bucket/eagle3" --dry-run

First, with --create, the slice is asked for as a queued resource (with --spot a spot slice); once its state is ACTIVE,
the same call without --create sets the hosts up and starts the program. It is one command on every host: the hosts find
each other, and the same call resumes the run after an interruption.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from experiments.launch import _recipe

RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def commands(options: argparse.Namespace) -> list[list[str]]:
    """The gcloud calls, in order: to ask for the slice, or to set it up and start.

    Raises:
        ValueError: see `_recipe.check`, `_recipe.need_bucket`; or an accelerator type without a known runtime.
    """
    _recipe.check(options.name, options.command)
    _recipe.need_bucket(options.command)
    kind = options.type.rpartition("-")[0]
    if kind not in RUNTIMES:
        raise ValueError(f"type {options.type!r}: expected <kind>-<size> with a kind of {', '.join(RUNTIMES)}")
    place = [f"--zone={options.zone}", *([f"--project={options.project}"] if options.project else [])]
    everywhere = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", options.name, *place, "--worker=all"]
    made: list[list[str]] = []
    if options.create:
        made.append(
            ["gcloud", "compute", "tpus", "queued-resources", "create", options.name, *place]
            + [f"--node-id={options.name}", f"--accelerator-type={options.type}"]
            + [f"--runtime-version={RUNTIMES[kind]}", *(["--spot"] if options.spot else [])]
        )
        made.append(
            ["gcloud", "compute", "tpus", "queued-resources", "describe", options.name, *place]
            + ["--format=value(state.state)"]
        )
        return made
    made.append([*everywhere, f"--command={setup(options)}"])
    made.append([*everywhere, f"--command={start(options)}"])
    return made


def setup(options: argparse.Namespace) -> str:
    """What every host does once; safe to repeat."""
    return " && ".join(
        [
            "sudo apt-get install -y -q python3.11 python3.11-venv git",
            f"(test -d specjax || git clone --quiet {shlex.quote(options.repository)} specjax)",
            "cd specjax",
            f"git fetch --quiet && git checkout --quiet {shlex.quote(options.revision)}",
            "python3.11 -m venv .venv",
            ".venv/bin/pip install --quiet --editable '.[tpu]'",
        ]
    )


def start(options: argparse.Namespace) -> str:
    """The program, in the environment, refused on hosts whose TPU did not come up."""
    return f"cd specjax && source .venv/bin/activate && {options.command} --require_platform=tpu"


def main(arguments: Sequence[str] | None = None) -> None:
    """Creates, sets up, runs."""
    parser = _recipe.parser("start a program on a Cloud TPU VM slice")
    parser.add_argument("--type", required=True, help="accelerator type, such as v5litepod-256")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", default="", help="empty: gcloud's own")
    parser.add_argument("--repository", required=True, help="git URL that the hosts clone")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--spot", action="store_true", help="a spot slice: cheaper, may be taken away")
    parser.add_argument("--create", action="store_true", help="ask for the slice, and do no more")
    options = parser.parse_args(arguments)
    try:
        found = commands(options)
    except ValueError as error:
        parser.error(str(error))
    _recipe.run_all(found, options.dry_run)


if __name__ == "__main__":
    main()
