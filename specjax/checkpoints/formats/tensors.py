"""Reading and writing the tensors of other people's checkpoints: safetensors, and pickles without their code."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from etils import epath

from specjax.checkpoints.drafters import SavedDrafter
from specjax.checkpoints.safetensors import Spec, read_header, write_file

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PICKLES = (".bin", ".pt", ".pth")
INDEX = ".index.json"
LISTED = 10  # names that an error spells out
FLOATS = ("bfloat16", "float16", "float32")

Read = Callable[[], np.ndarray]


def refuse_different_blocks(params: Any, num_layers: int, allowed: int) -> None:
    """For layouts whose authors' code makes one block and runs it for all: blocks of each head that differ.

    Args:
        params: of the heads, with `heads/<i>/blocks/<j>`.
        num_layers: as the config has it.
        allowed: up to how many layers no block is run twice.

    Raises:
        ValueError: such blocks.
    """
    for i, head in params["heads"].items():
        first, *others = head.get("blocks", {}).values() or [None]
        for other in others:
            same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), first, other)
            if not all(jax.tree.leaves(same)):
                raise ValueError(
                    f"num_layers={num_layers}: the authors' code runs one block in the place of several, those of head "
                    f"{i} differ; expected num_layers of at most {allowed}"
                )


def read_tensors(path: epath.PathLike) -> dict[str, np.ndarray]:
    """All tensors of `open_tensors`, read."""
    return {name: read() for name, read in open_tensors(path).items()}


def open_tensors(path: epath.PathLike) -> dict[str, Read]:
    """The tensors of one file, or of all files of an index, by name: calling one gives it in its stored dtype.

    Args:
        path: `.safetensors` (read when called), or `.bin`, `.pt`, `.pth`: a dictionary of tensors as torch saves it,
            read at once by torch's loader for weights alone, which runs no code; or an `.index.json` of such files.

    Raises:
        FileNotFoundError: a file of the index is not there.
        ValueError: damaged, not a dictionary of tensors, or a pickle that needs code to be read.
        ImportError: a pickle, and torch is not installed.
    """
    path = epath.Path(path)
    if path.name.endswith(INDEX):
        return _open_parts(path)
    if path.suffix not in PICKLES:
        return {name: tensor.read for name, tensor in read_header(path).items()}
    return {name: functools.partial(_array, value) for name, value in _load_pickle(path).items()}


def _open_parts(index: epath.Path) -> dict[str, Read]:
    """The tensors that an index lists, each from the file that it names."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} lists no tensors: expected a weight_map of names to files")
    absent = [name for name in sorted(set(listed.values())) if not (index.parent / name).exists()]
    if absent:
        raise FileNotFoundError(f"{index} lists {some(absent)}, which {index.parent} does not have: fetch them too")
    files = {name: open_tensors(index.parent / name) for name in sorted(set(listed.values()))}
    missing = [name for name, file in listed.items() if name not in files[file]]
    if missing:
        raise ValueError(f"{index} lists {some(missing)}, which the files that it names do not hold: fetch them again")
    return {name: files[file][name] for name, file in listed.items()}


def _load_pickle(path: epath.Path) -> dict[str, Any]:
    """Torch's tensors of a pickle."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{path} needs torch to be read: pip install 'specjax[torch]', or convert it") from error
    try:
        with path.open("rb") as stream:
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged, or holds more than tensors, which is not read because it could run code: "
            "save it as safetensors"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} is not a dictionary of tensors; expected a state dict saved by torch")
    return {str(name): value for name, value in content.items()}


def write_tensors(path: epath.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file.

    Raises:
        ValueError: a value is infinite, as one above 65,504 is in float16.
    """
    for name, value in tensors.items():
        if value.dtype in map(np.dtype, FLOATS) and np.isinf(value).any():
            raise ValueError(f"{name} has values beyond the range of {value.dtype}: write bfloat16 or float32")
    specs = {name: Spec(value.shape, value.dtype) for name, value in tensors.items()}
    write_file(path, specs, lambda name: np.ascontiguousarray(tensors[name]))


def read_json(path: epath.PathLike) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one.
    """
    path = epath.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: give a directory that has one")
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is {type(content).__name__}; expected a JSON object")
    return content


def find_tensors(path: epath.PathLike, files: tuple[str, ...]) -> tuple[epath.Path, Mapping[str, Any]]:
    """The file of tensors, and the config beside it (empty where there is none and the file itself was named).

    Raises:
        FileNotFoundError: a directory without such a file or without a config, or no file.
    """
    path = epath.Path(path)
    if path.is_dir():
        found = [path / name for name in files if (path / name).exists()]
        if not found:
            raise FileNotFoundError(f"{path} has none of {', '.join(files)}")
        return found[0], read_json(path / "config.json")
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: expected a directory or a file of heads")
    beside = path.parent / "config.json"
    return path, read_json(beside) if beside.exists() else {}


def linear(part: Mapping[str, np.ndarray], dtype: str) -> dict[str, Any]:
    """A torch linear layer as ours: `kernel` `[in, out]`, `bias`."""
    kernel = {"kernel": jnp.asarray(np.asarray(part["weight"], np.float32).T, dtype)}
    return kernel | ({"bias": jnp.asarray(np.asarray(part["bias"], np.float32), dtype)} if "bias" in part else {})


def torch_linear(part: Mapping[str, Any], dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """A linear layer of ours as torch's: `weight` `[out, in]`, `bias`."""
    weight = {"weight": np.asarray(jnp.asarray(part["kernel"]).T.astype(dtype))}
    return weight | ({"bias": np.asarray(jnp.asarray(part["bias"]).astype(dtype))} if "bias" in part else {})


def stored_dtype(dtypes: Iterable[np.dtype]) -> str:
    """The dtype that holds all floats of a file as they are: their own where they agree, float32 otherwise."""
    found = {dtype.name for dtype in dtypes if dtype.name.startswith(("float", "bfloat"))}
    return found.pop() if len(found) == 1 and found <= set(FLOATS) else "float32"


def require_method(drafter: SavedDrafter, method: str, kind: type[Any]) -> Any:
    """The config of a drafter of one method.

    Raises:
        ValueError: it is another method's.
    """
    if drafter.method != method or not isinstance(drafter.config, kind):
        raise ValueError(f"a drafter of method {drafter.method!r} cannot be written as one of {method!r}")
    return drafter.config


def refuse_broken(file: epath.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError where a tensor holds NaN or infinity."""
    broken = [name for name, value in tensors.items() if not np.isfinite(np.asarray(value, np.float32)).all()]
    if broken:
        raise ValueError(f"{file} holds NaN or infinity in {some(broken)}: the file is of no use")


def some(names: Iterable[str]) -> str:
    """The first names of a list, sorted, for messages."""
    names = sorted(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _array(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()
