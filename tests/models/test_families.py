"""Every family computes what transformers computes, from its own files and back again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from specjax.checkpoints import from_directory, save_target
from specjax.models import causal_view, init_cache, merge
from specjax.models.families import FAMILIES, config_from_hf, config_to_hf
from specjax.models.target import Target
from tests.models import tiny

LENGTH = 24
ALL_TAPS = (0, 1, 2, 3, "final", "normed")


def reference(model: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Logits, every hidden state and the last one before its norm, from transformers."""
    final: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: final.append(inputs[0]))
    with torch.no_grad():
        out = model(torch.tensor(ids), output_hidden_states=True)
    hook.remove()
    states = [state.numpy() for state in out.hidden_states]
    found = {str(i): state for i, state in enumerate(states[:-1])}
    last = final[0].numpy()
    return found | {str(len(states) - 1): last, "final": last, "normed": states[-1], "logits": out.logits.numpy()}


def full(target: Target, ids: np.ndarray) -> dict[str, np.ndarray]:
    @jax.jit
    def run(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        module = merge(target.graph, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        out = module.full(tokens, positions, jnp.zeros_like(positions), taps=ALL_TAPS)
        found = {str(tap): value for tap, value in out.taps.items()}
        return found | {"logits": module.logits(out.taps["normed"])}

    return {name: np.asarray(value) for name, value in run(target.params, jnp.asarray(ids)).items()}


def cached(target: Target, ids: np.ndarray, cuts: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The same through the KV cache, in the pieces between the cuts."""

    @jax.jit
    def run(params: Any, tokens: jax.Array, cache: Any) -> tuple[dict[str, jax.Array], Any]:
        module = merge(target.graph, params)
        out, cache = module.cached(tokens, cache, causal_view(cache.length, tokens.shape[1]), taps=ALL_TAPS)
        found = {str(tap): value for tap, value in out.taps.items()}
        length = cache.length + tokens.shape[1]
        return found | {"logits": module.logits(out.taps["normed"])}, cache.replace(length=length)

    batch, length = ids.shape
    cache = init_cache(target.config, batch, length)
    parts = []
    for start, stop in itertools.pairwise((0, *cuts, length)):
        part, cache = run(target.params, jnp.asarray(ids[:, start:stop]), cache)
        parts.append(part)
    return {name: np.concatenate([np.asarray(part[name]) for part in parts], axis=1) for name in parts[0]}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Largest difference within 1e-4 of the largest value, for every activation."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / np.abs(value).max()
        assert error < 1e-4, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_full_pass_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny.model(name)
    target = from_directory(tiny.save(model, tmp_path))
    ids = np.random.default_rng(0).integers(3, tiny.VOCAB, (2, LENGTH))
    assert_close(full(target, ids), reference(model, ids))


CACHED = ("llama", "llama3_rope", "yarn_rope", "qwen2_window", "mistral", "qwen3", "smollm3_window", "gemma2", "gemma3")


@pytest.mark.parametrize("name", CACHED)
def test_cached_passes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Every family, each with what it alone has: the cache sees no more of it than these."""
    model = tiny.model(name)
    target = from_directory(tiny.save(model, tmp_path))
    ids = np.random.default_rng(0).integers(3, tiny.VOCAB, (2, LENGTH))
    assert_close(cached(target, ids, (8, 16)), reference(model, ids))


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_reach_across_cache_chunks(name: str, tmp_path: Path) -> None:
    """More tokens than one attention chunk, so that the loop starts at the window's own chunk."""
    model = tiny.model(name)
    target = from_directory(tiny.save(model, tmp_path))
    ids = np.random.default_rng(1).integers(3, tiny.VOCAB, (1, 272))
    assert_close(cached(target, ids, (248, 260)), reference(model, ids))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_saved_targets_load_in_transformers(name: str, tmp_path: Path) -> None:
    model = tiny.model(name)
    target = from_directory(tiny.save(model, tmp_path / "theirs"))
    save_target(target, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(again) is type(model)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    ids = torch.arange(3, 3 + LENGTH)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    messages = [{"role": "user", "content": "Grüße, 12 €"}]
    theirs = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert theirs == target.tokenizer.apply_chat(messages)
    assert words.eos_token_id == target.eos_ids[0]
    reloaded = from_directory(tmp_path / "ours")
    assert (reloaded.config, reloaded.config_hash) == (target.config, target.config_hash)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_configs_survive_the_way_there_and_back(name: str) -> None:
    kind, differs = tiny.MODELS[name]
    theirs = transformers.AutoConfig.for_model(kind, **(tiny.COMMON | differs))
    config = config_from_hf(theirs.to_dict())
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("name", tiny.MODELS)
def test_both_ways_to_write_rope_mean_the_same(name: str) -> None:
    """What transformers 4 wrote (`rope_theta`, `rope_scaling`), and what transformers 5 writes."""
    kind, differs = tiny.MODELS[name]
    old = tiny.COMMON | differs | {"model_type": kind}
    new = transformers.AutoConfig.for_model(kind, **(tiny.COMMON | differs)).to_dict()
    assert "rope_parameters" in new and "rope_scaling" not in new
    assert config_from_hf(old) == config_from_hf(new)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Stored in bfloat16, run in bfloat16: within its rounding of transformers in bfloat16."""
    model = tiny.model(name).to(torch.bfloat16)
    target = from_directory(tiny.save(model, tmp_path), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype("bfloat16")}
    ids = np.random.default_rng(0).integers(3, tiny.VOCAB, (2, LENGTH))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.float().numpy()
    found = full(target, ids)["logits"]
    assert np.abs(found - expected).mean() < 0.02 * np.abs(expected).max()
    stored = from_directory(tmp_path)
    assert stored.config.dtype == "float32"
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), target.params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), widened, stored.params))


def test_unsupported_architectures_name_the_supported() -> None:
    with pytest.raises(ValueError, match="MambaForCausalLM") as error:
        config_from_hf({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    for name, family in FAMILIES.items():
        assert name in str(error.value) and family.architecture in str(error.value)
    with pytest.raises(ValueError, match="LlamaForSequenceClassification"):
        config_from_hf({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised \\(awq\\)"),
        ({"layer_types": ["full_attention"]}, "lists 1 layers, but num_hidden_layers=3"),
        ({"layer_types": ["linear_attention"] * 3}, "layer types linear_attention"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(tiny.COMMON | {"model_type": "llama"} | changes)


def test_bidirectional_gemma_is_refused() -> None:
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        config_from_hf(tiny.COMMON | {"model_type": "gemma3_text", "use_bidirectional_attention": True})


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype 'fp8' is not one of float32, bfloat16, float16"):
        config_from_hf(tiny.COMMON | {"model_type": "llama"}, "fp8")


def test_a_config_no_family_can_express_is_refused() -> None:
    config = config_from_hf(tiny.COMMON | {"model_type": "llama"})
    with pytest.raises(ValueError, match="a llama config.json cannot express embed_scale=2.0"):
        config_to_hf(dataclasses.replace(config, embed_scale=2.0))
    with pytest.raises(ValueError, match="save it as a drafter"):
        config_to_hf(dataclasses.replace(config, head_size=32))


def test_the_old_config_files_of_published_models() -> None:
    """The values that matter, as written in the config.json of well-known checkpoints."""
    llama32 = config_from_hf(
        json.loads(
            """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
            "tie_word_embeddings": true, "vocab_size": 128256}"""
        )
    )
    assert llama32.ropes[0].scaling == "llama3" and llama32.ropes[0].factor == 32.0 and llama32.tie_embeddings
    gemma3 = config_from_hf(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
        }
    )
    assert [i for i, window in enumerate(gemma3.windows) if window is None] == [5, 11, 17, 23]
    assert gemma3.ropes[5].theta == 1e6 and gemma3.ropes[0].theta == 1e4 and gemma3.tie_embeddings
    assert gemma3.embed_scale == 1152**0.5 and gemma3.query_scale == 256**-0.5
