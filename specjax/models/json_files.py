"""Small text files beside a model's weights, read with errors that name the file."""

from __future__ import annotations

import json
from typing import Any

from etils import epath


def read_text(path: epath.Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): fetch it again") from error


def read_object(path: epath.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it is not JSON, or is JSON of something else.
    """
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {_shown(content)}; expected a JSON object: fetch it again")
    return content


def _shown(content: Any) -> str:
    text = json.dumps(content)
    return text if len(text) <= 40 else f"{text[:40]}..."
