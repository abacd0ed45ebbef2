"""The hidden-state store: one pass of the frozen target over the training text feeds every objective.

Per position it keeps the final hidden state after the last norm in bfloat16 (optionally taps), and one float32
log-sum-exp, never logits: any part of the target's law is `normed @ head - lse`. A store is a directory of shards of
packed rows, memory-mapped when read. `manifest.json` ties it to target and text; a shard counts once its
`shard.json`, written last, lists the checksums of its arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from etils import epath

from specjax.checkpoints.rundir import write_whole
from specjax.models import Tap, merge
from specjax.models.config import check_taps
from specjax.models.target import Target
from specjax.training.data import Batch, Document, check_rows, lay_out, order, pack

FORMAT = 1
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LSE_CHUNK = 1024
CHECKED = 32  # Positions on which a store is held against the target that it is opened for.
SAME_WEIGHTS = 0.1  # A small target's own states come back within 0.005, those of one tuned for 50 steps 0.4 apart.


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """How text becomes a store.

    Attributes:
        row_length: tokens a packed row.
        shard_rows: rows a shard.
        pass_rows: rows a pass of the target.
        taps: layer inputs to keep beside the final hidden state.
        seed: of the order in which documents are packed: every shard is a sample of the whole text.
    """

    row_length: int = 512
    shard_rows: int = 64
    pass_rows: int = 8
    taps: tuple[Tap, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_rows(self.row_length)
        if min(self.shard_rows, self.pass_rows) < 1:
            raise ValueError(f"shard_rows={self.shard_rows}, pass_rows={self.pass_rows}; expected at least 1 and 1")
        if self.shard_rows % self.pass_rows:
            raise ValueError(f"shard_rows={self.shard_rows} is not a multiple of pass_rows={self.pass_rows}")


def write_store(
    directory: str | Path,
    target: Target,
    documents: Sequence[Document],
    config: StoreConfig,
    *,
    max_shards: int | None = None,
    report: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> None:
    """Computes the shards that are missing; a store that was begun before is continued.

    Args:
        directory: of the store.
        target: whose hidden states to keep.
        documents: the text.
        config: see `StoreConfig`.
        max_shards: stop once the store has this many.
        report: called after each shard with shards done, shards in all, tokens of the shard.

    Raises:
        ValueError: a tap outside the target, or the directory holds a store of another target, text or config; says
            what differs.
    """
    check_taps(config.taps, target.config.num_layers)
    directory = Path(directory)
    rows, cut = pack([documents[i] for i in order(len(documents), config.seed, 0)], config.row_length)
    shards = -(-len(rows) // config.shard_rows)
    manifest = {
        "format": FORMAT,
        "target": target.name,
        "target_config_hash": target.config_hash,
        "tokenizer": target.tokenizer.fingerprint(),
        "text": _text_hash(documents),
        "documents": len(documents),
        "cut": cut,
        "rows": len(rows),
        "shards": shards,
        "hidden_size": target.config.hidden_size,
        "config": {**dataclasses.asdict(config), "taps": [str(tap) for tap in config.taps]},
    }
    _claim(directory, manifest, target)
    if (begun := directory / "shard-00000" / "shard.json").exists():
        _check_weights(directory, _open_shard(begun.parent, verify=False), target)
    for index in range(shards if max_shards is None else min(shards, max_shards)):
        path = directory / f"shard-{index:05d}"
        part = rows[index * config.shard_rows : (index + 1) * config.shard_rows]
        if not (path / "shard.json").exists():
            _write_shard(path, _compute(target, lay_out(part, config.row_length), config))
        report(index + 1, shards, sum(len(d.tokens) for row in part for d in row))


def _claim(directory: Path, manifest: dict[str, Any], target: Target) -> None:
    """Writes the manifest of a new store, or checks that of an old one. The target's name may differ."""
    path = directory / "manifest.json"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(epath.Path(path), json.dumps(manifest, indent=2) + "\n")
        return
    found = json.loads(path.read_text())
    manifest = manifest | {"tokenizer": target.tokenizer.fingerprint_as(found.get("tokenizer"))}
    differ = [k for k in manifest if k != "target" and manifest[k] != found.get(k)]
    if differ:
        lines = "; ".join(f"{k}: found {found.get(k)!r}, expected {manifest[k]!r}" for k in differ)
        raise ValueError(f"{directory} is a store of something else ({lines}): choose another directory")


