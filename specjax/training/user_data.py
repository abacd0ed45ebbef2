"""Text of one's own as training documents: chats and plain text, from local files or the Hugging Face hub.

`datasets` fetches and reads; what is tokenised is kept under a hash of text, tokenizer and template. Only assistants'
turns carry loss, and each is tokenised behind its prompt as it is at inference.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.models.tokenizer import Message, Tokenizer
from specjax.training.data import Document, TextRows, check_rows, lay_out, order, pack

FORMAT = 1  # Part of every cache key: raise it when documents are made differently.
KINDS = ("chat", "plain")
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
# Names that roles and turns go by in public sets of conversations.
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Which rows of which data set, and what they are.

    Attributes:
        path: a `.jsonl`, `.json`, `.parquet` or `.arrow` file (`.gz` as well), a directory that `datasets` saved or
            that holds such files, or the id of a data set on the hub.
        name: of a configuration on the hub; empty for the only one.
        split: to read.
        kind: `chat` or `plain`.
        field: that holds the turns (dicts with `role` and `content`, or `from` and `value`) or the text.
        max_rows: the first so many; 0 for all.
    """

    path: str
    name: str = ""
    split: str = "train"
    kind: str = "chat"
    field: str = "messages"
    max_rows: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"dataset kind {self.kind!r} is unknown; expected {' or '.join(KINDS)}")
        if not self.path:
            raise ValueError("dataset path is empty; expected a file, a directory or an id on the hub")


def dataset_documents(config: DatasetConfig, tokenizer: Tokenizer, cache: str | Path | None = None) -> list[Document]:
    """The documents of a data set, in its order.

    Args:
        config: what to read.
        tokenizer: of the target, with its chat template.
        cache: directory where tokenised text is kept and found again; None for none.

    Raises:
        FileNotFoundError: no such file or data set.
        ValueError: a field that it lacks (lists those it has), no rows, or conversations that are none.
        PermissionError: it is gated; says what to do.
        ConnectionError: it is on the hub, and there is no network.
    """
    rows = _rows(config)
    path = None if cache is None else Path(cache).expanduser() / f"{_key(config, rows, tokenizer)}.npz"
    if path is not None and path.exists():
        return _unpack(path)
    make = _chat if config.kind == "chat" else _plain
    documents = [
        document
        for number, value in enumerate(rows[config.field])
        for document in make(value, tokenizer, f"{config.path}, row {number}")
    ]
    if not documents:
        raise ValueError(f"{config.path} has {len(rows)} rows, and none with an assistant's turn or text in it")
    if path is not None:
        _pack(path, documents)
    return documents


@dataclasses.dataclass(frozen=True)
class DatasetRows:
    """A data set as packed rows.

    Attributes:
        train: to learn from.
        held_out: to evaluate on; none of its documents is in `train`.
        documents: in all.
        cut: documents that were longer than a row and lost their end.
        tokens: of all documents.
        answer_tokens: int32 `[n]`, the tokens of `train` that carry loss.
    """

    train: TextRows
    held_out: TextRows
    documents: int
    cut: int
    tokens: int
    answer_tokens: np.ndarray


def dataset_rows(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    *,
    row_length: int,
    held_out_rows: int,
    seed: int = 0,
    cache: str | Path | None = None,
) -> DatasetRows:
    """The documents of a data set, shuffled, some held out, the rest packed to train on.

    Args:
        config: what to read.
        tokenizer: of the target.
        row_length: tokens a row. Plain text goes on in further rows; a conversation loses what is beyond.
        held_out_rows: to keep apart, at most.
        seed: of the order in which documents are packed, and of which are held out.
        cache: see `dataset_documents`.

    Raises:
        ValueError: rows of fewer than 2 tokens, or fewer than one held out; too little text to train on and to hold
            out; or as `dataset_documents`.
    """
    check_rows(row_length, held_out_rows)
    documents = dataset_documents(config, tokenizer, cache)
    tokens = sum(len(d.tokens) for d in documents)
    if config.kind == "plain":
        documents = [
            Document(d.tokens[i : i + row_length], 0) for d in documents for i in range(0, len(d.tokens), row_length)
        ]
    documents = [documents[i] for i in order(len(documents), seed, 0)]
    sizes = np.cumsum([min(len(d.tokens), row_length) for d in documents])
    apart = int(np.searchsorted(sizes, held_out_rows * row_length, side="left")) + 1
    if apart >= len(documents):
        raise ValueError(
            f"{config.path} has {len(documents)} documents of {tokens} tokens in all: too few to hold out "
            f"{held_out_rows} rows of {row_length} tokens and to train on the rest; lower data.held_out_rows"
        )
    held, _ = pack(documents[:apart], row_length)
    rows, _ = pack(documents[apart:], row_length)
    train = lay_out(rows, row_length)
    return DatasetRows(
        train=TextRows(train),
        held_out=TextRows(lay_out(held[:held_out_rows], row_length)),
        documents=len(documents),
        cut=sum(len(d.tokens) > row_length for d in documents),
        tokens=tokens,
        answer_tokens=train.tokens[train.response],
    )


