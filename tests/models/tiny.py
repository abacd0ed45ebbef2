"""Tiny random transformers models of every family, as directories that we load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from specjax.checkpoints.vocabularies import CONTROL, NORMAL, byte_level_bpe
from specjax.models.tokenizer import Tokenizer

VOCAB = 264
SPECIAL = ("<|end|>", "<|start|>", "<|pad|>")
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=0,
    pad_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
GEMMA = dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=24)

# name -> (model_type, what differs from COMMON)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(rms_norm_eps=1e-5)),
    "llama_tied": ("llama", dict(tie_word_embeddings=True)),
    "llama_biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama3_rope": ("llama", dict(rope_theta=500000.0, rope_scaling=LLAMA3)),
    "linear_rope": ("llama", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    "yarn_rope": ("llama", dict(rope_theta=100000.0, rope_scaling=YARN)),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", dict(rope_scaling=YARN | dict(beta_fast=16, beta_slow=2))),
    "qwen2_window": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "mistral": ("mistral", dict(sliding_window=8, head_dim=16)),
    "mistral_full": ("mistral", dict(sliding_window=None)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2)),
    "smollm3_window": ("smollm3", dict(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=8)),
    "gemma2": ("gemma2", GEMMA | dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.5)),
    "gemma2_plain": ("gemma2", GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    "gemma3": ("gemma3_text", GEMMA | dict(sliding_window_pattern=3, rope_local_base_freq=5000.0)),
    "gemma3_linear": (
        "gemma3_text",
        GEMMA | dict(sliding_window_pattern=2, rope_scaling=dict(rope_type="linear", factor=8.0)),
    ),
}


def model(name: str, **changes: Any) -> Any:
    """A random model whose every parameter, norms and biases included, is away from its initial value."""
    kind, differs = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **(COMMON | differs | changes))
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def tokenizer() -> Tokenizer:
    """Bytes and three special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * 256
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    backend = byte_level_bpe("gpt-2", tokens, types, [])
    return Tokenizer(backend=backend, eos_ids=(0,), bos_id=1, pad_id=2, chat_template=template)


def save(made: Any, directory: Path, **options: Any) -> Path:
    """Writes the model as transformers does, with a tokenizer beside it."""
    made.save_pretrained(directory, **options)
    tokenizer().save(directory)
    return directory
