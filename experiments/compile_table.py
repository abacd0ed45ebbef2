"""Compiles the programs of a pod, one after another, and writes what the compiler says as one table.

    python -m experiments.compile_table --runs=runs/compiled --out=docs/compiled.md

Each is a call of `experiments.compile_for` in a directory of its own; started again it goes on with what is missing, so
needs no more than libtpu (`pip install 'specjax[tpu]'`) and patience: minutes a program on a few cores.

    NAME ...    programs, or beginnings of their names; all of them where none is named
    --runs      directory of the runs, runs/compiled by default
    --out       the table, of all runs that are there; runs/compiled.md by default
    --minutes   no program is begun after so long; 0 for no limit
    --list      prints the commands
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.compile_for import DRAFTERS
from experiments import _main
from experiments._arguments import Parser
from specjax.checkpoints.rundir import write_whole
from specjax.parallel.slices import GIB, chips_of

ROOT = Path(__file__).resolve().parents[1]
FOUND = "compiled.json"
HEADS = 8  # key heads of the models here: as many chips split them, and rows go over the others
ROWS = 8  # in decoding, of each such group of chips

HEADER = """\
# What the compiler says of a pod

Written by `python -m experiments.compile_table`: programs compiled for TPU slices by libtpu on a machine without one
(`experiments.compile_for`), bfloat16, per chip. "Bytes moved" is what a decode step moves to and from the chip's
memory, held against a bare forward pass over as many tokens with the same weights and cache, compiled the same way, and
the drafter's own weights once a pass of the draft; layers of the target that draft are not in the reference. In
parentheses is XLA's count of the step against its count of the bare pass: it adds what moves within the chip, so it
depends on what the compiler fetches early. Copies of the cache are counted in the loop. Collectives: how many, and the
bytes of their largest operands.

| program | slice | mesh | arguments GiB | temporaries GiB | peak | bytes moved | collectives | cache copies |
|---|---|---|---:|---:|---:|---:|---|---:|
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """One call of `experiments.compile_for`.

    Attributes:
        name: of its run directory.
        config: its config.
        topology: the slice.
        more: further options.
    """

    name: str
    config: str
    topology: str
    more: tuple[str, ...] = ()

    def command(self, runs: Path) -> list[str]:
        """As it is typed."""
        words = ["-m", "experiments.compile_for", f"--config={self.config}", f"--topology={self.topology}"]
        return [*words, f"--workdir={runs / self.name}", *self.more]


def on_slice(name: str, config: str, topology: str, *, split: bool = False) -> Program:
    """A decoding program over a whole slice: heads over as many chips as there are, rows over the others.

    Args:
        name: of the program.
        config: its config.
        topology: the slice.
        split: the weights that a group of chips holds are split over the others too, where they are too much for one.
    """
    axis, groups = "fsdp" if split else "data", chips_of(topology) // HEADS
    sizes = [f"--config.mesh.{axis}=-1", f"--config.mesh.tensor={HEADS}", f"--config.decode.batch={groups * ROWS}"]
    sizes += ["--config.mesh.target=fsdp_tp"] if split else []
    return Program(f"{name}-{topology.replace(':', '-')}", config, topology, tuple(sizes))


def programs() -> list[Program]:
    """All of them, the cheapest first."""
    slices = ("v5e:16x16", "v6e:16x16", "v5p:4x4x4")
    made = [on_slice("chain-8b", "configs/papers/eagle3.py:llama3_8b,decode", topology) for topology in slices]
    for topology in slices:
        name = f"train-8b-{topology.replace(':', '-')}"
        made.append(Program(name, "configs/papers/eagle3.py:llama3_8b,train", topology))
    made += [on_slice("tree-8b", "configs/compile_for.py:llama3_8b,decode,eagle3", topology) for topology in slices]
    for drafter in DRAFTERS:
        made.append(Program(f"drafter-{drafter}", f"configs/compile_for.py:llama3_8b,decode,{drafter}", "v5e:2x4"))
    for topology in slices:
        # Eight chips of 16 GiB do not hold the weights of 70B.
        split = topology.startswith("v5e")
        made.append(on_slice("chain-70b", "configs/papers/eagle3.py:llama3_70b,decode", topology, split=split))
        tree = on_slice("tree-70b", "configs/compile_for.py:llama3_70b,decode,eagle3", topology, split=split)
        made.append(dataclasses.replace(tree, more=(*tree.more, "--config.objective.intermediate_size=28672")))
    return made


