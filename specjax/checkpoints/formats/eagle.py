"""EAGLE heads of other projects: EAGLE-1 and 2, EAGLE-3 and 3.1, and the `speculators` library's eagle3.

| layout | tensors |
|---|---|
| `eagle` | `fc`, `layers.0.*` without an input norm, `embed_tokens`; the head is the target's (EAGLE, vLLM) |
| `eagle-sglang` | the same for SGLang: its architecture, and always a `fc.bias`, which it would draw at random |
| `eagle3` | `fc`, `midlayer.*` with `hidden_norm`, `norm`, `lm_head`, `d2t` and `t2d`, perhaps `embed_tokens` |
| `speculators` | as `eagle3`, with `layers.0.` for `midlayer.` and a `config.json` of its own |

`d2t` holds *offsets*: draft id i is target id i + d2t[i]. Tap layers are named in two ways: `eagle_config` names layers
whose *outputs* are fused (SGLang and llama.cpp add one), the key at the top names those whose *inputs* are (vLLM,
`speculators`). Both are written always: where a reader finds none, it takes layers of its own choice.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.checkpoints.formats import speculators
from specjax.checkpoints.formats.keys import MODEL, unread
from specjax.checkpoints.formats.plain import refuse_others
from specjax.checkpoints.formats.tensors import (
    find_tensors,
    read_tensors,
    refuse_broken,
    some,
    stored_dtype,
    write_tensors,
)
from specjax.checkpoints.formats.vocabulary import read_vocabulary, write_vocabulary
from specjax.models.eagle import Eagle3Config, EagleConfig, FeatureConfig, default_taps, feature_graph
from specjax.models.families import config_from_hf, config_to_hf
from specjax.models.target import Target

FILES = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")
LAYOUTS = ("eagle", "eagle-sglang", "eagle3", "speculators")
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
AUX = "use_aux_hidden_state"
SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
# Tensors that say nothing about the draft: tables of old checkpoints, and the target's own in training checkpoints.
IGNORED = ("layers.0.self_attn.rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
MODULES = {
    "attn": "layers.0.self_attn",
    "mlp": "layers.0.mlp",
    "mlp_norm": "layers.0.post_attention_layernorm",
    "embed_norm": "layers.0.input_layernorm",
    "hidden_norm": "layers.0.hidden_norm",
    "embed": "embed_tokens",
}
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")

Path = tuple[str | int, ...]


def read_eagle(path: epath.PathLike, target: Target) -> SavedDrafter:
    """Reads an EAGLE head for a target; the layout is told by config and tensors.

    Args:
        path: a directory with `config.json` and one of the usual files, or the file of tensors beside one.
        target: that the head belongs to. An embedding that equals the target's is shared, not kept.

    Returns:
        The drafter, of method `eagle` (EAGLE-1 and 2) or `eagle3`; its `info` names the layout, and the keys of config
        and file that nothing uses.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not an EAGLE head, a head for another target, tensors missing, unexpected or of the wrong shape (all
            in one message), a vocabulary map that is none, or NaN.
    """
    file, content = find_tensors(path, FILES)
    if not content:
        raise ValueError(f"{file} has no config.json beside it: an EAGLE head cannot be read without")
    found = read_tensors(file)
    tensors = {_plain(name): value for name, value in found.items()}
    if twice := [name for name in found if tensors[_plain(name)] is not found[name]]:
        raise ValueError(f"{file} holds the same tensor under two names ({some(twice)} is one of them): which counts?")
    layout = _layout(file, content, tensors)
    refuse_broken(file, tensors)
    unused = sorted(name for name in tensors if name in IGNORED)
    tensors = {name: value for name, value in tensors.items() if name not in IGNORED}
    head = tensors.get("lm_head.weight")
    if layout == "eagle" and head is not None and head.shape == (target.config.vocab_size, target.config.hidden_size):
        if _is(head, target_head(target.config, target.params, jnp.arange(target.config.vocab_size)).T):
            del tensors["lm_head.weight"]
    described = speculators.flat(file, content) if layout == "speculators" else content
    vocab = read_vocabulary(file, tensors, described.get("draft_vocab_size"), target.config.vocab_size)
    config = _config(file, described, layout, target, tensors, None if vocab is None else len(vocab))
    params = _params(file, config, tensors, target)
    shares = [share for share, group in (("embed", "embed"), ("head", "lm_head")) if group not in params]
    tables = {} if vocab is None else {"vocab": jnp.asarray(vocab, jnp.int32)}
    dtype = stored_dtype(value.dtype for value in tensors.values())
    info = {"layout": layout, "file": file.name, "dtype": dtype, "unused": unused}
    info["config_unused"] = _unread(content, layout)
    return SavedDrafter("eagle" if layout == "eagle" else "eagle3", config, params, tables, tuple(shares), info)


def write_eagle(
    directory: epath.PathLike, drafter: SavedDrafter, target: Target, layout: str, dtype: str = "bfloat16"
) -> list[str]:
    """Writes an EAGLE head in a layout of others.

    Args:
        directory: made if absent.
        drafter: as `load_drafter` or `read_eagle` gives it.
        target: that it was trained for.
        layout: of `LAYOUTS`. `eagle` has no draft vocabulary: the target's whole head reads the same feature.
        dtype: of the floats.

    Returns:
        The files written.

    Raises:
        ValueError: an unknown layout, or one whose readers would not load or compute this head (see `refuse_others`).
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; expected one of {', '.join(LAYOUTS)}")
    config: Any = drafter.config
    params = dict(drafter.params)
    is_1 = layout.startswith("eagle") and layout != "eagle3"
    if not isinstance(config, EagleConfig if is_1 else Eagle3Config):
        raise ValueError(f"a drafter of method {drafter.method!r} cannot be written in the layout {layout!r}")
    refuse_others(drafter, layout, target.config.num_layers)
    if is_1:
        params.pop("lm_head", None)  # rows of the target's
        params.setdefault("embed", {"embedding": target.params["embed"]["embedding"]})
        if layout == "eagle-sglang":
            params["fc"] = {"bias": jnp.zeros((config.layer.hidden_size,)), **params["fc"]}
    elif "lm_head" not in params:
        ids = drafter.tables.get("vocab", jnp.arange(target.config.vocab_size))
        params["lm_head"] = {"kernel": target_head(target.config, target.params, ids)}
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    tensors = {}
    for keys, leaf in leaves:
        path = tuple(key.key for key in keys)
        name = _name(path)
        if layout == "eagle3":
            name = name.replace("layers.0.", "midlayer.")
        array = np.asarray(jnp.asarray(leaf).astype(dtype))
        tensors[name] = array.T if path[-1] == "kernel" else array
    if not is_1 and "vocab" in drafter.tables:
        tensors |= write_vocabulary(np.asarray(drafter.tables["vocab"]), config.vocab_size)
    described = _described(config, layout) | {"torch_dtype": dtype}
    if layout == "speculators":
        described = speculators.nested(described, target)
    directory = epath.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / FILES[0], tensors)
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return [FILES[0], "config.json"]


