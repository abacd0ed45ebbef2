"""Counts the programs that XLA compiles, by the name of the jitted function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_PHASES = (_COMPILED, "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")


@dataclasses.dataclass
class Compilations:
    """What was compiled in a stretch of time.

    Attributes:
        names: function name of each program, in order; a program read back from the persistent cache counts too.
        seconds: spent on tracing, lowering and compiling.
    """

    names: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def count(self, name: str) -> int:
        """Programs of one function."""
        return self.names.count(name)


_watching: list[Compilations] = []


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
    """Collects the compilations of all threads while the context is open."""
    seen = Compilations()
    _watching.append(seen)
    try:
        yield seen
    finally:
        # By identity: two records with equal content are equal.
        _watching[:] = [other for other in _watching if other is not seen]


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if not _watching or event not in _PHASES:
        return
    name = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
    for seen in _watching:
        seen.seconds += duration_secs
        if event == _COMPILED:
            seen.names.append(name)


jax.monitoring.register_event_duration_secs_listener(_listen)
