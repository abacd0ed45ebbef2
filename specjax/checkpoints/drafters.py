"""Trained drafters on disk: `config.json` and safetensors, in a directory of their own.

The format is versioned and explicit. A drafter names the target it was trained for. What it borrows from that target
(`shares`) is declared and not stored: `embed`, the token embedding, by reference, and `head`, the rows of the target's
output head that belong to the draft vocabulary, gathered once when the drafter is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from specjax.checkpoints.safetensors import SINGLE, Spec, StoredTensor, read_header, write_file
from specjax.models import ModelConfig, graph
from specjax.models.eagle import Eagle3Config, EagleConfig, feature_graph
from specjax.models.kangaroo import KangarooConfig, kangaroo_graph
from specjax.models.medusa import HeadsConfig, HydraConfig, MedusaConfig, heads_graph
from specjax.models.mtp import MtpConfig, mtp_graph
from specjax.models.redrafter import RedrafterConfig, redrafter_graph
from specjax.models.target import Target

KIND, FORMAT = "specjax_drafter", 1
CONFIG = "config.json"
ZOO = Path(__file__).resolve().parent.parent / "zoo"
LISTED = 10  # entries of one kind that an error spells out
SHARES = ("embed", "head")


class NetworkConfig(Protocol):
    """What every drafter's network config has: a frozen dataclass of numbers, strings, tuples and the like.

    A nested dataclass (a `ModelConfig`, say) is stored and read as one. A field `dtype`, at any depth, follows the
    target's on loading.
    """

    @property
    def vocab_size(self) -> int:
        """Rows V of the target's vocabulary."""
        ...

    @property
    def head_size(self) -> int:
        """Rows Vd of the draft's output head; below V, `tables["vocab"]` says which."""
        ...


@dataclasses.dataclass(frozen=True)
class Network:
    """How the drafters of one method are stored.

    Attributes:
        config: dataclass of the network.
        params: config -> the abstract parameter tree, shared groups (`embed`, `lm_head`) included.
        tables: config -> the abstract arrays beside `vocab`.
        whole_head: a shared head over the whole vocabulary stays the target's own, and no `vocab` goes with it.
    """

    config: type[Any]
    params: Callable[[Any], Any]
    tables: Callable[[Any], Mapping[str, jax.ShapeDtypeStruct]] = lambda config: {}
    whole_head: bool = False


