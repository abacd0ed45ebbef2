"""What clusters say about themselves: how many processes take part, which one this is, where they meet."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

TPU_PORT = 8482
PORTS = range(61440, 65536)  # One of these, by job number: two jobs on one host rarely meet.

# key of a machine's metadata -> its value, or None where there is none
Metadata = Callable[[str], str | None]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process of several.

    Attributes:
        source: who says so, for messages.
        coordinator: `host:port` at which process 0 is met, None where the cluster does not say.
        num_processes: of the whole run.
        process_id: of this one, from 0.
    """

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def detect(environ: Mapping[str, str], metadata: Metadata) -> Cluster | None:
    """The cluster that this process was started in, or None when it stands alone.

    Looked for, in this order: TPU pods (by environment, or by the metadata of a TPU machine), SLURM, Open MPI, each
    with more than one process. `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` override what they
    say, and are enough alone.

    Args:
        environ: the environment variables.
        metadata: asked for instance attributes on TPU machines only.

    Raises:
        RuntimeError: a cluster job whose processes were not started by its launcher.
        ValueError: a variable that should be a number is none.
    """
    found = _tpu(environ, metadata) or _slurm(environ) or _open_mpi(environ)
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return found
    found = found or Cluster("JAX_COORDINATOR_ADDRESS")
    return dataclasses.replace(
        found,
        coordinator=address,
        num_processes=_number(environ, "JAX_NUM_PROCESSES", found.num_processes),
        process_id=_number(environ, "JAX_PROCESS_ID", found.process_id),
    )


def _tpu(environ: Mapping[str, str], metadata: Metadata) -> Cluster | None:
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return None
    names = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    # JAX, once imported, marks machines with TPU chips in this way.
    on_tpu = "TPU_ML_PLATFORM" in environ and "TPU_SKIP_MDS_QUERY" not in environ
    if names is not None:
        hosts, source = [_host(name) for name in names.split(",")], "the TPU environment"
        worker = _number(environ, "TPU_WORKER_ID", None)
        slices = environ
    elif on_tpu and (names := metadata("worker-network-endpoints")):
        hosts, source = [_endpoint(name) for name in names.split(",")], "the TPU machine's metadata"
        worker = _number({"agent-worker-number": metadata("agent-worker-number") or ""}, "agent-worker-number", None)
        slices = {**_entries(metadata("tpu-env") or ""), **environ}
    else:
        return None
    count = _number(slices, "MEGASCALE_NUM_SLICES", 1) or 1
    if len(hosts) * count == 1:
        return None
    place = (_number(slices, "MEGASCALE_SLICE_ID", 0) or 0) * len(hosts)
    first = _host(slices.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0])
    port = _number(environ, "JAX_COORDINATOR_PORT", TPU_PORT)
    return Cluster(source, f"{first}:{port}", len(hosts) * count, None if worker is None else place + worker)


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    count = _number(environ, "SLURM_NTASKS", 1) or 1
    if count == 1:
        return None
    missing = [n for n in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID") if not environ.get(n)]
    if missing:
        raise RuntimeError(
            f"SLURM_NTASKS={count}, but {', '.join(missing)} is not set: start the processes with srun, or run this "
            "one alone with mode 'off'"
        )
    port = _number(environ, "JAX_COORDINATOR_PORT", _port(_number(environ, "SLURM_JOB_ID", 0) or 0))
    address = f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}"
    return Cluster("SLURM", address, count, _number(environ, "SLURM_PROCID", None))


def _open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    count = _number(environ, "OMPI_COMM_WORLD_SIZE", 1) or 1
    if count == 1:
        return None
    # Job number and the launcher's addresses; not set by Open MPI 5.
    uri = re.match(r"(\d+)\..*?tcp6?://(?:\[([^\],]+)|([^,:]+))", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    address = None
    if uri:
        host = f"[{uri[2]}]" if uri[2] else uri[3]
        address = f"{host}:{_number(environ, 'JAX_COORDINATOR_PORT', _port(int(uri[1]) // 4096))}"
    return Cluster("Open MPI", address, count, _number(environ, "OMPI_COMM_WORLD_RANK", None))


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `gpu[007-009,12],login1` gives `gpu007`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None  # every part may be empty
    return "".join(part or "" for part in match.groups())


def _port(job: int) -> int:
    return PORTS[job % len(PORTS)]


def _host(name: str) -> str:
    return name.strip().split(":")[0]


def _endpoint(text: str) -> str:
    """The address in `address`, or in the older `name:id:address`."""
    return text.strip().split(":")[-1]


def _entries(text: str) -> dict[str, str]:
    """Lines of the form `KEY: 'value'`."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip().strip("'") for key, value in pairs}


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = environ.get(name)
    if not text:
        return default
    if not text.isdigit():
        raise ValueError(f"{name}={text!r}; expected a number")
    return int(text)
