"""A target: the model whose output distribution is to be kept, with all that decoding needs of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from flax import nnx

from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder
from specjax.models.tokenizer import Tokenizer
from specjax.parallel import Placement


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded model.

    Attributes:
        config: its shapes and switches.
        graph: the static graph of its decoder (`specjax.models.graph`).
        params: plain nested dict of arrays; kernels `[in, out]`, `layers` keyed by int.
        tokenizer: its tokenizer.
        name: what it was loaded from, for reports.
        config_hash: hash of the architecture, whatever the dtype; drafters record it.
        eos_ids: ids that end a text.
        context: longest sequence in tokens.
        placement: where its arrays lie, and those of drafters that are loaded for it; None for one device.
    """

    config: ModelConfig
    graph: nnx.GraphDef[Decoder]
    params: Any
    tokenizer: Tokenizer
    name: str
    config_hash: str
    eos_ids: tuple[int, ...]
    context: int
    placement: Placement | None = None

    def placed(self, placement: Placement | None) -> Target:
        """The same model with its parameters there; as it is where `placement` is None."""
        if placement is None:
            return self
        return dataclasses.replace(self, params=placement.target_params(self.params), placement=placement)


def config_hash(config: ModelConfig) -> str:
    """Sixteen hex digits that stand for an architecture; the dtype is no part of it."""
    content = dataclasses.asdict(config)
    del content["dtype"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
