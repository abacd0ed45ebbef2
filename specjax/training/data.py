"""Training text: answers of the target, rendered as at inference, packed into rows of one length."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.struct
import jax
import numpy as np
from etils import epath

from specjax.models.target import Target
from specjax.models.tokenizer import Tokenizer

DECODED = 32  # Answers of a file that are decoded, to see whose tokenizer wrote them.
Array = Any  # of JAX in a trace, of NumPy outside


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value)


# What the fields of an answer that are computed with must be: a check, and words for it.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda value: isinstance(value, int | str), "a number or a text"),
    "temperature": (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a number of 0 or more"),
    "prompt": (lambda value: isinstance(value, str), "a text"),
    "response_ids": (_ids, "a list of token ids, whole numbers of 0 or more"),
    "response": (lambda value: isinstance(value, str), "a text"),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the target wrote to one prompt; a line of a JSONL file has exactly these keys.

    Attributes:
        source: name of the prompt set.
        id: of the prompt within it.
        temperature: that the answer was drawn at, 0 for greedy.
        prompt: the user's turn.
        response_ids: tokens of the answer, the end of turn included when it was reached.
        response: their text.
        finish: `stop` or `length`.
    """

    source: str
    id: int | str
    temperature: float
    prompt: str
    response_ids: tuple[int, ...]
    response: str
    finish: str

    @property
    def key(self) -> tuple[str, str, float]:
        """What tells this answer from every other."""
        return self.source, str(self.id), float(self.temperature)


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """One prompt and its answer as token ids, or a conversation of several.

    Attributes:
        tokens: int32 `[n]`.
        prompt_length: tokens before the first answer.
        answer: bool `[n]`, which tokens are part of an answer; None for all from `prompt_length` on.
    """

    tokens: np.ndarray
    prompt_length: int
    answer: np.ndarray | None = None

    @property
    def mask(self) -> np.ndarray:
        """Bool `[n]`: the tokens that are part of an answer."""
        return np.arange(len(self.tokens)) >= self.prompt_length if self.answer is None else self.answer

    def cut(self, length: int) -> Document:
        """Its first `length` tokens."""
        answer = None if self.answer is None else self.answer[:length]
        return Document(self.tokens[:length], self.prompt_length, answer)


@flax.struct.dataclass
class Batch:
    """Packed rows, with what the target computed on them where that is known.

    Attributes:
        tokens: `[B, T]` int32.
        positions: `[B, T]` int32, restarting at 0 in each document.
        segments: `[B, T]` int32 document number within the row, 0 for padding.
        response: `[B, T]` bool; the token is part of an answer.
        normed: `[B, T, d]` the target's final hidden state after its last norm, or None.
        lse: `[B, T]` float32 log-sum-exp of the target's logits where the next token is an answer's, else 0; or None.
        taps: the target's activations by tap name, each `[B, T, d]`.
    """

    tokens: Array
    positions: Array
    segments: Array
    response: Array
    normed: Array | None = None
    lse: Array | None = None
    taps: dict[str, Array] = flax.struct.field(default_factory=dict)

    @property
    def predicts(self) -> Array:
        """`[B, T]` bool: the next token belongs to the same document and to its answer (labels are shifted by one)."""
        same = (self.segments[:, 1:] == self.segments[:, :-1]) & (self.segments[:, 1:] > 0)
        inner = same & self.response[:, 1:]
        xp = np if isinstance(inner, np.ndarray) else jax.numpy
        return xp.pad(inner, ((0, 0), (0, 1)))


def read_answers(path: str | epath.Path) -> list[Answer]:
    """Answers of a JSONL file (gzipped when its name ends in .gz), or of all `part-*.jsonl` of a directory.

    A prompt that several parts of a directory answer, as two runs at once leave them, has the answer of the first.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not JSON, lacks a field or has one that is none; names file, line and what it has. Or the
            file is empty or damaged.
    """
    path = epath.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no training text at {path}: give a JSONL file of answers (experiments.regenerate)")
    parts = path.is_dir()
    files = sorted(path.glob("part-*.jsonl")) if parts else [path]
    answers = [_answer(entry, where) for file in files for where, entry in json_lines(file)]
    if parts:
        answers = list({answer.key: answer for answer in reversed(answers)}.values())[::-1]
    if not answers:
        raise ValueError(f"{path} holds no answers: at least one line is needed")
    return answers


