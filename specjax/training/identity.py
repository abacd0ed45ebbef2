"""What a run is made for beside what its config says, by names, counts and hashes: a resumed run must have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.models.target import Target


def target_identity(target: Target, recorded: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
    """The target's name, and hashes of its architecture, tokenizer and chat template; of weights none.

    Args:
        target: whose.
        recorded: the identity that it is to be compared with, which decides the form of the tokenizer's hash.
    """
    template = target.tokenizer.chat_template
    return {
        "target": target.name,
        "target_config": target.config_hash,
        "tokenizer": target.tokenizer.fingerprint_as(recorded.get("tokenizer")),
        "chat_template": "" if template is None else hashlib.sha256(template.encode()).hexdigest()[:16],
    }


def data_identity(rows: int, tables: Mapping[str, Any]) -> dict[str, str | int]:
    """The number of training rows, which their order depends on, and what the draft's token ids stand for.

    Args:
        rows: of the training data.
        tables: the drafter's; `vocab` is int `[Vd]`, the target's id of each id of the draft, where it has one.
    """
    found: dict[str, str | int] = {"rows": rows}
    if "vocab" in tables:
        content = np.asarray(tables["vocab"]).astype("<i4").tobytes()
        found["draft_vocab"] = hashlib.sha256(content).hexdigest()[:16]
    return found
