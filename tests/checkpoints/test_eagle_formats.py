"""EAGLE heads of other projects: names, maps and taps as published, read, written, and refused."""

import dataclasses
import json
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import drafters
from specjax.checkpoints.formats import read_head, write_head
from specjax.checkpoints.formats.tensors import read_tensors, write_tensors
from specjax.drafting.registry import DRAFTERS
from specjax.models.eagle import Eagle3Config, EagleConfig, draft_layer, feature_graph
from specjax.testing import tiny_target

WIDTH, VOCAB, DRAFT = 32, 259, 40
GAPS = np.arange(DRAFT, dtype=np.int64)  # offsets of the ids 0, 2, 4 ..., and themselves ids
IDS = np.sort(np.random.default_rng(0).choice(VOCAB, DRAFT, replace=False))
LAYER = {
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "post_attention_layernorm.weight": (32,),
    "input_layernorm.weight": (32,),
    "hidden_norm.weight": (32,),
}
# As the published repositories have them.
EAGLE3 = {f"midlayer.{name}": shape for name, shape in LAYER.items()}
EAGLE3 |= {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (DRAFT, 32)}
EAGLE3 |= {"d2t": (DRAFT,), "t2d": (VOCAB,)}
NARROW = {f"self_attn.{x}_proj.weight": (LAYER[f"self_attn.{x}_proj.weight"][0], 32) for x in "qkv"}
ONLY_3 = ("input_layernorm.weight", "hidden_norm.weight")
EAGLE1 = {f"layers.0.{name}": shape for name, shape in (LAYER | NARROW).items() if name not in ONLY_3}
EAGLE1 |= {"fc.weight": (32, 64), "fc.bias": (32,), "embed_tokens.weight": (VOCAB, 32)}
HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=8)


def made(shapes, seed=0):
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {name: np.asarray(jnp.asarray(value).astype(jnp.bfloat16)) for name, value in tensors.items()}
    if "d2t" in tensors:
        tensors["d2t"] = IDS.astype(np.int64) - np.arange(DRAFT)
        tensors["t2d"] = np.isin(np.arange(VOCAB), IDS)
    return tensors


def put(directory, tensors, config):
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def eagle1(directory, target, **config):
    tensors = made(EAGLE1) | {"embed_tokens.weight": np.asarray(target.params["embed"]["embedding"])}
    return put(directory, tensors, {**HF, **config})


def eagle3(directory, changes=None, **config):
    tensors = {k: v for k, v in (made(EAGLE3) | (changes or {})).items() if v is not None}
    return put(directory, tensors, {**HF, "draft_vocab_size": DRAFT, **config})


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_eagle1_as_published(tmp_path, target):
    head = read_head(eagle1(tmp_path / "in", target), target)
    assert head.method == "eagle" and head.shares == ("embed", "head") and not head.tables
    assert isinstance(head.config, EagleConfig) and head.config.bias and head.config.head_size == VOCAB
    stored = read_tensors(tmp_path / "in" / "model.safetensors")
    np.testing.assert_array_equal(
        np.asarray(head.params["attn"]["q"]["kernel"]).T, stored["layers.0.self_attn.q_proj.weight"].astype(np.float32)
    )
    files = write_head(tmp_path / "out", head, target)
    assert files == ["model.safetensors", "config.json"]
    assert set(read_tensors(tmp_path / "out" / "model.safetensors")) == set(EAGLE1)
    again = read_head(tmp_path / "out", target)
    # The embedding travels in bfloat16 and is recognised as the target's.
    assert again.config == head.config and again.shares == head.shares
    same(again.params, head.params)
    # Ours and back.
    write_head(tmp_path / "own", head, target, "specjax")
    same(read_head(tmp_path / "own", target).params, head.params)


