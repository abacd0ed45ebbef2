"""What a benchmark has measured so far, kept on disk: an interrupted run goes on with the next prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from specjax.checkpoints.rundir import flat, write_whole
from specjax.decoding import Completion
from specjax.evaluation.contenders import Timed


@dataclasses.dataclass(frozen=True)
class Answer:
    """One timed answer.

    Attributes:
        prompt: token ids of the conversation up to here.
        timed: what came, and how long it took.
    """

    prompt: tuple[int, ...]
    timed: Timed


# By contender, then by turn.
Answers = list[list[Answer]]


class Journal:
    """A file for each prompt of each repeat, with what all contenders answered to it side by side."""

    def __init__(self, folder: epath.Path, about: Mapping[str, Any]):
        """Opens the journal of a run, a new one or that of the same run interrupted.

        Args:
            folder: of this journal alone.
            about: whatever the figures depend on, as JSON has it: config, prompts, weights, versions, machine.

        Raises:
            ValueError: the folder holds prompts measured by a run that differs in `about`; names the fields.
        """
        self._folder = folder
        path = folder / "about.json"
        if path.exists() and len(self):
            before, now = flat(json.loads(path.read_text())), flat(json.loads(json.dumps(about)))
            if differing := sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k)):
                raise ValueError(
                    f"{folder} holds the first part of a run that differs in {', '.join(differing)}: give another "
                    "--workdir, or remove that folder to measure anew"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(about, indent=1) + "\n")

    def __len__(self) -> int:
        """How many prompts are there, each repeat counted."""
        return sum(path.name != "about.json" and path.suffix == ".json" for path in self._folder.iterdir())

    def read(self, repeat: int, prompt: int) -> Answers | None:
        """What was answered to a prompt, None where it has not been measured yet."""
        path = self._path(repeat, prompt)
        return [[_read(entry) for entry in turns] for turns in json.loads(path.read_text())] if path.exists() else None

    def write(self, repeat: int, prompt: int, answers: Answers) -> None:
        """Keeps what was answered to a prompt."""
        entries = [[_written(answer) for answer in turns] for turns in answers]
        write_whole(self._path(repeat, prompt), json.dumps(entries) + "\n")

    def remove(self) -> None:
        """Forgets everything: the run is whole, and its results are written."""
        self._folder.rmtree()

    def _path(self, repeat: int, prompt: int) -> epath.Path:
        return self._folder / f"{repeat}-{prompt:04d}.json"


def fingerprint(arrays: Any) -> str:
    """A hash of the arrays of a tree, those that this process can read whole."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(arrays):
        if getattr(leaf, "is_fully_addressable", True):
            array = np.asarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


_ARRAYS = ("accepted", "reached", "overlap")
_TIMED = ("prefill_seconds", "decode_seconds", "observed")


def _written(answer: Answer) -> dict[str, Any]:
    timed, completion = answer.timed, dataclasses.asdict(answer.timed.completion)
    for name in _ARRAYS:
        array = np.asarray(completion[name])
        completion[name] = {"dtype": array.dtype.name, "values": array.tolist()}
    seconds = {"prefill_seconds": timed.prefill_seconds, "decode_seconds": timed.decode_seconds}
    return {"prompt": answer.prompt, "completion": completion, **seconds, "observed": timed.observed}


def _read(entry: Mapping[str, Any]) -> Answer:
    fields = dict(entry["completion"])
    for name in _ARRAYS:
        fields[name] = np.asarray(fields[name]["values"], fields[name]["dtype"])
    completion = Completion(**fields | {"tokens": tuple(fields["tokens"])})
    return Answer(tuple(entry["prompt"]), Timed(completion, *(entry[k] for k in _TIMED)))
