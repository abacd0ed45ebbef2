"""Indexes texts for retrieval: python -m experiments.build_store --config=configs/build_store.py:PATH

Writes store.npz, which the drafter `retrieval` takes as its `source`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

import ml_collections
from etils import epath

from experiments import _main
from specjax import build
from specjax.drafting.text_store import index_texts, save_store
from specjax.evaluation import results
from specjax.training.data import json_lines

JSON_LINES = (".jsonl", ".jsonl.gz")


def main(config: ml_collections.ConfigDict) -> None:
    """Reads, indexes, writes."""
    console, workdir = _main.console(), _main.workdir()
    texts = list(documents(config.path, config.pattern, config.fields))
    results.check_writable(workdir)
    store = index_texts(texts, build.target_from_config(config.target).tokenizer)
    save_store(workdir / "store.npz", store)
    results.write_json(workdir / "config.json", config.to_dict())
    tokens = int((store.tokens >= 0).sum())
    console.print(
        f"{len(texts)} documents, {tokens} tokens, {store.tokens.nbytes + store.order.nbytes} bytes on the device: "
        f"{workdir / 'store.npz'}",
        highlight=False,
    )


def documents(path: str, pattern: str, fields: Sequence[str]) -> Iterator[str]:
    """The texts of a file, or of the files below a directory whose names match, in the order of their paths.

    Raises:
        FileNotFoundError: there is no such path, or nothing in it matches.
        ValueError: no path; a file is no text; a JSON line has none of the fields.
    """
    if not path:
        raise ValueError("no path of texts: name a file or directory, --config=configs/build_store.py:PATH")
    root = epath.Path(path)
    if not root.exists():
        raise FileNotFoundError(f"no texts at {path}: give a file, or a directory of files")
    files = [root]
    if root.is_dir():
        below = (epath.Path(folder) / name for folder, _, names in root.walk() for name in names)
        files = sorted(file for file in below if fnmatch.fnmatch(file.name, pattern))
    if not files:
        raise FileNotFoundError(f"no file below {path} has a name like pattern={pattern!r}")
    for file in files:
        if file.name.endswith(JSON_LINES):
            yield from _rows(file, fields)
            continue
        try:
            yield file.read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no UTF-8 text ({error}): leave it out with pattern") from error


def _rows(file: epath.Path, fields: Sequence[str]) -> Iterator[str]:
    for where, row in json_lines(file):
        held = [row[field] for field in fields if isinstance(row.get(field), str)]
        if not held:
            raise ValueError(f"{where} has no text in {', '.join(fields)}; it has {', '.join(row)}: set fields")
        yield "\n".join(held)


if __name__ == "__main__":
    _main.run(main, config="configs/build_store.py", workdir="runs/store")
