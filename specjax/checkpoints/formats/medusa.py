"""Medusa heads of other projects: FasterDecoding's Medusa (0.x and 1.0) and vLLM's.

| layout | tensors |
|---|---|
| `medusa` | `<i>.<j>.linear.{weight,bias}`, `<i>.<L>.weight`; in a whole model all behind `medusa_head.` |
| `vllm` | `blocks.<i>.layers.<j>.{weight,bias}`, `lm_heads.<i>.weight`, `token_map`, perhaps behind `medusa_heads.` |

What is in the file counts, not the number of heads in a config: the first published heads disagree with theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.checkpoints.formats.keys import MODEL, unread
from specjax.checkpoints.formats.tensors import (
    Read,
    find_tensors,
    linear,
    open_tensors,
    refuse_broken,
    refuse_different_blocks,
    require_method,
    some,
    stored_dtype,
    torch_linear,
    write_tensors,
)
from specjax.checkpoints.sources import published_name
from specjax.models.medusa import MedusaConfig
from specjax.models.target import Target

FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
LAYOUTS = ("medusa", "vllm")
BLOCK = {
    "medusa": re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"),
    "vllm": re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
}
HEAD = {"medusa": re.compile(r"(\d+)\.(\d+)\.weight"), "vllm": re.compile(r"lm_heads\.(\d+)\.weight")}
PREFIXES = ("medusa_head.", "medusa_heads.")
# What the file says better than its config, and what describes the model around the heads.
CONFIG_KEYS = ("medusa_num_heads", "medusa_num_layers", "num_heads", "medusa_fc_bias", "truncated_vocab_size")
KNOWN_KEYS = (*CONFIG_KEYS, *MODEL, "base_model_name_or_path", "original_lm_head")


def is_vllm_medusa(content: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of vLLM's Medusa heads, whatever its files are called."""
    named = content.get("model_type") == "medusa" or "MedusaModel" in (content.get("architectures") or [])
    return named or "truncated_vocab_size" in content


def read_medusa(path: epath.PathLike, target: Target) -> SavedDrafter:
    """Reads Medusa heads for a target; the layout is told by the names of the tensors.

    Args:
        path: a directory with `config.json` and one of the usual files, or the file of tensors itself.
        target: that the heads belong to.

    Returns:
        The drafter, whose `info` names layout, config and the tensors that are not heads (those of a whole model).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not Medusa heads, heads of another target, tensors missing or unexpected, or not finite.
    """
    file, content = find_tensors(path, FILES)
    heads, layout, unused = _heads_of(file, open_tensors(file))
    dtype = stored_dtype(value.dtype for value in heads.values())
    token_map = heads.pop("token_map", None)
    blocks, products = _sorted_out(file, layout, heads)
    shared = layout == "vllm" and bool(content.get("original_lm_head"))
    count, layers = _regular(file, blocks, products, shared)
    width = blocks[0, 0]["weight"].shape[0]
    rows = products[0].shape[0]
    vocab = _vocabulary(file, token_map, rows, content, target)
    config = MedusaConfig(
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        head_size=rows if vocab is None else len(vocab),
        num_heads=count,
        num_layers=layers,
        own_head=True,
        bias="bias" in blocks[0, 0],
        dtype=target.config.dtype,
    )
    if width != config.hidden_size:
        raise ValueError(f"{file}: heads of width {width} for a target of {config.hidden_size}: another target's heads")
    order = None if vocab is None else np.argsort(vocab)
    params: dict[str, Any] = {"heads": {}}
    for i in range(count):
        product = products[0 if shared else i]
        if order is not None:
            product = (product if len(product) == len(order) else product[np.asarray(vocab)])[order]
        params["heads"][i] = {
            "blocks": {j: {"linear": linear(blocks[i, j], config.dtype)} for j in range(layers)},
            "lm_head": linear({"weight": product}, config.dtype),
        }
    tables = {}
    if vocab is not None and len(vocab) < target.config.vocab_size:  # a map of all tokens orders them, and no more
        tables = {"vocab": jnp.asarray(np.sort(vocab), jnp.int32)}
    kept = {key: content[key] for key in CONFIG_KEYS if key in content}
    info = {"layout": layout, "file": file.name, "dtype": dtype, "config": kept, "unused": sorted(unused)}
    info["config_unused"] = unread(content, KNOWN_KEYS)
    return SavedDrafter("medusa", config, params, tables, (), info)