def _plain(name: str) -> str:
    """A name as `speculators` has it."""
    name = name.removeprefix("model.")
    if name.startswith("fcs."):  # one norm a tap, as some heads of EAGLE-3.1 call it
        name = f"fc_norm.{name.removeprefix('fcs.')}"
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _layout(file: epath.Path, content: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    """Which layout config and tensors have, if they agree.

    Raises:
        ValueError: neither EAGLE-1 nor EAGLE-3, or the config is of the one and the tensors are of the other.
    """
    if "fc.weight" not in tensors or "layers.0.self_attn.q_proj.weight" not in tensors:
        found = some(tensors) or "nothing"
        raise ValueError(f"{file} is no EAGLE head: expected fc.weight and a layer, found {found}")
    if more := [name for name in tensors if name.startswith("layers.") and not name.startswith("layers.0.")]:
        raise ValueError(f"{file} has more than one layer ({some(more)}): such heads are not supported")
    is_3 = "layers.0.hidden_norm.weight" in tensors
    kind = content.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ValueError(f"{file} is a {kind!r} head of speculators; expected 'eagle3'")
    names = " ".join(content.get("architectures") or [])
    if not is_3 and (kind or "draft_vocab_size" in content or "Eagle3" in names):
        raise ValueError(f"{file} has the tensors of EAGLE-1, its config.json is one of EAGLE-3: one is another head's")
    if is_3 and content.get("bias"):
        raise ValueError(f"{file} has the tensors of EAGLE-3, its config.json is one of EAGLE-1: one is another head's")
    return "speculators" if kind else "eagle3" if is_3 else "eagle"


def _config(
    file: epath.Path,
    content: Mapping[str, Any],
    layout: str,
    target: Target,
    tensors: Mapping[str, np.ndarray],
    draft_vocab: int | None,
) -> FeatureConfig:
    """The network that a config.json describes, held against its target."""
    mine = target.config
    vocab_size = content.get("vocab_size")
    if vocab_size != mine.vocab_size:
        raise ValueError(
            f"{file} is for a target of vocab_size {vocab_size}, {target.name!r} has {mine.vocab_size}: load that "
            "target, or a head for this one"
        )
    kept = {"model_type": "llama", **content, "num_hidden_layers": 1, "tie_word_embeddings": False}
    kept.pop("architectures", None)  # The head's own, which names no family of targets.
    layer = config_from_hf(kept, mine.dtype)
    if layer.windows[0] is not None:
        raise ValueError(f"{file} describes a sliding window of {layer.windows[0]}: such heads are not supported")
    own_head = "lm_head.weight" in tensors
    fields: dict[str, Any] = {"head_size": draft_vocab or mine.vocab_size}
    if not own_head:
        fields["final_softcap"] = mine.final_softcap
    layer = dataclasses.replace(layer, **fields)
    widths = {"hidden_size": layer.hidden_size} if layout == "eagle" else {}
    if layout != "eagle":
        widths["target_hidden_size"] = content.get("target_hidden_size") or layer.hidden_size
    for name, width in widths.items():
        if width != mine.hidden_size:
            raise ValueError(
                f"{file} has {name} {width}, {target.name!r} has {mine.hidden_size}: it is another target's head"
            )
    if layout == "eagle":
        said = content.get("bias")  # the file counts where the config says nothing
        return EagleConfig(layer=layer, bias="fc.bias" in tensors if said is None else bool(said))
    if layout == "eagle3" and "norm_output" in content:
        raise ValueError(
            f"{file}: norm_output={content['norm_output']} means two things in this layout: to SpecForge that the "
            "output head reads the normed feature (as all heads that are read here do), to speculators and vLLM that "
            "the normed feature is handed on. Where true is SpecForge's, or false is the others', remove the key; a "
            "head that hands the normed feature on is read in the layout 'speculators', and one whose output head "
            "reads the feature before the norm is not supported"
        )
    switches = {name: bool(content.get(name, False)) for name in SWITCHES}
    return Eagle3Config(layer=layer, taps=_taps(file, content, target), target_hidden_size=mine.hidden_size, **switches)


def _taps(file: epath.Path, content: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    """Layers whose inputs are fused."""
    layers = target.config.num_layers
    nested = content.get("eagle_config") or {}
    if not nested.get(AUX, True):
        raise ValueError(f"{file}: eagle_config has {AUX}=false, so this head fuses no taps; such heads are not read")
    inputs, outputs = content.get(TAP_IDS), nested.get(TAP_IDS)
    for ids in (inputs, outputs):
        if ids and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ValueError(f"{file}: {TAP_IDS}={ids!r}; expected a list of layer numbers")
    if inputs and outputs and list(inputs) != [i + 1 for i in outputs]:
        raise ValueError(
            f"{file}: {TAP_IDS} names the inputs of layers {list(inputs)}, eagle_config the outputs of "
            f"{list(outputs)}, which are the inputs of {[i + 1 for i in outputs]}: remove the wrong one"
        )
    taps = tuple(inputs or ([i + 1 for i in outputs] if outputs else default_taps(layers)))
    if outside := [tap for tap in taps if not 0 <= tap <= layers]:
        raise ValueError(f"{file} reads the input of layer {outside[0]}, {target.name!r} has {layers} layers")
    return taps


def _params(file: epath.Path, config: FeatureConfig, tensors: Mapping[str, np.ndarray], target: Target) -> Any:
    """The parameter tree, after holding all names and shapes against the config."""
    wanted: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(feature_graph(config)[1])[0]:
        path = tuple(key.key for key in keys)
        wanted[_name(path)] = (path, leaf.shape[::-1] if path[-1] == "kernel" else leaf.shape)
    # Only what has the target's width can be borrowed from it.
    fits = config.layer.hidden_size == target.config.hidden_size
    optional = {"embed_tokens.weight"} if fits else set()
    optional |= {"lm_head.weight"} if isinstance(config, EagleConfig) else set()
    missing = [name for name in wanted if name not in tensors and name not in optional]
    problems = [f"missing {some(missing)}"] if missing else []
    extra = [name for name in tensors if name not in wanted]
    problems += [f"unexpected {some(extra)}"] if extra else []
    for name in wanted.keys() & tensors.keys():
        if tensors[name].shape != wanted[name][1]:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, expected {list(wanted[name][1])}")
    if problems:
        raise ValueError(f"{file} does not fit its config: {'; '.join(sorted(problems))}")
    params: dict[Any, Any] = {}
    for name, (path, _) in wanted.items():
        if name not in tensors:
            continue
        if name == "embed_tokens.weight" and _is(tensors[name], target.params["embed"]["embedding"]):
            continue
        array = np.asarray(tensors[name], np.float32)
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(array.T if path[-1] == "kernel" else array, config.layer.dtype)
    return params


def _is(stored: np.ndarray, mine: jax.Array) -> bool:
    """Whether a stored tensor is one of the target's, as far as its dtype can tell."""
    return mine.shape == stored.shape and np.array_equal(np.asarray(mine).astype(stored.dtype), stored)


def _name(path: Path) -> str:
    """The stored name of a leaf, in the layout of `speculators`."""
    *modules, leaf = path
    stored = [MODULES.get(str(modules[0]), str(modules[0])), *map(str, modules[1:])]
    stored = [f"{part}_proj" if part in PROJECTIONS else part for part in stored]
    return ".".join([*stored, "bias" if leaf == "bias" else "weight"])


def _described(config: FeatureConfig, layout: str) -> dict[str, Any]:
    """The config.json of a head, flat: a Llama layer, whatever the target is."""
    layer = config.layer
    plain: dict[str, Any] = {"family": "llama", "post_norms": False, "final_softcap": 0.0}
    hf = config_to_hf(dataclasses.replace(layer, head_size=layer.vocab_size, **plain))
    if isinstance(config, EagleConfig):
        # `bias: true` would give the layer's attention biases in vLLM and SGLang; EAGLE reads it as the default.
        names = {"eagle": "LlamaForCausalLM", "eagle-sglang": "LlamaForCausalLMEagle"}
        no_bias = {"bias": False} if layout == "eagle" and not config.bias else {}
        return hf | {"architectures": [names[layout]]} | no_bias
    hf |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": layer.head_size}
    hf |= {name: True for name in SWITCHES if getattr(config, name)}
    if config.target_hidden_size != layer.hidden_size or layout == "speculators":
        hf["target_hidden_size"] = config.target_hidden_size
    hf[TAP_IDS] = list(config.taps)
    if layout == "eagle3":
        hf["eagle_config"] = {TAP_IDS: [tap - 1 for tap in config.taps]}
    return hf


def _unread(content: Mapping[str, Any], layout: str) -> list[str]:
    """Keys of the config that nothing reads, for the report."""
    if layout == "speculators":
        return speculators.unread_keys(content)
    if layout == "eagle":
        return unread(content, (*MODEL, "bias"))
    nested = unread(content.get("eagle_config") or {}, (TAP_IDS, AUX))
    read = (*MODEL, "bias", "draft_vocab_size", "target_hidden_size", TAP_IDS, "eagle_config", *SWITCHES)
    return unread(content, read) + [f"eagle_config.{key}" for key in nested]


__all__ = ["LAYOUTS", "read_eagle", "write_eagle"]
