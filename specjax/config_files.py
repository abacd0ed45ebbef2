"""Config files: loading them without flags, and overriding their fields."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from ml_collections import config_dict


def config_module(path: str | Path) -> tuple[Any, str | None]:
    """The module of a config file, and the argument in `file.py:arg`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no Python file, has no `get_config`, or raises what is no ValueError of its own.
        ImportError: it imports what is not there.
    """
    text, _, tail = str(path).partition(".py:")
    file = Path(text + ".py") if tail else Path(text)
    if not file.is_file():
        raise FileNotFoundError(f"no config file {file}; expected a Python file that defines get_config(arg)")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"config file {file} is no Python file; expected one (.py) that defines get_config(arg)")
    module = importlib.util.module_from_spec(spec)
    # So that a config may build on its neighbours (`from configs import distill`), wherever the program was started.
    root = str(file.resolve().parent.parent)
    if root not in sys.path:
        sys.path.append(root)
    with _naming(file):
        spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{file} defines no get_config(arg)")
    return module, tail or None


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """A context of a config file's own code: what it raises names the file. ValueErrors and OSErrors are its say."""
    try:
        yield
    except SyntaxError as error:
        raise ValueError(f"config file {file} is no valid Python: {error}") from error
    except (ValueError, OSError):
        raise
    except ImportError as error:
        raise ImportError(f"config file {file} cannot import what it needs: {error}") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = f" in line {lines[-1]}" if lines else ""
        raise ValueError(f"config file {file} raised {type(error).__name__}{line}: {error}") from error


def load_config(
    path: str | Path, arg: str | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> ml_collections.ConfigDict:
    """Loads a config file without flags, for notebooks and programs.

    Args:
        path: a Python file with `get_config(arg)`; `file.py:arg` also gives the argument.
        arg: passed on; a file whose `get_config` takes none refuses it.
        overrides: `{"a.b": 1}`, or `["a.b=1"]` with Python literals.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no valid Python, has no `get_config`, or one that takes no argument where one is given,
            or returns no config; or an override names no field or has the wrong type.
        ImportError: the file imports what is not there.
    """
    module, tail = config_module(path)
    chosen = arg if arg is not None else tail
    given = () if chosen is None else (chosen,)
    try:
        inspect.signature(module.get_config).bind(*given)
    except TypeError as error:
        asked = "takes no argument" if given else "needs an argument: write file.py:<argument>"
        said = f", and was given {chosen!r}" if given else ""
        raise ValueError(f"get_config of {module.__file__} {asked}{said}") from error
    with _naming(Path(module.__file__)):
        config = module.get_config(*given)
    if not isinstance(config, ml_collections.ConfigDict):
        raise ValueError(f"get_config of {path} returns {type(config).__name__}; expected an ml_collections.ConfigDict")
    override(config, [overrides] if isinstance(overrides, str) else overrides)
    return config.lock()


def override(config: ml_collections.ConfigDict, overrides: Sequence[str] | Mapping[str, Any]) -> None:
    """Sets fields that exist, keeping their types.

    Raises:
        ValueError: a field that does not exist (suggests the nearest), or a value of another type.
    """
    if not isinstance(overrides, Mapping):
        pairs = [item.partition("=") for item in overrides]
        overrides = {key.removeprefix("config."): _literal(value) for key, _, value in pairs}
    for key, value in overrides.items():
        if not _has(config, key):
            fields = sorted(_flat(config))
            close = difflib.get_close_matches(key, fields)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"unknown config field {key!r}; {hint}fields: {', '.join(fields)}")
        try:
            config.update_from_flattened_dict({key: value})
        except TypeError as error:
            raise ValueError(f"config field {key!r} does not take {value!r}: {error}") from error


def _has(config: ml_collections.ConfigDict, key: str) -> bool:
    """Whether a dotted name exists; an unlocked config would take any."""
    here: Any = config
    for part in key.split("."):
        if not isinstance(here, ml_collections.ConfigDict) or part not in here:
            return False
        here = here[part]
    return True


def _flat(config: ml_collections.ConfigDict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, config_dict.ConfigDict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
