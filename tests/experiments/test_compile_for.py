"""Drafters from shapes alone, and what they are compiled for."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

from configs.compile_for import DRAFTERS
from experiments._abstract import abstract_target, decode_drafter, ints, objective_of
from experiments.compile_for import abstract
from specjax import build
from specjax.decoding import Loop, make_sampling
from specjax.drafting import registry
from specjax.models import merge
from specjax.testing.carried import carried
from specjax.testing.sequences import four_token_target

# Made of a text, of another tokenizer, or around another drafter.
LEFT_OUT = {"adaptive", "other_tokenizer", "retrieval"}


def test_every_method_has_its_shapes_but_those_that_need_a_text() -> None:
    assert set(DRAFTERS) | LEFT_OUT == set(registry.DRAFTERS)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_for_8b_is_made_without_weights(name: str) -> None:
    config = build.load_config("configs/compile_for.py", f"llama3_8b,decode,{name}")
    target = abstract_target(config.model, config.dtype)
    drafter = decode_drafter(config.drafter.to_dict(), target, objective_of(config, target))
    rule = build.make_rule(None, drafter, make_sampling([1.0]))
    assert drafter.num_nodes <= 60 and drafter.kind(make_sampling([1.0])) in rule.exact_for
    params, _ = jax.eval_shape(lambda p: drafter.init_params(jax.random.key(0), merge(target.graph, p)), target.params)
    assert {x.dtype for x in jax.tree.leaves(params)} <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}


def test_what_cannot_be_made_is_said() -> None:
    target = abstract_target("smollm2", "float32")
    with pytest.raises(ValueError, match="'retrieval' cannot be made from shapes alone .it needs trained weights, or"):
        decode_drafter({"name": "retrieval"}, target)
    with pytest.raises(ValueError, match="drafter 'early_exit' does not take these options .*: .*'nodes'"):
        decode_drafter({"name": "early_exit", "exit_layer": 1, "nodes": 2}, target)
    with pytest.raises(ValueError, match="expected one model, one of decode, train, and one drafter of"):
        build.load_config("configs/compile_for.py", "llama3_8b,eagle,medusa")


@pytest.mark.parametrize(("name", "temperature"), [("eagle2", 1.0), ("medusa", 0.0)])
def test_the_decoding_loop_lowers_for_gpus(name: str, temperature: float) -> None:
    """Without one: what is written for CPUs must not be in it."""
    target, sampling = four_token_target(), make_sampling([temperature] * 2)
    loop, weights = build.make_loop(target, carried(target)[0][name], sampling)
    shapes = [abstract(tree) for tree in (weights, sampling)]
    keys = jax.ShapeDtypeStruct((2, 2), jnp.uint32)
    state = jax.eval_shape(loop.prefill, shapes[0], ints(2, 128), ints(2), ints(2), shapes[1], keys)
    run = jax.jit(lambda weights, state, steps: Loop.run(loop, weights, state, steps))
    exported = export.export(run, platforms=["cuda"])(shapes[0], state, ints())
    text = exported.mlir_module()
    assert exported.platforms == ("cuda",) and "stablehlo.while" in text
    assert not re.findall(r"custom_call @(specjax\w*|\w*matmul\w*|\w*attention\w*)", text)
