"""Multi-token-prediction modules as they lie in the checkpoints of their targets.

Module k is a layer and four more tensors: the norms of token and hidden state, the joint, and the last norm.

- `deepseek`: `model.layers.<L + k>.` with `enorm`, `hnorm`, `eh_proj` (token first), `shared_head.norm`.
- `mimo`: `model.mtp_layers.<k>.` with `token_layernorm`, `hidden_layernorm`, `input_proj` (hidden state first),
  `final_layernorm`.
- `qwen3_next`: `mtp.layers.<k>.`, and for all modules together `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`,
  `mtp.fc` (token first), `mtp.norm`; norms are stored minus one.

The rest of a module is a layer under the names that it has in the target (L layers). DeepSeek-V3's own checkpoint
repeats embedding and head beside each module. vLLM feeds zeros for the token at position 0; here it is the token.

Servers run fewer modules than they draft tokens again, the only one for every token as a rule; DeepSeek-V3's code hands
on the hidden state, that of the two others what the last norm makes of it. Here every depth of a module that is run
again has a cache of its own, as in FastMTP's training; vLLM keeps one for all, with the target's hidden states in it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from etils import epath

from specjax.checkpoints import names
from specjax.checkpoints.drafters import SavedDrafter
from specjax.checkpoints.formats.tensors import (
    read_json,
    refuse_broken,
    require_method,
    some,
    stored_dtype,
    write_tensors,
)
from specjax.checkpoints.safetensors import StoredTensor, open_directory
from specjax.models.mtp import MtpConfig, mtp_config
from specjax.models.target import Target

PARTS = ("token_norm", "hidden_norm", "proj", "norm")
COUNT = "num_nextn_predict_layers"  # modules, in config.json
DEPTH = "specjax_depth"  # tokens that one module drafts, where it was trained for more than one
NAMED = re.compile(r"model\.layers\.\d+\.eh_proj\.|model\.mtp_layers\.|mtp\.(fc|norm|layers)\.")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of one family of checkpoints.

    Attributes:
        layer: prefix of module k's layer, of `{k}` and `{at}` (k behind the target's layers).
        joint: prefix of `PARTS`.
        parts: their names.
        token_first: the joint reads the token before the hidden state.
        feedback: what a module hands to the next depth, see `MtpConfig`.
        offset: what is added to stored norm weights.
        repeated: tensors beside a module that are the target's own.
    """

    layer: str
    joint: str
    parts: tuple[str, str, str, str]
    token_first: bool
    feedback: Literal["hidden", "normed"] = "normed"
    offset: float = 0.0
    repeated: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)


LAYOUTS = {
    "deepseek": Layout(
        "model.layers.{at}.",
        "model.layers.{at}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        token_first=True,
        feedback="hidden",
        repeated={"embed_tokens.weight": "embed", "shared_head.head.weight": "lm_head"},
    ),
    "mimo": Layout(
        "model.mtp_layers.{k}.",
        "model.mtp_layers.{k}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        token_first=False,
    ),
    "qwen3_next": Layout(
        "mtp.layers.{k}.",
        "mtp.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        token_first=True,
        offset=1.0,
    ),
}