def test_a_projection_without_a_bias_needs_no_key(tmp_path, target):
    bare = {name: value for name, value in made(EAGLE1).items() if name != "fc.bias"}
    assert not read_head(put(tmp_path / "bare", bare, HF), target).config.bias
    with pytest.raises(ValueError, match="missing fc.bias"):
        read_head(put(tmp_path / "said", bare, {**HF, "bias": True}), target)
    with pytest.raises(ValueError, match="unexpected fc.bias"):
        read_head(put(tmp_path / "denied", made(EAGLE1), {**HF, "bias": False}), target)


def test_an_embedding_of_its_own_is_kept(tmp_path, target):
    head = read_head(put(tmp_path, made(EAGLE1), HF), target)
    assert head.shares == ("head",) and head.params["embed"]["embedding"].shape == (VOCAB, WIDTH)


def test_a_head_of_its_own_is_kept_and_the_targets_is_not(tmp_path, target):
    theirs = np.asarray(target.params["lm_head"]["kernel"]).T
    head = read_head(put(tmp_path / "same", made(EAGLE1) | {"lm_head.weight": theirs}, HF), target)
    assert head.shares == ("head",) and "lm_head" not in head.params
    head = read_head(put(tmp_path / "own", made(EAGLE1) | {"lm_head.weight": theirs + 1}, HF), target)
    assert head.shares == () and head.params["lm_head"]["kernel"].shape == (WIDTH, VOCAB)
    with pytest.raises(ValueError, match="has an output head of its own, and every reader of the layout 'eagle' takes"):
        write_head(tmp_path / "out", head, target)


def test_floats_keep_their_dtype(tmp_path, target):
    half = {name: value.astype(np.float16) for name, value in made(EAGLE3).items() if name not in ("d2t", "t2d")}
    head = read_head(eagle3(tmp_path / "in", half), target)
    for layout in ("eagle3", "specjax"):
        write_head(tmp_path / layout, head, target, layout)
        again = read_head(tmp_path / layout, target)
        assert again.info["dtype"] == "float16"
        same(again.params, head.params)
    stored = read_tensors(tmp_path / "eagle3" / "model.safetensors")
    assert {value.dtype.name for name, value in stored.items() if name not in ("d2t", "t2d")} == {"float16"}
    write_head(tmp_path / "wide", head, target, "eagle3", "float32")
    assert read_head(tmp_path / "wide", target).info["dtype"] == "float32"
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(ValueError, match="dtype='int8'; expected one of bfloat16, float16, float32"):
        write_head(tmp_path / "int8", head, target, "eagle3", "int8")


def test_keys_that_nothing_reads_are_reported(tmp_path, target):
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "mystery": 1}
    head = read_head(eagle3(tmp_path / "3", norm_topology="x", use_cache=True, eagle_config=nested), target)
    assert head.info["config_unused"] == ["norm_topology", "eagle_config.mystery"]
    assert read_head(eagle1(tmp_path / "1", target, logit_scale=2.0), target).info["config_unused"] == ["logit_scale"]
    write_head(tmp_path / "s", head, target, "speculators")
    content = json.loads((tmp_path / "s" / "config.json").read_text())
    assert read_head(tmp_path / "s", target).info["config_unused"] == []
    content["transformer_layer_config"]["logit_scale"] = 2.0
    (tmp_path / "s" / "config.json").write_text(json.dumps(content | {"mask_token_id": 3}))
    assert read_head(tmp_path / "s", target).info["config_unused"] == [
        "mask_token_id",
        "transformer_layer_config.logit_scale",
    ]
    del content["norm_before_residual"]
    (tmp_path / "s" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no norm_before_residual, for which speculators takes false and vLLM true"):
        read_head(tmp_path / "s", target)


def test_a_map_of_the_whole_vocabulary_is_none(tmp_path, target):
    whole = made({**EAGLE3, "lm_head.weight": (VOCAB, WIDTH)})
    whole |= {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)}
    head = read_head(put(tmp_path / "in", whole, {**HF, "draft_vocab_size": VOCAB}), target)
    assert not head.tables and head.config.head_size == VOCAB
    write_head(tmp_path / "own", head, target, "specjax")
    same(read_head(tmp_path / "own", target).params, head.params)
    with pytest.raises(ValueError, match=f"d2t for {DRAFT} draft tokens, but config.json lacks draft_vocab_size"):
        read_head(put(tmp_path / "lacks", made(EAGLE3), HF), target)
    del whole["d2t"]
    assert not read_head(put(tmp_path / "mask", whole, HF), target).tables
    whole["t2d"] = np.isin(np.arange(VOCAB), IDS)
    with pytest.raises(ValueError, match=f"a t2d that marks {DRAFT} of {VOCAB} tokens, but no d2t"):
        read_head(put(tmp_path / "marks", whole, HF), target)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_eagle3_as_published(tmp_path, target, layout):
    head = read_head(eagle3(tmp_path / "in"), target)
    assert head.method == "eagle3" and head.shares == ("embed",)
    assert isinstance(head.config, Eagle3Config) and head.config.taps == (2, 4, 5)
    np.testing.assert_array_equal(head.tables["vocab"], IDS)
    write_head(tmp_path / "out", head, target, layout)
    stored, before = (read_tensors(tmp_path / name / "model.safetensors") for name in ("out", "in"))
    renamed = {n.replace("midlayer.", "layers.0.") if layout == "speculators" else n: v for n, v in before.items()}
    assert stored.keys() == renamed.keys()
    for name, value in renamed.items():
        np.testing.assert_array_equal(stored[name], value)
    again = read_head(tmp_path / "out", target)
    assert again.config == head.config and again.info["layout"] == layout
    same(again.params, head.params)


