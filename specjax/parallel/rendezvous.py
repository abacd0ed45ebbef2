"""Processes meet at the coordinator's address before JAX starts there, so that an absent one has a name.

JAX's own start-up ends a process that waited in vain with an abort and does not say for whom.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_OK = "ok"
_ERRORS: dict[str, type[Exception]] = {"TimeoutError": TimeoutError, "RuntimeError": RuntimeError}
_HELLO = {"process_id": int, "num_processes": int, "host": str}
_PAUSE = 0.2
_GRACE = 10.0  # The coordinator may have started later, and answers only then.


def meet(coordinator: str, process_id: int, num_processes: int, timeout_s: float) -> None:
    """Returns when all processes have called it, and raises in each of them when not all came.

    Args:
        coordinator: `host:port`; process 0 listens at the port, and leaves it free again.
        process_id: from 0.
        num_processes: expected.
        timeout_s: how long to wait.

    Raises:
        TimeoutError: names the coordinator and the missing processes.
        RuntimeError: two processes with one id, different numbers of processes, or a port that is taken.
    """
    host, _, port = coordinator.rpartition(":")
    if process_id == 0:
        _wait(coordinator, int(port), num_processes, timeout_s)
    else:
        _report(coordinator, (host.strip("[]"), int(port)), process_id, num_processes, timeout_s)


def _wait(coordinator: str, port: int, num_processes: int, timeout_s: float) -> None:
    """Process 0: gathers the others, then answers all of them."""
    deadline = time.monotonic() + timeout_s
    present: dict[int, tuple[socket.socket, str]] = {}
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=num_processes)
    except OSError as error:
        raise RuntimeError(
            f"process 0 cannot listen at port {port} of coordinator {coordinator} ({error}): choose another port"
        ) from error
    with server:
        try:
            while len(present) < num_processes - 1:
                if time.monotonic() >= deadline:
                    raise TimeoutError(_absent(coordinator, present, num_processes, timeout_s))
                _admit(server, present, num_processes, deadline)
                present = {i: peer for i, peer in present.items() if _alive(peer[0])}
        except (TimeoutError, RuntimeError) as error:
            _answer(present, str(error), type(error))
            raise
        _answer(present, _OK, None)


def _admit(
    server: socket.socket, present: dict[int, tuple[socket.socket, str]], num_processes: int, deadline: float
) -> None:
    """Takes in one process, if one calls within a second."""
    server.settimeout(max(min(1.0, deadline - time.monotonic()), 0.01))
    try:
        peer, _ = server.accept()
    except TimeoutError:
        return
    peer.settimeout(5.0)
    hello = _hello(peer)
    if hello is None:  # not one of ours
        peer.close()
        return
    index, host = hello["process_id"], hello["host"]
    problem = None
    if hello["num_processes"] != num_processes:
        problem = f"process {index} on {host} expects {hello['num_processes']} processes, process 0 {num_processes}"
    elif not 0 < index < num_processes:
        problem = f"process {index} on {host}: expected an id in 0..{num_processes - 1}, 0 being the coordinator's"
    elif index in present and _alive(present[index][0]):
        problem = f"two processes have the id {index}: on {present[index][1]} and on {host}"
    if problem:
        problem += "; start each process once, with an id of its own and the same number of processes"
        _answer({index: (peer, host)}, problem, RuntimeError)
        raise RuntimeError(problem)
    present[index] = (peer, host)


def _absent(
    coordinator: str, present: dict[int, tuple[socket.socket, str]], num_processes: int, timeout_s: float
) -> str:
    missing = [i for i in range(1, num_processes) if i not in present]
    came = ", ".join(f"{i} on {host}" for i, (_, host) in sorted(present.items()))
    named = ", ".join(map(str, missing))
    return (
        f"of {num_processes} processes {len(missing)} did not reach coordinator {coordinator} within {timeout_s:g} s: "
        f"missing {named}; present 0 on {socket.gethostname()}{', ' if came else ''}{came}. Run the same command on "
        "every host, and check that they reach this port"
    )


def _report(coordinator: str, address: tuple[str, int], process_id: int, num_processes: int, timeout_s: float) -> None:
    """The others: report to process 0 until it answers."""
    deadline, last = time.monotonic() + timeout_s, "no answer"
    hello = {"process_id": process_id, "num_processes": num_processes, "host": socket.gethostname()}
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=5.0) as peer:
                peer.sendall(json.dumps(hello).encode() + b"\n")
                peer.settimeout(timeout_s + _GRACE)
                answer = _line(peer)
        except OSError as error:
            answer, last = "", str(error)
        kind, _, text = answer.partition(" ")
        if kind == _OK:
            return
        if kind in _ERRORS:
            raise _ERRORS[kind](text)
        time.sleep(_PAUSE)
    raise TimeoutError(
        f"process {process_id} of {num_processes} did not find coordinator {coordinator} within {timeout_s:g} s "
        f"({last}): process 0 is missing. Run the same command on every host, and check that they reach this port"
    )


def _hello(peer: socket.socket) -> dict[str, Any] | None:
    try:
        hello = json.loads(_line(peer))
        return {name: kind(hello[name]) for name, kind in _HELLO.items()}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _line(peer: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < 1 << 14:
        part = peer.recv(4096)
        if not part:
            break
        data += part
    return data.decode(errors="replace").strip()


def _alive(peer: socket.socket) -> bool:
    """Whether the other end is still connected."""
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        peer.settimeout(5.0)


def _answer(present: dict[int, tuple[socket.socket, str]], text: str, error: type[Exception] | None) -> None:
    """Tells the others that all are there, or what is wrong."""
    line = text if error is None else f"{error.__name__} {text}"
    for peer, _ in present.values():
        try:
            with peer:
                peer.sendall(line.encode() + b"\n")
                peer.recv(1)  # The other end closes first: the port is then free at once.
        except OSError:
            continue
