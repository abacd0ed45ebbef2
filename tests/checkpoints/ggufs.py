"""GGUF files of tiny models, written as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.checkpoints.vocabularies import CONTROL, NORMAL, UNUSED
from tests.models import tiny

PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rotary pairs to neighbours, row by row."""
    head_dim = rows.shape[0] // heads
    half = head_dim // 2
    return rows[[h * head_dim + i + part for h in range(heads) for i in range(half) for part in (0, half)]]


def write(model: Any, path: Path, kind: str = "F32", *, changes: dict[str, Any] | None = None) -> Path:
    """Writes a transformers model; matrices in the quantisation `kind`, vectors in float32.

    Args:
        model: a llama, qwen2 or qwen3 model.
        path: of the file.
        kind: of `gguf.GGMLQuantizationType`.
        changes: metadata set last; None removes a key.
    """
    config = model.config
    architecture = config.model_type
    meta = metadata(config) | (changes or {})
    writer = gguf.GGUFWriter(path, meta.pop("general.architecture"))
    for key, value in meta.items():
        add(writer, key, value)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for projection, count in heads.items():
            if projection in name and architecture == "llama":
                array = interleave(array, count)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        quantisation = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem in PARTS:
        return f"{PARTS[stem]}.{leaf}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{leaf}"


def metadata(config: Any) -> dict[str, Any]:
    a = config.model_type
    rope = config.rope_parameters
    tokenizer = tiny.tokenizer()
    tokens = [tokenizer.backend.id_to_token(i) for i in range(tokenizer.vocab_size)]
    tokens += ["ab", "Ġa"]
    types = [CONTROL] * len(tiny.SPECIAL) + [NORMAL] * 258 + [UNUSED] * (config.vocab_size - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(config.vocab_size - len(tokens))]
    meta = {
        "general.architecture": a,
        f"{a}.embedding_length": config.hidden_size,
        f"{a}.block_count": config.num_hidden_layers,
        f"{a}.feed_forward_length": config.intermediate_size,
        f"{a}.context_length": config.max_position_embeddings,
        f"{a}.attention.head_count": config.num_attention_heads,
        f"{a}.attention.head_count_kv": config.num_key_value_heads,
        f"{a}.attention.key_length": getattr(config, "head_dim", None),
        f"{a}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{a}.rope.freq_base": rope["rope_theta"],
        f"{a}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    if rope["rope_type"] in ("linear", "yarn"):
        meta |= {f"{a}.rope.scaling.type": rope["rope_type"], f"{a}.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        meta[f"{a}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return meta


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