def test_a_speculators_config(tmp_path, target):
    write_head(tmp_path, read_head(eagle3(tmp_path / "in"), target), target, "speculators")
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["speculators_model_type"] == "eagle3" and content["architectures"] == ["Eagle3Speculator"]
    assert content["draft_vocab_size"] == DRAFT and content["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert content["transformer_layer_config"]["num_hidden_layers"] == 1
    assert content["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert content["speculators_config"]["proposal_methods"][0]["proposal_type"] == "greedy"


def test_taps_are_inputs_at_the_top_and_outputs_within(tmp_path, target):
    ids = "eagle_aux_hidden_state_layer_ids"
    assert read_head(eagle3(tmp_path / "a", **{ids: [1, 3, 8]}), target).config.taps == (1, 3, 8)
    nested = read_head(eagle3(tmp_path / "b", eagle_config={ids: [1, 3, 4]}), target)
    assert nested.config.taps == (2, 4, 5)
    other = dataclasses.replace(nested, config=dataclasses.replace(nested.config, taps=(1, 3, 6)))
    write_head(tmp_path / "c", other, target, "eagle3")
    assert read_head(tmp_path / "c", target).config.taps == (1, 3, 6)
    both = {ids: [1, 3, 6], "eagle_config": {ids: [1, 3, 5]}}
    with pytest.raises(ValueError, match=r"outputs of \[1, 3, 5\], which are the inputs of \[2, 4, 6\]: remove"):
        read_head(eagle3(tmp_path / "two", **both), target)
    with pytest.raises(ValueError, match="use_aux_hidden_state=false, so this head fuses no taps"):
        read_head(eagle3(tmp_path / "none", eagle_config={"use_aux_hidden_state": False}), target)
    with pytest.raises(ValueError, match=r"layer_ids=\['2', 3, 4\]; expected a list of layer numbers"):
        read_head(eagle3(tmp_path / "text", **{ids: ["2", 3, 4]}), target)
    with pytest.raises(ValueError, match="reads the input of layer 9, 'tiny' has 8 layers"):
        read_head(eagle3(tmp_path / "d", **{ids: [1, 3, 9]}), target)


def test_the_norms_of_3_1_travel(tmp_path, target):
    extra = made({f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}, seed=1)
    head = read_head(eagle3(tmp_path / "in", extra, fc_norm=True), target)
    assert head.config.fc_norm and set(head.params["fc_norm"]) == {0, 1, 2}
    handing_on = dataclasses.replace(head, config=dataclasses.replace(head.config, norm_output=True))
    for layout, written in (("eagle3", head), ("speculators", head), ("speculators", handing_on)):
        write_head(tmp_path / f"{layout}-{written.config.norm_output}", written, target, layout)
        again = read_head(tmp_path / f"{layout}-{written.config.norm_output}", target)
        assert again.config == written.config
        same(again.params, head.params)
    with pytest.raises(ValueError, match="unexpected fc_norm.0.weight"):
        read_head(eagle3(tmp_path / "bad", extra), target)
    # Under the other name that such norms have.
    other = {name.replace("fc_norm", "fcs"): value for name, value in extra.items()}
    same(read_head(eagle3(tmp_path / "fcs", other, fc_norm=True), target).params, head.params)
    with pytest.raises(ValueError, match="the same tensor under two names"):
        read_head(eagle3(tmp_path / "both", extra | other, fc_norm=True), target)


def test_what_a_dtype_cannot_hold_is_not_written(tmp_path, target):
    head = read_head(eagle3(tmp_path / "in"), target)
    params = jax.tree.map(lambda x: x * 1e6, head.params)
    large = dataclasses.replace(head, params=params)
    with pytest.raises(ValueError, match="beyond the range of float16: write bfloat16 or float32"):
        write_head(tmp_path / "half", large, target, "eagle3", "float16")
    assert not (tmp_path / "half" / "model.safetensors").exists()
    write_head(tmp_path / "brain", large, target, "eagle3", "bfloat16")


@pytest.mark.parametrize("value", [True, False])
def test_a_key_of_two_meanings_is_refused(tmp_path, target, value):
    """What SpecForge calls norm_output is not what speculators calls so."""
    with pytest.raises(ValueError, match=f"norm_output={value} means two things in this layout"):
        read_head(eagle3(tmp_path / "in", norm_output=value), target)
    head = read_head(eagle3(tmp_path / "plain"), target)
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, norm_output=True))
    with pytest.raises(ValueError, match=r"hands its normed feature on .*: write the layout 'speculators'"):
        write_head(tmp_path / "out", head, target, "eagle3")