def read_mtp(directory: epath.PathLike, target: Target) -> SavedDrafter:
    """Reads the modules of a checkpoint; the layout is told by the names of its tensors.

    Args:
        directory: of safetensors, those of the target among them or not.
        target: that the modules belong to.

    Returns:
        The drafter; its `info` names the layout.

    Raises:
        ValueError: no modules in a known layout; modules whose layer the target's family does not have (DeepSeek-V3's
            and Qwen3-Next's own attention and experts); tensors missing or of the wrong shape, all in one message.
    """
    directory = epath.Path(directory)
    tensors = open_directory(directory)
    name, depth = _layout(directory, tensors, target)
    layout = LAYOUTS[name]
    drafts = content_of(directory).get(DEPTH, depth) if depth == 1 else depth
    shared = drafts > depth
    config = mtp_config(target.config, depth=drafts, kind="sequential", shared=shared, feedback=layout.feedback)
    arrays: dict[str, np.ndarray] = {}
    heads: dict[int, Any] = {}
    problems: list[str] = []
    for k in range(depth):
        wanted = _wanted(layout, config, k, target)
        layer = layout.layer.format(k=k, at=target.config.num_layers + k)
        known = wanted.keys() | {layer + extra for extra in layout.repeated}
        foreign = [n for n in tensors if n.startswith(layer) and n not in known]
        if foreign:
            raise ValueError(
                f"{directory} has multi-token modules in the layout {name!r} whose layer holds {some(foreign)}: the "
                f"target's family {target.config.family!r} has no such layer. Modules of a supported body only"
            )
        for tensor, slot in wanted.items():
            if tensor not in tensors:
                problems.append(f"missing {tensor}")
            elif tensors[tensor].shape != slot.shape:
                problems.append(f"{tensor} has shape {list(tensors[tensor].shape)}, expected {list(slot.shape)}")
            else:
                arrays[tensor] = np.asarray(tensors[tensor].read(), np.float32)
        problems += _other_than_the_targets(layout, layer, tensors, target)
        if not problems:
            heads[k] = _tree(layout, config, wanted, arrays)
    if problems:
        raise ValueError(
            f"{directory}: modules in the layout {name!r} do not fit {target.name!r}: {'; '.join(problems)}"
        )
    refuse_broken(directory, arrays)
    info = {"layout": name, "dtype": stored_dtype(tensors[tensor].dtype for tensor in arrays)}
    return SavedDrafter("mtp", config, {"heads": heads}, {}, (), info)


def content_of(directory: epath.Path) -> dict[str, Any]:
    """Its config.json; empty where there is none."""
    return read_json(directory / "config.json") if (directory / "config.json").exists() else {}


def is_mtp(directory: epath.Path) -> bool:
    """Whether a directory holds multi-token modules, told by config.json or by the names of its tensors."""
    if COUNT in content_of(directory):
        return True
    stored = any(directory.glob("*.safetensors"))
    return stored and any(NAMED.match(name) for name in open_directory(directory))


def repeated(drafter: SavedDrafter, num_nodes: int) -> SavedDrafter:
    """A published module that is run once for each of `num_nodes` tokens, as servers do with the only one there is.

    The drafter as it is where that is not asked for, where it was trained by us for a depth, or where it has several.
    """
    config: MtpConfig = drafter.config
    if num_nodes <= config.depth or config.num_modules > 1 or "layout" not in drafter.info:
        return drafter
    return dataclasses.replace(drafter, config=dataclasses.replace(config, depth=num_nodes, shared=True))


def write_mtp(
    directory: epath.PathLike, drafter: SavedDrafter, target: Target, layout: str, dtype: str = "bfloat16"
) -> list[str]:
    """Writes sequential modules under the names of a layout, in a dtype, without the target's own tensors.

    A module that is shared by all depths is one module, which readers run again; how often is noted in config.json.

    Returns:
        The files written.

    Raises:
        ValueError: no modules, an unknown layout, or one that cannot hold them.
    """
    config: MtpConfig = require_method(drafter, "mtp", MtpConfig)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; expected {', '.join(LAYOUTS)}")
    own, tensors = LAYOUTS[layout], {}
    if config.kind != "sequential":
        raise ValueError(f"kind={config.kind!r}: layout {layout!r} holds sequential modules; write layout 'specjax'")
    if config.head_size != config.vocab_size:
        raise ValueError(
            f"a draft vocabulary of {config.head_size} of {config.vocab_size} tokens: layout {layout!r} has no place "
            "for one. Write layout 'specjax', or train with draft_vocab=0"
        )
    if config.depth > 1 and config.feedback != own.feedback:
        fits = [name for name, other in LAYOUTS.items() if other.feedback == config.feedback]
        raise ValueError(
            f"modules that read feedback={config.feedback!r} of the depth before: readers of layout {layout!r} feed "
            f"back {own.feedback!r}. Expected layout {' or '.join(fits)}"
        )
    if own.joint == "mtp." and config.num_modules > 1:
        raise ValueError(f"the layout {layout!r} has one joint for all modules; there are {config.num_modules}")
    for k in range(config.num_modules):
        for name, slot in _wanted(own, config, k, target).items():
            leaf = drafter.params["heads"][k]
            for key in slot.path:
                leaf = leaf[key]
            value = np.asarray(leaf, np.float32)
            if slot.path[-1] == "weight":
                value = value + config.layer.norm_offset - own.offset
            if slot.path[0] == "proj" and own.token_first:
                value = np.roll(value, config.layer.hidden_size, axis=0)
            tensors[name] = (value.T if slot.transpose else value).astype(jnp.dtype(dtype))
    directory = epath.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", tensors)
    content = {COUNT: config.num_modules, "num_hidden_layers": target.config.num_layers}
    if config.shared:
        content[DEPTH] = config.depth
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    return ["model.safetensors", "config.json"]


