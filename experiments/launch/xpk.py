r"""Starts a program on TPU slices of a GKE cluster that xpk made (`pip install xpk`; Kueue and JobSet are there).

    python -m experiments.launch.xpk --name=eagle3 --cluster=<cluster> --zone=<zone> --type=v6e-256 --image=<image> \
        --dry-run \
        --command="python -m experiments.train --config=configs/eagle3.py:smollm2,pod --workdir=gs://bucket/eagle3"

A slice that is taken away starts the workload again, and the same command resumes. --list shows the workloads there,
--delete ends this one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments.launch import _recipe

ACTIONS = {"list": "show the cluster's workloads", "delete": "end the workload"}


def commands(options: argparse.Namespace) -> list[list[str]]:
    """The xpk call of `options.action`.

    Raises:
        ValueError: see `_recipe.check`, `_recipe.need_bucket`; or a count below 1.
    """
    _recipe.check(options.name, options.command)
    _recipe.need_bucket(options.command)
    if options.slices < 1 or options.max_restarts < 0:
        raise ValueError(
            f"slices={options.slices}, max_restarts={options.max_restarts}: expected at least 1 slice and no negative "
            "number of restarts"
        )
    place = [f"--cluster={options.cluster}", f"--zone={options.zone}"]
    place += [f"--project={options.project}"] if options.project else []
    if options.action == "list":
        return [["xpk", "workload", "list", *place]]
    if options.action == "delete":
        return [["xpk", "workload", "delete", f"--workload={options.name}", *place]]
    return [
        ["xpk", "workload", "create", f"--workload={options.name}", *place]
        + [f"--tpu-type={options.type}", f"--num-slices={options.slices}", f"--docker-image={options.image}"]
        + [f"--max-restarts={options.max_restarts}", f"--termination-grace-period-seconds={options.grace}"]
        + [f"--command=exec env {options.command} --require_platform=tpu"]
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Creates, lists or deletes."""
    parser = _recipe.parser("start a program with xpk on a GKE cluster")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", default="", help="empty: gcloud's own")
    parser.add_argument("--type", required=True, help="TPU type, such as v6e-256")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--image", required=True, help="container image that holds specjax, see the Dockerfile")
    parser.add_argument("--max-restarts", type=int, default=50)
    parser.add_argument("--grace", type=int, default=120, help="seconds between SIGTERM and the end")
    _recipe.act(parser, arguments, "create", ACTIONS, commands)


if __name__ == "__main__":
    main()
