"""Finished runs as summaries that a repository can hold: python -m experiments.summarise runs/leviathan runs/chen

Writes what notebooks read, <out>/<run>.json: of results.json every row, and where it comes from with the command that
made it; no token, no text, numbers to six digits. A run's name is that of its directory.

    --out   directory, notebooks/results by default
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from etils import epath

from experiments import _main
from specjax.evaluation.results import read_results, write_json

OUT = Path(__file__).resolve().parents[1] / "notebooks" / "results"
# Of a row; they hold token ids.
LEFT_OUT = ("divergences",)
# Of the meta; names and hashes of every program and array, which no table shows.
META_LEFT_OUT = ("programs", "peak_memory_bytes", "target_identity", "drafters")
DIGITS = 6


class _Parser(argparse.ArgumentParser):
    """Says what is wrong on one line, as all programs do."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see python -m experiments.summarise --help")


def main(arguments: Sequence[str]) -> None:
    """Reads, strips, writes.

    Raises:
        FileNotFoundError: no run was named, or one holds no results.json.
        ValueError: an unknown option, a file that is no benchmark's results of this version, or one name twice.
    """
    plain = argparse.RawTextHelpFormatter
    parser = _Parser("python -m experiments.summarise", description=__doc__, formatter_class=plain)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directory")
    parser.add_argument("--out", default=str(OUT), metavar="DIRECTORY")
    options = parser.parse_args(arguments)
    if not options.runs:
        raise FileNotFoundError("no runs were named; expected run directories of experiments.benchmark")
    folders = [epath.Path(run) for run in options.runs]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"the names {', '.join(names)} of the runs differ not all; summarise them one by one")
    found = [read_results(folder / "results.json") for folder in folders]
    made = {name: summary(name, document) for name, document in zip(names, found, strict=True)}
    out = epath.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, document in made.items():
        write_json(out / f"{name}.json", document)
        print(f"{out / name}.json: {len(document['rows'])} rows")


def summary(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a results file without tokens; its command writes to runs/<name>."""
    meta = {key: value for key, value in document["meta"].items() if key not in META_LEFT_OUT}
    if meta.get("command"):
        meta["command"] = re.sub(r"--workdir[= ]\S+", f"--workdir=runs/{name}", meta["command"])
    rows = [{key: value for key, value in row.items() if key not in LEFT_OUT} for row in document["rows"]]
    return {"meta": meta, "rows": [_short(row) for row in rows]}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    with _main.one_line_errors():
        main(sys.argv[1:])
