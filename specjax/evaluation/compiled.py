"""What a compiled program will do to a device: bytes held, bytes moved, collectives, copies of the cache."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from specjax.evaluation.traffic import moved_bytes

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8}


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Per device, as XLA reports it; bytes unless said otherwise.

    Attributes:
        arguments: parameters and state.
        outputs: of which `aliased` lie in the buffers of donated arguments.
        aliased: see `outputs`.
        temporaries: what a run needs besides.
        accessed: moved by all instructions as XLA counts it, on-chip traffic too; a loop's body counts once.
        moved: to and from the device's memory, in loops of known length as often as they run (`traffic.moved_bytes`).
        flops: operations, a loop's body once.
        collectives: by kind, how many instructions and the bytes of their largest operands.
        cache_copies: instructions below the entry computation (in a loop's body) that write a whole cache leaf anew.
            At the entry the compiler may change a leaf's layout once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    accessed: float
    moved: float
    flops: float
    collectives: Mapping[str, tuple[int, int]]
    cache_copies: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def describe_program(compiled: jax.stages.Compiled, cache_shapes: Iterable[tuple[int, ...]] = ()) -> CompiledProgram:
    """Reads a compiled program.

    Args:
        compiled: of `jax.jit(...).lower(...).compile()`.
        cache_shapes: shapes that cache leaves have on one device.
    """
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis() or {}
    text = compiled.as_text() or ""
    return CompiledProgram(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        accessed=cost.get("bytes accessed", math.nan),
        moved=moved_bytes(text) if text else math.nan,
        flops=cost.get("flops", math.nan),
        collectives=collectives(text),
        cache_copies=tuple(line for shape in dict.fromkeys(cache_shapes) for line in whole_copies(_inner(text), shape)),
    )


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Count and bytes of each kind of collective in an optimised program."""
    found: dict[str, tuple[int, int]] = {}
    for match in re.finditer(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", program):
        sizes = [_size(kind, dims) for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])]
        count, total = found.get(match[2], (0, 0))
        found[match[2]] = count + 1, total + max(sizes, default=0)
    return found


def whole_copies(program: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions of an optimised program that write an array of this shape anew instead of updating it.

    An asynchronous copy gives its destination, its source and a token. One whose destination is the memory on the chip
    (`S(1)`) is a read that was begun early, and no copy.
    """
    array = rf"\w+\[{','.join(map(str, shape))}\](?:{{[^}}]*}})?"
    plain = re.findall(rf"{array} (?:copy|select|concatenate|transpose)\(.*", program)
    started = re.findall(rf"\(({array}), .*?\) (copy-start\(.*)", program)
    return plain + [f"{made} {rest}" for made, rest in started if not re.search(r"S\([1-9]", made)]


def _inner(program: str) -> str:
    """An optimised program without its entry computation, which ends at the first brace in column 0."""
    before, entry, rest = program.partition("\nENTRY ")
    return before + rest.partition("\n}")[2] if entry else program


def _size(kind: str, dims: str) -> int:
    return _BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