def check_written_with(answers: Sequence[Answer], target: Target, where: str | epath.Path) -> None:
    """Sees to it that the ids of some answers are of the target's tokenizer: they must give the answers' text.

    Args:
        answers: of one file; of those with text the first 32 are decoded.
        target: that is to learn from them.
        where: they were read.

    Raises:
        ValueError: an id is outside the vocabulary, or most of the answers decode to another text.
    """
    size = target.config.vocab_size
    largest = max((i for answer in answers for i in answer.response_ids), default=0)
    some = [answer for answer in answers if answer.response.strip()][:DECODED]
    read = [target.tokenizer.decode([i for i in answer.response_ids if i < size]) for answer in some]
    differ = [pair for pair in zip(read, some, strict=True) if pair[0].strip() != pair[1].response.strip()]
    if largest < size and 2 * len(differ) <= len(some):
        return
    found = f"id {largest} in it is outside the vocabulary of {size}"
    if differ:
        text, answer = differ[0]
        found = f"the ids of {answer.source} {answer.id} read {text[:60]!r}, and its text is {answer.response[:60]!r}"
    raise ValueError(
        f"{where} was written with another tokenizer than that of {target.name!r}: {found}. Let this target answer the "
        "prompts (experiments.regenerate), and give that as data.text and data.held_out_text"
    )


def json_lines(path: str | epath.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its place for error messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, or the file is not whole or not UTF-8.
    """
    path = epath.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}: expected JSONL, one object a line")
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}): make or fetch it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 ({error}): expected JSONL in UTF-8, gzipped where it ends in .gz"
        ) from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error})") from error
        if not isinstance(entry, dict):
            raise ValueError(f"{path}:{number} is {type(entry).__name__}; expected a JSON object")
        yield f"{path}:{number}", entry


def _answer(entry: dict[str, Any], where: str) -> Answer:
    names = [field.name for field in dataclasses.fields(Answer)]
    missing = [name for name in names if name not in entry]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; it has {', '.join(entry)}; expected {', '.join(names)}")
    values = {name: entry[name] for name in names}
    wrong = next((name for name, (check, _) in FIELDS.items() if not check(values[name])), None)
    if wrong is not None:
        raise ValueError(f"{where} has {wrong}={values[wrong]!r:.60}; expected {FIELDS[wrong][1]}")
    return Answer(**{**values, "response_ids": tuple(values["response_ids"])})


def check_rows(length: int, held_out: int | None = None) -> None:
    """Raises ValueError for rows too short for a token behind another, or fewer than one row to hold out."""
    if length < 2:
        raise ValueError(f"row_length={length}; expected at least 2: a token is learnt behind another")
    if held_out is not None and held_out < 1:
        raise ValueError(f"held_out_rows={held_out}; expected at least 1: the best checkpoint is chosen on them")


def render(tokenizer: Tokenizer, answer: Answer) -> Document:
    """The conversation as the target sees it at inference: chat template, one user turn, the answer's own ids."""
    prompt = tokenizer.apply_chat([{"role": "user", "content": answer.prompt}])
    return Document(np.asarray([*prompt, *answer.response_ids], np.int32), len(prompt))


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: a permutation that depends on nothing but its arguments."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def pack(documents: Sequence[Document], length: int, open_rows: int = 32) -> tuple[list[list[Document]], int]:
    """Fills rows of `length` tokens with whole documents, each into the open row that it fills best.

    Args:
        documents: in the order in which to place them.
        length: tokens a row; a longer document loses its end.
        open_rows: rows that still take documents; the fullest is closed when there are more.

    Returns:
        The rows, and how many documents were cut.
    """
    closed: list[list[Document]] = []
    rows: list[tuple[int, list[Document]]] = []
    cut = 0
    for document in documents:
        if len(document.tokens) > length:
            cut += 1
            document = document.cut(length)
        size = len(document.tokens)
        fits = [i for i, (used, _) in enumerate(rows) if used + size <= length]
        if fits:
            best = max(fits, key=lambda i: rows[i][0])
            rows[best][1].append(document)
            rows[best] = (rows[best][0] + size, rows[best][1])
        else:
            rows.append((size, [document]))
        if len(rows) > open_rows:
            fullest = max(range(len(rows)), key=lambda i: rows[i][0])
            closed.append(rows.pop(fullest)[1])
    return closed + [row for _, row in rows], cut


def lay_out(rows: Sequence[Sequence[Document]], length: int) -> Batch:
    """Rows of documents as arrays `[len(rows), length]`; the padding is a segment of its own, 0."""
    shape = (len(rows), length)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    response = np.zeros(shape, bool)
    for b, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row, 1):
            end = start + len(document.tokens)
            if end > length:
                raise ValueError(f"row {b} holds more than {length} tokens; pack it for this length")
            tokens[b, start:end] = document.tokens
            positions[b, start:end] = np.arange(end - start)
            segments[b, start:end] = number
            response[b, start:end] = document.mask
            start = end
        positions[b, start:] = np.arange(length - start)
    return Batch(tokens, positions, segments, response)