def write_medusa(
    directory: epath.PathLike, drafter: SavedDrafter, target: Target, layout: str, dtype: str = "bfloat16"
) -> list[str]:
    """Writes Medusa heads in a layout of others.

    Args:
        directory: made if absent.
        drafter: as `load_drafter` gives it, the shared head in it.
        target: that it was trained for.
        layout: `medusa` for FasterDecoding's, which has no reduced vocabulary: heads that share the target's get all of
            its rows; `vllm` for vLLM's.
        dtype: of the floats.

    Returns:
        The files written.

    Raises:
        ValueError: not Medusa heads, an unknown layout, or one that cannot hold these heads: a vocabulary, or different
            blocks in one head, which their code would run as one.
    """
    config = require_method(drafter, "medusa", MedusaConfig)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; expected {' or '.join(repr(name) for name in LAYOUTS)}")
    if layout == "medusa":
        refuse_different_blocks(drafter.params, config.num_layers, allowed=1)
    vocab = drafter.tables.get("vocab")
    tensors: dict[str, np.ndarray] = {}
    for i in range(config.num_heads):
        for j, block in drafter.params["heads"][i]["blocks"].items():
            name = f"{i}.{j}.linear" if layout == "medusa" else f"blocks.{i}.layers.{j}"
            tensors |= {f"{name}.{leaf}": value for leaf, value in torch_linear(block["linear"], dtype).items()}
            if (
                layout == "medusa" and not config.bias
            ):  # Their blocks have one, and keep a random one that is not given.
                tensors[f"{name}.bias"] = np.zeros(config.hidden_size, tensors[f"{name}.weight"].dtype)
        if layout == "vllm" and not config.own_head and i:
            continue
        name = f"{i}.{config.num_layers}.weight" if layout == "medusa" else f"lm_heads.{i}.weight"
        if layout == "medusa" and config.head_size < config.vocab_size:
            if config.own_head:
                raise ValueError(
                    f"the layout 'medusa' has no reduced vocabulary, these heads have one of {config.head_size} tokens "
                    "with matrices of their own; expected layout='vllm'"
                )
            head = target_head(target.config, target.params, jnp.arange(config.vocab_size))
            tensors[name] = torch_linear({"kernel": head}, dtype)["weight"]
        else:
            product = drafter.params["heads"][i]["lm_head"] if config.own_head else drafter.params["lm_head"]
            tensors[name] = torch_linear(product, dtype)["weight"]
    if layout == "vllm" and vocab is not None:
        tensors["token_map"] = np.asarray(vocab, np.int64)
    directory = epath.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    file = "medusa_lm_head.safetensors" if layout == "medusa" else "model.safetensors"
    write_tensors(directory / file, tensors)
    (directory / "config.json").write_text(json.dumps(_described(config, target, layout), indent=2) + "\n")
    return [file, "config.json"]


def _heads_of(file: epath.Path, tensors: Mapping[str, Read]) -> tuple[dict[str, np.ndarray], str, list[str]]:
    """The tensors of the heads without their prefix, their layout, and what else the file has, which is not read."""
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in tensors)), "")
    found = {name.removeprefix(prefix): read for name, read in tensors.items() if name.startswith(prefix)}
    unused = [name for name in tensors if not name.startswith(prefix)]
    layout = next((name for name in LAYOUTS if any(BLOCK[name].fullmatch(key) for key in found)), None)
    if layout is None:
        raise ValueError(
            f"{file} holds no Medusa heads: expected tensors such as '0.0.linear.weight' or "
            f"'blocks.0.layers.0.weight', found {some(tensors) or 'none'}"
        )
    if "token_map" in unused:  # vLLM takes it with and without the prefix.
        unused.remove("token_map")
        found["token_map"] = tensors["token_map"]
    heads = {name: read() for name, read in found.items()}
    refuse_broken(file, heads)
    return heads, layout, unused


