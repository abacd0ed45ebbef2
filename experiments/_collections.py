"""Published sets of instructions, as they come: JSONL or a JSON list, by `question`, or `instruction` and `input`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etils import epath

from specjax.training.data import json_lines

# Who asks, and in which field the answer is.
FIELDS = {"question": "answer", "instruction": "response"}


def entries(path: Path | epath.Path) -> list[dict[str, Any]]:
    """What a file holds."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return [entry for _, entry in json_lines(path)]


def asked(entry: dict[str, Any]) -> tuple[str, str | None]:
    """The prompt of an entry and its answer, None where it has none; an empty prompt where it asks nothing."""
    name = next((name for name in FIELDS if name in entry), None)
    if name is None:
        return "", None
    parts = (entry[name], entry.get("input", ""))
    return "\n\n".join(part for part in parts if part).strip(), entry.get(FIELDS[name])
