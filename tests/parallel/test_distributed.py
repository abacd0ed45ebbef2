"""Start-up: what is refused before anything connects, and the meeting of processes (threads, here)."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import jax
import pytest

from specjax.parallel import Process, initialize, require_platform, topology
from specjax.parallel.cluster import detect
from specjax.parallel.rendezvous import meet


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that announces nothing, whatever machine this runs on."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS")):
            monkeypatch.delenv(name)
    return monkeypatch


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def together(calls: list[tuple[int, int]], timeout_s: float, port: int | None = None) -> list[BaseException | None]:
    """Runs `meet` for each (id, number of processes) at once; what each raised."""
    address = f"127.0.0.1:{port or free_port()}"
    raised: list[BaseException | None] = [None] * len(calls)

    def run(slot: int, index: int, count: int) -> None:
        try:
            meet(address, index, count, timeout_s)
        except Exception as error:
            raised[slot] = error

    threads = [threading.Thread(target=run, args=(slot, *call)) for slot, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_alone(bare: pytest.MonkeyPatch) -> None:
    assert initialize() == initialize("off") == Process(0, 1, None)


def test_off_beats_the_environment(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("SLURM_NTASKS", "4")
    assert detect(dict(SLURM_NTASKS="1"), lambda key: None) is None
    assert initialize("off") == Process()
    with pytest.raises(RuntimeError, match="srun"):
        initialize("auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mode="on"), "mode='on'; expected 'auto', 'off' or 'explicit'"),
        (dict(mode="off", coordinator="h:1"), "mode='off' takes no coordinator"),
        (dict(mode="explicit"), "the arguments.*no coordinator, num_processes, process_id"),
        (dict(mode="explicit", coordinator="h:1", num_processes=2), "no process_id: give it"),
        (dict(coordinator="h:1"), "no num_processes, process_id"),
        (dict(mode="explicit", coordinator="h", num_processes=2, process_id=0), "coordinator='h'; expected host:port"),
        (dict(mode="explicit", coordinator="h:1", num_processes=2, process_id=2), "process_id=2 of num_processes=2"),
    ],
)
def test_arguments(bare: pytest.MonkeyPatch, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initialize(**arguments)


def test_where_processes_meet_is_said_before_they_wait(bare: pytest.MonkeyPatch) -> None:
    """A port that a firewall closes is otherwise a silence."""
    said: list[str] = []
    asked = dict(coordinator=f"127.0.0.1:{free_port()}", num_processes=2, process_id=0)
    with pytest.raises(TimeoutError, match="missing 1"):
        initialize("explicit", **asked, timeout_s=0.5, announce=said.append)
    (line,) = said
    assert line == f"process 0 of 2 (from the arguments) meets the others at coordinator {asked['coordinator']}"


def test_the_environment_announces_an_incomplete_cluster(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("JAX_COORDINATOR_ADDRESS", "h:1")
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS.*no num_processes, process_id"):
        initialize()


def test_all_meet_and_the_port_is_free_again() -> None:
    port = free_port()
    for _ in range(2):
        assert together([(2, 3), (0, 3), (1, 3)], 20, port) == [None] * 3


def test_every_process_learns_who_is_missing() -> None:
    raised = together([(0, 4), (2, 4)], 1.5)
    for error in raised:
        assert isinstance(error, TimeoutError)
        assert "of 4 processes 2 did not reach coordinator 127.0.0.1:" in str(error)
        assert "missing 1, 3; present 0 on" in str(error)


def test_process_zero_is_missing() -> None:
    (error,) = together([(1, 2)], 0.7)
    assert isinstance(error, TimeoutError)
    assert "process 1 of 2 did not find coordinator 127.0.0.1:" in str(error)
    assert "process 0 is missing" in str(error)


def test_two_processes_with_one_id() -> None:
    raised = together([(0, 3), (1, 3), (1, 3)], 10)
    assert all(isinstance(error, RuntimeError) and "two processes have the id 1" in str(error) for error in raised)


def test_numbers_of_processes_differ() -> None:
    raised = together([(0, 2), (1, 3)], 10)
    for error in raised:
        assert isinstance(error, RuntimeError)
        assert "expects 3 processes, process 0 2" in str(error)


def test_strangers_and_the_dead_do_not_count() -> None:
    """A port scan, and a process that died while it waited and was started again."""
    port = free_port()

    def disturb() -> None:
        for hello in (b"GET / HTTP/1.0\r\n\r\n", b'{"process_id": 1, "num_processes": 3, "host": "x"}\n'):
            for _ in range(100):
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
                        peer.sendall(hello)
                        time.sleep(0.2)
                    break
                except OSError:
                    time.sleep(0.05)

    stranger = threading.Thread(target=disturb)
    stranger.start()
    zero = threading.Thread(target=lambda: outcome.extend(together([(0, 3)], 20, port)))
    outcome: list[BaseException | None] = []
    zero.start()
    stranger.join()
    others = together([(1, 3), (2, 3)], 20, port)
    zero.join()
    assert [*outcome, *others] == [None] * 3


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (error,) = together([(0, 2)], 1, port)
    assert isinstance(error, RuntimeError)
    assert f"cannot listen at port {port}" in str(error)


def test_platform() -> None:
    require_platform(jax.default_backend())
    other = "tpu" if jax.default_backend() != "tpu" else "cpu"
    with pytest.raises(
        RuntimeError, match=f"requires the platform '{other}', but JAX runs on '{jax.default_backend()}'"
    ):
        require_platform(other)
    with pytest.raises(ValueError, match="platform='cuda'; expected one of cpu, gpu, tpu"):
        require_platform("cuda")


def test_topology() -> None:
    assert topology().startswith(f"{jax.device_count()} x ")
    assert topology().endswith(f"({jax.default_backend()}); jax {jax.__version__}")
