"""Partition rules by path, preset and shape, on meshes that need no devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from specjax.decoding.state import init_statistics
from specjax.models import ModelConfig, RopeConfig, graph, init_cache, pack
from specjax.parallel import (
    PRESETS,
    Role,
    batch_shardings,
    param_shardings,
    replicated,
    spread_rows,
    state_shardings,
)


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))


def params(**changes: Any) -> Any:
    shape = dict(hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, vocab_size=64)
    shape |= dict(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, post_norms=True)
    shape |= changes
    config = ModelConfig(
        family="llama",
        head_size=shape["vocab_size"],
        num_layers=2,
        head_dim=8,
        max_position=64,
        norm_eps=1e-5,
        query_scale=1.0,
        windows=(None,) * 2,
        ropes=(RopeConfig(),) * 2,
        **shape,
    )
    return graph(config)[1]


def specs(shardings: Any) -> dict[str, PartitionSpec]:
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x.spec for path, x in leaves}


P = PartitionSpec
EXPECTED = {  # of one layer and what surrounds it: fsdp=2 and tensor=2
    "embed/embedding": P("tensor", "fsdp"),
    "lm_head/kernel": P("fsdp", "tensor"),
    "final_norm/weight": P(),
    "layers/0/attn/q/kernel": P("fsdp", "tensor"),
    "layers/0/attn/k/kernel": P("fsdp", "tensor"),
    "layers/0/attn/v/kernel": P("fsdp", "tensor"),
    "layers/0/attn/o/kernel": P("tensor", "fsdp"),
    "layers/0/attn/q/bias": P("tensor"),
    "layers/0/attn/k/bias": P("tensor"),
    "layers/0/attn/v/bias": P("tensor"),
    "layers/0/attn/o/bias": P(),
    "layers/0/attn/q_norm/weight": P(),
    "layers/0/attn/k_norm/weight": P(),
    "layers/0/attn_norm/weight": P(),
    "layers/0/mlp_norm/weight": P(),
    "layers/0/attn_post_norm/weight": P(),
    "layers/0/mlp_post_norm/weight": P(),
    "layers/0/mlp/gate/kernel": P("fsdp", "tensor"),
    "layers/0/mlp/up/kernel": P("fsdp", "tensor"),
    "layers/0/mlp/down/kernel": P("tensor", "fsdp"),
    "layers/0/mlp/gate/bias": P("tensor"),
    "layers/0/mlp/up/bias": P("tensor"),
    "layers/0/mlp/down/bias": P(),
}


def without(axis: str, spec: PartitionSpec) -> PartitionSpec:
    kept = [None if entry == axis else entry for entry in spec]
    while kept and kept[-1] is None:
        kept.pop()
    return P(*kept)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_leaf_of_a_decoder(preset: str) -> None:
    found = specs(param_shardings(params(), mesh(2, 2, 2), preset, head_dim=8))
    absent = {"dp": ("fsdp", "tensor"), "fsdp": ("tensor",), "tp": ("fsdp",), "fsdp_tp": ()}[preset]
    for path, spec in EXPECTED.items():
        for axis in absent:
            spec = without(axis, spec)
        assert (path, found[path]) == (path, spec)
    assert {path.replace("layers/1", "layers/0") for path in found} == set(EXPECTED)


def test_axes_of_size_one_are_left_out() -> None:
    """XLA hands shardings back without them; another spelling would compile every step twice."""
    found = specs(param_shardings(params(), mesh(4, 1, 2), "fsdp_tp", head_dim=8))
    assert found["layers/0/attn/q/kernel"] == P(None, "tensor")
    assert found["layers/0/attn/o/kernel"] == P("tensor")


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.chain(optax.clip(1.0), optax.adamw(1e-3))])
def test_moments_lie_as_their_parameters(optimizer: optax.GradientTransformation) -> None:
    state = jax.eval_shape(optimizer.init, params())
    found = specs(param_shardings(state, mesh(1, 2, 2), "fsdp_tp", head_dim=8))
    moments = {path: spec for path, spec in found.items() if "/mu/" in path or "/nu/" in path}
    assert len(moments) == 2 * len(jax.tree.leaves(params()))
    for path, spec in moments.items():
        tail = path.split("/mu/")[-1].split("/nu/")[-1].replace("layers/1", "layers/0")
        assert (path, spec) == (path, EXPECTED[tail])
    assert {spec for path, spec in found.items() if path.endswith("count")} == {P()}


def test_factored_moments_are_whole() -> None:
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, params())
    found = specs(param_shardings(state, mesh(1, 2, 2), "fsdp_tp", head_dim=8))
    factored = [path for path in found if path.endswith("v_row/layers/0/attn/q/kernel")]
    assert factored
    assert found[factored[0]] == P()


def test_one_error_lists_all_that_does_not_divide() -> None:
    tree = params(num_heads=9, num_kv_heads=3, hidden_size=72, vocab_size=259, intermediate_size=130)
    with pytest.raises(ValueError) as error:
        param_shardings(tree, mesh(1, 16, 4), "fsdp_tp", head_dim=8)
    message = str(error.value)
    assert message.startswith("preset 'fsdp_tp' does not fit the mesh (data=1, fsdp=16, tensor=4):")
    for line in (
        "259 vocabulary entries are not divisible by tensor=4: embed/embedding and 1 more",
        "72 hidden units are not divisible by fsdp=16: embed/embedding and 15 more",
        "9 heads are not divisible by tensor=4: layers/0/attn/o/kernel and 5 more",
        "3 kv heads are not divisible by tensor=4: layers/0/attn/k/bias and 7 more",
        "130 MLP columns are not divisible by tensor=4",
    ):
        assert line in message
    assert message.count("\n") == 5


def test_heads_stay_whole() -> None:
    """2 kv heads of 8 make 16 columns, which 4 divides; the heads it does not."""
    with pytest.raises(ValueError, match="2 kv heads are not divisible by tensor=4"):
        param_shardings(params(), mesh(tensor=4), "tp", head_dim=8)


def test_head_dim_is_asked_for_where_it_matters() -> None:
    assert param_shardings(params(), mesh(fsdp=2), "fsdp")
    assert param_shardings(params(), mesh(data=2), "tp")
    with pytest.raises(ValueError, match="head_dim is needed to split heads over tensor=2"):
        param_shardings(params(), mesh(tensor=2), "tp")
    with pytest.raises(ValueError, match="32 columns are not whole heads of head_dim=12"):
        param_shardings(params(), mesh(tensor=2), "tp", head_dim=12)


def test_unknown_names() -> None:
    with pytest.raises(
        ValueError, match="unknown sharding preset 'fdsp'; did you mean 'fsdp'. known: dp, fsdp, tp, fsdp_tp"
    ):
        param_shardings(params(), mesh(), "fdsp")
    with pytest.raises(ValueError, match="unknown sharding preset 'ddp'"):
        state_shardings({}, mesh(), "dp", drafter="ddp")
    with pytest.raises(ValueError, match="has the axes data, fsdp, tensor, not batch, model"):
        param_shardings(params(), AbstractMesh((1, 1), ("batch", "model")), "dp")
    with pytest.raises(ValueError, match="role 'fc/kernel' has the dimension 'hiden'; known: hidden, heads"):
        Role("fc/kernel", ("hiden", None))


def test_weights_with_names_of_their_own() -> None:
    tree = {"blocks": {"kernel": jnp.zeros((4, 8, 8)), "scale": jnp.zeros(8)}, "fc": {"kernel": jnp.zeros((8, 6))}}
    assert set(specs(param_shardings(tree, mesh(fsdp=2), "dp")).values()) == {P()}
    with pytest.raises(ValueError, match="2 dimensions expected, not 4x8x8"):
        param_shardings(tree, mesh(fsdp=2), "fsdp")
    with pytest.raises(ValueError, match="no role says what the dimensions 2x2 are .give it in `roles`.: mix"):
        param_shardings({"mix": jnp.zeros((2, 2))}, mesh(fsdp=2), "fsdp")
    roles = (Role("blocks/kernel", (None, "hidden", "intermediate")),)
    found = specs(param_shardings(tree, mesh(fsdp=2, tensor=4), "fsdp_tp", roles=roles))
    assert found == {"blocks/kernel": P(None, "fsdp", "tensor"), "blocks/scale": P(), "fc/kernel": P("fsdp")}


def test_packed_weights_are_refused() -> None:
    packed = jax.eval_shape(pack, params())
    with pytest.raises(ValueError, match="packed weights are for one CPU device"):
        param_shardings(packed, mesh(tensor=2), "tp", head_dim=8)


def state(rows: int, kv_heads: int) -> Any:
    config = ModelConfig(
        family="llama",
        vocab_size=8,
        head_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        max_position=64,
        norm_eps=1e-5,
        query_scale=1.0,
        windows=(None,),
        ropes=(None,),
    )
    cache = jax.eval_shape(lambda: init_cache(config, rows, 16))
    statistics = jax.eval_shape(lambda: init_statistics(rows, 3))
    return {"tokens": jnp.zeros((rows, 16)), "cache": cache, "drafter": {"cache": cache}, "statistics": statistics}


def test_decoding_state() -> None:
    found = specs(state_shardings(state(8, 4), mesh(2, 2, 2), "tp"))
    assert found["tokens"] == found["cache/length"] == found["statistics/steps"] == P(("data", "fsdp"))
    assert found["cache/layers/0/k"] == found["cache/layers/0/v"] == P(("data", "fsdp"), None, "tensor")
    assert found["drafter/cache/layers/0/k"] == P(("data", "fsdp"))
    found = specs(state_shardings(state(8, 4), mesh(4, 1, 2), "dp", drafter="fsdp_tp"))
    assert found["cache/layers/0/k"] == P("data")
    assert found["drafter/cache/layers/0/k"] == P("data", None, "tensor")


def test_a_state_that_does_not_fit() -> None:
    with pytest.raises(ValueError) as error:
        state_shardings(state(6, 3), mesh(2, 2, 2), "tp")
    message = str(error.value)
    assert "6 rows are not divisible by data=2*fsdp=2: cache/layers/0/k and 11 more" in message
    assert "3 kv heads are not divisible by tensor=2: cache/layers/0/k and 1 more" in message


def test_batches_and_tables() -> None:
    batch = {"tokens": jnp.zeros((8, 5)), "step": jnp.zeros(())}
    assert specs(batch_shardings(batch, mesh(2, 4, 1))) == {"tokens": P(("data", "fsdp")), "step": P()}
    assert specs(replicated(batch, mesh(2, 4, 1))) == {"tokens": P(), "step": P()}
    with pytest.raises(ValueError, match="8 rows are not divisible by data=3"):
        batch_shardings(batch, mesh(data=3))


def test_nothing_is_held_without_a_mesh() -> None:
    tree = {"x": jnp.zeros((3, 2))}
    assert spread_rows(tree) is tree
