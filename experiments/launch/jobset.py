r"""Writes a JobSet for Kubernetes (GKE with TPUs, or any cluster with GPUs) and applies it.

    python -m experiments.launch.jobset --name=eagle3 --image=<image> --hosts=64 --chips=4 \
        --accelerator=tpu-v5-lite-podslice --topology=16x16 \
        --dry-run \
        --command="python -m experiments.train --config=configs/eagle3.py:smollm2,pod --workdir=gs://bucket/eagle3"

A host that dies restarts the whole set, and the same command resumes from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml

from experiments.launch import _recipe

PORT = 8476
NUMBER = "declare -ix JAX_PROCESS_ID=GROUP*HOSTS+HOST;"  # over all groups of hosts; Kubernetes cannot calculate
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
WRONG = 2  # the programs' exit code for what a user has to put right


def manifest(options: argparse.Namespace) -> dict[str, Any]:
    """The JobSet.

    Raises:
        ValueError: see `_recipe.check`, `_recipe.need_bucket`; or a count below 1, or a TPU without its topology.
    """
    _recipe.check(options.name, options.command)
    _recipe.need_bucket(options.command)
    if options.hosts < 1 or options.chips < 1 or options.slices < 1:
        raise ValueError(
            f"hosts={options.hosts}, chips={options.chips}, slices={options.slices}: expected at least 1 of each"
        )
    on_tpu = options.accelerator.startswith("tpu")
    if on_tpu and not options.topology:
        raise ValueError(f"accelerator {options.accelerator!r} needs --topology, such as 4x4")
    platform = "tpu" if on_tpu else "gpu"
    if joined := {"&&", "||", ";", "|"} & set(shlex.split(options.command)):
        raise ValueError(f"the command has {' '.join(sorted(joined))}: give one program, which is told when to end")
    # In place of the shell, which would keep SIGTERM to itself; `env` takes settings before the program.
    command = f"exec env {options.command} --require_platform={platform}"
    container = {
        "name": "specjax",
        "image": options.image,
        "command": ["bash", "-c", command if on_tpu else f"{NUMBER} {command}"],
        "resources": {"limits": {"google.com/tpu" if on_tpu else "nvidia.com/gpu": options.chips}},
        **({} if on_tpu else {"env": _meeting(options)}),
    }
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": _selector(options, on_tpu),
        "terminationGracePeriodSeconds": options.grace,
        "containers": [container],
    }
    job = {
        "parallelism": options.hosts,
        "completions": options.hosts,
        "backoffLimit": 0,
        # What a restart does not put right: a config that is wrong stays wrong.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": "specjax", "operator": "In", "values": [WRONG]}}
            ]
        },
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        # A slice is a node pool: all hosts of one job on one of them, and no other job there.
        "metadata": {"name": options.name, **({"annotations": EXCLUSIVE} if on_tpu else {})},
        "spec": {
            "failurePolicy": {
                "maxRestarts": options.max_restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": "worker", "replicas": options.slices, "template": {"spec": job}}],
        },
    }


def _selector(options: argparse.Namespace, on_tpu: bool) -> dict[str, str]:
    spot = {"cloud.google.com/gke-spot": "true"} if options.spot else {}
    if not on_tpu:
        return {"cloud.google.com/gke-accelerator": options.accelerator, **spot}
    return {
        "cloud.google.com/gke-tpu-accelerator": options.accelerator,
        "cloud.google.com/gke-tpu-topology": options.topology,
        **spot,
    }


def _meeting(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Where processes meet: GKE tells TPU hosts itself, others are told here."""
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    group = {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}}
    return [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{options.name}-worker-0-0.{options.name}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(options.hosts * options.slices)},
        {"name": "HOSTS", "value": str(options.hosts)},
        {"name": "HOST", "valueFrom": index},
        {"name": "GROUP", "valueFrom": group},
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Renders and applies."""
    parser = _recipe.parser("start a program as a JobSet on Kubernetes")
    parser.add_argument("--image", required=True, help="container image that holds specjax, see the Dockerfile")
    parser.add_argument("--accelerator", required=True, help="GKE accelerator label, such as tpu-v5-lite-podslice")
    parser.add_argument("--topology", default="", help="of a TPU slice, such as 4x4")
    parser.add_argument("--hosts", type=int, default=1, help="of each slice, or group of GPU hosts")
    parser.add_argument("--chips", type=int, default=4, help="chips or GPUs a host")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--max-restarts", type=int, default=50)
    parser.add_argument("--grace", type=int, default=120, help="seconds between SIGTERM and the end")
    parser.add_argument("--spot", action="store_true")
    options = parser.parse_args(arguments)
    try:
        text = yaml.safe_dump(manifest(options), sort_keys=False)
    except ValueError as error:
        parser.error(str(error))
    print(text, end="")
    if not options.dry_run:
        subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=True)


if __name__ == "__main__":
    main()