def _sorted_out(
    file: epath.Path, layout: str, heads: Mapping[str, np.ndarray]
) -> tuple[dict[tuple[int, int], dict[str, np.ndarray]], dict[int, np.ndarray]]:
    """Blocks by head and place, vocabulary matrices by head.

    Raises:
        ValueError: a tensor is neither.
    """
    blocks: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    products: dict[int, np.ndarray] = {}
    unexpected = []
    for name, value in heads.items():
        if match := BLOCK[layout].fullmatch(name):
            blocks.setdefault((int(match[1]), int(match[2])), {})[match[3]] = value
        elif match := HEAD[layout].fullmatch(name):
            products[int(match[1])] = value
        else:
            unexpected.append(name)
    if unexpected:
        raise ValueError(f"{file} has unexpected tensors: {some(unexpected)}")
    return blocks, products


def _regular(
    file: epath.Path,
    blocks: Mapping[tuple[int, int], Mapping[str, np.ndarray]],
    products: Mapping[int, np.ndarray],
    shared: bool,
) -> tuple[int, int]:
    """Numbers of heads and of blocks a head.

    Raises:
        ValueError: heads differ in what they have, or a tensor has the wrong shape; all in one message.
    """
    count, layers = max(i for i, _ in blocks) + 1, max(j for _, j in blocks) + 1
    missing = [f"block {j} of head {i}" for i in range(count) for j in range(layers) if (i, j) not in blocks]
    missing += [f"weight of block {j} of head {i}" for (i, j), part in blocks.items() if "weight" not in part]
    missing += [f"vocabulary matrix of head {i}" for i in range(1 if shared else count) if i not in products]
    extra = [f"vocabulary matrix of head {i}" for i in products if i >= count]
    biased = {"bias" in part for part in blocks.values()}
    problems = [f"missing {some(missing)}"] * bool(missing) + [f"unexpected {some(extra)}"] * bool(extra)
    if len(biased) > 1:
        problems.append("some blocks have a bias and some have none")
    if not problems:
        width, rows = blocks[0, 0]["weight"].shape[-1], products[0].shape[0]
        expected = {(i, j, "weight"): (width, width) for i, j in blocks} | {(i, j, "bias"): (width,) for i, j in blocks}
        for (i, j), part in blocks.items():
            problems += [
                f"{leaf} of block {j} of head {i} has shape {list(value.shape)}, expected {list(expected[i, j, leaf])}"
                for leaf, value in part.items()
                if value.shape != expected[i, j, leaf]
            ]
        problems += [
            f"vocabulary matrix of head {i} has shape {list(value.shape)}, expected {[rows, width]}"
            for i, value in products.items()
            if value.shape != (rows, width)
        ]
    if problems:
        raise ValueError(f"{file} does not hold Medusa heads as expected: {'; '.join(problems)}")
    return count, layers


def _vocabulary(
    file: epath.Path, token_map: np.ndarray | None, rows: int, content: Mapping[str, Any], target: Target
) -> np.ndarray | None:
    """Target id of each row of the vocabulary matrices as they are in the file, or None where all are there."""
    whole = target.config.vocab_size
    if token_map is None:
        if rows != whole:
            raise ValueError(
                f"{file}: vocabulary matrices of {rows} rows for a target of {whole} tokens, and no token_map: another "
                "target's heads"
            )
        return None
    ids = np.asarray(token_map).astype(np.int64)
    if ids.ndim != 1 or len(np.unique(ids)) != len(ids) or not ((ids >= 0) & (ids < whole)).all():
        raise ValueError(f"{file}: token_map of shape {list(ids.shape)}; expected different ids from 0 to {whole - 1}")
    if rows not in (len(ids), whole):
        raise ValueError(f"{file}: vocabulary matrices of {rows} rows, token_map of {len(ids)}; expected as many")
    said = content.get("truncated_vocab_size")
    if said not in (None, len(ids)):
        raise ValueError(f"{file}: config says truncated_vocab_size={said}, token_map has {len(ids)} ids")
    return ids


def _described(config: MedusaConfig, target: Target, layout: str) -> dict[str, Any]:
    if layout == "medusa":
        return {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": published_name(target.name),
        }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.head_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": not config.own_head,
    }
