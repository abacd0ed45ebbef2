"""What is read out of optimised programs, on programs whose answer is known."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from specjax import build, decoding
from specjax.decoding import Request, make_sampling
from specjax.evaluation.compiled import collectives, describe_program, whole_copies
from specjax.models.published import published_config
from specjax.parallel.slices import chip
from specjax.testing.carried import carried
from specjax.testing.sequences import four_token_target

PROGRAM = """HloModule m

%body (p: f32[2,8]) -> f32[2,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %all-reduce.1 = f32[2,8]{1,0} all-reduce(%p), to_apply=%add
  ROOT %copy.1 = f32[2,8]{0,1} copy(%all-reduce.1)
}

ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0} parameter(0)
  %gathered = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x), dimensions={0}
  %again = bf16[2,4]{1,0} all-reduce(%y), to_apply=%add
  %copy.2 = f32[2,8]{0,1} copy(%a)
}
"""


class Fake:
    """A compiled program that says what it was given."""

    def as_text(self):
        return PROGRAM

    def cost_analysis(self):
        return {"flops": 5.0, "bytes accessed": 7.0}

    def memory_analysis(self):
        class Memory:
            argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes = 100, 30, 20, 5

        return Memory


def test_collectives_by_kind_with_the_bytes_of_their_largest_operands():
    assert collectives(PROGRAM) == {"all-reduce": (2, 64 + 16), "all-gather": (1, 32)}


def test_copies_at_the_entry_are_no_copies_in_the_loop():
    assert len(whole_copies(PROGRAM, (2, 8))) == 2
    found = describe_program(Fake(), [(2, 8), (2, 8)])
    assert len(found.cache_copies) == 1 and "copy(%all-reduce.1)" in found.cache_copies[0]
    assert found.peak == 100 + 30 - 20 + 5
    assert (found.flops, found.accessed) == (5.0, 7.0)


def test_an_asynchronous_copy_is_a_copy_unless_it_goes_to_the_chip():
    layout, ends = "{3,2,1,0:T(8,128)(2,1)}", "u32[]{:S(2)}) copy-start(%leaf), cross_program_prefetch_index=0"
    away = f"  %copy-start.1 = (bf16[8,4112,1,128]{layout}, bf16[8,4112,1,128]{layout}, {ends}"
    ahead = away.replace("(2,1)}", "(2,1)S(1)}", 1)
    back = f"  %copy-start.3 = (bf16[8,4112,1,128]{layout}, bf16[8,4112,1,128]{layout[:-1]}S(1)}}, {ends}"
    other = away.replace("4112", "4113")
    found = whole_copies("\n".join((away, ahead, back, other)), (8, 4112, 1, 128))
    assert len(found) == 2 and all("copy-start(%leaf)" in line for line in found)


def test_a_real_program():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    compiled = jax.jit(lambda a, b: (a @ b, a + 1), donate_argnums=0).lower(x, x).compile()
    found = describe_program(compiled)
    assert found.arguments == 2 * 64 * 64 * 4 and found.aliased == 64 * 64 * 4
    assert found.flops >= 2 * 64**3 and not found.collectives


@pytest.mark.parametrize("name", ["draft_model", "eagle2"])
def test_the_decoding_loop_copies_no_cache(name):
    target, sampling = four_token_target(), make_sampling([0.0])
    loop, weights = build.make_loop(target, carried(target)[0][name], sampling)
    requests = [Request((1, 2, 3), 8), Request((1, 2), 8)]
    state = decoding.prefill(loop, weights, requests, context=target.context, seed=0, buffer=512)
    caches = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim == 4 and leaf.shape[1] >= 512}
    assert state.cache.layers[0].k.shape in caches
    found = describe_program(loop.run.lower(loop, weights, state, jnp.int32(4)).compile(), caches)
    assert not found.cache_copies
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert found.aliased >= 0.99 * held


def test_published_shapes():
    config = published_config("llama3_8b")
    assert (config.num_layers, config.hidden_size, config.num_kv_heads, config.dtype) == (32, 4096, 8, "bfloat16")
    assert published_config("meta-llama/Llama-3.1-8B-Instruct") == config
    with pytest.raises(ValueError, match="did you mean 'llama3_8b'"):
        published_config("llama3_8")


def test_unknown_slices_are_named():
    assert chip("v5e:2x4").memory == 16 << 30
    with pytest.raises(ValueError, match="topology 'v9:2x2' is unknown"):
        chip("v9:2x2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu")
@pytest.mark.parametrize(("arg", "axis"), [("smollm2,decode", "data"), ("smollm2,train", "fsdp")])
def test_compiling_for_a_slice_that_is_not_here(arg, axis, tmp_path):
    options = [f"--config.mesh.{name}={-1 if name == axis else 1}" for name in ("data", "fsdp", "tensor")]
    small = ["--config.train.batch=8", "--config.data.row_length=256", "--config.objective.draft_vocab=8192"]
    small.append("--config.objective.intermediate_size=1536")
    ran = subprocess.run(
        [sys.executable, "-m", "experiments.compile_for", f"--config=configs/compile_for.py:{arg}"]
        + [
            "--topology=v5e:2x2",
            f"--workdir={tmp_path}",
            *options,
            *small,
            "--config.objective.intermediate_size=1536",
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert all(row["fits"] and not row["cache_copies"] for row in rows)