def chat_document(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Document]:
    """A conversation as one document whose assistant turns are answers.

    The prompt before each answer is the template's, as at inference. A template that rewrites earlier turns (drops
    their reasoning, say) gives one document an answer instead, since no single text has all of them as they were made.

    Raises:
        ValueError: the template refuses the conversation, or does not open an assistant's turn as it writes one.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    pieces: list[tuple[str, bool]] = []  # text, whether it is an answer
    documents, written = [], ""
    for i in answers:
        prompt = tokenizer.render_chat(messages[:i])
        whole = tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(
                "the chat template writes an assistant's turn differently from how it opens one "
                f"({prompt[-40:]!r} is no beginning of it): no prompt at inference would look like the training text"
            )
        if not prompt.startswith(written):
            documents.append(_joined(pieces, tokenizer))
            pieces, written = [], ""
        pieces += [(prompt[len(written) :], False), (whole[len(prompt) :], True)]
        written = whole
    return [*documents, _joined(pieces, tokenizer)] if pieces else documents


def _joined(pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> Document:
    """Tokenised piece by piece: at inference nothing is merged over the border of prompt and answer either."""
    ids: list[int] = []
    answer: list[bool] = []
    for text, is_answer in pieces:
        piece = tokenizer.encode(text, add_special=False)
        counted = len(piece) if is_answer else 0
        if is_answer:  # What the template writes behind the end of the turn, the model never does.
            ends = [n for n, token in enumerate(piece, 1) if token in tokenizer.eos_ids]
            counted = ends[0] if ends else counted
        ids += piece
        answer += [True] * counted + [False] * (len(piece) - counted)
    mask = np.asarray(answer)
    return Document(np.asarray(ids, np.int32), int(np.argmax(mask)), mask)


def _chat(value: Any, tokenizer: Tokenizer, where: str) -> Iterator[Document]:
    try:
        yield from chat_document(_messages(value), tokenizer)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error}") from error


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(m, Mapping) for m in value):
        raise ValueError(f"expected a list of turns with role and content, not {str(value)[:60]!r}")
    found: list[Message] = []
    for turn in value:
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"a turn has the fields {', '.join(turn)}; expected role and content, or from and value")
        found.append({"role": ROLES.get(role, role), "content": content})
    return found


def _plain(value: Any, tokenizer: Tokenizer, where: str) -> Iterator[Document]:
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text, not {str(value)[:60]!r}; for turns, kind='chat'")
    if value.strip():
        yield Document(np.asarray([*tokenizer.encode(value), tokenizer.eos_ids[0]], np.int32), 0)


def _rows(config: DatasetConfig) -> Any:
    import datasets

    try:
        found = _open(datasets, config)
    except datasets.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error):
            raise PermissionError(
                f"the data set {config.path!r} is gated: accept its terms at https://huggingface.co/datasets/"
                f"{config.path}, then log in with `hf auth login` or set HF_TOKEN"
            ) from error
        if isinstance(error.__cause__, ConnectionError):
            raise ConnectionError(
                f"the data set {config.path!r} is not at hand, and the hub does not answer"
            ) from error
        raise FileNotFoundError(
            f"no data set {config.path!r}: there is no such file or directory here, and none of that id on the hub"
        ) from error
    if isinstance(found, dict):  # splits
        if config.split not in found:
            raise ValueError(f"{config.path} has no split {config.split!r}; it has {', '.join(found)}")
        found = found[config.split]
    if config.field not in found.column_names:
        raise ValueError(f"{config.path} has no field {config.field!r}; it has {', '.join(found.column_names)}")
    if not len(found):
        raise ValueError(f"{config.path} (split {config.split!r}) is empty: at least one row is needed")
    return found.select(range(min(config.max_rows, len(found)))) if config.max_rows else found


def _open(datasets: Any, config: DatasetConfig) -> Any:
    path = Path(config.path).expanduser()
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(str(path), split=config.split)
    if path.is_file():
        suffix = next((s for s in path.suffixes if s in READERS), None)
        if suffix is None:
            raise ValueError(f"{path}: expected a file that ends in {', '.join(READERS)}")
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty: at least one row is needed")
        try:
            return datasets.load_dataset(READERS[suffix], data_files=str(path), split="train")
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(f"{path} cannot be read as {suffix}: {error.__cause__ or error}") from error
    if path.suffix or len(config.path.split("/")) > 2:
        raise FileNotFoundError(f"there is no file {path}")
    return datasets.load_dataset(config.path, config.name or None, split=config.split)


def _key(config: DatasetConfig, rows: Any, tokenizer: Tokenizer) -> str:
    """What the tokens depend on, and nothing else: the same text from another place is the same."""
    digest = hashlib.sha256()
    for value in rows[config.field]:
        digest.update(json.dumps(value, sort_keys=True, default=str).encode())
        digest.update(b"\0")
    template = tokenizer.chat_template if config.kind == "chat" else None
    said = [FORMAT, config.kind, tokenizer.fingerprint(), template, list(tokenizer.eos_ids)]
    digest.update(json.dumps(said).encode())
    return digest.hexdigest()[:32]


def _pack(path: Path, documents: Sequence[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    np.savez(
        partial,
        tokens=np.concatenate([d.tokens for d in documents]),
        mask=np.packbits(np.concatenate([d.mask for d in documents])),
        lengths=np.asarray([len(d.tokens) for d in documents]),
        prompts=np.asarray([d.prompt_length for d in documents]),
    )
    partial.replace(path)  # Whole or absent.


def _unpack(path: Path) -> list[Document]:
    with np.load(path) as stored:
        ends = np.cumsum(stored["lengths"])[:-1]
        tokens, mask = stored["tokens"], np.unpackbits(stored["mask"]).astype(bool)[: len(stored["tokens"])]
        parts = zip(np.split(tokens, ends), stored["prompts"], np.split(mask, ends), strict=True)
        return [Document(ids, int(prompt), answer) for ids, prompt, answer in parts]
