"""The decoding loop on eight devices gives the tokens of one device, with weights and caches really split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

from specjax.decoding import Completion, DecodeState, Loop, Weights, generate, prefill, read_row
from specjax.drafting import Autoregressive, DraftModel, PromptLookup
from specjax.models import graph
from specjax.parallel import make_mesh, state_shardings
from specjax.verification import Greedy, OneHot, Recursive
from tests.distributed.common import (
    DRAFT,
    ROWS,
    TARGET,
    VOCAB,
    bytes_on_one_device,
    collectives,
    draft_params,
    max_steps,
    place,
    random_params,
    requests,
)

DRAFTERS = {"autoregressive": Autoregressive(), "prompt_lookup": PromptLookup(3), "draft_model": DraftModel(DRAFT, 3)}
MESHES = {  # sizes, preset of the target, of the drafter
    "dp": ((8, 1, 1), "dp", "dp"),
    "tp": ((4, 1, 2), "tp", "dp"),
    "fsdp_tp": ((2, 2, 2), "fsdp_tp", "fsdp_tp"),
}


@functools.cache
def program(name: str, temperature: float) -> tuple[Loop, Weights]:
    drafter: Any = DRAFTERS[name]
    kinds = {"autoregressive": OneHot, "prompt_lookup": OneHot, "draft_model": Recursive}
    rule = Greedy(drafter.depth) if not temperature else kinds[name](drafter.depth)
    params = draft_params() if name == "draft_model" else {}
    return Loop(graph(TARGET)[0], drafter, rule, eos=(0,)), Weights(random_params(0), params, {})


def start(name: str, temperature: float, weights: Weights) -> DecodeState:
    return prefill(program(name, temperature)[0], weights, requests(temperature), context=512, seed=3)


def rows(state: DecodeState) -> list[Completion]:
    return [read_row(state, row) for row in range(ROWS)]


@functools.cache
def on_one_device(name: str, temperature: float) -> list[Completion]:
    loop, weights = program(name, temperature)
    return rows(loop.run(weights, start(name, temperature, weights), max_steps(100)))


def check_places(state: DecodeState, expected: Any) -> None:
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True)
    wrong = [
        f"{jax.tree_util.keystr(path)}: {x.sharding.spec}, not {sharding.spec}"
        for (path, x), sharding in pairs
        if x.size and not x.sharding.is_equivalent_to(sharding, x.ndim)
    ]
    assert wrong == []


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh_name", "name", "temperature"),
    [
        ("dp", "prompt_lookup", 0.0),
        ("dp", "draft_model", 0.4),
        ("tp", "prompt_lookup", 0.4),
        ("tp", "draft_model", 0.0),
        ("fsdp_tp", "autoregressive", 0.0),
        pytest.param("dp", "autoregressive", 0.0, marks=SLOW),
        pytest.param("dp", "autoregressive", 0.4, marks=SLOW),
        pytest.param("tp", "autoregressive", 0.0, marks=SLOW),
        pytest.param("dp", "prompt_lookup", 0.4, marks=SLOW),
        pytest.param("dp", "draft_model", 0.0, marks=SLOW),
        pytest.param("tp", "autoregressive", 0.4, marks=SLOW),
        pytest.param("tp", "prompt_lookup", 0.0, marks=SLOW),
        pytest.param("tp", "draft_model", 0.4, marks=SLOW),
        pytest.param("fsdp_tp", "draft_model", 0.4, marks=SLOW),
    ],
)
def test_tokens_of_one_device(mesh_name: str, name: str, temperature: float) -> None:
    sizes, preset, drafter_preset = MESHES[mesh_name]
    mesh, (loop, weights) = make_mesh(*sizes), program(name, temperature)
    placed = place(weights, mesh, preset, drafter_preset)
    with jax.set_mesh(mesh):
        state = start(name, temperature, placed)
        places = state_shardings(state, mesh, preset, drafter=drafter_preset)
        check_places(state, places)
        consumed = jax.tree.leaves(state)
        state = loop.run(placed, state, max_steps(2))
        programs = Loop.run._cache_size()
        state = loop.run(placed, state, max_steps(100))
    check_places(state, places)
    assert all(x.is_deleted() for x in consumed)  # donated: no second cache beside the first
    assert Loop.run._cache_size() == programs  # what a step returns lies as what it took
    shares = 8 if preset != "dp" else sizes[0]
    layer = state.cache.layers[0]
    assert bytes_on_one_device(layer) * shares == layer.k.nbytes + layer.v.nbytes

    found = rows(state)
    # Greedy and one-hot verification are exact token for token, so plain decoding on one device stands for them.
    recursive = name == "draft_model" and temperature > 0
    expected = on_one_device("draft_model" if recursive else "autoregressive", temperature)
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (row, ours.tokens, ours.finish) == (row, theirs.tokens, theirs.finish)
        if recursive:
            assert (ours.steps, ours.accepted.tolist()) == (theirs.steps, theirs.accepted.tolist())
    if name != "autoregressive":
        assert sum(c.emitted for c in found) > sum(c.steps for c in found)


def test_data_parallel_rows_need_no_word_from_each_other() -> None:
    """The devices only agree on when to stop, and on how long the longest row is."""
    mesh, (loop, weights) = make_mesh(8), program("prompt_lookup", 0.0)
    placed = place(weights, mesh, "dp", "dp")
    with jax.set_mesh(mesh):
        state = start("prompt_lookup", 0.0, placed)
        text = Loop.run.lower(loop, placed, state, max_steps(100)).compile().as_text()
    found = collectives(text)
    assert found
    assert {shape for _, shape in found} == {()}


def test_refill_of_finished_rows() -> None:
    """More requests than rows: single prefilled rows enter a batch that is spread over the devices."""
    mesh, (loop, weights) = make_mesh(4, 1, 2), program("autoregressive", 0.0)
    placed = place(weights, mesh, "tp", "dp")
    asked = requests(0.0)
    with jax.set_mesh(mesh):
        found = generate(loop, placed, asked, context=512, vocab=VOCAB, seed=3, batch=4)
    assert [c.tokens for c in found] == [c.tokens for c in on_one_device("autoregressive", 0.0)]


def test_rows_that_do_not_divide_are_refused() -> None:
    mesh, (loop, weights) = make_mesh(8), program("autoregressive", 0.0)
    placed = place(weights, mesh, "dp", "dp")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="6 rows are not divisible by data=8"):
        prefill(loop, placed, requests(0.0)[:6], context=512, seed=3)
