"""What other programs' loaders ask of a head, stated as literal sets of names and keys, and the heads they cannot hold.

The names are those of the loaders' own sources: vLLM's `llama_eagle` and `llama_eagle3`, SGLang's of the same names,
llama.cpp's conversion of `LlamaForCausalLMEagle3`, SpecForge's draft model.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.drafters import SavedDrafter
from specjax.checkpoints.formats import read_head, write_head
from specjax.checkpoints.formats.plain import layer_reasons
from specjax.checkpoints.formats.tensors import read_tensors
from specjax.models.config import RopeConfig
from specjax.models.eagle import Eagle3Config, EagleConfig, draft_layer, init_feature_layer
from specjax.testing import tiny_target
from specjax.training.objectives.registry import OBJECTIVES

DRAFT = 40
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
LINEAR = {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {
    f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")
}
# `load_weights` of vLLM raises for a name that its module lacks; that of SGLang leaves what is missing at random.
EAGLE1 = {f"layers.0.{name}" for name in (*LINEAR, "post_attention_layernorm.weight")} | {
    "fc.weight",
    "embed_tokens.weight",
}
IN_3 = {*LINEAR, "post_attention_layernorm.weight", "input_layernorm.weight", "hidden_norm.weight"}
EAGLE3 = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
LAYER_KEYS = {
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "torch_dtype",
    "vocab_size",
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=8)


def head(target, config):
    vocab = {"vocab": jnp.asarray(np.arange(0, 3 * DRAFT, 3), jnp.int32)}
    method = "eagle" if isinstance(config, EagleConfig) else "eagle3"
    return SavedDrafter(method, config, init_feature_layer(config, jax.random.key(0)), vocab, ("embed", "head"))


def shapes(target, **changes):
    layer = draft_layer(target.config, intermediate_size=48, head_size=DRAFT)
    return dataclasses.replace(layer, **changes)


def three(target, taps=(2, 4, 5), **changes):
    return Eagle3Config(layer=shapes(target), taps=taps, target_hidden_size=target.config.hidden_size, **changes)


def written(directory):
    content = json.loads((directory / "config.json").read_text())
    return read_tensors(directory / "model.safetensors"), content


@pytest.mark.parametrize("bias", [False, True])
def test_eagle_1_for_vllm_and_for_sglang(tmp_path, target, bias):
    saved = head(target, EagleConfig(layer=shapes(target), bias=bias))
    write_head(tmp_path / "vllm", saved, target, "eagle")
    tensors, content = written(tmp_path / "vllm")
    assert set(tensors) == (EAGLE1 | {"fc.bias"} if bias else EAGLE1)
    assert content["architectures"] == ["LlamaForCausalLM"] and content["model_type"] == "llama"
    # EAGLE's own code takes a bias by default; true would give vLLM's attention biases that the file lacks.
    assert content.get("bias") is (None if bias else False)
    assert read_head(tmp_path / "vllm", target).config.bias is bias
    write_head(tmp_path / "sglang", saved, target, "eagle-sglang")
    tensors, content = written(tmp_path / "sglang")
    assert set(tensors) == EAGLE1 | {"fc.bias"} and content.keys() == LAYER_KEYS | {"architectures"}
    assert content["architectures"] == ["LlamaForCausalLMEagle"]
    assert bias or not tensors["fc.bias"].any()
    assert read_head(tmp_path / "sglang", target).config.bias


@pytest.mark.parametrize("taps", [(2, 4, 5), (1, 3, 7)])
def test_eagle_3_says_its_taps_twice(tmp_path, target, taps):
    """A converter that finds none in `eagle_config` takes layers of its own choice, the usual ones of ours too."""
    write_head(tmp_path, head(target, three(target, taps)), target, "eagle3")
    tensors, content = written(tmp_path)
    assert set(tensors) == {f"midlayer.{name}" for name in IN_3} | EAGLE3
    assert content.keys() == LAYER_KEYS | {"architectures", "draft_vocab_size", TAP_IDS, "eagle_config"}
    assert content["architectures"] == ["LlamaForCausalLMEagle3"] and content["num_hidden_layers"] == 1
    assert content[TAP_IDS] == list(taps) and content["eagle_config"] == {TAP_IDS: [tap - 1 for tap in taps]}
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_the_last_layers_output_is_no_servers_tap(tmp_path, target, layout):
    with pytest.raises(ValueError, match=r"taps=\(1, 3, 8\): servers read the inputs of layers, and none has number 8"):
        write_head(tmp_path, head(target, three(target, (1, 3, 8))), target, layout)


def test_speculators_and_the_norms_of_3_1(tmp_path, target):
    config = three(target, (0, 4, 5), fc_norm=True, norm_output=True)
    write_head(tmp_path, head(target, config), target, "speculators")
    tensors, content = written(tmp_path)
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(tensors) == {f"layers.0.{name}" for name in IN_3} | EAGLE3 | norms
    assert content[TAP_IDS] == [0, 4, 5] and content["fc_norm"] and content["norm_output"]
    assert content["transformer_layer_config"].keys() == LAYER_KEYS | {"architectures"}
    assert read_head(tmp_path, target).config == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"qkv_bias": True}, "biases in its attention"),
        ({"mlp_bias": True}, "biases in its MLP"),
        ({"norm_offset": 1.0}, "norm weights stored minus 1"),
        ({"activation": "gelu_tanh", "embed_scale": 5.5}, "the activation 'gelu_tanh'; embeddings scaled by 5.5"),
        ({"query_scale": 0.25}, "queries scaled by 0.25"),
        ({"attention_softcap": 50.0, "final_softcap": 30.0}, "attention scores capped at 50; logits capped at 30"),
        ({"ropes": (None,)}, "no rotary embedding"),
    ],
)
def test_what_is_no_plain_llama_layer_is_refused(tmp_path, target, changes, says):
    for layout, config in (
        ("eagle", EagleConfig(layer=shapes(target, **changes))),
        ("eagle3", dataclasses.replace(three(target), layer=shapes(target, **changes))),
    ):
        saved = SavedDrafter(layout, config, {}, {}, ("embed", "head"))
        with pytest.raises(ValueError, match=f"one plain Llama layer, this head has {says}.*objective.layer='plain'"):
            write_head(tmp_path / layout, saved, target, layout)


@pytest.mark.parametrize(("name", "options"), [("eagle", {}), ("eagle3", {"taps": (2, 4, 5)})])
def test_a_draft_with_a_plain_layer_can_be_written_whatever_the_target_is(tmp_path, target, name, options):
    gemma = {"qk_norm": True, "activation": "gelu_tanh", "norm_offset": 1.0, "embed_scale": 5.5, "final_softcap": 30.0}
    other = dataclasses.replace(target, config=dataclasses.replace(target.config, **gemma))
    options = {"intermediate_size": 48, "draft_vocab": DRAFT, **options}
    plain = OBJECTIVES[name](other, layer="plain", **options).config
    assert layer_reasons(OBJECTIVES[name](other, **options).config.layer) and not layer_reasons(plain.layer)
    write_head(tmp_path, head(target, plain), target, name)
    with pytest.raises(ValueError, match="layer='llama'; expected 'target' .* or 'plain'"):
        OBJECTIVES[name](other, layer="llama", **options)


def test_a_plain_layer_under_another_name_is_written_as_llama(tmp_path, target):
    layer = shapes(target, family="mistral", ropes=(RopeConfig(theta=5e5),))
    write_head(tmp_path, head(target, EagleConfig(layer=layer, bias=False)), target, "eagle")
    _, content = written(tmp_path)
    assert content["model_type"] == "llama" and content["rope_theta"] == 5e5 and "sliding_window" not in content


def test_two_ways_to_norm_the_taps_are_refused(tmp_path, target):
    with pytest.raises(ValueError, match="has fc_norm and norm_before_fc, and the readers of the layout 'speculators'"):
        write_head(tmp_path, head(target, three(target, fc_norm=True, norm_before_fc=True)), target, "speculators")


def test_taps_that_a_layout_cannot_name_are_refused(tmp_path, target):
    with pytest.raises(ValueError, match=r"taps=\(0, 4, 5\): the layout 'eagle3' names layers by their outputs"):
        write_head(tmp_path, head(target, three(target, (0, 4, 5))), target, "eagle3")
    for layout in ("eagle3", "speculators"):
        with pytest.raises(ValueError, match=rf"taps=\(2, 5\): the readers of the layout '{layout}' fuse 3 layers"):
            write_head(tmp_path, head(target, three(target, (2, 5))), target, layout)
