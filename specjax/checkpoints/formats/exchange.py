"""Heads from and to other projects, whatever their format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from etils import epath

from specjax.checkpoints.drafters import SavedDrafter, find_drafter, load_drafter, save_drafter
from specjax.checkpoints.formats.eagle import read_eagle, write_eagle
from specjax.checkpoints.formats.hydra import read_hydra, write_hydra
from specjax.checkpoints.formats.medusa import is_vllm_medusa, read_medusa, write_medusa
from specjax.checkpoints.formats.mtp import is_mtp, read_mtp, write_mtp
from specjax.checkpoints.formats.redrafter import is_redrafter, read_redrafter
from specjax.checkpoints.formats.tensors import FLOATS, read_json
from specjax.checkpoints.sources import CACHE, from_hub
from specjax.models.target import Target

OWN = "specjax"
# layout -> write(directory, drafter, target, dtype=...) -> files
WRITERS: dict[str, Callable[..., list[str]]] = {
    "eagle": partial(write_eagle, layout="eagle"),
    "eagle-sglang": partial(write_eagle, layout="eagle-sglang"),
    "eagle3": partial(write_eagle, layout="eagle3"),
    "hydra": write_hydra,
    "medusa": partial(write_medusa, layout="medusa"),
    "medusa-vllm": partial(write_medusa, layout="vllm"),
    "mtp-deepseek": partial(write_mtp, layout="deepseek"),
    "mtp-mimo": partial(write_mtp, layout="mimo"),
    "mtp-qwen3-next": partial(write_mtp, layout="qwen3_next"),
    "speculators": partial(write_eagle, layout="speculators"),
}
# What readers take besides safetensors and JSON, by torch's weights-only loader.
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
# method -> the layout that most programs read
USUAL = {"eagle": "eagle", "eagle3": "eagle3", "hydra": "hydra", "medusa": "medusa"}


def read_head(source: str | epath.Path, target: Target) -> SavedDrafter:
    """Reads a drafter for a target: one of ours, or a head in any layout of `WRITERS`, or ReDrafter's, told by
    names and keys.

    Args:
        source: a zoo entry, a run directory, a directory or file of a head, or its repository on the hub.
        target: that it belongs to.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: it is no head, or one that does not fit the target.
    """
    if find_drafter(source) is not None:
        return load_drafter(source, target)
    path = locate(source)
    folder = path if path.is_dir() else path.parent
    names = {file.name.partition("_lm_head")[0] for file in folder.iterdir()} if path.is_dir() else {path.name}
    content = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    for method, read in (("hydra", read_hydra), ("medusa", read_medusa)):
        if any(name.startswith(method) for name in names) or f"{method}_num_heads" in content:
            return read(path, target)
    if is_vllm_medusa(content):
        return read_medusa(path, target)
    if is_redrafter(content):
        return read_redrafter(path, target)
    if is_mtp(folder):
        return read_mtp(folder, target)
    return read_eagle(path, target)


def write_head(
    directory: epath.PathLike, drafter: SavedDrafter, target: Target, layout: str = "", dtype: str = ""
) -> list[str]:
    """Writes a drafter in a layout of others, or in ours (`specjax`).

    Args:
        directory: made if absent.
        drafter: as `read_head` gives it.
        target: that it belongs to.
        layout: of `WRITERS`; empty for the usual one of its method.
        dtype: of the floats, `bfloat16`, `float16` or `float32`; empty for what the head was read in, bfloat16 for one
            that was trained here.

    Returns:
        The files written.

    Raises:
        ValueError: no such layout or dtype, or a layout that cannot hold this drafter.
    """
    layout = layout or USUAL.get(drafter.method, OWN)
    dtype = dtype or drafter.info.get("dtype", "bfloat16")
    if dtype not in FLOATS:
        raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(FLOATS)}, or none for the head's own")
    if layout == OWN:
        save_drafter(directory, drafter, target, dtype)
        return ["config.json", "model.safetensors"]
    if layout not in WRITERS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(sorted([OWN, *WRITERS]))}")
    return WRITERS[layout](directory, drafter, target, dtype=dtype)


def locate(source: str | epath.Path) -> epath.Path:
    """The directory or file of a head, fetched where it is a repository on the hub."""
    path = epath.Path(source).expanduser()
    if path.exists():
        return path
    text = str(source)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return from_hub(text, Path(CACHE).expanduser(), also=PICKLED)
    raise FileNotFoundError(f"no head at {text!r}: expected a zoo entry, a run directory, a head, or a hub id")
