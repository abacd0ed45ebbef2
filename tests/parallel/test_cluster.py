"""What the environment of a cluster says."""

from __future__ import annotations

import pytest

from specjax.parallel.cluster import Cluster, detect, first_host

SLURM = dict(SLURM_JOB_ID="70001", SLURM_STEP_NODELIST="gpu[07-09,12]", SLURM_NTASKS="16", SLURM_PROCID="9")
ON_TPU = dict(TPU_ML_PLATFORM="JAX")  # and TPU_SKIP_MDS_QUERY unset: JAX saw TPU chips


def nothing(key: str) -> str | None:
    raise AssertionError(f"asked the machine for {key}")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[001-016]", "node001"),
        ("node[001,007-015],login", "node001"),
        ("rack[3-4]-ib,rack9", "rack3-ib"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_alone() -> None:
    assert detect({}, nothing) is None
    assert detect(dict(SLURM_NTASKS="1"), nothing) is None
    assert detect(dict(OMPI_COMM_WORLD_SIZE="1"), nothing) is None
    assert detect(dict(TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0"), nothing) is None
    assert detect(ON_TPU | dict(TPU_SKIP_MDS_QUERY="1"), nothing) is None


def test_slurm() -> None:
    assert detect(SLURM, nothing) == Cluster("SLURM", f"gpu07:{61440 + 70001 % 4096}", 16, 9)
    found = detect(SLURM | dict(JAX_COORDINATOR_PORT="1234"), nothing)
    assert found is not None
    assert found.coordinator == "gpu07:1234"


def test_a_slurm_job_without_srun() -> None:
    with pytest.raises(RuntimeError, match="SLURM_NTASKS=4, but SLURM_STEP_NODELIST, SLURM_PROCID is not set.*srun"):
        detect(dict(SLURM_NTASKS="4", SLURM_JOB_ID="7"), nothing)


def test_a_variable_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="SLURM_NTASKS='4x'; expected a number"):
        detect(SLURM | dict(SLURM_NTASKS="4x"), nothing)


def test_open_mpi() -> None:
    ranks = dict(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3")
    four = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    port = 61440 + (1531576320 // 4096) % 4096
    assert detect(ranks | dict(OMPI_MCA_orte_hnp_uri=four), nothing) == Cluster("Open MPI", f"10.96.0.1:{port}", 4, 3)
    six = "1531576320.0;tcp6://[fe80::1,2620::2]:43370"
    found = detect(ranks | dict(OMPI_MCA_orte_hnp_uri=six), nothing)
    assert found is not None
    assert found.coordinator == f"[fe80::1]:{port}"
    assert detect(ranks, nothing) == Cluster("Open MPI", None, 4, 3)  # Open MPI 5 does not give its address


def test_tpu_pod_by_environment() -> None:
    pod = dict(TPU_WORKER_HOSTNAMES="w0,w1,w2,w3", TPU_WORKER_ID="2")
    assert detect(pod, nothing) == Cluster("the TPU environment", "w0:8482", 4, 2)
    slices = dict(MEGASCALE_NUM_SLICES="2", MEGASCALE_SLICE_ID="1", MEGASCALE_COORDINATOR_ADDRESS="s0:8080")
    assert detect(pod | slices, nothing) == Cluster("the TPU environment", "s0:8482", 8, 6)
    addresses = dict(TPU_PROCESS_ADDRESSES="w0:8476,w1:8476", TPU_WORKER_ID="1")
    assert detect(addresses, nothing) == Cluster("the TPU environment", "w0:8482", 2, 1)
    assert detect(pod | dict(JAX_PLATFORMS="cpu"), nothing) is None


def test_tpu_pod_by_metadata() -> None:
    attributes = {
        "worker-network-endpoints": "x:0:10.0.0.1,x:1:10.0.0.2",
        "agent-worker-number": "1",
        "tpu-env": "TYPE: 'v5'\nMEGASCALE_NUM_SLICES: '3'\nMEGASCALE_SLICE_ID: '2'",
    }
    found = detect(ON_TPU, attributes.get)
    assert found == Cluster("the TPU machine's metadata", "10.0.0.1:8482", 6, 5)
    assert detect(ON_TPU, {"worker-network-endpoints": "10.0.0.1", "agent-worker-number": "0"}.get) is None
    assert detect(ON_TPU, {}.get) is None


def test_jax_variables_override_and_suffice() -> None:
    address = dict(JAX_COORDINATOR_ADDRESS="h:1")
    assert detect(SLURM | address, nothing) == Cluster("SLURM", "h:1", 16, 9)
    alone = address | dict(JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="1")
    assert detect(alone, nothing) == Cluster("JAX_COORDINATOR_ADDRESS", "h:1", 2, 1)
    assert detect(address, nothing) == Cluster("JAX_COORDINATOR_ADDRESS", "h:1", None, None)
