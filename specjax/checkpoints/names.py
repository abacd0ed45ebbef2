"""Names: where each leaf of a parameter tree lies in a Hugging Face checkpoint, and in a GGUF file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.safetensors import Spec, StoredTensor
from specjax.models import graph
from specjax.models.config import ModelConfig

Path = tuple[str | int, ...]

FLOATS = tuple(np.dtype(name) for name in ("float32", "float16", "bfloat16"))
LISTED = 20  # entries of one kind that an error spells out

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOP = {("embed", "embedding"): _EMBEDDING, ("final_norm", "weight"): "model.norm.weight", ("lm_head", "kernel"): _HEAD}
_INNER = {
    "attn": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"},
    "mlp": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}
_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
# Gemma's `post_attention_layernorm` is what its name says; in the other families it precedes the MLP.
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a stored tensor goes.

    Attributes:
        path: keys down the parameter tree.
        shape: shape as stored; kernels are stored `[out, in]` and kept `[in, out]`.
        transpose: whether the leaf is the transpose of what is stored.
    """

    path: Path
    shape: tuple[int, ...]
    transpose: bool


@functools.lru_cache(maxsize=16)
def slots(config: ModelConfig) -> dict[str, Slot]:
    """Every tensor of a Hugging Face checkpoint of `config`, by name."""
    # All layers have the leaves of the first, and tracing one is quick.
    leaves, _ = jax.tree_util.tree_flatten_with_path(graph(config.with_layers((0,)))[1])
    shapes = {tuple(key.key for key in keys): leaf.shape for keys, leaf in leaves}
    layer = {path[2:]: shape for path, shape in shapes.items() if path[0] == "layers"}
    whole = {path: shape for path, shape in shapes.items() if path[0] != "layers"}
    for i in range(config.num_layers):
        whole |= {("layers", i, *path): shape for path, shape in layer.items()}
    return {_name(path, config): _slot(path, shape) for path, shape in whole.items()}


def _slot(path: Path, shape: tuple[int, ...]) -> Slot:
    transpose = path[-1] == "kernel"
    return Slot(path, shape[::-1] if transpose else shape, transpose)


def _name(path: Path, config: ModelConfig) -> str:
    if path in _TOP:
        return _TOP[path]
    _, layer, block, *rest = path
    leaf = "bias" if path[-1] == "bias" else "weight"
    if block in _INNER:
        module = {"attn": "self_attn", "mlp": "mlp"}[str(block)]
        return f"model.layers.{layer}.{module}.{_INNER[str(block)][str(rest[0])]}.{leaf}"
    norms = _FOUR_NORMS if config.post_norms else _NORMS
    return f"model.layers.{layer}.{norms[str(block)]}.{leaf}"


def load_params(config: ModelConfig, tensors: Mapping[str, StoredTensor], places: Any = None) -> Any:
    """Reads a parameter tree, one tensor in host memory at a time, and of one that is split this process's parts alone.

    Beside what lies on the devices, never more is held than the largest tensor and this process's parts of it.

    Args:
        config: the model; `config.dtype` is the dtype of the leaves.
        tensors: what the checkpoint holds.
        places: tree of a sharding for each leaf; None for the default device.

    Raises:
        ValueError: tensors are missing, unexpected, or of the wrong shape or dtype; all of them in one message.
    """
    wanted = slots(config)
    check_tensors(config, tensors)
    dtype = jnp.dtype(config.dtype)
    params: dict[Any, Any] = {}
    for name, slot in wanted.items():
        branch = params
        for key in slot.path[:-1]:
            branch = branch.setdefault(key, {})
        read = parts_of(tensors[name], slot, dtype)
        if places is None:
            branch[slot.path[-1]] = jnp.asarray(read((slice(None),) * len(slot.shape)))
            continue
        place = functools.reduce(lambda tree, key: tree[key], slot.path, places)
        shape = slot.shape[::-1] if slot.transpose else slot.shape
        # Waited for: arrays on their way to devices would pile up in host memory.
        branch[slot.path[-1]] = jax.block_until_ready(jax.make_array_from_callback(shape, place, read))
    return params


