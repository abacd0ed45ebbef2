"""Multi-token modules under the names of DeepSeek-V3, MiMo and Qwen3-Next, on synthetic weights."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.build import make_drafter
from specjax.checkpoints.drafters import SavedDrafter
from specjax.checkpoints.formats import read_head
from specjax.checkpoints.formats.mtp import LAYOUTS, read_mtp, write_mtp
from specjax.checkpoints.formats.tensors import read_tensors, write_tensors
from specjax.models import merge
from specjax.models.mtp import init_mtp, mtp_config, mtp_graph
from specjax.testing import tiny_target


@functools.cache
def target() -> Any:
    return tiny_target(width=16)


def drafter(depth: int = 1, **options: Any) -> SavedDrafter:
    """Random modules, every norm its own, in numbers that bfloat16 holds."""
    config = mtp_config(target().config, depth=depth, kind="sequential", **options)
    leaves, structure = jax.tree.flatten(init_mtp(config, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    # Eighths between 1 and 2: exact in bfloat16, with and without an offset of 1.
    drawn = [1 + jax.random.randint(k, x.shape, 0, 8) / 8 for k, x in zip(keys, leaves, strict=True)]
    return SavedDrafter("mtp", config, jax.tree.unflatten(structure, drawn), {}, ())


@pytest.mark.parametrize(("layout", "depth"), [("deepseek", 2), ("mimo", 2), ("qwen3_next", 1)])
def test_round_trip(tmp_path: Any, layout: str, depth: int) -> None:
    saved = drafter(depth, feedback=LAYOUTS[layout].feedback)
    assert write_mtp(tmp_path, saved, target(), layout) == ["model.safetensors", "config.json"]
    loaded = read_mtp(tmp_path, target())
    assert loaded.config == saved.config and loaded.info == {"layout": layout, "dtype": "bfloat16"}
    same = jax.tree.map(lambda a, b: bool((a == b).all()), loaded.params, saved.params)
    assert all(jax.tree.leaves(same))


def test_a_shared_module_stays_shared(tmp_path: Any) -> None:
    saved = drafter(3, shared=True)
    write_mtp(tmp_path, saved, target(), "deepseek")
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert read_head(tmp_path, target()).config == saved.config
    assert make_drafter("mtp", target(), source=str(tmp_path)).drafter.num_nodes == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_published_module_drafts_as_many_tokens_as_are_asked_for(tmp_path: Any, layout: str) -> None:
    """Told by the names of its tensors; what it hands on is what the layout's own code hands on."""
    write_mtp(tmp_path, drafter(), target(), layout)
    (tmp_path / "config.json").unlink()
    assert make_drafter("mtp", target(), source=str(tmp_path)).drafter.depth == 1
    made = make_drafter("mtp", target(), source=str(tmp_path), num_nodes=3)
    config, feedback = made.drafter.config, {"deepseek": "hidden"}.get(layout, "normed")
    assert (config.depth, config.num_modules, config.feedback) == (3, 1, feedback)
    plain = dataclasses.replace(config, feedback="hidden")
    net, other = (merge(mtp_graph(c)[0], made.params) for c in (config, plain))
    h, e = jax.random.normal(jax.random.key(0), (2, 1, 5, 16))
    at = (jnp.arange(5)[None], jnp.ones((1, 5), jnp.int32))
    decoder = merge(target().graph, target().params)
    handed_on, hidden = net.full(1, h, e, *at), other.full(1, h, e, *at)
    read = other.normed(1, hidden, decoder)
    np.testing.assert_array_equal(net.normed(1, handed_on, decoder), read)
    np.testing.assert_array_equal(handed_on, read if feedback == "normed" else hidden)
    assert not np.allclose(read, hidden)