def main(arguments: Sequence[str]) -> int:
    """Compiles what is missing, writes the table.

    Returns:
        Exit code: 0, 1 where a program failed (the others are compiled), or 75 where the time was up.

    Raises:
        ValueError: an unknown program or option, or a limit below 0.
    """
    plain = argparse.RawTextHelpFormatter
    parser = Parser("python -m experiments.compile_table", description=__doc__, formatter_class=plain)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--runs", default="runs/compiled", metavar="DIRECTORY")
    parser.add_argument("--out", default="runs/compiled.md", metavar="FILE")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    if not options.minutes >= 0:
        raise ValueError(f"--minutes={options.minutes:g}; expected at least 0")
    chosen, runs, out = chosen_of(options.names), Path(options.runs).absolute(), Path(options.out).absolute()
    if options.list:
        for program in chosen:
            print(shlex.join(["python", *program.command(Path(options.runs))]))
        return 0
    until = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    failed = []
    for number, program in enumerate(chosen, 1):
        if (runs / program.name / FOUND).exists():
            continue
        if time.monotonic() >= until:
            print("the time is up; the same command goes on from here", flush=True)
            return _main.RESTART
        print(f"{number} of {len(chosen)}: {program.name}", flush=True)
        # TPUs are only described: those that are here, if any, are left alone.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if subprocess.run([sys.executable, *program.command(runs)], cwd=ROOT, env=environment).returncode:
            failed.append(program.name)
        write_table(runs, out)
    write_table(runs, out)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def chosen_of(names: Sequence[str]) -> list[Program]:
    """The programs whose names begin so.

    Raises:
        ValueError: none does.
    """
    found = programs()
    for name in names:
        if not any(program.name.startswith(name) for program in found):
            raise ValueError(f"no program {name!r}; there are {', '.join(program.name for program in found)}")
    return [p for p in found if not names or any(p.name.startswith(name) for name in names)]


def write_table(runs: Path, out: Path) -> None:
    """Writes a row for every program that has been compiled, and the names of the others."""
    lines: list[str] = []
    missing: list[str] = []
    for program in programs():
        place = runs / program.name / FOUND
        if place.exists():
            found = json.loads(place.read_text())
            if "moved_ratio" not in found["rows"][-1]:
                raise ValueError(f"{place} is of an older version, which counted other bytes: remove its directory")
            lines.append(table_row(program.topology, found))
        else:
            missing.append(program.name)
    if missing:
        lines += ["", f"Not compiled yet: {', '.join(missing)}."]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, HEADER + "".join(f"{line}\n" for line in lines))


def table_row(topology: str, found: dict[str, Any]) -> str:
    """One line of the table, from what `experiments.compile_for` wrote of a program."""
    config, row = found["meta"]["config"], found["rows"][-1]
    decoding = config["program"] == "decode"
    drafter = config["drafter"] if decoding else config["objective"]
    shape = f", {drafter['topology']}" if "topology" in drafter else ""
    nodes = f" of {drafter['num_nodes']}" if shape else ""
    sizes = config["decode"]["batch"] if decoding else config["train"]["batch"]
    name = f"{config['model']}, {config['program']} {drafter['name']}{shape}{nodes}, {sizes} rows"
    mesh = [f"{axis}={config['mesh'][axis]}" for axis in ("data", "fsdp", "tensor") if config["mesh"][axis] != 1]
    kinds = [f"{n} {kind} ({size / 1e6:.1f} MB)" for kind, (n, size) in row["collectives"].items()]
    cells = (
        name,
        topology,
        " ".join(mesh).replace("=-1", "=rest"),
        f"{row['arguments'] / GIB:.2f}",
        f"{row['temporaries'] / GIB:.2f}",
        f"{row['peak'] / row['memory']:.0%}{'' if row['fits'] else ' **does not fit**'}",
        f"{row['moved_ratio']:.2f} x ({row['accessed_ratio']:.2f} x)" if decoding else "",
        ", ".join(kinds) or "none",
        str(len(row["cache_copies"])) if decoding else "",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    with _main.one_line_errors():
        raise SystemExit(main(sys.argv[1:]))
