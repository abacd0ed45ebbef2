"""GGUF files give the model that went into them, tokenizer and all, and say clearly when they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from specjax.checkpoints import from_directory, gguf, load_target
from specjax.checkpoints.safetensors import open_directory
from specjax.models.target import Target
from tests.checkpoints import ggufs
from tests.models import tiny
from tests.models.test_families import full

IDS = np.random.default_rng(0).integers(3, 259, (1, 20))


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.numpy()


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def converted(path: Path) -> Target:
    directory = path.with_suffix("")
    directory.mkdir()
    gguf.convert(path, directory)
    return from_directory(directory)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_biases", "linear_rope", "yarn_rope", "qwen2", "qwen3"])
def test_unquantised_files_give_the_model_back(name: str, tmp_path: Path) -> None:
    model = tiny.model(name)
    target = converted(ggufs.write(model, tmp_path / "model.gguf"))
    kernel = np.asarray(target.params["layers"][1]["attn"]["q"]["kernel"])
    expected = model.state_dict()["model.layers.1.self_attn.q_proj.weight"].numpy().T
    np.testing.assert_array_equal(kernel, expected)
    assert relative(full(target, IDS)["logits"], logits(model)) < 1e-4


def test_rows_left_in_interleaved_order_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault gives fluent nonsense and no error, so the comparison above must be one that sees it."""
    model = tiny.model("llama")
    path = ggufs.write(model, tmp_path / "model.gguf")
    monkeypatch.setattr(gguf, "INTERLEAVED", ())
    assert relative(full(converted(path), IDS)["logits"], logits(model)) > 1e-2


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_from_the_same_file(name: str, tmp_path: Path) -> None:
    """Independent of how these tests write files: transformers' own GGUF reader is the judge."""
    model = tiny.model(name)
    path = ggufs.write(model, tmp_path / "model.gguf", "Q8_0")
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    directory = tmp_path / "ours"
    directory.mkdir()
    gguf.convert(path, directory)
    ours = open_directory(directory)
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key].read(), tensor.numpy(), err_msg=key)


# Mean relative error of a matrix of normal values that each format must stay under.
ERRORS = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.01, "Q5_1": 0.06, "Q5_0": 0.06, "Q4_1": 0.12, "Q4_0": 0.13}


@pytest.mark.parametrize("kind", ERRORS)
def test_quantisations(kind: str, tmp_path: Path) -> None:
    model = tiny.model("llama")
    target = converted(ggufs.write(model, tmp_path / "model.gguf", kind))
    for layer in range(3):
        for ours, theirs in (("gate", "gate_proj"), ("down", "down_proj")):
            found = np.asarray(target.params["layers"][layer]["mlp"][ours]["kernel"])
            weight = model.state_dict()[f"model.layers.{layer}.mlp.{theirs}.weight"].numpy().T
            error = np.abs(found - weight).mean() / np.abs(weight).mean()
            assert 0 < error < ERRORS[kind]


def scales_and_mins(packed: np.ndarray) -> tuple[list[int], list[int]]:
    """The eight 6-bit scales and minima in the twelve bytes of a K-quant block."""
    scales, mins = [], []
    for j in range(8):
        if j < 4:
            scales.append(int(packed[j]) & 63)
            mins.append(int(packed[j + 4]) & 63)
        else:
            scales.append(int(packed[j + 4]) & 15 | int(packed[j - 4]) >> 6 << 4)
            mins.append(int(packed[j + 4]) >> 4 | int(packed[j]) >> 6 << 4)
    return scales, mins