def test_a_head_trained_here_serves_elsewhere(tmp_path, target):
    """Head rows borrowed from the target are written out; EAGLE-1 leaves its vocabulary behind."""
    layer = draft_layer(target.config, intermediate_size=48, head_size=DRAFT)
    for config, layout in (
        (EagleConfig(layer=layer), "eagle"),
        (Eagle3Config(layer=layer, taps=(2, 4, 5), target_hidden_size=WIDTH), "eagle3"),
    ):
        shapes = {k: v for k, v in feature_graph(config)[1].items() if k not in ("embed", "lm_head")}
        params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype) / 8, shapes)
        saved = drafters.SavedDrafter(layout, config, params, {"vocab": jnp.asarray(IDS, jnp.int32)}, ("embed", "head"))
        drafters.save_drafter(tmp_path / layout, saved, target)
        write_head(tmp_path / f"{layout}-out", read_head(tmp_path / layout, target), target)
        again = read_head(tmp_path / f"{layout}-out", target)
        if layout == "eagle":
            assert not again.tables and again.config.head_size == VOCAB
        else:
            np.testing.assert_array_equal(again.tables["vocab"], IDS)
            rows = np.asarray(target.params["lm_head"]["kernel"])[:, IDS]
            np.testing.assert_allclose(again.params["lm_head"]["kernel"], rows, rtol=1e-2)
        drafting = DRAFTERS[layout](target, str(tmp_path / f"{layout}-out"), num_nodes=2)
        assert drafting.drafter.num_nodes == 2


