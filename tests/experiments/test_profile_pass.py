from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments import profile_pass
from experiments._tight_loop import check_supported, tight_loop
from specjax import build
from specjax.decoding import Request, make_sampling, prefill
from specjax.drafting import PromptLookup
from specjax.models import Target
from specjax.testing import tiny_target


def tiny_config(tiny: Path, **more):
    options = {
        "target.source": f"{tiny}/target", "tokens": (1, 3), "capacities": (256, 512), "valid_lengths": (16, 300),
        "read_mib": 16, "layouts": ("packed",),
    }  # fmt: skip
    return build.load_config("configs/profile_pass.py", "quick", options | more)


@pytest.mark.parametrize("lookup", [None, PromptLookup(3)])
def test_the_hand_written_loop_writes_what_the_library_writes(lookup: PromptLookup | None) -> None:
    target: Target = tiny_target()
    drafting = build.make_drafter("prompt_lookup", target, num_nodes=3) if lookup else None
    drafting = drafting or build.make_drafter("autoregressive", target)
    loop, weights = build.make_loop(target, drafting, make_sampling([0.0]))
    loop = dataclasses.replace(loop, eos=())
    state = prefill(loop, weights, [Request((5, 9, 5, 9, 7), 21)], context=target.context, seed=0)
    caches = tuple((layer.k[0, :64], layer.v[0, :64]) for layer in state.cache.layers)
    tokens, length = state.tokens[0], state.length[0]
    _, tight = tight_loop(target.graph, "float32", target.params, caches, tokens, length, jnp.int32(20), lookup)
    ours = loop.run(weights, state, jnp.int32(20))
    assert tight[:26].tolist() == ours.tokens[0, :26].tolist()
    assert len(set(tight[6:26].tolist())) > 3


def test_models_that_the_hand_written_loop_does_not_cover() -> None:
    config = tiny_target().config
    check_supported(config)
    with pytest.raises(ValueError, match="does not cover sliding windows, norms of queries and keys"):
        check_supported(dataclasses.replace(config, windows=(4, None), qk_norm=True))


def test_every_table_is_written(tiny: Path, in_workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_pass.main(tiny_config(tiny))
    found = json.loads((in_workdir / "profile.json").read_text())
    assert found["meta"]["schema"] == "specjax.profile/1"
    assert [row["tokens"] for row in found["tokens"]] == [1, 3]
    assert [row["batch"] for row in found["batch"]] == [1, 2]
    assert [row["capacity"] for row in found["capacity"]] == [256, 512]
    assert [row["valid_length"] for row in found["valid_length"]] == [16, 300]
    for table in ("tokens", "batch", "capacity", "valid_length"):
        assert found[table][0]["ratio"] == 1.0 and all(row["seconds"] > 0 for row in found[table])
    assert found["bandwidth_bytes_per_second"] > 1e8
    forms = [(row["form"], row["nodes"]) for row in found["tight_loop"]]
    assert forms == [("plain", 0), ("chain", 4), ("chain as a tree", 4)]
    share = found["weight_bytes"] / found["tokens"][0]["seconds"] / found["bandwidth_bytes_per_second"]
    assert found["tokens"][0]["bandwidth_share"] == pytest.approx(share)
    out = capsys.readouterr().out
    assert "t(T), batch 1" in out and "hand-written" in out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tokens": ()}, "tokens is empty"),
        ({"batches": (0,)}, "expected numbers of at least 1"),
        ({"layouts": ("packd",)}, "layout 'packd'; expected some of plain, packed"),
        ({"capacities": (128,)}, "capacity 128 has no room for valid_length and tokens"),
        ({"rounds": 0}, "rounds, repeat and read_mib must be at least 1"),
    ],
)
def test_settings_are_checked(tiny: Path, in_workdir: Path, wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        profile_pass.main(tiny_config(tiny, **wrong))
    assert not in_workdir.exists()


def test_an_embedding_that_only_looks_up_is_not_read_by_a_pass() -> None:
    target = tiny_target()
    total = sum(x.nbytes for x in jax.tree.leaves(target.params))
    assert profile_pass.weight_bytes(target) == total - target.config.vocab_size * target.config.hidden_size * 4
    tied = dataclasses.replace(target, config=dataclasses.replace(target.config, tie_embeddings=True))
    assert profile_pass.weight_bytes(tied) == total
