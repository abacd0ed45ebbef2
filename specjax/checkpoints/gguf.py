"""GGUF files: dequantised once, with their tokenizer and chat template, into a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
from etils import epath

from specjax.checkpoints import names, vocabularies
from specjax.checkpoints.directory import write_description
from specjax.checkpoints.safetensors import write_directory
from specjax.models.config import ModelConfig
from specjax.models.families import config_from_hf
from specjax.models.tokenizer import Tokenizer

QUANTISATIONS = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K", "Q5_K", "Q6_K"),
)
# GGUF architecture -> model_type of the Hugging Face config.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Architectures whose q and k rows are stored for interleaved rotary embedding.
INTERLEAVED = ("llama",)

Metadata = Mapping[str, Any]
_IGNORED = ("rope_freqs.weight",)


def open_gguf(path: epath.PathLike) -> gguf.GGUFReader:
    """Opens a GGUF file and reads its metadata.

    Raises:
        ValueError: it is no GGUF file, is truncated or damaged, or holds unsupported quantisations.
    """
    path = epath.Path(path)
    size = path.stat().length
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
    try:
        reader = gguf.GGUFReader(path)
        for field in reader.fields.values():
            field.contents()  # Text is decoded here alone.
    except Exception as error:  # The reader lets numpy's and enum's errors through.
        raise ValueError(f"{path} ({size} bytes) is truncated or damaged ({error}): fetch it again") from error
    end = max((tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), default=0)
    if end > size:
        raise ValueError(f"{path} is truncated: it describes {end} bytes, and has {size}: fetch it again")
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors} - set(QUANTISATIONS))
    if kinds:
        raise ValueError(f"{path} holds {', '.join(kinds)} tensors; supported: {', '.join(QUANTISATIONS)}")
    return reader


def convert(path: epath.PathLike, directory: epath.PathLike) -> None:
    """Writes a GGUF file as a Hugging Face directory in float32, one tensor in memory at a time.

    Raises:
        ValueError: the file is damaged, or its architecture, quantisation or tokenizer is not supported, or
            its tensors do not fit its metadata.
    """
    directory = epath.Path(directory)
    reader = open_gguf(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {meta['split.count']} parts: join them with `llama-gguf-split --merge`")
    tokenizer = read_tokenizer(meta, str(path))
    try:
        config = read_config(meta, reader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    rows = max(config.vocab_size, tokenizer.vocab_size)
    if beyond := [i for i in tokenizer.eos_ids if not 0 <= i < rows]:
        raise ValueError(f"{path}: its end-of-text id {beyond[0]} lies outside the vocabulary of {rows} tokens")
    tensors = _by_hf_name(reader)
    specs = names.tensor_specs(config)
    _check(tensors, specs, config)
    write_directory(directory, specs, lambda name: _dequantise(name, tensors[name], config, meta))
    write_description(directory, config, tokenizer)


def read_config(meta: Metadata, reader: gguf.GGUFReader) -> ModelConfig:
    """Our config of the model that the metadata describes."""
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"unsupported GGUF architecture {architecture!r}; supported: {supported}")

    def key(name: str, default: Any = None) -> Any:
        return meta.get(f"{architecture}.{name}", default)

    if key("expert_count", 0):
        raise ValueError(f"unsupported GGUF architecture: {architecture!r} with experts (a mixture)")
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape[::-1]) for tensor in reader.tensors}
    needed = (
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
        "context_length",
    )
    missing = [f"{architecture}.{name}" for name in needed if key(name) is None]
    missing += [name for name in ("token_embd.weight",) if name not in shapes]
    if missing:
        raise ValueError(f"the GGUF file lacks {', '.join(missing)}")
    heads = key("attention.head_count")
    for name in ("attention.head_count", "embedding_length"):
        if not isinstance(key(name), int) or key(name) < 1:
            raise ValueError(f"{architecture}.{name} is {key(name)!r}; expected a whole number, 1 or more")
    head_dim = key("attention.key_length") or key("embedding_length") // heads
    rotated = key("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"rotary embedding over {rotated} of {head_dim} dimensions is not supported")
    hf = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": _rounded(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": key("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, reader, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes and architecture != "qwen2",
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    return config_from_hf(hf)


def _rounded(value: Any) -> Any:
    """A float32 of the file as the decimal that was meant; what is no float as it is, to be refused."""
    return round(value, 12) if isinstance(value, float) else value


def _rope_scaling(meta: Metadata, reader: gguf.GGUFReader, head_dim: int) -> dict[str, Any] | None:
    architecture = meta["general.architecture"]
    kind = meta.get(f"{architecture}.rope.scaling.type", "none")
    factors = next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        theta = float(meta.get(f"{architecture}.rope.freq_base", 10000.0))
        return _llama3_scaling(np.asarray(factors.data, np.float64).reshape(-1), theta, head_dim)
    if kind == "none":
        return None
    name = f"{architecture}.rope.scaling.factor"
    if name not in meta:
        raise ValueError(f"the GGUF file lacks {name}, which {architecture}.rope.scaling.type {kind!r} needs")
    scaling = {"rope_type": kind, "factor": meta[name]}
    original = meta.get(f"{architecture}.rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters behind a table of divisors: GGUF keeps the table, Llama 3 models share all but `factor`."""
    guess = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor = float(factors.max())
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError("rope_freqs.weight is not that of a Llama 3 model (factors 1 and 4, context 8192)")
    return {"rope_type": "llama3", "factor": factor, **guess}