def _calibration(config: HeadsConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """`accuracy` `[K, R]`: how often the token to come has rank r at head i."""
    shape = (config.num_heads, config.ranks)
    return {"accuracy": jax.ShapeDtypeStruct(shape, jnp.float32)} if config.ranks else {}


# method -> its network
NETWORKS: dict[str, Network] = {
    "draft_model": Network(ModelConfig, lambda config: graph(config)[1]),
    "eagle": Network(EagleConfig, lambda config: feature_graph(config)[1], whole_head=True),
    "eagle3": Network(Eagle3Config, lambda config: feature_graph(config)[1]),
    "hydra": Network(HydraConfig, lambda config: heads_graph(config)[1], _calibration),
    "kangaroo": Network(KangarooConfig, lambda config: kangaroo_graph(config)[1]),
    "medusa": Network(MedusaConfig, lambda config: heads_graph(config)[1], _calibration),
    "mtp": Network(MtpConfig, lambda config: mtp_graph(config)[1]),
    "redrafter": Network(RedrafterConfig, lambda config: redrafter_graph(config)[1]),
}


@dataclasses.dataclass(frozen=True, eq=False)
class SavedDrafter:
    """A trained drafter without the code that runs it.

    Attributes:
        method: registry name of the drafting method.
        config: its network, of the class that `NETWORKS` has for the method.
        params: parameter tree, int keys for layers. Loaded: with the shared head in it, float32 or as the config says.
            Saved: shared groups are left out.
        tables: arrays that are not trained; `vocab` `[Vd]` int32 maps draft ids to target ids.
        shares: what it borrows from the target, of `SHARES`.
        info: how it came to be: command, data, held-out figures.
    """

    method: str
    config: Any
    params: Any
    tables: Mapping[str, jax.Array]
    shares: tuple[str, ...]
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def save_drafter(directory: str | epath.Path, drafter: SavedDrafter, target: Target, dtype: str = "bfloat16") -> None:
    """Writes a drafter for `target`.

    Args:
        directory: made if absent; an older drafter in it is replaced.
        drafter: what to write.
        target: that it was trained for.
        dtype: of the floats on disk. Exactness of decoding does not depend on it: a draft is verified whatever it is.

    Raises:
        ValueError: a parameter is not finite, or the tree does not fit the config.
    """
    directory = epath.Path(directory)
    arrays = _flatten({"params": _owned(drafter.params, drafter.shares), "tables": dict(drafter.tables)})
    _refuse_misfits(str(directory), _expected(drafter.method, drafter.config, drafter.shares), arrays, drafter.tables)
    broken = [name for name, value in arrays.items() if not np.isfinite(np.asarray(value, np.float32)).all()]
    if broken:
        raise ValueError(f"not saved: {_some(broken)} hold NaN or infinity; the run has diverged, take an earlier step")
    content = {
        "kind": KIND,
        "format": FORMAT,
        "method": drafter.method,
        "shares": list(drafter.shares),
        "target": _identity(target) | {"name": target.name},
        "model": dataclasses.asdict(drafter.config),
        "info": dict(drafter.info),
    }
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: _as_stored(value, dtype) for name, value in arrays.items()}
    specs = {name: Spec(value.shape, value.dtype) for name, value in stored.items()}
    write_file(directory / SINGLE, specs, lambda name: stored[name])
    (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def load_drafter(name: str | epath.Path, target: Target) -> SavedDrafter:
    """Reads a drafter and fits it to its target.

    Args:
        name: a zoo entry, a drafter's directory, or a run directory that has one.
        target: must be the one it was trained for.

    Raises:
        FileNotFoundError: there is no such drafter; names those of the zoo.
        ValueError: another target's, another format's, damaged, or with tensors that are missing, unexpected, of the
            wrong shape, or not finite; all misfits in one message.
    """
    directory = find_drafter(name)
    if directory is None:
        known = ", ".join(zoo_entries()) or "(empty)"
        raise FileNotFoundError(
            f"no drafter {str(name)!r}: expected a directory with {CONFIG} of one, or of the zoo: {known}"
        )
    content = _read_config(directory)
    _check_target(directory, content["target"], target)
    config = read_config(NETWORKS[content["method"]].config, content["model"], target.config.dtype)
    shares = tuple(content["shares"])
    tensors = read_header(directory / SINGLE)
    expected = _expected(content["method"], config, shares)
    vocab = tensors["tables.vocab"].read() if "tables.vocab" in tensors else None
    tables = {} if vocab is None else {"vocab": vocab}
    _refuse_misfits(str(directory / SINGLE), expected, tensors, tables, target.config.vocab_size)
    arrays = {key: _as_loaded(tensor, expected[key].dtype) for key, tensor in tensors.items()}
    broken = [key for key, value in arrays.items() if not bool(jnp.all(jnp.isfinite(value)))]
    if broken:
        raise ValueError(f"{directory / SINGLE} holds NaN or infinity in {_some(broken)}: the file is of no use")
    tree = _unflatten(arrays)
    params, tables = tree.get("params", {}), tree.get("tables", {})
    if "head" in shares and "vocab" in tables:
        params = {**params, "lm_head": {"kernel": target_head(target.config, target.params, tables["vocab"])}}
    return SavedDrafter(content["method"], config, params, tables, shares, content.get("info", {}))


def find_drafter(name: str | epath.Path) -> epath.Path | None:
    """The directory of a drafter: of the zoo, itself, or `drafter/` of a run directory; None where there is none."""
    for directory in (epath.Path(ZOO) / name, epath.Path(name), epath.Path(name) / "drafter"):
        file = directory / CONFIG
        try:
            if file.exists() and json.loads(file.read_text()).get("kind") == KIND:
                return directory
        except (json.JSONDecodeError, AttributeError, NotADirectoryError):
            continue
    return None


def is_drafter(name: str | epath.Path) -> bool:
    """Whether `load_drafter` would find something there."""
    return find_drafter(name) is not None


def saved_method(name: str | epath.Path) -> str | None:
    """The method of the drafter that `load_drafter` would find there; None where there is none."""
    directory = find_drafter(name)
    return None if directory is None else json.loads((directory / CONFIG).read_text()).get("method")


def zoo_entries() -> list[str]:
    """Names of the drafters that ship."""
    return sorted(path.parent.name for path in ZOO.glob(f"*/{CONFIG}"))


def target_head(config: ModelConfig, target_params: Any, vocab: jax.Array) -> jax.Array:
    """The columns `[d, Vd]` of the target's output head that belong to the given target ids.

    Args:
        config: the target's.
        target_params: its parameters, in the plain layout.
        vocab: int32 `[Vd]` target ids.
    """
    if config.tie_embeddings:
        return target_params["embed"]["embedding"][vocab].T
    return target_params["lm_head"]["kernel"][:, vocab]


def _read_config(directory: epath.Path) -> dict[str, Any]:
    content = json.loads((directory / CONFIG).read_text())
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{directory / CONFIG} has format {content.get('format')!r}, this version reads {FORMAT}: "
            "save the drafter again, or use the version of specjax that wrote it"
        )
    missing = [key for key in ("method", "shares", "target", "model") if key not in content]
    if missing:
        raise ValueError(f"{directory / CONFIG} lacks {', '.join(missing)}: fetch it again")
    unknown = [share for share in content["shares"] if share not in SHARES]
    if unknown:
        raise ValueError(f"{directory / CONFIG} shares {_some(unknown)}; expected only {', '.join(SHARES)}")
    if content["method"] not in NETWORKS:
        raise ValueError(f"{directory / CONFIG} is for method {content['method']!r}; known: {', '.join(NETWORKS)}")
    return content


