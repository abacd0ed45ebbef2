"""Two real processes with two devices each, over gloo."""

from __future__ import annotations

import json

import pytest

from specjax.decoding import Completion
from tests.distributed.processes import Ended, finish, free_port, start
from tests.distributed.test_decoding import on_one_device

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


def processes(program: str) -> list[Ended]:
    """Runs the program as processes 0 and 1 at once, two devices each."""
    address = f"127.0.0.1:{free_port()}"
    return finish(start([["-c", program, address, str(index)] for index in range(2)], devices=2))


def test_a_third_process_is_missing() -> None:
    """An error that names it, in both others, instead of the abort that JAX's own start-up ends in."""
    for code, _, said in processes(ALONE):
        assert code == 1
        assert "TimeoutError: of 3 processes 1 did not reach coordinator 127.0.0.1:" in said
        assert "missing 2; present 0 on" in said


@pytest.mark.slow
def test_decoding() -> None:
    expected: list[Completion] = on_one_device("autoregressive", 0.0)
    for index, (code, out, said) in enumerate(processes(DECODE)):
        assert code == 0, said
        found = json.loads(out.splitlines()[-1])
        assert f"4 x cpu (cpu) in 2 processes; this is process {index} with 2 devices" in found["topology"]
        assert [tuple(text) for text in found["texts"]] == [c.tokens for c in expected]
