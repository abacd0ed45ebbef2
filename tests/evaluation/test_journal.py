"""A measurement that is interrupted and gone on with is the measurement."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from etils import epath

from specjax.decoding import Completion
from specjax.evaluation.benchmark import measure
from specjax.evaluation.contenders import LoopContender, Timed
from specjax.evaluation.journal import Answer, Journal, fingerprint
from specjax.models import Target
from tests.evaluation.test_benchmark import PROMPTS, SETTINGS, Scripted, scripted

ABOUT = {"config": {"seed": 0, "rows": {"a": {"num_nodes": 3}}}, "versions": {"jax": "1"}}


class Dies(Scripted):
    """Is interrupted when it is asked for the fifth time: in the second repeat's first prompt."""

    def complete(self, request):
        if len(self.log) == 4:
            raise KeyboardInterrupt
        return super().complete(request)


def test_what_is_measured_is_not_measured_again(trio: list[LoopContender], target: Target, tmp_path) -> None:
    folder, log, again = epath.Path(tmp_path / "measured"), [], []
    info = scripted([], "one").info
    with pytest.raises(KeyboardInterrupt):
        measure([trio[0], Dies(info, log)], PROMPTS, target, SETTINGS, journal=Journal(folder, ABOUT))
    assert [p for _, p in log] == [0, 1, 1, 0]
    journal = Journal(folder, ABOUT)
    # The prompt that was begun counts for nothing: its answers were not side by side.
    assert len(journal) == 3
    found = measure([trio[0], Scripted(info, again)], PROMPTS, target, SETTINGS, journal=journal)
    assert [p for _, p in again] == [1, 1] and len(journal) == 4
    whole = measure([trio[0], Scripted(info, [])], PROMPTS, target, SETTINGS)
    assert found.turns.keys() == whole.turns.keys() and found.repeatable == whole.repeatable == [True, True]
    for key, turns in whole.turns.items():
        for mine, theirs in zip(found.turns[key], turns, strict=True):
            assert mine.prompt == theirs.prompt and mine.completion.tokens == theirs.completion.tokens
            assert len(mine.decode_seconds) == SETTINGS.repeats == len(mine.prefill_seconds)
            np.testing.assert_array_equal(mine.completion.accepted, theirs.completion.accepted)
    journal.remove()
    assert not folder.exists()


def test_answers_come_back_as_they_were(tmp_path) -> None:
    counts = np.array([3, 1], np.int32), np.array([4], np.int32), np.array([0.1], np.float32)
    completion = Completion((1, 2, 3), "stop", 4, 5, *counts, prompt_length=2)
    journal = Journal(epath.Path(tmp_path / "measured"), ABOUT)
    answers = [[Answer((5, 6), Timed(completion, None, 0.25))], []]
    journal.write(1, 12, answers)
    assert journal.read(0, 12) is None
    read = journal.read(1, 12)
    assert read is not None and read[1] == [] and read[0][0].prompt == (5, 6)
    assert (read[0][0].timed.prefill_seconds, read[0][0].timed.decode_seconds) == (None, 0.25)
    for field in dataclasses.fields(Completion):
        mine, theirs = (getattr(x, field.name) for x in (read[0][0].timed.completion, completion))
        assert np.array_equal(mine, theirs) and np.asarray(mine).dtype == np.asarray(theirs).dtype


def test_another_run_is_refused_by_name(tmp_path) -> None:
    folder = epath.Path(tmp_path / "measured")
    Journal(folder, {"config": "another"})
    journal = Journal(folder, ABOUT)  # nothing was measured: nothing is mixed
    journal.write(0, 0, [])
    other = {"config": {"seed": 0, "rows": {"a": {"num_nodes": 4}}}, "versions": {"jax": "2"}}
    with pytest.raises(ValueError, match=r"differs in config.rows.a.num_nodes, versions.jax: give another --workdir"):
        Journal(folder, other)


def test_weights_are_told_apart() -> None:
    params = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.int32)}
    assert fingerprint(params) == fingerprint({k: x.copy() for k, x in params.items()})
    changed = {"a": np.array([1, 1, 2], np.float32), "b": params["b"]}
    assert len({fingerprint(x) for x in (params, changed, {"a": params["a"]}, {})}) == 4
