"""What a model's directory or GGUF file may hold by mistake is one error that names file and key."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import specjax
from specjax.checkpoints import gguf, load_target, save_target
from specjax.checkpoints.safetensors import INDEX, SINGLE
from specjax.testing import tiny_target
from tests.checkpoints import ggufs
from tests.models import tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    save_target(tiny_target(layers=1, width=16), folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refused(model: Path, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_target(str(model))
    assert says in str(caught.value), caught.value


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON (Expecting property name"),
        (b"[]", "holds []; expected a JSON object"),
        (b"null", "holds null; expected a JSON object"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_files_that_are_no_json_objects(name: str, content: bytes, says: str, model: Path) -> None:
    if name == INDEX:
        (model / SINGLE).rename(model / "model-00001-of-00001.safetensors")
    (model / name).write_bytes(content)
    refused(model, f"{model / name} {says}")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "lacks weight_map"),
        ('{"weight_map": []}', "has weight_map []"),
        ('{"weight_map": {}}', "has weight_map {}"),
        ('{"weight_map": {"a": 1}}', "has weight_map {'a': 1}"),
    ],
)
def test_indices_that_say_nothing(content: str, says: str, model: Path) -> None:
    (model / SINGLE).rename(model / "model-00001-of-00001.safetensors")
    (model / INDEX).write_text(content)
    refused(model, f"{model / INDEX} {says}; expected the name of the file that holds each tensor")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": ["llama"]}, "unsupported architecture: model_type ['llama']"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'; expected a list of names"),
        ({"quantization_config": "gptq"}, "the checkpoint is quantised (gptq)"),
        ({"num_attention_heads": 0}, "num_attention_heads=0; expected a whole number, 1 or more"),
        ({"hidden_size": 0}, "hidden_size=0; expected a whole number, 1 or more"),
        ({"hidden_size": "16"}, "hidden_size='16'; expected a whole number, 1 or more"),
        ({"hidden_size": 1, "head_dim": None}, "hidden_size=1 leaves no width for num_attention_heads=2"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0; expected a whole number, 1 or more"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1; expected a whole number, 1 or more"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True; expected a whole number"),
        ({"num_key_value_heads": "1"}, "num_key_value_heads='1'; expected a whole number"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None; expected a whole number, 1 or more"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None; expected a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'; expected a number above 0"),
        ({"rope_theta": None}, "rope_theta is missing or null; expected a number above 0"),
        ({"rope_theta": "1"}, "rope_theta='1'; expected a number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'; expected an object, or null"),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
            "rope type 'llama3': low_freq_factor is missing or null",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": "x"}}, "rope type 'llama3': factor='x'; expected a number above 0"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope type ['linear'] is not supported"),
        ({"attention_bias": "no"}, "attention_bias='no'; expected true or false"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention'; expected a list"),
        ({"hidden_act": ["silu"]}, "activation ['silu'] is not supported"),
    ],
)
def test_values_that_no_model_has(changes: dict[str, Any], says: str, model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(model, f"{path}: {says}")


def test_values_that_may_be_null_or_whole(model: Path) -> None:
    path = model / "config.json"
    changes = {"rope_theta": 10000, "rope_scaling": None, "head_dim": None, "tie_word_embeddings": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert load_target(str(model)).config.ropes[0].theta == 10000.0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (99999, "eos_token_id 99999 lies outside the vocabulary of 259 tokens, so no text would end"),
        ([0, -1], "eos_token_id -1 lies outside the vocabulary of 259 tokens"),
        (["a"], "eos_token_id is ['a']; expected a token id, or a list of them"),
        ("a", "eos_token_id is 'a'; expected a token id, or a list of them"),
        (True, "eos_token_id is True; expected a token id, or a list of them"),
    ],
)
def test_ends_of_text_that_never_come(value: Any, says: str, model: Path) -> None:
    path = model / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": value}))
    refused(model, f"{path}: {says}")


def test_an_empty_list_of_ends_leaves_it_to_the_next_file(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": []}')
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": [5, 7]}))
    assert load_target(str(model)).eos_ids == (5, 7)
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": []}))
    assert load_target(str(model)).eos_ids == (0,)  # the tokenizer's own


def test_special_tokens_and_templates_of_another_type(model: Path) -> None:
    path = model / "tokenizer_config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"eos_token": 3}))
    refused(model, f"{path}: eos_token is 3; expected a token's text")
    (model / "chat_template.jinja").unlink()
    path.write_text(json.dumps(whole | {"chat_template": [1]}))
    refused(model, f"{path}: chat_template is list; expected text")
    (model / "chat_template.jinja").write_bytes(b"\xff")
    refused(model, f"{model / 'chat_template.jinja'} is not UTF-8 text")


def test_text_that_is_no_unicode() -> None:
    target = tiny_target(layers=1, width=16)
    drafting = specjax.load_drafter("autoregressive", target)
    with pytest.raises(
        ValueError, match=r"the prompt is no valid text: character 2 is '\\ud800', half of a surrogate pair"
    ):
        specjax.generate(target, drafting, "ab\ud800", max_new_tokens=2)
    with pytest.raises(ValueError, match="the text is no valid text: character 0"):
        target.tokenizer.encode("\udcff")
    assert target.tokenizer.encode("\U0001f600")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"llama.rope.scaling.type": "linear"},
            "the GGUF file lacks llama.rope.scaling.factor, which llama.rope.scaling.type 'linear' needs",
        ),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0; expected a whole number, 1 or more"),
        ({"llama.embedding_length": 0}, "llama.embedding_length is 0; expected a whole number, 1 or more"),
        ({"llama.block_count": 0}, "num_hidden_layers=0; expected a whole number, 1 or more"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "its end-of-text id 99999 lies outside the vocabulary of 264 tokens"),
    ],
)
def test_gguf_files_with_values_that_no_model_has(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", changes=changes)
    (tmp_path / "made").mkdir()
    with pytest.raises(ValueError, match=re.escape(f"{path}: {says}")):
        gguf.convert(path, tmp_path / "made")


def test_a_gguf_file_whose_text_is_damaged(tmp_path: Path) -> None:
    path = ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", changes={"general.name": "NAMEOFIT"})
    content = path.read_bytes()
    assert content.count(b"NAMEOFIT") == 1
    path.write_bytes(content.replace(b"NAMEOFIT", b"NAME\xff\xfeIT"))
    with pytest.raises(ValueError, match=r"model.gguf .* is truncated or damaged .*can't decode byte 0xff"):
        gguf.open_gguf(path)


def test_directories_that_are_no_drafter_say_what_they_are(model: Path, tmp_path: Path) -> None:
    target = load_target(str(model))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"objective": {}, "train": {}, "target": {}}))
    for call in (
        lambda: specjax.load_drafter(str(run), target),
        lambda: specjax.load_drafter("draft_model", target, source=str(run)),
        lambda: load_target(str(run)),
    ):
        with pytest.raises(ValueError, match=f"{run} is .*training run that holds no finished drafter .{run}/drafter"):
            call()
    says = rf"{model} is a model, not a drafter; .*load_drafter\('draft_model', target, source='{model}'\)"
    with pytest.raises(ValueError, match=says):
        specjax.load_drafter(str(model), target)
