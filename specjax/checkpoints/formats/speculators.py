"""The config.json of an eagle3 head of the `speculators` library, which vLLM serves by its path alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etils import epath

from specjax.checkpoints.formats.keys import MODEL, unread
from specjax.checkpoints.sources import published_name
from specjax.models.families import config_to_hf
from specjax.models.target import Target

VERSION = "0.3.0"  # of the format: `proposal_methods` and `verifier` as written here
OUTER = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "norm_output",
)

# What says who the head is and how long its chains are, not what it computes. The embedding counts as stored.
KNOWN = (
    "draft_attn_kernel",
    "embed_requires_grad",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "tie_word_embeddings",
    "transformer_layer_config",
)


def flat(file: epath.Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the head and of its layer in one dictionary, as an EAGLE-3 config.json has them.

    Raises:
        ValueError: it does not describe a layer, or lacks what its readers differ about.
    """
    layer = content.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{file}: config.json has no transformer_layer_config; expected one of speculators' eagle3")
    if "norm_before_residual" not in content:
        raise ValueError(
            f"{file}: config.json has no norm_before_residual, for which speculators takes false and vLLM true: add "
            "what the head was trained with"
        )
    return {**layer, **{key: content[key] for key in OUTER if content.get(key) is not None}}


def unread_keys(content: Mapping[str, Any]) -> list[str]:
    """Keys of the config, and of the layer within, that nothing reads."""
    layer = unread(content["transformer_layer_config"], MODEL)
    return unread(content, (*OUTER, *KNOWN)) + [f"transformer_layer_config.{key}" for key in layer]


def nested(described: Mapping[str, Any], target: Target, tokens: int = 3) -> dict[str, Any]:
    """The config.json of a head.

    Args:
        described: flat, as an EAGLE-3 config.json has it.
        target: the verifier.
        tokens: chain length that a server drafts by default.
    """
    outer = {key: described[key] for key in OUTER if key in described}
    layer = {key: value for key, value in described.items() if key not in OUTER}
    verifier = config_to_hf(target.config)
    layer["architectures"] = ["LlamaForCausalLM"]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        **{name: False for name in OUTER[3:]},
        **outer,
        "embed_requires_grad": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": published_name(target.name), "architectures": verifier["architectures"]},
        },
        "torch_dtype": described["torch_dtype"],
    }
