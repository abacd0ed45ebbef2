"""Whether training text repeats the prompts of an evaluation set, on which a figure would then say little."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

RUN = 13  # Words in a row that two texts have by chance hardly ever (Brown et al. 2020, 2005.14165, appendix C).


def repeated(training: Sequence[str], evaluation: Sequence[str]) -> list[int]:
    """Which evaluation prompts are in the training text, whatever case, punctuation and white space.

    Args:
        training: texts that are trained on.
        evaluation: prompts that are measured on.

    Returns:
        Indices of the prompts that share thirteen words in a row with a text, or, being shorter, are one.
    """
    runs = {run for text in training for run in _runs(text)}
    return [i for i, prompt in enumerate(evaluation) if any(run in runs for run in _runs(prompt))]


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    if 0 < len(words) <= RUN:
        yield tuple(words)
    for start in range(len(words) - RUN + 1):
        yield tuple(words[start : start + RUN])
