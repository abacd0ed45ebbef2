"""A target and a drafter under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from specjax.decoding import Drafter, Loop, Rule, Weights
from specjax.drafting import Autoregressive
from specjax.models import Decoder, merge
from specjax.verification import OneHot

CHUNK = 16  # Short prefill chunks keep the token buffer, and with it every cache, short.

# depth -> rule
MakeRule = Callable[[int], Rule]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A target and a drafter under test.

    Attributes:
        graph: the target's static graph.
        target: its parameters.
        drafter: the method.
        params: its trained parameters.
        tables: its tables.
        eos: end-of-sequence ids.
    """

    graph: nnx.GraphDef[Decoder]
    target: Any
    drafter: Drafter
    params: Any
    tables: Any
    eos: tuple[int, ...] = ()

    @property
    def vocab(self) -> int:
        """The target's vocabulary."""
        return merge(self.graph, self.target).config.vocab_size

    def loop(self, make_rule: MakeRule) -> tuple[Loop, Weights]:
        """The loop with this drafter."""
        loop = Loop(self.graph, self.drafter, make_rule(self.drafter.depth), self.eos, chunk=CHUNK)
        return loop, Weights(self.target, self.params, self.tables)

    def autoregressive(self) -> tuple[Loop, Weights]:
        """The loop without a draft."""
        return Loop(self.graph, Autoregressive(), OneHot(0), self.eos, chunk=CHUNK), Weights(self.target, {}, {})
