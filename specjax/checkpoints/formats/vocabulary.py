"""The maps between draft and target vocabulary as EAGLE-3 heads store them: `d2t` offsets and the `t2d` mask."""

from __future__ import annotations

import numpy as np
from etils import epath


def read_vocabulary(
    file: epath.Path, tensors: dict[str, np.ndarray], draft_vocab: int | None, vocab_size: int
) -> np.ndarray | None:
    """Takes `d2t` and `t2d` out of the tensors: sorted target ids `[Vd]`, None where the vocabularies agree (a
    map of the whole vocabulary says so too).

    Raises:
        ValueError: the map is missing, holds absolute ids or may hold them, does not rise, or disagrees with the mask.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if draft_vocab in (None, vocab_size) and d2t is None:
        if t2d is not None and not (t2d.shape == (vocab_size,) and t2d.astype(bool).all()):
            raise ValueError(
                f"{file} has a t2d that marks {int(t2d.astype(bool).sum())} of {vocab_size} tokens, but no d2t, and "
                "config.json names no smaller draft_vocab_size: one of them is another head's"
            )
        return None
    if d2t is None:
        raise ValueError(f"{file} has no d2t, but a draft vocabulary of {draft_vocab} of {vocab_size} tokens needs it")
    if draft_vocab is None:
        raise ValueError(f"{file} has d2t for {len(d2t)} draft tokens, but config.json lacks draft_vocab_size")
    if not np.issubdtype(d2t.dtype, np.integer) or d2t.shape != (draft_vocab,):
        raise ValueError(f"{file}: d2t is {d2t.dtype}{list(d2t.shape)}; expected int64[{draft_vocab}] offsets")
    ids, mask = np.arange(len(d2t)) + d2t.astype(np.int64), None if t2d is None else t2d.astype(bool)
    if mask is not None and mask.shape != (vocab_size,):
        raise ValueError(f"{file}: t2d has shape {list(mask.shape)}; expected [{vocab_size}], one entry a target token")
    absolute = d2t.astype(np.int64)
    if _fits(ids, mask, vocab_size):
        # Offsets between neighbouring ids are equal, so only a vocabulary without two ids in a row can be taken for
        # absolute ones; the mask decides then.
        if mask is None and _fits(absolute, None, vocab_size) and not np.array_equal(ids, absolute):
            raise ValueError(
                f"{file}: d2t may hold offsets (ids {ids[0]} to {ids[-1]}) or absolute ids ({absolute[0]} to "
                f"{absolute[-1]}), and there is no t2d to tell: add t2d, bool[{vocab_size}], True for the target ids "
                "that the draft has"
            )
        return None if len(ids) == vocab_size else ids
    if _fits(absolute, mask, vocab_size):
        raise ValueError(
            f"{file}: d2t holds absolute ids; expected offsets, target id = i + d2t[i]: subtract arange({len(d2t)})"
        )
    marked = "" if mask is None else f", those that t2d marks ({int(mask.sum())} for {len(d2t)} rows)"
    raise ValueError(
        f"{file}: d2t is no map: i + d2t[i] runs from {ids.min()} to {ids.max()}; expected rising ids of 0 to "
        f"{vocab_size - 1}{marked}"
    )


def write_vocabulary(vocab: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """`d2t` and `t2d` of a sorted draft vocabulary."""
    mask = np.zeros(vocab_size, bool)
    mask[vocab] = True
    return {"d2t": vocab.astype(np.int64) - np.arange(len(vocab)), "t2d": mask}


def _fits(ids: np.ndarray, mask: np.ndarray | None, vocab_size: int) -> bool:
    inside = bool((ids >= 0).all() and (ids < vocab_size).all() and (np.diff(ids) > 0).all())
    return inside and (mask is None or (int(mask.sum()) == len(ids) and bool(mask[ids].all())))
