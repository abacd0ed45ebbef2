"""A target that is made in a second: random weights, a tokenizer of bytes, a chat template."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.vocabularies import CONTROL, NORMAL, byte_level_bpe
from specjax.models import ModelConfig, RopeConfig, Target, graph, init_decoder
from specjax.models.target import config_hash
from specjax.models.tokenizer import Tokenizer

SPECIAL = ("<|end|>", "<|start|>", "<|pad|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """The 256 bytes behind three special tokens; id 0 ends a text."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * 256
    backend = byte_level_bpe("gpt-2", tokens, types, [])
    return Tokenizer(backend=backend, eos_ids=(0,), bos_id=1, pad_id=2, chat_template=TEMPLATE)


def tiny_target(*, layers: int = 2, width: int = 32, context: int = 4096, seed: int = 0) -> Target:
    """A random Llama over bytes.

    Its weights are larger than at initialisation, so that its laws are peaked and depend on the context.

    Args:
        layers: transformer layers.
        width: hidden size, a multiple of 16.
        context: longest sequence in tokens.
        seed: of the weights.
    """
    tokenizer = tiny_tokenizer()
    config = ModelConfig(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        head_size=tokenizer.vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=width // 8,
        num_kv_heads=width // 16,
        head_dim=8,
        max_position=context,
        norm_eps=1e-5,
        query_scale=8**-0.5,
        windows=(None,) * layers,
        ropes=(RopeConfig(),) * layers,
    )
    params = jax.tree.map(lambda x: x * 2 if x.ndim == 2 else x, init_decoder(config, jax.random.key(seed)))
    return Target(
        config=config,
        graph=graph(config)[0],
        params=params,
        tokenizer=tokenizer,
        name="tiny",
        config_hash=config_hash(config),
        eos_ids=tokenizer.eos_ids,
        context=context,
    )


def noisy_draft(target: Target, noise: float = 0.05, seed: int = 1) -> Any:
    """The target's parameters with noise: a draft that agrees with it often, not always.

    Args:
        target: what it is to draft for; the draft's config is the target's.
        noise: standard deviation over that of each weight matrix.
        seed: of the noise.
    """
    return with_noise(target.params, noise, seed)


def with_noise(params: Any, noise: float, seed: int = 1) -> Any:
    """Parameters with normal noise on every matrix, of `noise` times its standard deviation."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        x + noise * jnp.std(x) * jax.random.normal(k, x.shape, x.dtype) if x.ndim == 2 else x
        for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)
