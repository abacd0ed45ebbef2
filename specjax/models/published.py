"""Shapes of well-known public models, for compiling and planning without their weights.

Each entry holds the fields of the model's own config.json that fix its shapes; the key is its Hugging Face id.
"""

from __future__ import annotations

import difflib
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import config_from_hf

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "rope_scaling": {**_LLAMA3["rope_scaling"], "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}

# What configs call them.
SHORT = {
    "llama3_1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3_8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3_70b": "meta-llama/Llama-3.1-70B-Instruct",
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B-Instruct",
}


def published_config(name: str, dtype: str = "bfloat16") -> ModelConfig:
    """The config of a public model, by its id or short name.

    Raises:
        ValueError: unknown; suggests the nearest and lists the short names.
    """
    model = SHORT.get(name, name)
    if model not in PUBLISHED:
        close = difflib.get_close_matches(name, [*SHORT, *PUBLISHED], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no shapes are kept of {name!r}; {hint}known: {', '.join(SHORT)}, or their full ids")
    return config_from_hf(PUBLISHED[model], dtype)
