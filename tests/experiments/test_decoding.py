"""Tau while a drafter is trained: what the drafter that would be saved really does."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from experiments import _main
from experiments._decoding import measuring, with_decoding
from specjax.evaluation.prompts import Prompt
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import TextRows, lay_out, pack
from specjax.training.objectives import Distill
from tests.training import common


def test_a_copy_of_the_target_is_accepted_whole_and_a_poor_draft_is_not(tmp_path) -> None:
    target = tiny_target(layers=1, width=16)
    size = target.config.vocab_size
    rows = TextRows(lay_out(pack(common.documents(target, 4), 96)[0], 96))
    objective = Distill(common.student(target, layers=(0,), intermediate_size=32, draft_vocab=size))
    trainer = Trainer(
        target=target,
        objective=objective,
        tables={"vocab": jnp.arange(size, dtype=jnp.int32)},
        optimizer=OptimizerConfig(learning_rate=1e-2, steps=2),
        config=TrainerConfig(steps=2, batch=1, best="decode/tau"),
        train=rows,
        held_out={},
    )
    with pytest.raises(ValueError, match="best='decode/tau' names no held-out set; .* of the sets none"):
        trainer.claim(tmp_path / "none", {})
    prompts = [Prompt(str(i), "made", (text,)) for i, text in enumerate(("a tree", "the loop runs"))]
    measured = dataclasses.replace(
        trainer, measures={"decode": measuring(target, objective, trainer.tables, prompts, 24)}
    )
    measured.claim(tmp_path / "run", {})
    params = measured.init().params
    good = measured.evaluate(params)["decode/tau"]
    # Four drafted and one more; a little less for the bfloat16 that is saved, and for the budget's end.
    assert 3.5 < good <= 5
    gate = params["layers"][0]["mlp"]["gate"]["kernel"]
    params["layers"][0]["mlp"]["gate"]["kernel"] = -5 * gate
    params["final_norm"]["weight"] = -params["final_norm"]["weight"]
    assert 1 <= measured.evaluate(params)["decode/tau"] < good - 1


def test_without_prompts_nothing_is_decoded() -> None:
    console = _main.console()
    config = ConfigDict({"decoding": {"prompts": "", "prompts_per_category": 1, "max_new_tokens": 48}})
    assert with_decoding("trainer", config, None, console) == "trainer"
    assert with_decoding("trainer", ConfigDict({"seed": 0}), None, console) == "trainer"