def k_block(kind: str, block: np.ndarray) -> np.ndarray:
    """One block of 256 values from its definition, value by value."""
    values = np.zeros(256, np.float32)
    if kind == "Q6_K":
        low, high, scale = block[:128], block[128:192], block[192:208].view(np.int8)
        d = block[208:210].view(np.float16)[0].astype(np.float32)
        for i in range(256):
            half, at = divmod(i, 128)
            quarter, column = divmod(at, 32)
            nibble = low[half * 64 + quarter % 2 * 32 + column] >> (4 * (quarter // 2)) & 15
            top = high[half * 32 + column] >> (2 * quarter) & 3
            values[i] = d * scale[i // 16] * (int(nibble) + 16 * int(top) - 32)
        return values
    d, dmin = block[:4].view(np.float16).astype(np.float32)
    scales, mins = scales_and_mins(block[4:16])
    high = block[16:48] if kind == "Q5_K" else np.zeros(32, np.uint8)
    low = block[48:] if kind == "Q5_K" else block[16:]
    for i in range(256):
        group, column = divmod(i, 32)
        nibble = int(low[group // 2 * 32 + column]) >> (4 * (group % 2)) & 15
        top = int(high[column]) >> group & 1
        values[i] = d * scales[group] * (nibble + 16 * top) - dmin * mins[group]
    return values


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quantisations(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random blocks, dequantised by their definition."""
    rng = np.random.default_rng(0)
    quantisation = reference.GGMLQuantizationType[kind]
    size = reference.GGML_QUANT_SIZES[quantisation][1]
    blocks: dict[tuple[int, ...], np.ndarray] = {}

    def random_blocks(array: np.ndarray, wanted: Any) -> np.ndarray:
        if wanted != quantisation:
            return array
        data = rng.integers(0, 256, (*array.shape[:-1], array.shape[-1] // 256, size), np.uint8)
        at = slice(208, 210) if kind == "Q6_K" else slice(0, 4)
        data[..., at] = np.full((at.stop - at.start) // 2, 0.01, np.float16).view(np.uint8)
        blocks[array.shape] = data
        return data.reshape(*array.shape[:-1], -1)

    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1, head_dim=64)
    model = tiny.model("llama", **sizes)
    with monkeypatch.context() as patch:
        patch.setattr(reference.quants, "quantize", random_blocks)
        path = ggufs.write(model, tmp_path / "model.gguf", kind)
    target = converted(path)
    down = np.asarray(target.params["layers"][0]["mlp"]["down"]["kernel"]).T
    for row in (0, 100):
        expected = np.concatenate([k_block(kind, block) for block in blocks[256, 512][row]])
        np.testing.assert_allclose(down[row], expected, rtol=1e-5, atol=1e-6)


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.add_bos_token": True}
    target = converted(ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", changes=changes))
    tokenizer = target.tokenizer
    assert target.eos_ids == (0, 2) and tokenizer.bos_id == 1 and tokenizer.pad_id == 2
    assert tokenizer.encode("ab c") == [1, *tokenizer.encode("ab c", add_special=False)]
    assert tokenizer.decode(tokenizer.encode("ab ac \u20ac")) == "ab ac \u20ac"
    chat = tokenizer.apply_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat, skip_special=False) == "<|start|>user\nhi<|end|><|start|>assistant\n"


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], "\u2581", "a", "b", "ab", "\u2581ab"]
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-5.0, -4.0, -3.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.pre": "default",
    }
    tokenizer = converted(ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", changes=changes)).tokenizer
    assert tokenizer.encode("ab ba") == [1, 263, 259, 261, 260]
    assert tokenizer.encode("\u20ac", add_special=False) == [259, 3 + 0xE2, 3 + 0x82, 3 + 0xAC]
    for text in ("ab ba", "\u20ac ab", " ab", "a\nb"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        stream = tokenizer.stream()
        assert "".join(stream.push(i) for i in tokenizer.encode(text)) + stream.finish() == text


def test_llama3_rope_is_recognised_by_its_table() -> None:
    from specjax.models.attention import rope_frequencies
    from specjax.models.config import RopeConfig

    for factor in (8.0, 32.0):
        rope = RopeConfig(theta=5e5, scaling="llama3", factor=factor, original_max_position=8192)
        table = rope_frequencies(RopeConfig(theta=5e5), 128) / rope_frequencies(rope, 128)
        scaling = gguf._llama3_scaling(table.astype(np.float64), 5e5, 128)
        assert scaling["rope_type"] == "llama3" and scaling["factor"] == pytest.approx(factor)
        with pytest.raises(ValueError, match="rope_freqs.weight is not that of a Llama 3 model"):
            gguf._llama3_scaling(table * np.linspace(1, 1.1, 64), 5e5, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "unsupported GGUF architecture 'mamba'; supported: llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "with experts"),
        ({"split.count": 3}, "is one of 3 parts: join them with `llama-gguf-split --merge`"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.rope.dimension_count": 4}, "over 4 of 8 dimensions"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported; expected smollm, qwen2, llama-bpe, gpt-2"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of kind 'bert'; supported: gpt2 .BPE., llama .SPM."),
        ({"tokenizer.ggml.merges": ["zq zq"]}, "vocabulary and merges do not fit"),
        ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.eos_token_id": None}, "names no end-of-text token"),
    ],
)
def test_metadata_that_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", changes=changes)
    with pytest.raises(ValueError, match=message):
        converted(path)


def test_all_misfits_come_in_one_message(tmp_path: Path) -> None:
    changes = {"llama.block_count": 4, "llama.feed_forward_length": 96}
    path = ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", changes=changes)
    with pytest.raises(ValueError) as error:
        converted(path)
    text = str(error.value)
    assert "9 missing:" in text and "model.layers.3.self_attn.q_proj.weight [32, 32]" in text
    assert "9 of the wrong shape:" in text
    assert "model.layers.0.mlp.down_proj.weight: expected [32, 96], found [32, 64]" in text


def test_unsupported_quantisations_name_the_supported(tmp_path: Path) -> None:
    path = ggufs.write(tiny.model("llama", hidden_size=256, intermediate_size=256), tmp_path / "model.gguf", "TQ1_0")
    with pytest.raises(ValueError, match="holds TQ1_0 tensors; supported: F32, F16, BF16, Q8_0"):
        converted(path)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    whole = ggufs.write(tiny.model("llama"), tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "part.gguf"
    for end in (10, 40, 300, 4000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="part.gguf.*truncated.*fetch it again"):
            gguf.open_gguf(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ValueError, match="is not a GGUF file"):
        gguf.open_gguf(path)


def test_conversion_happens_once_and_failures_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    path = ggufs.write(tiny.model("llama"), tmp_path / "model.gguf", "Q8_0")
    first = load_target(str(path), cache_dir=cache)
    assert [entry.name[:5] for entry in cache.iterdir()] == ["gguf-"]
    assert json.loads(next(cache.glob("gguf-*/config.json")).read_text())["architectures"] == ["LlamaForCausalLM"]

    def fail(*_: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf, "convert", fail)
    path = path.rename(tmp_path / "renamed.gguf")
    again = load_target(str(path), cache_dir=cache)
    np.testing.assert_array_equal(again.params["embed"]["embedding"], first.params["embed"]["embedding"])
    (tmp_path / "other.gguf").write_bytes(path.read_bytes() + b"x")
    with pytest.raises(AssertionError, match="converted again"):
        load_target(str(tmp_path / "other.gguf"), cache_dir=cache)
    assert len(list(cache.iterdir())) == 1
