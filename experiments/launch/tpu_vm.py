r"""Starts a program on every host of a Cloud TPU VM slice (v4 to v6e), by gcloud.

    python -m experiments.launch.tpu_vm --name=eagle3 --type=v5litepod-256 --zone=us-west4-a --repository=<git url> \
        --dry-run \
        --command="python -m experiments.train --config=configs/eagle3.py:smollm2,pod --workdir=gs://bucket/eagle3"

First, with --create, the slice is asked for as a queued resource (with --spot a spot slice); once its state is ACTIVE,
the same call without --create sets the hosts up, starts the program and follows what it says. It is one command on
every host: the hosts find each other, and the same call resumes the run after an interruption.

The program outlives the connection. --follow shows again what it says, --stop has it save and end, and --delete gives
the slice back: also one that was taken away, which keeps its name until then.
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

ACTIONS = {
    "create": "ask for the slice, and do no more",
    "follow": "show what the program says",
    "stop": "have the program save and end",
    "delete": "give the slice back; one that was taken away keeps its name until then",
}


def commands(options: argparse.Namespace) -> list[list[str]]:
    """The gcloud calls of `options.action`, in order.

    Raises:
        ValueError: see `_recipe.check`, `_recipe.need_bucket`; or an accelerator type without a known runtime.
    """
    _recipe.check(options.name, options.command)
    _recipe.need_bucket(options.command)
    kind = options.type.rpartition("-")[0]
    if kind not in RUNTIMES:
        raise ValueError(f"type {options.type!r}: expected <kind>-<size> with a kind of {', '.join(RUNTIMES)}")
    place = [f"--zone={options.zone}", *([f"--project={options.project}"] if options.project else [])]
    queue = ["gcloud", "compute", "tpus", "queued-resources"]
    everywhere = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", options.name, *place, "--worker=all"]
    if options.action == "create":
        kinds = [f"--accelerator-type={options.type}", f"--runtime-version={RUNTIMES[kind]}"]
        ask = [*queue, "create", options.name, *place, f"--node-id={options.name}", *kinds]
        ask += ["--spot"] if options.spot else []
        return [ask, [*queue, "describe", options.name, *place, "--format=value(state.state)"]]
    if options.action == "delete":
        return [[*queue, "delete", options.name, *place, "--force", "--quiet"]]
    steps = {"start": (setup, start, follow), "follow": (follow,), "stop": (stop, follow)}[options.action]
    return [[*everywhere, f"--command={step(options)}"] for step in steps]


def setup(options: argparse.Namespace) -> str:
    """What every host does once; safe to repeat."""
    return " && ".join(
        [
            "sudo apt-get -q -o DPkg::Lock::Timeout=300 update",
            "sudo apt-get -q -o DPkg::Lock::Timeout=300 install -y python3.11 python3.11-venv git",
            f"(test -d specjax || git clone --quiet {shlex.quote(options.repository)} specjax)",
            "cd specjax",
            # What the repository has now: a branch of this clone stays where it was when it was cloned.
            f"git fetch --quiet origin {shlex.quote(options.revision)}",
            "git checkout --quiet --detach FETCH_HEAD",
            "python3.11 -m venv .venv",
            ".venv/bin/pip install --quiet --editable '.[tpu]'",
        ]
    )


def start(options: argparse.Namespace) -> str:
    """The program in a session of its own, refused on hosts whose TPU did not come up, or where one runs already."""
    pid, log, status = (f"~/{options.name}.{end}" for end in ("pid", "log", "status"))
    # The shell around it waits when it is told to end, so that the program can save.
    inner = f"trap : TERM; {options.command} --require_platform=tpu; echo $? > {status}"
    return " && ".join(
        [
            "cd specjax",
            f'if kill -0 "$(cat {pid} 2>/dev/null)" 2>/dev/null; '
            f"then echo {options.name} runs already: use --follow or --stop >&2; exit 1; fi",
            "source .venv/bin/activate",
            f"rm -f {status}",
            f"{{ setsid nohup bash -c {shlex.quote(inner)} > {log} 2>&1 < /dev/null & echo $! > {pid}; }}",
        ]
    )


def follow(options: argparse.Namespace) -> str:
    """Shows what the program has said and says, until it ends, and takes over its exit code."""
    pid, log, status = (f"~/{options.name}.{end}" for end in ("pid", "log", "status"))
    return f'tail --pid="$(cat {pid})" -n +1 -f {log}; exit "$(cat {status} 2>/dev/null || echo 1)"'


def stop(options: argparse.Namespace) -> str:
    """Asks the program to save and end."""
    return f'pkill -TERM --session "$(cat ~/{options.name}.pid)"'


def main(arguments: Sequence[str] | None = None) -> None:
    """Creates, sets up, runs."""
    parser = _recipe.parser("start a program on a Cloud TPU VM slice")
    parser.add_argument("--type", required=True, help="accelerator type, such as v5litepod-256")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", default="", help="empty: gcloud's own")
    parser.add_argument("--repository", required=True, help="git URL that the hosts clone")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--spot", action="store_true", help="a spot slice: cheaper, may be taken away")
    _recipe.act(parser, arguments, "start", ACTIONS, commands)


if __name__ == "__main__":
    main()
