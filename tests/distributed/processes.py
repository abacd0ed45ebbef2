"""Real processes that work together over gloo on this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# (exit status, what it printed, what it said on stderr)
Ended = tuple[int, str, str]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(commands: Sequence[Sequence[str]], devices: int, **variables: str) -> list[subprocess.Popen[str]]:
    """Python with each of the arguments at once, from the repository's root.

    Args:
        commands: arguments of Python, a process each.
        devices: simulated ones of each process.
        **variables: more of the environment.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": f"{devices}", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_DEFAULT_MATMUL_PRECISION": "float32"} | variables
    pipe = subprocess.PIPE
    return [
        subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        for command in commands
    ]


def start_program(
    module: str, arguments: Sequence[str], *, count: int, devices: int = 1, **variables: str
) -> list[subprocess.Popen[str]]:
    """A program of `experiments` in several processes that find each other, or in one that looks for none."""
    command = ["-m", f"experiments.{module}", *arguments]
    if count == 1:
        return start([[*command, "--distributed=off"]], devices, **variables)
    joined = ["--distributed=explicit", f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}"]
    return start([[*command, *joined, f"--process_id={index}"] for index in range(count)], devices, **variables)


def finish(started: Sequence[subprocess.Popen[str]], timeout: float = 400) -> list[Ended]:
    """Waits for all; none outlives the call."""
    try:
        said = [process.communicate(timeout=timeout) for process in started]
        return [(process.returncode, out, err) for process, (out, err) in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()