@dataclasses.dataclass(frozen=True)
class TextRows:
    """Packed rows of text, without hidden states, as a source of training batches.

    Attributes:
        text: `[rows, T]` arrays.
    """

    text: Batch

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.text.tokens)

    def batch(self, rows: np.ndarray) -> Batch:
        """The rows with these indices."""
        return jax.tree.map(lambda x: x[rows], self.text)


def answers_at(
    path: str | epath.Path, target: Target, temperature: float | None = None, sources: Sequence[str] = ()
) -> list[Document]:
    """The answers of a file as documents, all or those drawn at one temperature, from all sources or from some.

    Raises:
        ValueError: a source that the file does not have, or no answers of that temperature.
    """
    answers = read_answers(path)
    check_written_with(answers, target, path)
    known = dict.fromkeys(a.source for a in answers)
    if unknown := [source for source in sources if source not in known]:
        raise ValueError(f"{path} has no answers from {unknown[0]!r}; its sources: {', '.join(known)}")
    kept = [a for a in answers if temperature in (None, a.temperature) and (not sources or a.source in sources)]
    if not kept:
        raise ValueError(f"{path} has no answers drawn at temperature {temperature}")
    return [render(target.tokenizer, answer) for answer in kept]


def text_rows(
    path: str | epath.Path,
    target: Target,
    length: int,
    temperature: float | None = None,
    max_rows: int | None = None,
    sources: Sequence[str] = (),
) -> TextRows:
    """The answers of a file as packed rows, the first `max_rows` of them; of some `sources`, or of all.

    Raises:
        ValueError: rows of fewer than 2 tokens, or fewer than one; or as `answers_at`.
    """
    check_rows(length, max_rows)
    rows, _ = pack(answers_at(path, target, temperature, sources), length)
    return TextRows(lay_out(rows[:max_rows], length))


def draft_vocabulary(path: str | epath.Path, target: Target, size: int) -> np.ndarray:
    """The tokens that the target writes most often, and those that end its texts: int32 `[size]`, sorted."""
    answers = read_answers(path)
    check_written_with(answers, target, path)
    return frequent_tokens(answers, size, target.eos_ids)


def frequent_tokens(answers: Sequence[Answer], size: int, always: Sequence[int] = ()) -> np.ndarray:
    """The draft vocabulary: the `size` most frequent tokens of the answers, sorted int32 ids; see `most_frequent`."""
    return most_frequent(np.concatenate([answer.response_ids for answer in answers]), size, always)


def most_frequent(tokens_n: np.ndarray, size: int, always: Sequence[int] = ()) -> np.ndarray:
    """The `size` most frequent of some tokens, sorted int32 ids.

    Args:
        tokens_n: of the text.
        size: tokens to keep.
        always: ids that are kept whatever their count (end of text).

    Raises:
        ValueError: the text has fewer distinct tokens than `size`.
    """
    counts = np.bincount(tokens_n.astype(np.int64))
    counts = np.pad(counts, (0, max(0, max(always, default=0) + 1 - len(counts))))
    counts[list(always)] = counts.max() + 1
    distinct = int(np.count_nonzero(counts))
    if not 0 < size <= distinct:
        raise ValueError(f"draft vocabulary of {size} tokens, but the training text has {distinct} distinct ones")
    # Ties go to the lower id: the choice must not depend on the sort.
    ranked = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(ranked[:size]).astype(np.int32)
