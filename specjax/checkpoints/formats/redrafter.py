"""ReDrafter networks as their authors store them (apple/ml-recurrent-drafter), read.

`lm_head.<j>.linear.{weight,bias}` are the residual blocks and `lm_head.<L>.weight` the vocabulary matrix;
`rnn_w.weight` and `rnn_u.{weight,bias}` the recurrence, which a config with `rnn: false` does without; and
`input_proj.{weight,bias}`, where `exit_dim` is not twice the target's width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from specjax.checkpoints.drafters import SavedDrafter
from specjax.checkpoints.formats.keys import unread
from specjax.checkpoints.formats.tensors import LISTED, find_tensors, linear, read_tensors, refuse_broken, stored_dtype
from specjax.models.redrafter import RedrafterConfig
from specjax.models.target import Target

FILES = ("model.safetensors", "pytorch_model.bin")
MODEL_TYPE = "recurrent_drafting_drafter"
BLOCK = re.compile(r"lm_head\.(\d+)\.linear\.(weight|bias)")
CONFIG_KEYS = ("vocab_size", "hidden_size", "exit_dim", "num_draft_layers", "num_lookback_tokens", "rnn")


def is_redrafter(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of theirs."""
    return content.get("model_type") == MODEL_TYPE or {"exit_dim", "num_draft_layers"} <= content.keys()


def read_redrafter(path: epath.PathLike, target: Target) -> SavedDrafter:
    """Reads a ReDrafter network for a target. What is in the file counts, not the sizes in its config.

    Args:
        path: a directory with `config.json` and one of the usual files, or the file of tensors itself.
        target: that it belongs to.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a ReDrafter network, another target's, tensors missing or unexpected, or not finite.
    """
    file, content = find_tensors(path, FILES)
    tensors = read_tensors(file)
    layers = 1 + max((int(m[1]) for m in map(BLOCK.fullmatch, tensors) if m), default=-1)
    if not layers:
        raise ValueError(f"{file} holds no ReDrafter network: expected tensors such as 'lm_head.0.linear.weight'")
    refuse_broken(file, tensors)
    width = target.config.hidden_size
    config = RedrafterConfig(
        hidden_size=width,
        vocab_size=target.config.vocab_size,
        head_size=target.config.vocab_size,
        exit_dim=int(tensors["lm_head.0.linear.weight"].shape[0])
        if "lm_head.0.linear.weight" in tensors
        else 2 * width,
        num_layers=layers,
        recurrent=any(name.startswith("rnn_") for name in tensors),
        own_head=True,
        dtype=target.config.dtype,
    )
    _refuse_misfits(file, config, tensors, content, target)

    def part(name: str) -> dict[str, Any]:
        leaves = {leaf: tensors[f"{name}.{leaf}"] for leaf in ("weight", "bias") if f"{name}.{leaf}" in tensors}
        return linear(leaves, config.dtype)

    params: dict[str, Any] = {
        "blocks": {j: {"linear": part(f"lm_head.{j}.linear")} for j in range(layers)},
        "lm_head": part(f"lm_head.{layers}"),
    }
    params |= {name: part(name) for name in ("rnn_w", "rnn_u", "input_proj") if f"{name}.weight" in tensors}
    kept = {key: content[key] for key in CONFIG_KEYS if key in content}
    info = {"layout": "redrafter", "file": file.name, "config": kept}
    info["dtype"] = stored_dtype(value.dtype for value in tensors.values())
    info["config_unused"] = unread(content, (*CONFIG_KEYS, "model_type"))
    return SavedDrafter("redrafter", config, params, {}, ("embed",), info)


def _refuse_misfits(
    file: epath.Path,
    config: RedrafterConfig,
    tensors: Mapping[str, np.ndarray],
    content: Mapping[str, Any],
    target: Target,
) -> None:
    """One error for all that does not fit."""
    width, inner = config.hidden_size, config.exit_dim
    expected: dict[str, tuple[int, ...]] = {f"lm_head.{config.num_layers}.weight": (config.head_size, inner)}
    for j in range(config.num_layers):
        expected |= {f"lm_head.{j}.linear.weight": (inner, inner), f"lm_head.{j}.linear.bias": (inner,)}
    if config.recurrent:
        square = (width, width)
        expected |= {"rnn_w.weight": square, "rnn_u.weight": square, "rnn_u.bias": (width,)}
    if inner != 2 * width:
        expected |= {"input_proj.weight": (inner, 2 * width), "input_proj.bias": (inner,)}
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if content.get("rnn", config.recurrent) != config.recurrent:
        problems.append(f"config.json says rnn={content['rnn']}, the tensors say {config.recurrent}")
    if problems:
        raise ValueError(
            f"{file} does not hold a ReDrafter network for {target.name!r}: {'; '.join(problems[:LISTED])}"
        )
