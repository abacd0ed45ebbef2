"""Models and drafters by name or path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax import build, checkpoints
from specjax.build import Drafting
from specjax.checkpoints import drafters
from specjax.models import Target


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
        ValueError: no such method, zoo entry or directory, or options that do not fit.
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
        zoo = drafters.zoo_entries()
        close = difflib.get_close_matches(name, [*build.DRAFTERS, *zoo])
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown drafter {name!r}; {hint}methods: {', '.join(sorted(build.DRAFTERS))}; in the zoo: "
            f"{', '.join(zoo)}; or the directory of a saved drafter or training run, or 'package.module:maker'"
        )
    return build.make_drafter(method, target, source=name, **options)
