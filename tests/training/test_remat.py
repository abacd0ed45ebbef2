"""What is computed again in the backward pass: the same update, in less memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import Target, causal_view, init_cache, merge
from specjax.models.remat import POLICIES, rematerialised
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import TextRows, lay_out, pack
from specjax.training.objectives.registry import OBJECTIVES, PRETRAINING
from specjax.training.online import online_taps
from tests.training import common

LENGTH, STEPS = 128, 4
# XLA for CPUs takes the barriers out, and then finds the second computation to be the first.
BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}

# Objectives whose layers, or steps of a draft, are kept for the backward pass.
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"intermediate_size": 64, "draft_vocab": 16, "taps": (1, 3, 5), "steps": 5}),
    "lm": ("lm", {"layers": (0, 1, 2, 3, 4, 5), "intermediate_size": 64, "draft_vocab": 16}),
    "medusa2": ("medusa2", {"num_heads": 2}),
    "mtp": ("mtp", {"heads": 2}),
    "mtp_sequential": ("mtp", {"heads": 4, "kind": "sequential"}),
    "layerskip": ("layerskip", {}),
}


@functools.cache
def target() -> Target:
    return tiny_target(layers=6)


@functools.cache
def trainer(name: str, remat: str) -> Trainer:
    registered, options = MADE[name]
    pretraining = name not in ("eagle3", "lm")
    make = functools.partial(PRETRAINING[registered], steps=STEPS) if pretraining else OBJECTIVES[registered]
    objective = make(target(), **options)
    rows, _ = pack(common.documents(target(), 40), LENGTH)
    return Trainer(
        target=target(),
        objective=objective,
        tables={} if pretraining else {"vocab": jnp.asarray(common.vocabulary())},
        # What changes is the gradient itself.
        optimizer=OptimizerConfig(name="sgd", learning_rate=1.0, steps=STEPS, schedule="constant", clip=0.0),
        config=TrainerConfig(steps=STEPS, batch=4, best="", remat=remat),
        train=TextRows(lay_out(rows, LENGTH)),
        held_out={},
        online=online_taps(objective) if name == "eagle3" else None,
    )


@functools.cache
def update(name: str, remat: str) -> tuple[Any, dict[str, Any], int]:
    """Parameters after an update, its metrics, and bytes of the program's temporaries."""
    made = trainer(name, remat)
    batch = made.train.batch(np.arange(4))
    program = made.lower(batch).compile(compiler_options=BARRIERS)
    state, metrics = program(made.init(), made.target.params, made.tables, batch)
    return state.params, metrics, program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", MADE)
def test_loss_and_gradient_are_the_same_and_temporaries_smaller(name: str) -> None:
    plain, metrics, whole = update(name, "none")
    params, found, less = update(name, "full")
    start = trainer(name, "none").init().params
    assert float(found["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    size = float(metrics["grad_norm"])
    assert size > 1e-3 and float(found["grad_norm"]) == pytest.approx(size, rel=1e-6)
    for a, b, before in zip(*map(jax.tree.leaves, (params, plain, start)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1.0, float(jnp.max(jnp.abs(b - before)))))
    assert less < 0.8 * whole


def test_what_is_kept_takes_its_memory() -> None:
    full, no_batch, dots, whole = (update("eagle3", name)[2] for name in ("full", "dots_no_batch", "dots", "none"))
    assert full < no_batch < dots < whole
    for name in ("dots", "dots_no_batch"):
        loss = float(update("eagle3", name)[1]["loss"])
        assert loss == pytest.approx(float(update("eagle3", "none")[1]["loss"]), rel=1e-6)


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="remat='some': expected one of none, full, dots, dots_no_batch"):
        TrainerConfig(steps=1, batch=1, best="", remat="some")
    with pytest.raises(ValueError, match="remat='all'"), rematerialised("all"):
        pass
    assert all(TrainerConfig(steps=1, batch=1, best="", remat=name) for name in POLICIES)


def test_what_is_computed_twice_is_no_work_of_the_model() -> None:
    """MFU counts an update's operations as they would be without."""
    batch = trainer("lm", "none").train.batch(np.arange(4))
    assert trainer("lm", "full").flops(batch) == trainer("lm", "none").flops(batch)


def test_decoding_is_left_alone() -> None:
    """Its attention writes the cache, and nothing is kept for a backward pass."""
    network, tokens = merge(target().graph, target().params), jnp.ones((1, 3), jnp.int32)

    def run(tokens: jax.Array) -> Any:
        cache = init_cache(target().config, 1, 8)
        out, cache = network.cached(tokens, cache, causal_view(cache.length, 3))
        return out.hidden, cache.layers

    with rematerialised("full"):
        text = str(jax.make_jaxpr(run)(tokens))
    assert "dot_general" in text and "checkpoint" not in text
