"""Process start-up: who takes part, a meeting with a time limit, then `jax.distributed`.

Clusters announce themselves through the environment, so this is the one library file that reads it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Literal

import jax

from specjax.parallel.cluster import Cluster, detect
from specjax.parallel.rendezvous import meet

Mode = Literal["auto", "off", "explicit"]
PLATFORMS = ("cpu", "gpu", "tpu")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Process:
    """Which process of a run this is.

    Attributes:
        index: from 0; process 0 writes and prints.
        count: processes of the run.
        coordinator: `host:port` of process 0, None for a process alone.
    """

    index: int = 0
    count: int = 1
    coordinator: str | None = None


def initialize(
    mode: Mode = "auto",
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    timeout_s: float = 120,
    announce: Callable[[str], None] = _log.info,
) -> Process:
    """Joins the other processes of a run. To be called before anything else touches JAX's devices.

    Args:
        mode: `auto` joins when the environment names more than one process (a TPU pod, SLURM, Open MPI,
            `JAX_COORDINATOR_ADDRESS`), and stays alone otherwise; `off` stays alone; `explicit` takes the arguments.
        coordinator: `host:port` of process 0. With `auto`, this and the next three override what was found.
        num_processes: of the run.
        process_id: of this process, from 0.
        local_device_ids: which of this host's GPUs this process uses; one each by default under SLURM and Open MPI.
        timeout_s: how long processes wait for each other.
        announce: told where the processes meet, before this one goes there.

    Returns:
        What this process is.

    Raises:
        ValueError: unknown mode, or arguments that are missing or contradict each other.
        TimeoutError: not all processes came; names the coordinator and the missing ones.
        RuntimeError: what JAX or the cluster refuses, among it a start after the devices were used.
    """
    if mode not in ("auto", "off", "explicit"):
        raise ValueError(f"mode={mode!r}; expected 'auto', 'off' or 'explicit'")
    given = Cluster("the arguments", coordinator, num_processes, process_id)
    named = [f.name for f in dataclasses.fields(Cluster)[1:] if getattr(given, f.name) is not None]
    if mode == "off":
        if named:
            raise ValueError(f"mode='off' takes no {', '.join(named)}: leave them out, or use mode='explicit'")
        return Process()
    found = detect(os.environ, _metadata) if mode == "auto" else None
    if mode == "auto" and found is None and not named:
        return Process()
    cluster = dataclasses.replace(found or given, **{name: getattr(given, name) for name in named})
    return _join(cluster, local_device_ids, timeout_s, announce)


def require_platform(platform: str) -> None:
    """Refuses to run on another kind of device than was asked for.

    Args:
        platform: `cpu`, `gpu` or `tpu`.

    Raises:
        ValueError: none of these.
        RuntimeError: JAX runs on another platform; names it.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}; expected one of {', '.join(PLATFORMS)}")
    found = jax.default_backend()
    if found != platform:
        extras = {"tpu": "specjax[tpu]", "gpu": "specjax[cuda13]"}
        hint = f"install {extras[platform]}, look at JAX_PLATFORMS" if platform in extras else "set JAX_PLATFORMS=cpu"
        raise RuntimeError(
            f"this run requires the platform {platform!r}, but JAX runs on {found!r} ({jax.device_count()} devices): "
            f"{hint}, or ask for {found!r}"
        )


def topology() -> str:
    """One line on devices and processes, to be printed at the start of a run."""
    kinds = sorted({device.device_kind for device in jax.devices()})
    text = f"{jax.device_count()} x {', '.join(kinds)} ({jax.default_backend()})"
    if jax.process_count() > 1:
        text += (
            f" in {jax.process_count()} processes; this is process {jax.process_index()} "
            f"with {jax.local_device_count()} devices"
        )
    return f"{text}; jax {jax.__version__}"


def _join(
    cluster: Cluster, local_device_ids: Sequence[int] | None, timeout_s: float, announce: Callable[[str], None]
) -> Process:
    address, count, index = cluster.coordinator, cluster.num_processes, cluster.process_id
    missing = [f.name for f in dataclasses.fields(Cluster)[1:] if getattr(cluster, f.name) is None]
    if address is None or count is None or index is None:
        raise ValueError(
            f"{cluster.source} names several processes, but no {', '.join(missing)}: give it as an argument"
        )
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"coordinator={address!r}; expected host:port, such as 10.0.0.1:8476")
    if not 0 <= index < count:
        raise ValueError(
            f"process_id={index} of num_processes={count} (from {cluster.source}); expected 0..{count - 1}"
        )
    process = Process(index, count, address)
    if jax.distributed.is_initialized():
        return _joined(process)
    announce(f"process {index} of {count} (from {cluster.source}) meets the others at coordinator {address}")
    meet(address, index, count, timeout_s)
    jax.distributed.initialize(
        address,
        num_processes=count,
        process_id=index,
        local_device_ids=local_device_ids,
        initialization_timeout=max(round(timeout_s), 1),
    )
    return _joined(process)


def _joined(process: Process) -> Process:
    """Holds what JAX made of it against what was meant."""
    if (jax.process_index(), jax.process_count()) != (process.index, process.count):
        raise RuntimeError(
            f"JAX runs as process {jax.process_index()} of {jax.process_count()}, not as process {process.index} of "
            f"{process.count} with coordinator {process.coordinator}: initialize once, with the same arguments"
        )
    return process


def _metadata(key: str) -> str | None:
    """An instance attribute of a Google Cloud machine, None where there is none."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    except OSError as error:
        raise RuntimeError(
            f"this machine has TPUs, but its metadata server {host} does not say whether it is one of several "
            f"({error}): use mode 'off' for a single machine, or mode 'explicit'"
        ) from error
