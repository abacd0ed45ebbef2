"""Text to pretrain small models on: Python's standard library and any text files, a BPE of its own, packed rows."""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from specjax.models.tokenizer import Tokenizer
from specjax.training.data import Document, TextRows, lay_out, pack

END = "<|end|>"


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """One file.

    Attributes:
        name: where it is from.
        kind: `code` or `prose`.
        text: its content.
    """

    name: str
    kind: str
    text: str


def standard_library(limit: int) -> Iterator[Text]:
    """Python sources of the running interpreter's standard library, in the order of their names.

    Args:
        limit: characters after which to stop.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = ("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings")
    taken = 0
    for path in sorted(root.rglob("*.py")):
        if taken >= limit:
            return
        if any(part in skipped for part in path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        taken += len(text)
        yield Text(str(path.relative_to(root)), "code", text)


def text_files(directory: str | Path) -> list[Text]:
    """The `.txt` files of a directory.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = sorted(Path(directory).glob("*.txt"))
    if not paths:
        raise FileNotFoundError(f"no .txt files in {directory}: expected prose to train on")
    return [Text(path.name, "prose", path.read_text(encoding="utf-8")) for path in paths]


def train_tokenizer(texts: Sequence[Text], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; id 0 ends a text.

    Raises:
        ValueError: fewer tokens than bytes.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size}; a byte-level BPE has at least 257 tokens")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text.text for text in texts), trainer)
    return Tokenizer(backend=backend, eos_ids=(0,))


def pieces(texts: Sequence[Text], tokenizer: Tokenizer, length: int) -> list[Document]:
    """The texts as documents of at most `length` tokens, all of which are to be predicted; each text ends in END."""
    found = []
    for text in texts:
        ids = np.asarray([*tokenizer.encode(text.text, add_special=False), tokenizer.eos_ids[0]], np.int32)
        found += [Document(ids[i : i + length], 0) for i in range(0, len(ids), length)]
    return found


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Rows to train on, and of each kind some that are held out.

    Attributes:
        train: packed rows.
        held_out: by kind.
        openings: by kind, the first tokens of held-out documents, to be continued.
    """

    train: TextRows
    held_out: dict[str, TextRows]
    openings: dict[str, list[list[int]]]


def split_corpus(documents: dict[str, list[Document]], length: int, held_out_rows: int, max_tokens: int) -> Corpus:
    """Every tenth document of each kind is kept apart; the rest is packed, the kinds in equal shares of tokens.

    Args:
        documents: by kind.
        length: tokens a row.
        held_out_rows: of each kind, at most.
        max_tokens: to train on, in all.

    Raises:
        ValueError: a kind has too little text to train on and to hold out.
    """
    train: list[Document] = []
    held_out, openings = {}, {}
    for kind, own in documents.items():
        if len(own) < 10:
            raise ValueError(f"kind {kind!r} has {len(own)} documents; expected at least 10")
        kept, share = [], max_tokens // len(documents)
        for document in (d for i, d in enumerate(own) if i % 10):
            if share <= 0:
                break
            kept.append(document)
            share -= len(document.tokens)
        train += kept
        apart = own[::10]
        rows, _ = pack(apart, length)
        held_out[kind] = TextRows(lay_out(rows[:held_out_rows], length))
        openings[kind] = [d.tokens[: length // 4].tolist() for d in apart if len(d.tokens) == length]
    rows, _ = pack(train, length)
    return Corpus(TextRows(lay_out(rows, length)), held_out, openings)
