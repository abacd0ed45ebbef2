"""What a name stands for: an entry of a registry, or a user's own code by its path."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any


def lookup(registry: Mapping[str, Any], name: str, what: str) -> Any:
    """A registry's entry, or what `package.module:name` points at.

    Raises:
        ValueError: unknown; suggests the nearest name and lists all. Or the module holds no such name.
        ImportError: the module cannot be imported.
    """
    if not isinstance(name, str):
        raise ValueError(f"{what}={name!r}; expected a name: {', '.join(sorted(registry))}, or 'package.module:maker'")
    if name in registry:
        return registry[name]
    module, _, attribute = name.partition(":")
    if attribute:
        try:
            held = importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"{what} {name!r} cannot be imported ({error}): install its package, or put its directory in PYTHONPATH"
            ) from error
        if not hasattr(held, attribute):
            raise ValueError(
                f"{what} {name!r}: module {module} holds no {attribute!r}; expected 'package.module:maker'"
            )
        return getattr(held, attribute)
    close = difflib.get_close_matches(name, registry)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown {what} {name!r}; {hint}known: {', '.join(sorted(registry))}; or 'package.module:maker'")
