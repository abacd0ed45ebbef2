"""Text stores from files: what a document is, and that the drafter reads what the program wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import build_store
from specjax import build
from specjax.drafting.text_store import SEPARATOR
from specjax.testing import tiny_target

FIELDS = ("text", "prompt", "response")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("to be or not to be")
    rows = [{"text": "one"}, {"id": 3, "prompt": "two", "response": "three"}]
    (folder / "more" / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_documents_are_files_and_lines(texts: Path) -> None:
    found = list(build_store.documents(str(texts), "*", FIELDS))
    assert found == ["to be or not to be", "one", "two\nthree"]
    assert list(build_store.documents(str(texts / "a.txt"), "", FIELDS)) == ["to be or not to be"]
    assert list(build_store.documents(str(texts), "*.txt", FIELDS)) == ["to be or not to be"]


def test_the_drafter_reads_the_store(texts: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=1, width=16)
    monkeypatch.setattr(build, "target_from_config", lambda config: target)
    build_store.main(build.load_config("configs/build_store.py", str(texts)))
    made = build.make_drafter("retrieval", target, source=str(in_workdir / "store.npz"), num_nodes=4, depth=2)
    tokens = np.asarray(made.tables["tokens"])
    assert (tokens == SEPARATOR).sum() == 3, "documents are kept apart"
    first = tokens[: np.flatnonzero(tokens == SEPARATOR)[0]]
    assert target.tokenizer.decode(first.tolist()) == "to be or not to be"


def test_what_is_no_text(texts: Path, tmp_path: Path) -> None:
    def read(path: Path | str, pattern: str = "*") -> list[str]:
        return list(build_store.documents(str(path), pattern, FIELDS))

    with pytest.raises(ValueError, match="no path of texts: name a file or directory"):
        read("")
    with pytest.raises(FileNotFoundError, match="no texts at .*nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has a name like pattern='\*.md'"):
        read(texts, "*.md")
    (texts / "c.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(ValueError, match="c.jsonl:1 has no text in text, prompt, response; it has title: set fields"):
        read(texts)
    (texts / "c.jsonl").unlink()
    (texts / "c.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="c.bin is no UTF-8 text"):
        read(texts)
