"""Finished runs as summaries that a repository can hold: python -m experiments.summarise runs/leviathan runs/chen

Writes what notebooks read, <out>/<run>.json: of results.json every row, and where it comes from with the command that
made it; no token, no text, numbers to six digits. A run's name is that of its directory. Reads runs of
experiments.benchmark and its like, and of experiments.ablate.

    --out   directory, notebooks/results by default
    --note  what a reader has to know of how they were made, such as a machine that did other work; kept with them
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from experiments import _main, ablate
from experiments._arguments import Parser
from specjax.evaluation.results import SCHEMA, read_results, write_json

OUT = Path(__file__).resolve().parents[1] / "notebooks" / "results"
SCHEMAS = (SCHEMA, ablate.SCHEMA)
# Of a row; they hold token ids.
LEFT_OUT = ("divergences",)
# Of the meta; names and hashes of every program and array, which no table shows.
META_LEFT_OUT = ("programs", "peak_memory_bytes", "target_identity", "drafters")
DIGITS = 6


def main(arguments: Sequence[str]) -> None:
    """Reads, strips, writes.

    Raises:
        FileNotFoundError: no run was named, or one holds no results.json.
        ValueError: an unknown option, a file that is no benchmark's results of this version, or one name twice.
    """
    plain = argparse.RawTextHelpFormatter
    parser = Parser("python -m experiments.summarise", description=__doc__, formatter_class=plain)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directory")
    parser.add_argument("--out", default=str(OUT), metavar="DIRECTORY")
    parser.add_argument("--note", default="")
    options = parser.parse_args(arguments)
    if not options.runs:
        raise FileNotFoundError("no runs were named; expected run directories of experiments.benchmark")
    folders = [epath.Path(run) for run in options.runs]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"the names {', '.join(names)} of the runs differ not all; summarise them one by one")
    found = [read_results(folder / "results.json", SCHEMAS) for folder in folders]
    made = {
        folder.name: summary(folder, document, options.note) for folder, document in zip(folders, found, strict=True)
    }
    out = epath.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, document in made.items():
        write_json(out / f"{name}.json", document)
        print(f"{out / name}.json: {len(document['rows'])} rows")


def summary(folder: epath.Path, document: Mapping[str, Any], note: str = "") -> dict[str, Any]:
    """The contents of a results file without tokens, as if its run and those it reads had been made in runs/.

    Args:
        folder: of the run.
        document: as read.
        note: kept in the meta where it says anything.
    """
    meta = {key: value for key, value in document["meta"].items() if key not in META_LEFT_OUT}
    if meta.get("command"):
        meta["command"] = re.sub(r"--workdir[= ]\S+", f"--workdir=runs/{folder.name}", meta["command"])
    if "://" not in str(folder):
        meta = _moved(meta, f"{os.path.abspath(folder.parent)}/", "runs/")
    if note:
        meta["note"] = note
    rows = [{key: value for key, value in row.items() if key not in LEFT_OUT} for row in document["rows"]]
    return {"meta": meta, "rows": [_short(row) for row in rows]}


def _moved(value: Any, old: str, new: str) -> Any:
    """With paths below one directory as paths below another."""
    if isinstance(value, dict):
        return {key: _moved(one, old, new) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(one, old, new) for one in value]
    return value.replace(old, new) if isinstance(value, str) else value


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    with _main.one_line_errors():
        main(sys.argv[1:])
