"""Hydra heads as their authors store them: `hydra_lm_head.pt` with `hydra_mlp.<i>.<j>` and `hydra_lm_head.<i>`.

Only grounded heads are Hydra: head i reads the hidden state and i + 1 embeddings. Hydra++ (`hydra_head_arch`
`prefix-mlp`) has the decoder layer and norm of a model in front of them, behind `prefix_embeding_layer.`, and dropout
between its blocks, which counts in their numbers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from specjax.checkpoints import names
from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.checkpoints.formats.keys import unread
from specjax.checkpoints.formats.plain import layer_reasons
from specjax.checkpoints.formats.tensors import (
    LISTED,
    find_tensors,
    linear,
    read_tensors,
    refuse_broken,
    refuse_different_blocks,
    require_method,
    some,
    stored_dtype,
    torch_linear,
    write_tensors,
)
from specjax.checkpoints.sources import published_name
from specjax.models.medusa import HydraConfig
from specjax.models.target import Target

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt", "model.safetensors", "pytorch_model.bin")
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
# With dropout, the matrix is the second entry of a sequence.
HEAD = re.compile(r"hydra_lm_head\.(\d+)(?:\.1)?\.(weight|bias)")
PREFIX = "prefix_embeding_layer."  # their spelling
# Of the model around the prefix layer: an embedding that nothing reads, and tables of old checkpoints.
IGNORED = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
ARCHITECTURES = ("mlp", "prefix-mlp")
CONFIG_KEYS = ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "hidden_state_offset")

Part = dict[str, np.ndarray]


def read_hydra(path: epath.PathLike, target: Target) -> SavedDrafter:
    """Reads Hydra heads for a target.

    Args:
        path: a directory with `config.json` and one of the usual files, or the file of tensors itself.
        target: that the heads belong to.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not Hydra heads, heads of another target or kind, tensors missing or unexpected, or not finite.
    """
    file, content = find_tensors(path, FILES)
    _refuse_others(file, content)
    stored = read_tensors(file)
    refuse_broken(file, stored)
    dtype = stored_dtype(value.dtype for value in stored.values())
    unused = sorted(name for name in stored if name in IGNORED)
    prefix = {name: value for name, value in stored.items() if name.startswith(PREFIX) and name not in IGNORED}
    _check_architecture(file, content, bool(prefix))
    blocks, products = _sorted_out(file, {n: v for n, v in stored.items() if not n.startswith(PREFIX)})
    # Entries without parameters (dropout) leave gaps: the order counts.
    places = {i: sorted({j for head, j, _ in blocks if head == i}) for i in {head for head, _, _ in blocks}}
    count, layers = max(places) + 1, len(places[0]) if 0 in places else 0
    config = HydraConfig(
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        head_size=target.config.vocab_size,
        num_heads=count,
        num_layers=max(layers, 1),
        own_head=True,
        prefix=target.config.with_layers((target.config.num_layers - 1,)) if prefix else None,
        dtype=target.config.dtype,
    )
    expected = _expected(config, places)
    found: dict[tuple[Any, ...], Any] = {
        (*key, leaf): value for key, part in blocks.items() for leaf, value in part.items()
    }
    found |= {(i, leaf): value for i, part in products.items() for leaf, value in part.items()}
    problems = [f"missing {_name(key)}" for key in sorted(expected.keys() - found.keys(), key=str)]
    problems += [f"unexpected {_name(key)}" for key in sorted(found.keys() - expected.keys(), key=str)]
    problems += [
        f"{_name(key)} has shape {list(found[key].shape)}, expected {list(shape)}"
        for key, shape in expected.items()
        if key in found and found[key].shape != shape
    ]
    problems += [f"head {i} has {len(p)} blocks, head 0 {layers}" for i, p in places.items() if len(p) != layers]
    slots = _prefix_slots(config)
    problems += [f"missing {name}" for name in sorted(slots.keys() - prefix.keys())]
    problems += [f"unexpected {name}" for name in sorted(prefix.keys() - slots.keys())]
    problems += [
        f"{name} has shape {list(prefix[name].shape)}, expected {list(slot.shape)}"
        for name, slot in slots.items()
        if name in prefix and prefix[name].shape != slot.shape
    ]
    if problems:
        raise ValueError(f"{file} does not hold Hydra heads for {target.name!r}: {'; '.join(problems[:LISTED])}")
    heads: dict[int, Any] = {}
    for i in range(count):
        first, *rest = places[i]
        heads[i] = {
            "grounded": {
                "linear": linear(blocks[i, first, "linear"], config.dtype),
                "residual": linear(blocks[i, first, "res_connection"], config.dtype),
            },
            "blocks": {n: {"linear": linear(blocks[i, j, "linear"], config.dtype)} for n, j in enumerate(rest)},
            "lm_head": linear(products[i], config.dtype),
        }
        if not rest:
            del heads[i]["blocks"]
    params: dict[str, Any] = {"heads": heads}
    for name, slot in slots.items():
        node = params.setdefault("prefix", {})
        for key in slot.path[:-1]:
            node = node.setdefault(key, {})
        value = np.asarray(prefix[name], np.float32)
        node[slot.path[-1]] = jnp.asarray(value.T if slot.transpose else value, config.dtype)
    kept = {key: content[key] for key in CONFIG_KEYS if key in content}
    info = {"layout": "hydra", "file": file.name, "dtype": dtype, "config": kept, "unused": unused}
    info["config_unused"] = unread(content, (*CONFIG_KEYS, "base_model_name_or_path"))
    return SavedDrafter("hydra", config, params, {}, ("embed",), info)


def write_hydra(directory: epath.PathLike, drafter: SavedDrafter, target: Target, dtype: str = "bfloat16") -> list[str]:
    """Writes Hydra heads as their authors store them.

    The published form has whole embeddings, a linear residual and a whole vocabulary matrix for each head. Others are
    written out as such: a map of the embeddings is multiplied in, a residual of the hidden state is a unit matrix, and
    heads that share the target's vocabulary product get all of its rows.

    Args:
        directory: made if absent.
        drafter: as `load_drafter` gives it.
        target: that it was trained for.
        dtype: of the floats.

    Returns:
        The files written.

    Raises:
        ValueError: not Hydra heads, heads with a reduced vocabulary and matrices of their own, a prefix layer that is
            no plain Llama layer, or more than two blocks a head that differ (theirs repeat the second).
    """
    config: HydraConfig = require_method(drafter, "hydra", HydraConfig)
    if config.own_head and config.head_size < config.vocab_size:
        raise ValueError(
            f"the layout has no reduced vocabulary, these heads have one of {config.head_size} tokens with matrices of "
            "their own"
        )
    if config.prefix is not None and (reasons := layer_reasons(config.prefix)):
        raise ValueError(f"the layout's prefix is a plain Llama layer, this one has {'; '.join(reasons)}")
    refuse_different_blocks(drafter.params, config.num_layers, allowed=2)
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, part: Mapping[str, Any]) -> None:
        tensors.update({f"{name}.{leaf}": value for leaf, value in torch_linear(part, dtype).items()})

    # Dropout stands before each block and each matrix of Hydra++.
    step, first, head_place = (2, 1, ".1") if config.prefix is not None else (1, 0, "")

    for i in range(config.num_heads):
        head = drafter.params["heads"][i]
        grounded = head["grounded"]
        put(f"hydra_mlp.{i}.{first}.linear", _whole(config, grounded["linear"], drafter.params))
        put(f"hydra_mlp.{i}.{first}.res_connection", _residual(config, i, grounded, drafter.params))
        for j, block in head.get("blocks", {}).items():
            put(f"hydra_mlp.{i}.{first + step * (j + 1)}.linear", block["linear"])
        if config.own_head:
            put(f"hydra_lm_head.{i}{head_place}", head["lm_head"])
        else:
            kernel = target_head(target.config, target.params, jnp.arange(config.vocab_size))
            put(f"hydra_lm_head.{i}{head_place}", {"kernel": kernel, "bias": jnp.zeros((config.vocab_size,))})
    for name, slot in _prefix_slots(config).items():
        leaf = drafter.params["prefix"]
        for key in slot.path:
            leaf = leaf[key]
        value = np.asarray(jnp.asarray(leaf).astype(dtype))
        tensors[name] = value.T if slot.transpose else value
    directory = epath.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "hydra_lm_head.safetensors", tensors)
    described = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "mlp" if config.prefix is None else "prefix-mlp",
        "grounded_heads": True,
        "base_model_name_or_path": published_name(target.name),
    }
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return ["hydra_lm_head.safetensors", "config.json"]


def _refuse_others(file: epath.Path, content: Mapping[str, Any]) -> None:
    arch = content.get("hydra_head_arch", "mlp")
    if arch not in ARCHITECTURES:
        raise ValueError(f"{file}: hydra_head_arch={arch!r} is not read; expected {' or '.join(ARCHITECTURES)}")
    if not content.get("grounded_heads", True):
        raise ValueError(f"{file}: grounded_heads=false, so these heads do not see each other; they are Medusa's")
    if content.get("hidden_state_offset", 0):
        raise ValueError(f"{file}: hidden_state_offset={content['hidden_state_offset']} is not read; expected 0")


def _check_architecture(file: epath.Path, content: Mapping[str, Any], prefix: bool) -> None:
    arch = content.get("hydra_head_arch")
    if arch is not None and prefix != (arch == "prefix-mlp"):
        found = "has" if prefix else "has no"
        raise ValueError(
            f"{file} {found} tensors of a prefix layer ({PREFIX}*), its config.json says hydra_head_arch={arch!r}: one "
            "of them is another head's"
        )


def _prefix_slots(config: HydraConfig) -> dict[str, names.Slot]:
    """The tensors of the prefix layer by name; paths are within `params["prefix"]`."""
    if config.prefix is None:
        return {}
    slots = {}
    for name, slot in names.slots(config.prefix).items():
        if slot.path[0] == "layers":
            slots[PREFIX + name.removeprefix("model.")] = dataclasses.replace(slot, path=("layer", *slot.path[2:]))
    slots[f"{PREFIX}norm.weight"] = names.Slot(("norm", "weight"), (config.hidden_size,), False)
    return slots


def _sorted_out(
    file: epath.Path, tensors: Mapping[str, np.ndarray]
) -> tuple[dict[tuple[int, int, str], Part], dict[int, Part]]:
    """Linear maps by head, place and role; vocabulary matrices by head.

    Raises:
        ValueError: a tensor is neither, or there are no heads.
    """
    blocks: dict[tuple[int, int, str], Part] = {}
    products: dict[int, Part] = {}
    unexpected = []
    for name, value in tensors.items():
        if match := BLOCK.fullmatch(name):
            blocks.setdefault((int(match[1]), int(match[2]), match[3]), {})[match[4]] = value
        elif match := HEAD.fullmatch(name):
            products.setdefault(int(match[1]), {})[match[2]] = value
        else:
            unexpected.append(name)
    if unexpected:
        raise ValueError(f"{file} has unexpected tensors: {some(unexpected)}")
    if not blocks:
        raise ValueError(f"{file} holds no Hydra heads: expected tensors such as 'hydra_mlp.0.0.linear.weight'")
    return blocks, products


def _expected(config: HydraConfig, places: Mapping[int, list[int]]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Shape of every tensor, by (head, place, role, leaf) or (head, leaf)."""
    width = config.hidden_size
    shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for i in range(config.num_heads):
        for n, j in enumerate(places.get(i, [0])[: config.num_layers] or [0]):
            inputs = width * (i + 2) if n == 0 else width
            for role in ("linear", "res_connection") if n == 0 else ("linear",):
                shapes[i, j, role, "weight"], shapes[i, j, role, "bias"] = (width, inputs), (width,)
        shapes[i, "weight"], shapes[i, "bias"] = (config.head_size, width), (config.head_size,)
    return shapes


def _name(key: tuple[Any, ...]) -> str:
    if len(key) == 2:
        return f"hydra_lm_head.{key[0]}.{key[1]}"
    return f"hydra_mlp.{'.'.join(str(part) for part in key)}"


def _whole(config: HydraConfig, part: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """A linear map of hidden state and embeddings, the shared map of the embeddings multiplied in."""
    if not config.embed_rank:
        return dict(part)
    kernel, width, rank = jnp.asarray(part["kernel"]), config.hidden_size, config.embed_rank
    read = jnp.asarray(params["embed_in"]["kernel"], jnp.float32)
    pieces = [kernel[:width]]
    for start in range(width, kernel.shape[0], rank):
        pieces.append(jnp.dot(read, kernel[start : start + rank], precision="highest"))
    return {**part, "kernel": jnp.concatenate(pieces)}


def _residual(config: HydraConfig, index: int, grounded: Mapping[str, Any], params: Any) -> dict[str, Any]:
    if config.residual == "linear":
        return _whole(config, grounded["residual"], params)
    width = config.hidden_size
    return {"kernel": jnp.eye(width * (index + 2), width), "bias": jnp.zeros((width,))}
