"""Text to pretrain small models on: Python's standard library and any text files, a BPE of its own, packed rows."""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import tokenizers

from specjax.models.tokenizer import Tokenizer
from specjax.training.data import Document, TextRows, check_rows, lay_out, pack

END = "<|end|>"
HELD_OUT = 10  # one in so many files of code, and that share of each text of prose

T = TypeVar("T")


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
    check_rows(length)
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


def hold_out(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and texts that are held out: a tenth, apart so that neither continues the other.

    Of code every tenth file. Of prose the end of every file, cut between paragraphs, or words where there are none.

    Returns:
        Both in the order of `texts`.
    """
    train: list[Text] = []
    apart: list[Text] = []
    files = 0
    for text in texts:
        if text.kind == "code":
            (train if files % HELD_OUT else apart).append(text)
            files += 1
            continue
        at = len(text.text) * (HELD_OUT - 1) // HELD_OUT
        cut = next((found for mark in ("\n\n", " ") if (found := text.text.find(mark, at)) >= 0), at)
        train.append(dataclasses.replace(text, text=text.text[:cut]))
        apart.append(dataclasses.replace(text, text=text.text[cut:].lstrip()))
    return train, apart


def lay_out_corpus(
    train: dict[str, list[Document]],
    apart: dict[str, list[Document]],
    length: int,
    held_out_rows: int,
    max_tokens: int,
) -> Corpus:
    """Packs both parts; the kinds have equal shares of the tokens to train on.

    Args:
        train: by kind, to train on.
        apart: by kind, held out.
        length: tokens a row.
        held_out_rows: of each kind, at most; spread over all there are.
        max_tokens: to train on, in all.

    Raises:
        ValueError: rows of fewer than 2 tokens, or fewer than one held out; a kind has too little text to train on or
            to hold out.
    """
    check_rows(length, held_out_rows)
    chosen: list[Document] = []
    held_out, openings = {}, {}
    for kind, own in train.items():
        few = min(len(own), len(apart[kind]))
        if not few:
            raise ValueError(
                f"kind {kind!r} has {len(own)} pieces to train on and {len(apart[kind])} held out; expected both: give "
                "more text"
            )
        share = max_tokens // len(train)
        for document in own:
            if share <= 0:
                break
            chosen.append(document)
            share -= len(document.tokens)
        rows, _ = pack(apart[kind], length)
        held_out[kind] = TextRows(lay_out(spread(rows, held_out_rows), length))
        openings[kind] = [d.tokens[: length // 4].tolist() for d in apart[kind] if len(d.tokens) == length]
    rows, _ = pack(chosen, length)
    return Corpus(TextRows(lay_out(rows, length)), held_out, openings)


def spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items at equal distances, in order; all where there are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