def _by_hf_name(reader: gguf.GGUFReader) -> dict[str, gguf.ReaderTensor]:
    """Tensors by Hugging Face name; unknown ones keep theirs, so that they are reported."""
    return {
        names.gguf_to_hf(tensor.name) or tensor.name: tensor for tensor in reader.tensors if tensor.name not in _IGNORED
    }


def _check(tensors: Mapping[str, Any], specs: Mapping[str, Any], config: ModelConfig) -> None:
    """All misfits in one message, as for safetensors."""
    stored = {
        name: names.StoredTensor(epath.Path(), tuple(int(n) for n in tensor.shape[::-1]), np.dtype(np.float32), 0)
        for name, tensor in tensors.items()
    }
    names.check_tensors(config, stored)


def _dequantise(name: str, tensor: gguf.ReaderTensor, config: ModelConfig, meta: Metadata) -> np.ndarray:
    shape = tuple(int(n) for n in tensor.shape[::-1])
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
    if meta["general.architecture"] in INTERLEAVED:
        if ".q_proj." in name:
            return half_split(array, config.num_heads)
        if ".k_proj." in name:
            return half_split(array, config.num_kv_heads)
    return array


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a q or k weight `[heads * H, ...]` from interleaved to half-split rotary pairs.

    Row 2i and 2i + 1 of a head turn together in the interleaved layout; in the half-split one i and i + H/2 do.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def read_tokenizer(meta: Metadata, source: str) -> Tokenizer:
    """The tokenizer, chat template and end-of-text ids that the metadata hold."""

    def key(name: str, default: Any = None) -> Any:
        return meta.get(f"tokenizer.ggml.{name}", default)

    builders: dict[str, Callable[[], Any]] = {"gpt2": lambda: _bpe(key), "llama": lambda: _spm(key)}
    if key("model") not in builders:
        raise ValueError(f"{source} has a tokenizer of kind {key('model')!r}; supported: gpt2 (BPE), llama (SPM)")
    needed = {"gpt2": ("tokens", "merges"), "llama": ("tokens", "scores", "token_type")}[key("model")]
    missing = [f"tokenizer.ggml.{name}" for name in needed if key(name) is None]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}")
    backend = builders[key("model")]()
    ends = [key(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    eos_ids = tuple(dict.fromkeys(int(i) for i in ends if i is not None))
    if not eos_ids:
        raise ValueError(f"{source} names no end-of-text token (tokenizer.ggml.eos_token_id)")
    return Tokenizer(
        backend=backend,
        eos_ids=eos_ids,
        bos_id=key("bos_token_id"),
        pad_id=key("padding_token_id"),
        chat_template=meta.get("tokenizer.chat_template"),
    )


def _bpe(key: Callable[..., Any]) -> Any:
    pre, tokens = key("pre", "default"), key("tokens")
    types = key("token_type", [vocabularies.NORMAL] * len(tokens))
    bos = key("bos_token_id") if key("add_bos_token", pre == "llama-bpe") else None
    return vocabularies.byte_level_bpe(pre, tokens, types, key("merges"), bos)


def _spm(key: Callable[..., Any]) -> Any:
    bos = key("bos_token_id") if key("add_bos_token", True) else None
    return vocabularies.sentencepiece_bpe(
        key("tokens"), key("scores"), key("token_type"), key("add_space_prefix", True), bos
    )