@pytest.mark.pitfall("verl-SpeCo#66,#67; NeMo-Automodel#2447")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"d2t": IDS.astype(np.int64)}, rf"d2t holds absolute ids; expected offsets.*subtract arange\({DRAFT}\)"),
        ({"d2t": GAPS, "t2d": None}, rf"may hold offsets .* or absolute ids .*add t2d, bool\[{VOCAB}\]"),
        ({"d2t": GAPS + np.arange(DRAFT), "t2d": None}, r"may hold offsets .* or absolute ids"),
        ({"d2t": None}, f"has no d2t, but a draft vocabulary of {DRAFT} of {VOCAB} tokens needs it"),
        ({"d2t": np.zeros(DRAFT, np.int64)}, r"d2t is no map.*those that t2d marks \(40 for 40 rows\)"),
        ({"d2t": np.zeros(7, np.int64)}, rf"d2t is int64\[7\]; expected int64\[{DRAFT}\]"),
        ({"t2d": np.zeros(9, bool)}, rf"t2d has shape \[9\]; expected \[{VOCAB}\]"),
        ({"norm.weight": None}, "does not fit its config: missing norm.weight"),
        ({"layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, "has more than one layer"),
        ({"surprise.weight": np.zeros(3, np.float32)}, "unexpected surprise.weight"),
        ({"fc.weight": np.zeros((32, 64), np.float32)}, r"fc.weight has shape \[32, 64\], expected \[32, 96\]"),
        ({"norm.weight": np.full(32, np.nan, np.float32)}, "holds NaN or infinity in norm.weight"),
    ],
)
def test_a_head_that_is_not_whole_is_refused(tmp_path, target, changes, says):
    with pytest.raises(ValueError, match=says):
        read_head(eagle3(tmp_path, changes), target)


def test_a_head_of_another_kind_or_target_is_refused(tmp_path, target):
    one, three = eagle1(tmp_path / "1", target), eagle3(tmp_path / "3")
    with pytest.raises(ValueError, match="is a head of method 'eagle3', not 'eagle': use drafter 'eagle3'"):
        DRAFTERS["eagle2"](target, str(three))
    with pytest.raises(ValueError, match="is a head of method 'eagle', not 'eagle3': use drafter 'eagle' or 'eagle2'"):
        DRAFTERS["eagle3"](target, str(one))
    with pytest.raises(ValueError, match="tensors of EAGLE-1, its config.json is one of EAGLE-3"):
        read_head(eagle1(tmp_path / "mixed", target, draft_vocab_size=DRAFT), target)
    with pytest.raises(ValueError, match="tensors of EAGLE-3, its config.json is one of EAGLE-1"):
        read_head(eagle3(tmp_path / "mixed3", bias=True), target)
    with pytest.raises(ValueError, match="hidden_size 32, 'tiny' has 48"):
        read_head(one, tiny_target(layers=8, width=48))
    with pytest.raises(ValueError, match="for a target of vocab_size 300, 'tiny' has 259"):
        read_head(eagle1(tmp_path / "vocab", target, vocab_size=300), target)
    with pytest.raises(ValueError, match="cannot be written in the layout 'eagle'"):
        write_head(tmp_path / "out", read_head(three, target), target, "eagle")
    with pytest.raises(ValueError, match="unknown layout 'gguf'; known: eagle, eagle-sglang, eagle3"):
        write_head(tmp_path / "out", read_head(three, target), target, "gguf")
    with pytest.raises(FileNotFoundError, match="no head at './nothing'"):
        read_head("./nothing", target)


def test_a_damaged_file_is_refused(tmp_path, target):
    file = eagle3(tmp_path / "cut") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is truncated"):
        read_head(tmp_path / "cut", target)


def test_a_pickle_is_read_without_its_code(tmp_path, target):
    torch = pytest.importorskip("torch")
    safe = read_head(eagle3(tmp_path / "safe"), target)
    tensors = {
        name: torch.from_numpy(np.asarray(value, np.float32) if value.dtype == jnp.bfloat16 else value)
        for name, value in made(EAGLE3).items()
    }
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text((tmp_path / "safe" / "config.json").read_text())
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    same(read_head(tmp_path / "bin", target).params, safe.params)
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harmful()}))
    with pytest.raises(ValueError, match="could run code"):
        read_head(tmp_path / "bin", target)
    assert not os.path.exists("ran")


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("ran",)