def _layout(directory: epath.Path, tensors: Mapping[str, StoredTensor], target: Target) -> tuple[str, int]:
    """Name of the layout, and how many modules there are."""
    for name, layout in LAYOUTS.items():
        depth = 0
        while any(t.startswith(layout.layer.format(k=depth, at=target.config.num_layers + depth)) for t in tensors):
            depth += 1
        if depth:
            return name, depth
    behind = sorted({int(m[1]) for t in tensors if (m := re.match(r"model\.layers\.(\d+)\.eh_proj", t))})
    hint = f" (modules at layers {behind}, but the target has {target.config.num_layers})" if behind else ""
    raise ValueError(
        f"{directory} holds no multi-token modules in a known layout ({', '.join(LAYOUTS)}){hint}; found "
        f"{some(tensors) or 'no tensors'}"
    )


def _wanted(layout: Layout, config: MtpConfig, k: int, target: Target) -> dict[str, names.Slot]:
    """The tensors of module k by name; paths are within the module."""
    at = {"k": k, "at": target.config.num_layers + k}
    width, joint = config.layer.hidden_size, layout.joint.format(**at)
    wanted = {}
    for part, name in zip(PARTS, layout.parts, strict=True):
        leaf = (part, "kernel" if part == "proj" else "weight")
        shape = (width, 2 * width) if part == "proj" else (width,)
        wanted[f"{joint}{name}.weight"] = names.Slot(leaf, shape, part == "proj")
    for name, slot in names.slots(config.layer).items():
        if slot.path[0] == "layers":
            own = layout.layer.format(**at) + name.removeprefix("model.layers.0.")
            wanted[own] = dataclasses.replace(slot, path=("layer", *slot.path[2:]))
    return wanted


def _tree(
    layout: Layout, config: MtpConfig, wanted: Mapping[str, names.Slot], arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, slot in wanted.items():
        value = arrays[name].T if slot.transpose else arrays[name]
        if slot.path[-1] == "weight":
            value = value + layout.offset - config.layer.norm_offset
        if slot.path[0] == "proj" and layout.token_first:
            value = np.roll(value, config.layer.hidden_size, axis=0)  # ours reads the hidden state first
        branch = tree
        for key in slot.path[:-1]:
            branch = branch.setdefault(str(key), {})
        branch[str(slot.path[-1])] = jnp.asarray(value, config.layer.dtype)
    return tree


def _other_than_the_targets(
    layout: Layout, layer: str, tensors: Mapping[str, StoredTensor], target: Target
) -> list[str]:
    """Repeated embeddings and heads that are not the target's: drafting would use the target's in their place."""
    problems = []
    for extra, group in layout.repeated.items():
        if layer + extra not in tensors:
            continue
        tied = group == "lm_head" and target.config.tie_embeddings
        own = target.params["embed"]["embedding"] if tied or group == "embed" else target.params[group]["kernel"].T
        stored = np.asarray(tensors[layer + extra].read(), np.float32)
        same = stored.shape == own.shape and np.allclose(stored, np.asarray(own, np.float32), rtol=1e-2, atol=1e-3)
        if not same:
            problems.append(f"{layer + extra} is not the target's own, which is used in its place")
    return problems
