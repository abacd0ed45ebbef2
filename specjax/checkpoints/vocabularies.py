"""Tokenizers built from a bare vocabulary, as GGUF files and llama2.c carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

# GGUF token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# How each kind cuts text before merging: regexes applied one after the other, every match a piece of its own.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2 + r"|\s+"),
    "qwen2": (_WORDS % r"\p{N}",),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}",),
    "gpt-2": (_GPT2 + r"|\s+",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def byte_level_bpe(
    pre: str,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    bos: int | None = None,
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer.

    Args:
        pre: how text is cut before merging, a key of `PRE_TOKENIZERS`.
        tokens: all tokens by id, bytes in GPT-2's printable alphabet.
        types: GGUF type of each.
        merges: pairs separated by a space, most frequent first.
        bos: id put before every text, if any.

    Raises:
        ValueError: `pre` is unknown, or the merges lead to tokens that do not exist.
    """
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"pre-tokenizer {pre!r} is not supported; expected {', '.join(PRE_TOKENIZERS)}. "
            "Load the model from its Hugging Face directory instead, which carries a tokenizer.json"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 takes a whole piece that is a token even where merges do not lead there.
    backend = tokenizers.Tokenizer(_bpe(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, tokens, types, bos)
    return backend


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    space_prefix: bool,
    bos: int | None = None,
) -> tokenizers.Tokenizer:
    """A SentencePiece BPE tokenizer with byte fallback; merges are recovered from the scores of the pieces.

    Args:
        tokens: all pieces by id, a space as U+2581.
        scores: of each piece; of two possible merges the one with the higher score comes first.
        types: GGUF type of each.
        space_prefix: a text gets a space before it, as Llama 2 has it.
        bos: id put before every text, if any.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    mergeable = {t for t, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in mergeable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[vocabulary[token]], vocabulary[left], vocabulary[right], left, right))
    pairs = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    backend = tokenizers.Tokenizer(_bpe(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if space_prefix else replace
    steps: list[decoders.Decoder] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    _add_special(backend, tokens, types, bos)
    return backend


def _bpe(vocabulary: dict[str, int], pairs: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, pairs, **options)
    except Exception as error:  # The Rust side raises bare Exception.
        raise ValueError(f"the tokenizer's vocabulary and merges do not fit ({error}): fetch the file again") from error


def _add_special(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], bos: int | None) -> None:
    """Declares control and user-defined tokens, so that text cannot be merged across them."""
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