def test_what_a_layout_cannot_hold(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="feedback='hidden' .* 'mimo' feed back 'normed'. Expected layout deepseek"):
        write_mtp(tmp_path, drafter(3, shared=True), target(), "mimo")
    with pytest.raises(ValueError, match="a draft vocabulary of 8 of .* has no place for one. Write layout 'specjax'"):
        write_mtp(tmp_path, drafter(3, shared=True, draft_vocab=8), target(), "deepseek")
    heads = mtp_config(target().config, depth=1, kind="independent")
    with pytest.raises(ValueError, match="kind='independent': layout 'mimo' holds sequential modules"):
        write_mtp(tmp_path, SavedDrafter("mtp", heads, init_mtp(heads, jax.random.key(0)), {}, ()), target(), "mimo")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_joint_reads_what_its_layout_says(tmp_path: Any, layout: str) -> None:
    """From the stored tensors: norms, the order of token and hidden state, and the projection."""
    write_mtp(tmp_path, drafter(), target(), layout)
    tensors = {k: np.asarray(v, np.float32) for k, v in read_tensors(tmp_path / "model.safetensors").items()}
    own = LAYOUTS[layout]
    prefix = own.joint.format(k=0, at=target().config.num_layers)
    token, hidden, joint, _ = (tensors[f"{prefix}{part}.weight"] for part in own.parts)
    rng = np.random.default_rng(0)
    h, e = rng.normal(size=(2, 5, 16)).astype(np.float32)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (weight + own.offset)

    parts = [norm(e, token), norm(h, hidden)]
    expected = np.concatenate(parts if own.token_first else parts[::-1], axis=-1) @ joint.T
    loaded = read_mtp(tmp_path, target())
    module = merge(mtp_graph(loaded.config)[0], loaded.params).module(1)
    np.testing.assert_allclose(module.join(jnp.asarray(h), jnp.asarray(e)), expected, rtol=1e-4, atol=1e-4)


def rewritten(directory: Any, change: Any, layout: str = "deepseek") -> Any:
    write_mtp(directory, drafter(), target(), layout)
    tensors = read_tensors(directory / "model.safetensors")
    write_tensors(directory / "model.safetensors", change(dict(tensors)))
    return directory


def without(name: str) -> Any:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def test_missing_and_misshapen_tensors_are_named_together(tmp_path: Any) -> None:
    layer = f"model.layers.{target().config.num_layers}."

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return without(layer + "hnorm.weight")(tensors) | {layer + "eh_proj.weight": np.zeros((16, 16), np.float32)}

    with pytest.raises(ValueError, match=r"hnorm.weight.*") as caught:
        read_mtp(rewritten(tmp_path, change), target())
    assert f"{layer}eh_proj.weight has shape [16, 16], expected [16, 32]" in str(caught.value)


def test_bodies_of_other_families_are_refused(tmp_path: Any) -> None:
    layer = f"model.layers.{target().config.num_layers}."
    extra = {layer + "self_attn.kv_a_proj_with_mqa.weight": np.zeros((4, 16), np.float32)}
    with pytest.raises(ValueError, match="kv_a_proj_with_mqa.*family 'llama' has no such layer"):
        read_mtp(rewritten(tmp_path, lambda tensors: tensors | extra), target())


def test_a_repeated_embedding_must_be_the_targets(tmp_path: Any) -> None:
    layer = f"model.layers.{target().config.num_layers}."
    own = np.asarray(target().params["embed"]["embedding"])
    read_mtp(rewritten(tmp_path, lambda t: t | {layer + "embed_tokens.weight": own}), target())
    with pytest.raises(ValueError, match=r"embed_tokens.weight is not the target's own"):
        read_mtp(rewritten(tmp_path, lambda t: t | {layer + "embed_tokens.weight": own + 1}), target())


def test_an_unknown_layout_says_what_is_known(tmp_path: Any) -> None:
    write_tensors(tmp_path / "model.safetensors", {"model.layers.7.eh_proj.weight": np.zeros((2, 4), np.float32)})
    with pytest.raises(ValueError, match=r"\(deepseek, mimo, qwen3_next\) \(modules at layers \[7\], but the target"):
        read_mtp(tmp_path, target())
    with pytest.raises(ValueError, match="layout='glm'; expected deepseek, mimo, qwen3_next"):
        write_mtp(tmp_path, drafter(), target(), "glm")
    with pytest.raises(ValueError, match="'qwen3_next' has one joint for all modules; there are 2"):
        write_mtp(tmp_path, drafter(2, feedback="normed"), target(), "qwen3_next")
