"""Trained drafters on disk: a directory with config.json and model.safetensors, tied to the target they serve."""

from __future__ import annotations

import importlib.resources
import json

from etils import epath

FORMAT = "specjax-drafter-1"


def drafter_path(source: str) -> epath.Path | None:
    """Where a saved drafter lies: a zoo name, a directory, or a run directory's `export`; None if it is none."""
    zoo = epath.Path(str(importlib.resources.files("specjax") / "zoo")) / source
    for path in (zoo, epath.Path(source), epath.Path(source) / "export"):
        config = path / "config.json"
        if config.exists() and json.loads(config.read_text()).get("format") == FORMAT:
            return path
    return None


def is_drafter(source: str) -> bool:
    """Whether `source` names a drafter that specjax saved."""
    return drafter_path(source) is not None
