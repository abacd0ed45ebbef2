"""The safetensors format, read and written one tensor at a time, local or gs://, bfloat16 without torch.

A file is an 8-byte little-endian length, a JSON header of that length with dtype, shape and byte range of every
tensor, and the bytes. Large models are split over files listed in `model.safetensors.index.json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from specjax.models.json_files import read_object

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 1024**3


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in a file and has not been read.

    Attributes:
        file: where.
        shape: its shape as stored.
        dtype: its dtype as stored.
        start: first byte in the file.
    """

    file: epath.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes it occupies."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: slice = slice(None)) -> np.ndarray:
        """Its content, or that of consecutive rows of it, in memory of its own; nothing else is read."""
        first, last, _ = rows.indices(self.shape[0] if self.shape else 1)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(last - first, 0), *self.shape[1:]) if self.shape else ()
        buffer = np.empty(math.prod(shape) * self.dtype.itemsize, np.uint8)
        with self.file.open("rb") as stream:
            stream.seek(self.start + first * row)
            done = 0
            while done < len(buffer):
                count = stream.readinto(buffer.data[done:])
                if not count:
                    raise ValueError(f"{self.file} ended while it was read: it changed since it was opened")
                done += count
        return buffer.view(self.dtype).reshape(shape)


def read_header(path: epath.PathLike) -> dict[str, StoredTensor]:
    """The tensors of one file, by name, unread.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file, or is truncated.
    """
    path = epath.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    size = path.stat().length
    with path.open("rb") as stream:
        lead = stream.read(8)
        length = int.from_bytes(lead, "little") if len(lead) == 8 else -1
        if lead == b"version ":
            raise ValueError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`")
        if length < 2 or length + 8 > size:
            raise ValueError(
                f"{path} ({size} bytes) is no safetensors file, or is truncated within its header: fetch it again"
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _stored(path, entry, length + 8) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has a damaged safetensors header ({error}): fetch it again") from error
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=length + 8)
    if end > size:
        raise ValueError(f"{path} is truncated: its header describes {end} bytes, it has {size}: fetch it again")
    return tensors


def _stored(path: epath.Path, entry: Mapping[str, Any], offset: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']}, expected one of {', '.join(DTYPES)}")
    first, last = entry["data_offsets"]
    tensor = StoredTensor(path, tuple(entry["shape"]), DTYPES[entry["dtype"]], offset + first)
    if tensor.nbytes != last - first:
        raise ValueError(f"shape {tensor.shape} of {entry['dtype']} in a range of {last - first} bytes")
    return tensor


def open_directory(directory: epath.PathLike) -> dict[str, StoredTensor]:
    """The tensors of a model directory, single file or sharded, by name, unread.

    Raises:
        FileNotFoundError: no safetensors there, or a shard that the index names is missing.
        ValueError: a file is damaged or truncated, or the index names tensors that no shard holds.
    """
    directory = epath.Path(directory)
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).exists():
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f" (it has {', '.join(others[:3])})" if others else ""
        raise FileNotFoundError(
            f"{directory} has neither {SINGLE} nor {INDEX}{hint}: convert the weights to safetensors; "
            "a GGUF file is loaded by its own path"
        )
    weight_map = read_object(directory / INDEX).get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not weight_map or not isinstance(weight_map, dict) or not named:
        found = "lacks weight_map" if weight_map is None else f"has weight_map {str(weight_map)[:40]}"
        raise ValueError(
            f"{directory / INDEX} {found}; expected the name of the file that holds each tensor: fetch it again"
        )
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (directory / name).exists()]
    if missing:
        raise FileNotFoundError(f"{directory / INDEX} names {', '.join(missing)}, which are missing: fetch them")
    tensors = {name: t for file in files for name, t in read_header(directory / file).items()}
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise ValueError(f"{directory / INDEX} names tensors that no shard holds: {', '.join(absent[:10])}")
    return tensors


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it will occupy."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_directory(
    directory: epath.PathLike,
    specs: Mapping[str, Spec],
    make: Callable[[str], np.ndarray],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes tensors to a model directory, one in memory at a time.

    Args:
        directory: exists already.
        specs: every tensor, in the order in which it is to be written.
        make: gives the content of the named tensor, of the shape and dtype announced.
        shard_bytes: a new file is begun before one exceeds this.
    """
    directory = epath.Path(directory)
    shards = list(_shards(specs, shard_bytes))
    if len(shards) == 1:
        write_file(directory / SINGLE, specs, make)
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        write_file(directory / file, {name: specs[name] for name in shard}, make)
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(specs: Mapping[str, Spec], shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name, spec in specs.items():
        if shard and size + spec.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += spec.nbytes
    yield shard


def write_file(path: epath.PathLike, specs: Mapping[str, Spec], make: Callable[[str], np.ndarray]) -> None:
    """Writes one safetensors file, one tensor in memory at a time; arguments as in `write_directory`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    offset = 0
    for name, spec in specs.items():
        if spec.dtype not in _CODES:
            raise ValueError(f"{name} has dtype {spec.dtype}, which safetensors cannot hold")
        ends = [offset, offset + spec.nbytes]
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with epath.Path(path).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, spec in specs.items():
            array = np.asarray(make(name), order="C")
            if array.shape != spec.shape or array.dtype != spec.dtype:
                raise ValueError(
                    f"{name} was announced as {spec.dtype}{list(spec.shape)} and came as "
                    f"{array.dtype}{list(array.shape)}"
                )
            stream.write(array.reshape(-1).view(np.uint8).data)
