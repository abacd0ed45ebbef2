"""A user's texts as arrays that can be searched on the device: tokens and their suffix array."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Iterable

import numpy as np
from etils import epath

from specjax.models.tokenizer import Tokenizer

SCHEMA = "specjax.text_store/1"
SEPARATOR = -1  # Between texts: equal to no token.
SORTED_DEPTH = 32  # Suffixes are ordered by their first so many tokens; no longer match can be looked up.


@dataclasses.dataclass(frozen=True, eq=False)
class TextStore:
    """Tokens and the order of their suffixes.

    Attributes:
        tokens: `[S]` int32, texts one after the other, each followed by the separator -1.
        order: `[S]` int32 suffix array: positions by the tokens from there on, the end of the store before all.
        fingerprint: of the tokenizer.
    """

    tokens: np.ndarray
    order: np.ndarray
    fingerprint: str


def index_texts(texts: Iterable[str], tokenizer: Tokenizer) -> TextStore:
    """Tokenises and indexes texts.

    Raises:
        ValueError: there is no token at all.
    """
    tokens: list[int] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special=False)
        tokens += [*ids, SEPARATOR] if ids else []
    if not tokens:
        raise ValueError("the texts hold no token; a text store needs at least one")
    array = np.asarray(tokens, np.int32)
    return TextStore(array, suffix_array(array), tokenizer.fingerprint())


def suffix_array(tokens_s: np.ndarray) -> np.ndarray:
    """Positions `[S]` int32 ordered by the next `SORTED_DEPTH` tokens, by doubling; equal ones by position."""
    size = len(tokens_s)
    rank = np.unique(tokens_s, return_inverse=True)[1].astype(np.int64) + 1  # 0 is behind the end
    order, width = np.argsort(rank, kind="stable"), 1
    while width < SORTED_DEPTH and rank.max() < size:
        behind = np.concatenate([rank[width:], np.zeros(min(width, size), np.int64)])
        both = rank * (size + 1) + behind
        order = np.argsort(both, kind="stable")
        ordered = both[order]
        rank[order] = 1 + np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        width *= 2
    return order.astype(np.int32)


def save_store(path: str | epath.Path, store: TextStore) -> None:
    """Writes a store as one `.npz` file."""
    buffer = io.BytesIO()
    np.savez(buffer, schema=SCHEMA, fingerprint=store.fingerprint, tokens=store.tokens, order=store.order)
    epath.Path(path).write_bytes(buffer.getvalue())


def load_store(path: str | epath.Path, tokenizer: Tokenizer) -> TextStore:
    """Reads what `save_store` wrote, for a model with this tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no text store, is damaged, or was made with another tokenizer.
    """
    file = epath.Path(path)
    if not file.exists():
        raise FileNotFoundError(f"no text store at {path}; make one with index_texts and save_store")
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as held:
            schema, fingerprint = str(held["schema"]), str(held["fingerprint"])
            store = TextStore(held["tokens"], held["order"], fingerprint)
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a whole text store ({error}): make it again with index_texts") from error
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}, this version reads {SCHEMA!r}: make it again")
    if fingerprint != tokenizer.fingerprint_as(fingerprint):
        raise ValueError(
            f"the text store {path} was made with another tokenizer (fingerprint {fingerprint}, the target's is "
            f"{tokenizer.fingerprint()}): its ids mean other text; index the texts with the target's tokenizer"
        )
    sound = store.tokens.dtype == store.order.dtype == np.int32 and store.tokens.shape == store.order.shape
    if not sound or not np.array_equal(np.sort(store.order), np.arange(store.tokens.size)):
        raise ValueError(f"{path} is damaged: its order is no suffix array of its tokens; make it again")
    return store
