"""Bytes that an optimised program moves between a device's memory and its cores, read from the program's text.

XLA's own count adds what moves within the chip, and depends on which weights the compiler has fetched early. Here what
lies on the chip (`S(1)` in a layout) is free, an update in place costs what it writes, a slice what it takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Widths other than 32 bits.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "s64": 64}
_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")

# Instructions that move nothing, those that take a part of their first operand, and those that write into it.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_PARTS = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand holds what is written


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
        name: within its computation.
        type: of its result.
        kind: such as `fusion`.
        operands: names.
        rest: of the line, behind the operands.
        root: it is the computation's result.
    """

    name: str
    type: str
    kind: str
    operands: tuple[str, ...]
    rest: str
    root: bool


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
    """An optimised program.

    Attributes:
        computations: by name.
        entry: the name of the one that is run.
    """

    computations: dict[str, Computation]
    entry: str

    def run(self, name: str) -> float:
        """Bytes moved by one run of a computation."""
        return sum(self._moved(self.computations[name], line) for line in self.computations[name].values())

    def _moved(self, around: Computation, line: Instruction) -> float:
        if line.kind in _FREE or line.kind.endswith("-done"):
            return 0
        if line.kind == "while":
            return (self.times(line) or 1) * self.run(_called(line, "body"))
        if line.kind == "conditional":
            return max(map(self.run, _branches(line)))
        if line.kind in ("call", "async-start"):
            return self.run(_called(line, "to_apply" if line.kind == "call" else "calls"))
        if line.kind in ("copy-start", "slice-start"):
            # Source and destination are in its result, either of which may lie on the chip.
            made = _arrays(line.type)
            return made[0 if line.kind == "copy-start" else 1].size * sum(not array.on_chip for array in made[:2])
        return self._read(around, line) + self._written(line)

    def times(self, line: Instruction) -> int | None:
        """How often a loop runs, where the program tells."""
        if known := re.search(r"known_trip_count\D*(\d+)", line.rest):
            return int(known[1])
        condition = self.computations[_called(line, "condition")]
        compared = [x for x in condition.values() if x.kind == "compare" and "direction=LT" in x.rest]
        bounds = [condition[name] for x in compared for name in x.operands if name in condition]
        values = [x.rest.partition(")")[0] for x in bounds if x.kind == "constant"]
        return int(values[0]) if len(values) == 1 and len(compared) == 1 and values[0].isdigit() else None

    def _read(self, around: Computation, line: Instruction) -> float:
        total = 0.0
        for place, name in enumerate(line.operands):
            for array in _arrays(around[name].type if name in around else ""):
                if not array.on_chip:
                    total += min(array.size, self._taken(line, place, array.size))
        return total

    def _taken(self, line: Instruction, place: int, whole: float) -> float:
        """Bytes that an instruction takes of an operand of so many."""
        if line.kind == "fusion":
            inner = self.computations[_called(line, "calls")]
            return sum(self._taken(user, at, whole) for user, at in _users(inner, _parameter(inner, place)))
        if line.kind in _PARTS and place == 0:
            return _size(line.type)
        if line.kind in _UPDATES and place == 0 and not any(array.on_chip for array in _arrays(line.type)):
            return 0
        return whole

    def _written(self, line: Instruction) -> float:
        if line.kind == "fusion":
            inner = self.computations[_called(line, "calls")]
            roots = list(_results(inner, next(x for x in inner.values() if x.root)))
        else:
            inner, roots = {}, [line]
        if len(roots) != len(_arrays(line.type)):
            return sum(array.size for array in _arrays(line.type) if not array.on_chip)
        sizes = [self._made(inner, root, array) for root, array in zip(roots, _arrays(line.type), strict=True)]
        return sum(size for size, array in zip(sizes, _arrays(line.type), strict=True) if not array.on_chip)

    def _made(self, inner: Computation, root: Instruction, array: Array) -> float:
        if root.kind in _UPDATES and (update := inner.get(root.operands[_UPDATES[root.kind]])):
            return min(array.size, _size(update.type))
        return array.size


@dataclasses.dataclass(frozen=True)
class Array:
    """Bytes of an array, and whether it lies on the chip."""

    size: float
    on_chip: bool


def moved_bytes(text: str) -> float:
    """Bytes that an optimised program moves to and from its device's memory, in one run.

    Where what is run is a loop without a length that the program tells (decoding's), in one of its iterations. Within,
    such a loop counts once (attention over chunks of a cache), and others as often as they run.

    Args:
        text: `jax.jit(...).lower(...).compile().as_text()`.
    """
    program = parse(text)
    lines = program.computations[program.entry].values()
    loops = [line for line in lines if line.kind == "while" and program.times(line) is None]
    return sum(program.run(_called(line, "body")) for line in loops) if loops else program.run(program.entry)


def parse(text: str) -> Program:
    """Reads an optimised program.

    Raises:
        ValueError: there is none in the text.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            operands, rest = _split(found[5])
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            kept = operands + ")" + rest if found[4] in ("constant", "parameter") else rest
            current[found[2]] = Instruction(found[2], found[3], found[4], names, kept, bool(found[1]))
    if not entry:
        raise ValueError("no ENTRY computation in the text; expected what compiled.as_text() gives")
    return Program(computations, entry)


def _split(text: str) -> tuple[str, str]:
    """Operands, and what stands behind the parenthesis that closes them."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:at], text[at + 1 :]
    return text, ""


@functools.lru_cache(maxsize=4096)
def _arrays(kind: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(kind):
        bits = _BITS.get(dtype, 32)
        size = math.prod(int(n) for n in dims.split(",") if n) * bits / 8
        found.append(Array(size, bool(re.search(r"S\([1-9]", layout))))
    return tuple(found)


def _size(kind: str) -> float:
    return sum(array.size for array in _arrays(kind))


def _called(line: Instruction, key: str) -> str:
    found = re.search(rf"\b{key}=%?([\w.\-]+)", line.rest)
    if not found:
        raise ValueError(f"{line.kind} {line.name} names no {key}")
    return found[1]


def _branches(line: Instruction) -> list[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", line.rest):
        return re.findall(r"%?([\w.\-]+)", listed[1])
    return [_called(line, f"{name}_computation") for name in ("true", "false")]


def _parameter(inner: Computation, place: int) -> str:
    return next(x.name for x in inner.values() if x.kind == "parameter" and x.rest.startswith(f"{place})"))


def _users(inner: Computation, name: str) -> Iterator[tuple[Instruction, int]]:
    """Who reads a value, and as which operand; through bitcasts, unless one is the result."""
    for line in inner.values():
        for place, operand in enumerate(line.operands):
            if operand == name:
                yield from _users(inner, line.name) if line.kind == "bitcast" and not line.root else [(line, place)]


def _results(inner: Computation, line: Instruction) -> Iterator[Instruction]:
    """What makes the arrays that a fused computation gives; through bitcasts."""
    if line.kind == "tuple":
        for name in line.operands:
            yield from _results(inner, inner[name])
    elif line.kind == "bitcast" and line.operands[0] in inner:
        yield from _results(inner, inner[line.operands[0]])
    else:
        yield line
