"""Stop strings on the host: a text ends where one is spelt, whatever tokens spell it.

The loop stops by token ids (`Request.stop`), which it can do without leaving the device. A string has many spellings
in tokens: two line ends may be one token, two, or part of a token that begins with a full stop. So the text itself is
searched too, exactly, and cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specjax.models.tokenizer import StreamDecoder


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raises ValueError for what is no list of strings, and for a stop that is not a string, or empty."""
    if isinstance(stops, str) or not isinstance(stops, Sequence):
        raise ValueError(f"stop={stops!r}; expected strings that end the text, () for none")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"stop string {i} is {stop!r}; expected some text")


class StopText:
    """Lets text through as it comes, up to the first stop string, which is itself left out.

    What may be the beginning of a stop string is held back until the text that follows decides.

    Attributes:
        found: a stop string was met; what is pushed behind it is dropped.
    """

    def __init__(self, stops: Sequence[str]):
        """See `check_stop_strings` for what is refused."""
        check_stop_strings(stops)
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain now."""
        if self.found:
            return ""
        self._held += piece
        # The first to be complete counts, and of two that end together the longer: so it is however the text comes.
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            out, self._held, self.found = self._held[: min(matches)[1]], "", True
            return out
        keep = max((self._unfinished(stop) for stop in self._stops), default=0)
        split = len(self._held) - keep
        out, self._held = self._held[:split], self._held[split:]
        return out

    def finish(self) -> str:
        """What is still held back when no more text comes."""
        out, self._held = self._held, ""
        return out

    def _unfinished(self, stop: str) -> int:
        """Characters at the end of the held text that begin this stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((k for k in range(longest, 0, -1) if self._held.endswith(stop[:k])), 0)


class TextEnd:
    """Finds the token with which a text completes a stop string, as its tokens come."""

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str], silent: Collection[int]):
        """Takes a fresh decoder, the stop strings, and ids that are no text (end of sequence)."""
        self._decoder, self._watch, self._silent = decoder, StopText(stops), silent
        self._seen = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens so far are the text with its stop string; None as long as there is none."""
        for token in tokens[self._seen :]:
            if self._watch.found:
                break
            self._seen += 1
            if token not in self._silent:
                self._watch.push(self._decoder.push(token))
        return self._seen if self._watch.found else None


def cut_text(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there is one."""
    watch = StopText(stops)
    kept = watch.push(text)
    return kept + watch.finish(), watch.found