def _text_hash(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(np.asarray([len(document.tokens), document.prompt_length], np.int64).tobytes())
        digest.update(document.tokens.tobytes())
        if document.answer is not None:
            digest.update(document.answer.tobytes())
    return digest.hexdigest()


@functools.partial(jax.jit, static_argnames=("graph", "taps"))
def _hidden(graph: Any, params: Any, batch: Batch, taps: tuple[Tap, ...]) -> dict[str, jax.Array]:
    with jax.default_matmul_precision("float32"):
        out = merge(graph, params).full(batch.tokens, batch.positions, batch.segments, taps=(*taps, "normed"))
    return {str(tap): out.taps[tap] for tap in (*taps, "normed")}


@functools.partial(jax.jit, static_argnames=("graph",))
def _lse(graph: Any, params: Any, normed_nd: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("float32"):
        return jax.nn.logsumexp(merge(graph, params).logits(normed_nd), axis=-1)


def log_sum_exp(target: Target, normed_btd: np.ndarray, where_bt: np.ndarray) -> np.ndarray:
    """Float32 `[B, T]`: log-sum-exp of the target's logits where asked, 0 elsewhere."""
    picked = normed_btd[where_bt]
    out = np.zeros(where_bt.shape, np.float32)
    values = np.zeros(len(picked), np.float32)
    for first in range(0, len(picked), LSE_CHUNK):
        chunk = picked[first : first + LSE_CHUNK]
        padded = np.pad(chunk, ((0, LSE_CHUNK - len(chunk)), (0, 0)))
        values[first : first + len(chunk)] = np.asarray(_lse(target.graph, target.params, padded))[: len(chunk)]
    out[where_bt] = values
    return out


def _compute(target: Target, batch: Batch, config: StoreConfig) -> dict[str, np.ndarray]:
    """All arrays of a shard. The log-sum-exp is of the *stored* hidden state, so laws made from it sum to one."""
    rows = batch.tokens.shape[0]
    kept: dict[str, list[np.ndarray]] = {}
    for first in range(0, rows, config.pass_rows):
        count = min(config.pass_rows, rows - first)
        part = _rows(batch, first, config.pass_rows)
        for name, value in _hidden(target.graph, target.params, part, config.taps).items():
            kept.setdefault(name, []).append(np.asarray(value)[:count].astype(BFLOAT16))
    arrays = {name: np.concatenate(values) for name, values in kept.items()}
    normed = arrays["normed"].astype(np.float32)
    fields = {name: getattr(batch, name) for name in ("tokens", "positions", "segments", "response")}
    return {**fields, **arrays, "lse": log_sum_exp(target, normed, batch.predicts)}


def _rows(batch: Batch, first: int, count: int) -> Batch:
    """`count` rows from `first` on; behind the last come empty ones, so that every pass has one shape."""

    def cut(x: np.ndarray) -> np.ndarray:
        part = x[first : first + count]
        return np.pad(part, ((0, count - len(part)), (0, 0)))

    return jax.tree.map(cut, batch)


def _write_shard(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    checksums = {}
    for name, array in arrays.items():
        file = path / f"{name}.npy"
        # numpy's format has no bfloat16: the bits are stored as uint16.
        np.save(file, array.view(np.uint16) if array.dtype == BFLOAT16 else array)
        checksums[file.name] = _sha256(file)
    content = json.dumps({"rows": len(arrays["tokens"]), "sha256": checksums}, indent=2)
    write_whole(epath.Path(path / "shard.json"), content)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class HiddenStates:
    """Stores opened for reading as one: rows by index, over all finished shards, memory-mapped.

    Attributes:
        rows: packed rows at hand.
    """

    def __init__(
        self,
        directories: str | Path | Sequence[str | Path],
        target: Target,
        *,
        verify: bool = True,
        max_shards: int | None = None,
    ):
        """Opens one or several stores for a target.

        Args:
            directories: of the stores.
            target: that the drafter is trained for; the stores must be its own.
            verify: read everything once and compare the checksums.
            max_shards: use the first so many of each.

        Raises:
            FileNotFoundError: there is no store, or no finished shard in it.
            ValueError: it is another target's, or (looked at in one process only) one's with other weights; a shard is
                damaged, or two stores differ in what they hold.
        """
        stores = [directories] if isinstance(directories, str | Path) else list(directories)
        if not stores:
            raise ValueError("no hidden-state store is named: give one or more directories")
        manifests = [_manifest(Path(store), target) for store in stores]
        for store, manifest in zip(stores[1:], manifests[1:], strict=True):
            for name in ("row_length", "taps"):
                first, found = manifests[0]["config"][name], manifest["config"][name]
                if found != first:
                    raise ValueError(
                        f"{name} is {found} in {store} and {first} in {stores[0]}: stores that are trained on "
                        "together must agree, make one of them again"
                    )
        parts = [_finished(Path(store))[:max_shards] for store in stores]
        self._shards = [_open_shard(path, verify) for part in parts for path in part]
        if jax.process_count() == 1:
            firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
            for store, first in zip(stores, firsts, strict=True):
                _check_weights(Path(store), self._shards[first], target)
        ends = np.cumsum([len(shard["tokens"]) for shard in self._shards])
        self._starts, self.rows = np.concatenate([[0], ends[:-1]]), int(ends[-1])

    def batch(self, rows: np.ndarray) -> Batch:
        """The packed rows with these indices, bfloat16 hidden states included."""
        shard = np.searchsorted(self._starts, rows, side="right") - 1
        picked = [
            {name: array[row - self._starts[s]] for name, array in self._shards[s].items()}
            for s, row in zip(shard, rows, strict=True)
        ]
        arrays = {name: np.stack([entry[name] for entry in picked]) for name in picked[0]}
        known = {name: arrays.pop(name) for name in ("tokens", "positions", "segments", "response", "normed", "lse")}
        return Batch(**known, taps=arrays)

    def predicted_tokens(self) -> int:
        """Positions that carry loss, over all rows at hand."""
        batches = (Batch(s["tokens"], s["positions"], s["segments"], s["response"]) for s in self._shards)
        return sum(int(batch.predicts.sum()) for batch in batches)


def _manifest(directory: Path, target: Target) -> dict[str, Any]:
    """What a store says of itself, once it is known to be the target's."""
    if not (directory / "manifest.json").exists():
        raise FileNotFoundError(f"no hidden-state store at {directory}: make one with experiments.hidden_states")
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    expected = {
        "format": FORMAT,
        "target_config_hash": target.config_hash,
        "tokenizer": target.tokenizer.fingerprint_as(manifest.get("tokenizer")),
        "hidden_size": target.config.hidden_size,
    }
    differ = [k for k in expected if manifest.get(k) != expected[k]]
    if differ:
        lines = "; ".join(f"{k}: found {manifest.get(k)!r}, expected {expected[k]!r}" for k in differ)
        raise ValueError(f"{directory} holds hidden states of another target ({lines}): make a store for this one")
    return manifest


def _check_weights(directory: Path, shard: dict[str, np.ndarray], target: Target) -> None:
    """Holds the beginning of a store's first row against what the target says of it.

    Raises:
        ValueError: they differ by more than arithmetic and quantisation make of one model's weights.
    """
    tokens, positions, segments, response = (
        np.asarray(shard[name][:1, :CHECKED]) for name in ("tokens", "positions", "segments", "response")
    )
    batch = Batch(tokens, positions, segments, response)
    own = np.asarray(_hidden(target.graph, target.params, batch, ())["normed"], np.float32)[batch.segments > 0]
    stored = np.asarray(shard["normed"][:1, :CHECKED], np.float32)[batch.segments > 0]
    apart = float(np.linalg.norm(own - stored) / np.linalg.norm(stored))
    if not apart < SAME_WEIGHTS:
        raise ValueError(
            f"{directory} was written by other weights than those of {target.name!r}: its hidden states differ by "
            f"{apart:.0%} from what this target computes (expected less than {SAME_WEIGHTS:.0%}). Load that target, or "
            "make a store for this one"
        )


def _finished(directory: Path) -> list[Path]:
    shards = sorted(path.parent for path in directory.glob("shard-*/shard.json"))
    if not shards:
        raise FileNotFoundError(f"{directory} has no finished shard: run experiments.hidden_states to the end")
    return shards


def _open_shard(path: Path, verify: bool) -> dict[str, np.ndarray]:
    entry = json.loads((path / "shard.json").read_text())
    arrays = {}
    for name, checksum in entry["sha256"].items():
        file = path / name
        if not file.exists() or (verify and _sha256(file) != checksum):
            state = "is damaged" if file.exists() else "is missing"
            raise ValueError(f"{file} {state}: remove {path} and run experiments.hidden_states again")
        array = np.load(file, mmap_mode="r")
        arrays[file.stem] = array.view(BFLOAT16) if array.dtype == np.uint16 else array
    return arrays