def parts_of(tensor: StoredTensor, slot: Slot, dtype: np.dtype) -> Callable[[Any], np.ndarray]:
    """A reader of parts of a leaf, by a slice for each of its dimensions.

    Of what is stored only the rows of the part are read. Those that were read last are kept, and the parts so far: the
    devices of a process ask for the same ones.
    """
    rows: dict[tuple[int, int, int], np.ndarray] = {}
    parts: dict[tuple[Any, ...], np.ndarray] = {}

    def read(index: Any) -> np.ndarray:
        stored = index[::-1] if slot.transpose else index
        key = tuple(part.indices(size) for part, size in zip(stored, slot.shape, strict=True))
        if key not in parts:
            if key[0] not in rows:
                rows.clear()
                rows[key[0]] = tensor.read(stored[0])
            part = rows[key[0]][(slice(None), *stored[1:])].astype(dtype, copy=False)
            parts[key] = np.ascontiguousarray(part.T if slot.transpose else part)
        return parts[key]

    return read


def check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Holds what a checkpoint has against what `config` needs; raises as `load_params` does."""
    wanted = slots(config)
    problems = {
        "missing": [f"{name} {list(slot.shape)}" for name, slot in wanted.items() if name not in tensors],
        "unexpected": [
            f"{name} {list(tensor.shape)}"
            for name, tensor in tensors.items()
            if name not in wanted and not _harmless(name, config, tensors)
        ],
        "of the wrong shape": [
            f"{name}: expected {list(slot.shape)}, found {list(tensors[name].shape)}"
            for name, slot in wanted.items()
            if name in tensors and tensors[name].shape != slot.shape
        ],
        "of the wrong dtype": [
            f"{name}: expected float32, float16 or bfloat16, found {tensors[name].dtype.name}"
            for name in wanted
            if name in tensors and tensors[name].dtype not in FLOATS
        ],
    }
    lines = [line for kind, entries in problems.items() for line in _section(kind, entries)]
    if lines:
        raise ValueError(f"the checkpoint does not fit its config ({config.family}):\n" + "\n".join(lines))


def _section(kind: str, entries: list[str]) -> list[str]:
    if not entries:
        return []
    more = [f"  and {len(entries) - LISTED} more"] if len(entries) > LISTED else []
    return [f"{len(entries)} {kind}:", *(f"  {entry}" for entry in entries[:LISTED]), *more]


def _harmless(name: str, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> bool:
    """Tables that old checkpoints carry along, and a tied head that is written out."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name != _HEAD or not config.tie_embeddings or _EMBEDDING not in tensors:
        return False
    head, embedding = tensors[_HEAD], tensors[_EMBEDDING]
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return False
    return bool(np.array_equal(head.read().view(np.uint8), embedding.read().view(np.uint8)))


def tensor_specs(config: ModelConfig) -> dict[str, Spec]:
    """Name, shape and dtype of every tensor of a Hugging Face checkpoint of `config`."""
    return {name: Spec(slot.shape, jnp.dtype(config.dtype)) for name, slot in slots(config).items()}


def stored_form(config: ModelConfig, params: Any, name: str) -> np.ndarray:
    """One leaf of a parameter tree as a Hugging Face checkpoint holds it."""
    slot = slots(config)[name]
    leaf = functools.reduce(lambda branch, key: branch[key], slot.path, params)
    array = np.asarray(jax.device_get(leaf))
    return array.T if slot.transpose else array


_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_to_hf(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None where it is none of the model's own."""
    stem, _, leaf = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{leaf}"
    if not stem.startswith("blk."):
        return None
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{layer}.{_GGUF_LAYER[part]}.{leaf}" if part in _GGUF_LAYER else None