def _identity(target: Target) -> dict[str, Any]:
    """What must agree between a drafter's target and the one at hand."""
    return {
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "tokenizer": target.tokenizer.fingerprint(),
        "config_hash": target.config_hash,
    }


def _check_target(directory: epath.Path, recorded: Mapping[str, Any], target: Target) -> None:
    mine = _identity(target) | {"tokenizer": target.tokenizer.fingerprint_as(recorded.get("tokenizer"))}
    differ = [key for key in mine if recorded.get(key) != mine[key]]
    if differ:
        lines = ", ".join(f"{key} {recorded.get(key)!r} (here {mine[key]!r})" for key in differ)
        raise ValueError(
            f"{directory} was trained for {recorded.get('name')!r}, not for {target.name!r}: it expects {lines}. "
            "Load that target, or train a drafter for this one"
        )


def read_config(kind: type[Any], fields: Mapping[str, Any], dtype: str) -> Any:
    """A drafter's config from its JSON form, nested dataclasses too, in the target's dtype.

    Raises:
        ValueError: a field is unknown, or one without a default is missing.
    """
    own = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - set(own))
    if unknown:
        raise ValueError(
            f"the drafter's model has unknown fields {_some(unknown)}: a newer version of specjax wrote it"
        )
    empty = dataclasses.MISSING
    missing = [n for n, f in own.items() if n not in fields and f.default is empty and f.default_factory is empty]
    if missing:
        raise ValueError(f"the drafter's model lacks {_some(missing)}: fetch it again")
    hints = typing.get_type_hints(kind)
    values = {name: _typed(hints[name], value, dtype) for name, value in fields.items()}
    return kind(**(values | {"dtype": dtype} if "dtype" in own else values))


def _typed(hint: Any, value: Any, dtype: str) -> Any:
    """A JSON value as its field wants it: lists become tuples, objects dataclasses."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, list):
        inner = next((typing.get_args(c) for c in choices if typing.get_origin(c) is tuple), (Any, ...))
        hints = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_typed(h, item, dtype) for h, item in zip(hints, value, strict=True))
    kind = next((c for c in choices if dataclasses.is_dataclass(c)), None)
    return read_config(kind, value, dtype) if isinstance(kind, type) and isinstance(value, Mapping) else value


def _owned(params: Any, shares: Sequence[str]) -> Any:
    """The groups that are stored."""
    borrowed = {"embed": "embed", "head": "lm_head"}
    return {name: group for name, group in params.items() if name not in {borrowed[share] for share in shares}}


def _expected(method: str, config: NetworkConfig, shares: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    network = NETWORKS[method]
    expected = _flatten({"params": _owned(network.params(config), shares), "tables": network.tables(config)})
    if config.head_size != config.vocab_size or ("head" in shares and not network.whole_head):
        expected["tables.vocab"] = jax.ShapeDtypeStruct((config.head_size,), jnp.int32)
    return expected


def _refuse_misfits(
    where: str,
    expected: Mapping[str, jax.ShapeDtypeStruct],
    found: Mapping[str, Any],
    tables: Mapping[str, Any],
    vocab_size: int | None = None,
) -> None:
    """One error for everything that does not fit."""
    problems = []
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        problems.append(f"missing {_some(missing)}")
    if extra:
        problems.append(f"unexpected {_some(extra)}")
    for key in sorted(expected.keys() & found.keys()):
        if tuple(found[key].shape) != expected[key].shape:
            problems.append(f"{key} has shape {list(found[key].shape)}, expected {list(expected[key].shape)}")
    vocab = np.asarray(tables["vocab"]) if "vocab" in tables else None
    if vocab is not None:
        if not np.issubdtype(vocab.dtype, np.integer):
            problems.append(f"tables.vocab has dtype {vocab.dtype}, expected int32 target ids")
        elif vocab.ndim == 1 and len(vocab) > 1 and not (np.diff(vocab.astype(np.int64)) > 0).all():
            problems.append("tables.vocab is not sorted, or has an id twice; expected each target id once, in order")
        elif vocab_size is not None and (vocab.min() < 0 or vocab.max() >= vocab_size):
            problems.append(f"tables.vocab has ids {vocab.min()} to {vocab.max()}, expected 0 to {vocab_size - 1}")
    if problems:
        raise ValueError(f"{where} does not fit its config: {'; '.join(problems)}")


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _unflatten(flat: Mapping[str, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *path, leaf = (int(part) if part.isdigit() else part for part in name.split("."))
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def _as_stored(value: Any, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(value).astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value)


def _as_loaded(tensor: StoredTensor, dtype: Any) -> jax.Array:
    return jnp.asarray(tensor.read()).astype(dtype)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
