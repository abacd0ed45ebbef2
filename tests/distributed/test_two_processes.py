"""Two real processes with two devices each, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.decoding import Completion
from tests.distributed.test_decoding import on_one_device

ROOT = Path(__file__).resolve().parents[2]

DECODE = """
import json, sys
import jax
from specjax.parallel import initialize, make_mesh, topology
address, index = sys.argv[1], int(sys.argv[2])
process = initialize("explicit", address, 2, index, timeout_s=60)
assert process.index == index and jax.device_count() == 4 and jax.local_device_count() == 2
from specjax.decoding import generate
from tests.distributed.common import VOCAB, place, requests
from tests.distributed.test_decoding import program
loop, weights = program("prompt_lookup", 0.0)
mesh = make_mesh(data=2, tensor=2)
placed = place(weights, mesh, "tp", "dp")
assert not placed.target["layers"][0]["attn"]["q"]["kernel"].is_fully_addressable
found = generate(loop, placed, requests(0.0), context=512, vocab=VOCAB, seed=3, batch=4)
texts = [c.tokens for c in found]
print(json.dumps({"topology": topology(), "texts": texts}))
"""

ALONE = """
import sys
from specjax.parallel import initialize
initialize("explicit", sys.argv[1], 3, int(sys.argv[2]), timeout_s=2)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def processes(program: str, count: int) -> list[subprocess.CompletedProcess[str]]:
    """Runs the program as processes 0, 1, ... at once, two devices each."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_DEFAULT_MATMUL_PRECISION": "float32"}
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for index in range(count)
    ]
    done = []
    try:
        for process in started:
            out, err = process.communicate(timeout=400)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return done


def test_a_third_process_is_missing() -> None:
    """An error that names it, in both others, instead of the abort that JAX's own start-up ends in."""
    for run in processes(ALONE, 2):
        assert run.returncode == 1
        assert "TimeoutError: of 3 processes 1 did not reach coordinator 127.0.0.1:" in run.stderr
        assert "missing 2; present 0 on" in run.stderr


@pytest.mark.slow
def test_decoding() -> None:
    expected: list[Completion] = on_one_device("autoregressive", 0.0)
    for index, run in enumerate(processes(DECODE, 2)):
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout.splitlines()[-1])
        assert f"4 x cpu (cpu) in 2 processes; this is process {index} with 2 devices" in found["topology"]
        assert [tuple(text) for text in found["texts"]] == [c.tokens for c in expected]
