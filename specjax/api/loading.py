"""Models and drafters by name or path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from specjax import build, checkpoints
from specjax.build import Drafting
from specjax.checkpoints import drafters
from specjax.checkpoints.rundir import is_run, unfinished
from specjax.models import Target
from specjax.models.json_files import read_object


def load_target(
    source: str | Path,
    *,
    dtype: str = "float32",
    cache_dir: str | Path | None = None,
    mesh: Mapping[str, Any] | None = None,
) -> Target:
    """Loads a model, over several devices where `mesh` says so: see `specjax.checkpoints.load_target`."""
    return checkpoints.load_target(source, dtype=dtype, cache_dir=cache_dir, mesh=mesh)


def load_drafter(name: str, target: Target, **options: Any) -> Drafting:
    """A drafting method by registry name (`prompt_lookup`), or a trained drafter by zoo name, path or run directory.

    Args:
        name: what to load.
        target: what it drafts for.
        **options: of the method, `num_nodes` for instance.

    Raises:
        ValueError: no such method, zoo entry or directory, a target that is none, or options that do not fit.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"drafter={name!r}; expected a name ({', '.join(sorted(build.DRAFTERS))}), or as text the directory of a "
            "saved drafter or training run, or 'package.module:maker'"
        )
    if name in build.DRAFTERS or ":" in name:
        return build.make_drafter(name, target, **options)
    method = drafters.saved_method(name)
    if method is None:
        _refuse_other_directories(name)
        zoo = drafters.zoo_entries()
        close = difflib.get_close_matches(name, [*build.DRAFTERS, *zoo])
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown drafter {name!r}; {hint}methods: {', '.join(sorted(build.DRAFTERS))}; in the zoo: "
            f"{', '.join(zoo)}; or the directory of a saved drafter or training run, or 'package.module:maker'"
        )
    return build.make_drafter(method, target, source=name, **options)


def _refuse_other_directories(name: str) -> None:
    """Raises ValueError for a run without a drafter, and for a model that can be one."""
    file = epath.Path(name) / drafters.CONFIG
    try:
        config = read_object(file) if file.exists() else None
    except (OSError, ValueError):
        return
    if config is None:
        return
    if is_run(config):
        raise ValueError(unfinished(file.parent))
    if "model_type" in config:
        raise ValueError(
            f"{name} is a model, not a drafter; to let it draft, use load_drafter('draft_model', target, "
            f"source={name!r}), or 'other_tokenizer' where its vocabulary is another one"
        )
