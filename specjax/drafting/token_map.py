"""What two vocabularies have in common, and each target token in the draft's own ids.

Tokens are shared where they stand for the same bytes, or are special and bear the same name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.token_bytes import Spelling
from specjax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMap:
    """Between a target's ids and a draft's.

    Attributes:
        vocab: int32 `[Vs]` target ids of the shared tokens, sorted.
        draft_ids: int32 `[Vs]` the same tokens in draft ids, each once.
        pieces: int32 `[V, K]` draft ids that spell each target token; a shared token is its own draft id.
        counts: int32 `[V]` how many of them there are, at least 1.
    """

    vocab: np.ndarray
    draft_ids: np.ndarray
    pieces: np.ndarray
    counts: np.ndarray

    def tables(self) -> dict[str, jax.Array]:
        """As a drafter reads them."""
        names = ("vocab", "draft_ids", "pieces", "counts")
        return {name: jnp.asarray(getattr(self, name)) for name in names}


def map_tokens(target: Tokenizer, draft: Tokenizer, vocab_size: int, *, names: tuple[str, str]) -> TokenMap:
    """The map between two tokenizers.

    A target token that is not shared is spelt by its bytes, a special one by the letters of its name. One that the
    draft cannot spell at all, and an id that stands for nothing, is one draft id that means nothing either: that of
    the draft's end of text where it has one. The draft reads a text that is a little off there, no more.

    Args:
        target: its tokenizer.
        draft: its tokenizer.
        vocab_size: V, rows of the target's vocabulary.
        names: of target and draft, for the error.

    Raises:
        ValueError: no token is shared, so nothing could be drafted.
    """
    mine, theirs = Spelling(target), Spelling(draft)
    known = _by_spelling(theirs)
    # Of target tokens with the same bytes only one can have a draft token.
    shared = {i: known[spelling] for spelling, i in _by_spelling(mine).items() if spelling in known and i < vocab_size}
    if not shared:
        raise ValueError(
            f"target {names[0]!r} (tokenizer {target.fingerprint()}, {target.vocab_size} tokens) and draft "
            f"{names[1]!r} (tokenizer {draft.fingerprint()}, {draft.vocab_size} tokens) share 0 tokens, so nothing "
            "could be drafted; choose a draft whose vocabulary has tokens of the target's"
        )
    vocab = np.asarray(sorted(shared), np.int32)
    filler = draft.eos_ids[0] if draft.eos_ids else int(shared[int(vocab[0])])
    spelt: list[list[int]] = []
    for i in range(vocab_size):
        data = mine.specials[i].encode() if i in mine.specials else mine.bytes_of.get(i, b"")
        spelt.append([shared[i]] if i in shared else theirs.spell(data) or [filler])
    counts = np.asarray([len(ids) for ids in spelt], np.int32)
    pieces = np.zeros((vocab_size, counts.max()), np.int32)
    for i, ids in enumerate(spelt):
        pieces[i, : len(ids)] = ids
    return TokenMap(vocab, np.asarray([shared[int(i)] for i in vocab], np.int32), pieces, counts)


def _by_spelling(spelling: Spelling) -> dict[Any, int]:
    """An id for each spelling; a token that only stands in for a byte gives way to one that is written with it."""
    order = sorted(spelling.bytes_of, key=lambda i: (i in spelling.single_bytes, i))
    found: dict[Any, int] = {}
    for i in order:
        found.setdefault(spelling.bytes_of[i], i)
    for i, name in sorted(spelling.specials.items()):
        found.setdefault(("special", name), i)
    return found
