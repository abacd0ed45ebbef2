import dataclasses
import json
import math

import numpy as np
import pytest

from specjax import analysis

STRONG = analysis.GTest(12.0, 15, 0.68, 0.999, 1_000_000, 16, 0.0, 0.01, 1e-6)
REJECTED = dataclasses.replace(STRONG, statistic=900.0, p_value=1e-80)
WEAK = dataclasses.replace(STRONG, power=0.4, draws=30_000)
T1 = {"temperature": 1.0}


def test_verdicts():
    make = analysis.certificate
    assert make("draft_model", "speculative", T1, STRONG).verdict == "pass"
    assert make("draft_model", "speculative", T1, REJECTED).verdict == "fail"
    assert make("medusa", "typical", T1, REJECTED, lossless=False).verdict == "lossy"
    assert make("draft_model", "speculative", T1, REJECTED, planted="raw q").verdict == "caught"
    assert make("draft_model", "speculative", T1, STRONG, planted="raw q").verdict == "missed"
    ok = [
        make("d", "r", T1, t, planted=p).ok
        for t, p in ((STRONG, None), (REJECTED, None), (REJECTED, "x"), (STRONG, "x"))
    ]
    assert ok == [True, False, True, False]


def test_a_weak_test_proves_nothing_but_may_refute():
    with pytest.raises(ValueError, match=r"power 0\.400.*draw \d+ or more"):
        analysis.certificate("draft_model", "speculative", T1, WEAK)
    refuted = dataclasses.replace(WEAK, p_value=1e-9)
    assert analysis.certificate("draft_model", "speculative", T1, refuted).verdict == "fail"


def test_a_verdict_fits_its_kind_of_row():
    with pytest.raises(ValueError, match=r"'caught'.*without a planted fault"):
        analysis.Certificate("d", "r", T1, 1, None, None, None, "caught")
    with pytest.raises(ValueError, match=r"'pass'.*with a planted fault"):
        analysis.Certificate("d", "r", T1, 1, None, None, None, "pass", planted="raw q")


def test_certificates_on_disk(tmp_path):
    impossible = dataclasses.replace(REJECTED, statistic=math.inf, p_value=0.0)
    rows = [
        analysis.certificate("draft_model", "speculative", T1, STRONG),
        analysis.certificate("draft_model", "speculative", T1, impossible, planted="raw q for a warped draw"),
        analysis.Certificate("draft_model", "greedy", "greedy", 512, None, None, None, "pass"),
    ]
    path = tmp_path / "certificates.json"
    analysis.write_certificates(path, rows, meta={"seed": 0})
    document = json.loads(path.read_text())
    assert document["meta"] == {"schema": "specjax.certificates/1", "seed": 0}
    plain = {"drafter", "rule", "sampling", "draws", "statistic", "p_value", "power", "verdict"}
    plain |= {"check", "tv", "cells", "accepted", "near_ties", "rule_options", "layout", "precision"}
    assert [set(row) for row in document["rows"]] == [plain, plain | {"planted"}, plain]
    assert document["rows"][0] | {} == {
        "drafter": "draft_model",
        "rule": "speculative",
        "sampling": {"temperature": 1.0},
        "draws": 1_000_000,
        "statistic": 12.0,
        "p_value": 0.68,
        "power": 0.999,
        "verdict": "pass",
        "check": "sequences",
        "tv": 0.01,
        "cells": 16,
        "accepted": None,
        "near_ties": 0,
        "rule_options": {},
        "layout": None,
        "precision": None,
    }
    assert list(tmp_path.iterdir()) == [path]  # written aside and put in its place
    assert document["rows"][1]["statistic"] is None and document["rows"][1]["p_value"] == 0.0
    analysis.write_certificates(str(path), rows[:1])
    assert len(json.loads(path.read_text())["rows"]) == 1
    with pytest.raises(ValueError, match=r"etils\.epath"):
        analysis.write_certificates("gs://bucket/certificates.json", rows)


def test_first_divergence():
    assert analysis.first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert analysis.first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert analysis.first_divergence([1, 2], [1, 2, 3]) == 2
    assert analysis.first_divergence([], [1]) == 0
    assert analysis.first_divergence([], []) is None
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        analysis.first_divergence([[1, 2]], [1, 2])


def test_near_tie_by_the_top_two():
    assert analysis.top2_gap([1.0, 3.0, 2.5]) == pytest.approx(0.5)
    assert analysis.near_tie([1.0, 3.0, 2.5], bound=0.5)
    assert not analysis.near_tie([1.0, 3.0, 2.5], bound=0.4)
    assert analysis.near_tie([3.0, 3.0], bound=0.0)
    with pytest.raises(ValueError, match="NaN"):
        analysis.near_tie([1.0, np.nan], 0.1)
    with pytest.raises(ValueError, match="bound is -1"):
        analysis.near_tie([1.0, 2.0], -1)


def test_greedy_rows_are_sorted_into_equal_near_tie_and_wrong():
    logits = {
        (1, 1): [0.0, 5.0, 4.999, 1.0],  # the two best all but tie, and the rows chose one each
        (2, 1): [0.0, 5.0, 4.0, 1.0],  # no tie
        (3, 0): [5.0, 4.999, 1.0, 0.0],  # a tie, but the other row chose a third token
    }
    result = analysis.compare_greedy(
        [[1, 1], [3, 1, 0], [3, 1], [0], [1, 2]],
        [[1, 1], [3, 2, 2], [3, 2], [3], [1]],
        lambda row, position: np.array(logits[row, position]),
        bound=0.01,
    )
    assert result.equal == 1
    assert [(d.row, d.position, d.baseline, d.other) for d in result.near_ties] == [(1, 1, 1, 2)]
    assert result.near_ties[0].gap == pytest.approx(0.001)
    assert [(d.row, d.position, d.baseline, d.other) for d in result.different] == [
        (2, 1, 1, 2),
        (3, 0, 0, 3),
        (4, 1, 2, -1),
    ]
    assert not result.matches
    with pytest.raises(ValueError, match="1 baseline rows and 2 others"):
        analysis.compare_greedy([[1]], [[1], [2]], lambda row, position: [0.0, 1.0], 0.1)
