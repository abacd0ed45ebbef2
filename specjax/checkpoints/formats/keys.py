"""Keys of other projects' `config.json`: what is read, what says nothing about a draft, what is left over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# What `config_from_hf` reads, of all families.
MODEL = frozenset(
    {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "model_type",
        "no_rope_layer_interval",
        "no_rope_layers",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "partial_rotary_factor",
        "quantization_config",
        "query_pre_attn_scalar",
        "rms_norm_eps",
        "rope_local_base_freq",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "sliding_window_pattern",
        "tie_word_embeddings",
        "use_bidirectional_attention",
        "use_sliding_window",
        "vocab_size",
    }
)
# What every config of transformers may have, and what changes no number that a head computes.
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "mlp_dropout",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)


def unread(content: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Keys of a config that nothing reads and that may mean something, sorted, for the report.

    Args:
        content: a `config.json`, or a part of one.
        read: keys that the reader uses.
    """
    return sorted(content.keys() - set(read) - HARMLESS)
