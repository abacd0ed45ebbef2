"""Certificates of exactness, and greedy equality with near-ties apart.

Laws are tested in `gtest` (by sampling) and `enumeration` (exactly); here is what is said about the result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from specjax.analysis.gtest import MIN_POWER, GTest, required_draws

# --- Certificates --------------------------------------------------------------------------------------

Verdict = Literal["pass", "fail", "lossy", "caught", "missed"]


@dataclass(frozen=True)
class Certificate:
    """One row of `certificates.json`.

    Attributes:
        drafter: name of the drafter.
        rule: name of the verification rule.
        sampling: the sampling parameters under which it was run.
        draws: independent draws, or compared positions for greedy decoding.
        statistic: of the test; None where the comparison was exact.
        p_value: of the test; None where the comparison was exact.
        power: of the test at total variation `tv`; None where the comparison was exact.
        verdict: pass or fail of a lossless rule, lossy where the rule declares itself so, and for a planted
            fault caught or missed.
        planted: name of the planted fault, else None.
        check: what was compared: the law of whole sequences, of next tokens, or greedy texts.
        tv: the total variation that `power` speaks of; None where the comparison was exact.
        cells: outcomes that the test told apart; None where the comparison was exact.
        accepted: mean number of draft tokens that a step accepted; where it is 0 nothing was put to the test.
        near_ties: greedy texts that part from plain decoding's at a near-tie.
        rule_options: of the rule, where it was given any.
        layout: of the weights in the program that was tested; None where nothing is said about it.
        precision: of its matrix products; likewise.
    """

    drafter: str
    rule: str
    sampling: Mapping[str, Any] | str
    draws: int
    statistic: float | None
    p_value: float | None
    power: float | None
    verdict: Verdict
    planted: str | None = None
    check: str = "sequences"
    tv: float | None = None
    cells: int | None = None
    accepted: float | None = None
    near_ties: int = 0
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    layout: str | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        allowed = ("pass", "fail", "lossy") if self.planted is None else ("caught", "missed")
        if self.verdict not in allowed:
            kind = "a row without" if self.planted is None else "a row with"
            raise ValueError(f"verdict is {self.verdict!r}: {kind} a planted fault says one of {allowed}.")

    @property
    def ok(self) -> bool:
        """Whether the row is as it should be: a lossless rule passed, or a planted fault was caught."""
        return self.verdict in ("pass", "lossy", "caught")


def certificate(
    drafter: str,
    rule: str,
    sampling: Mapping[str, Any] | str,
    test: GTest,
    *,
    lossless: bool = True,
    planted: str | None = None,
    check: str = "sequences",
    accepted: float | None = None,
    min_power: float = MIN_POWER,
) -> Certificate:
    """The certificate row of a G-test.

    Args:
        drafter: name of the drafter.
        rule: name of the rule.
        sampling: the sampling parameters.
        test: its result.
        lossless: what the rule declares; a lossy rule's row says lossy whatever the test found.
        planted: name of a fault planted on purpose, which the test should catch.
        check: what was compared.
        accepted: mean number of draft tokens that a step accepted.
        min_power: a lossless rule passes only by a test at least this strong.

    Raises:
        ValueError: the test found nothing but is too weak for that to mean a pass.
    """
    verdict: Verdict
    if planted is not None:
        verdict = "caught" if test.rejected else "missed"
    elif not lossless:
        verdict = "lossy"
    else:
        verdict = "fail" if test.rejected else "pass"
    if verdict == "pass" and test.power < min_power:
        raise ValueError(
            f"{drafter} with {rule}: {test.draws} draws over {test.cells} cells ({test.pooled_mass:.2g} of "
            f"the mass pooled) have power {test.power:.3f} against total variation {test.tv}, {min_power} is "
            f"needed: {_enough(test, min_power)}."
        )
    return Certificate(
        drafter=drafter,
        rule=rule,
        sampling=sampling,
        draws=test.draws,
        statistic=test.statistic,
        p_value=test.p_value,
        power=test.power,
        verdict=verdict,
        planted=planted,
        check=check,
        tv=test.tv,
        cells=test.cells,
        accepted=accepted,
    )


def _enough(test: GTest, min_power: float) -> str:
    """What to do about a test that is too weak. More draws leave less to pool; what is merged stays."""
    seen = test.tv - test.merged
    if seen <= 0:
        return f"state a total variation well above {test.merged:.2g}, which no test of these outcomes tells apart"
    enough = required_draws(test.cells, tv=seen, power=min_power, false_alarm=test.false_alarm)
    return f"draw {enough} or more (twice that in each of two samples), over fewer rare outcomes"


def write_certificates(path: Any, rows: Sequence[Certificate], meta: Mapping[str, Any] | None = None) -> None:
    """Writes `{"meta": ..., "rows": [...]}` as JSON, a file that is whole or not there.

    `planted` stands only in rows of planted faults. An infinite statistic (an impossible outcome was drawn) is written
    as null beside p_value 0.

    Args:
        path: a local path as text, or any path object with `write_text` (`etils.epath` for `gs://`).
        rows: the certificates.
        meta: versions, machine, seeds, ...; the schema is added.
    """
    document = {"meta": {"schema": "specjax.certificates/1", **(meta or {})}, "rows": [_row(r) for r in rows]}
    if isinstance(path, str):
        if "://" in path:
            raise ValueError(f"path {path!r} is a URL: pass etils.epath.Path({path!r}).")
        path = Path(path)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    if "://" in str(path):  # object stores write so anyway
        path.write_text(text)
        return
    scratch = path.parent / f".{path.name}.{os.getpid()}"
    scratch.write_text(text)
    scratch.replace(path)


def _row(certificate: Certificate) -> dict[str, Any]:
    row = asdict(certificate)
    if certificate.planted is None:
        del row["planted"]
    if certificate.statistic is not None and math.isinf(certificate.statistic):
        row["statistic"] = None
    return row


# --- Greedy equality -----------------------------------------------------------------------------------


def first_divergence(tokens_a: ArrayLike, tokens_b: ArrayLike) -> int | None:
    """First position at which two sequences of ids differ, the shorter's length where it is a prefix, else
    None.
    """
    a, b = np.asarray(tokens_a), np.asarray(tokens_b)
    if a.ndim != 1 or b.ndim != 1:
        raise ValueError(f"sequences have shapes {a.shape} and {b.shape}: expected [n] ids each.")
    shared = min(a.size, b.size)
    differ = np.flatnonzero(a[:shared] != b[:shared])
    if differ.size:
        return int(differ[0])
    return None if a.size == b.size else shared


def top2_gap(logits_v: ArrayLike) -> float:
    """Gap between the two largest logits of one row `[V]`."""
    logits_v = np.asarray(logits_v, np.float64)
    if logits_v.ndim != 1 or logits_v.size < 2 or np.isnan(logits_v).any():
        raise ValueError(f"logits have shape {logits_v.shape}: expected one row [V >= 2] without NaN.")
    second, first = np.partition(logits_v, -2)[-2:]
    return float(first - second)


def near_tie(logits_v: ArrayLike, bound: float) -> bool:
    """Whether rounding could swap the two best tokens: their gap is at most `bound`.

    Args:
        logits_v: one row of the target's logits, float `[V]`.
        bound: how far rounding may move a difference of two logits at this precision.
    """
    if not bound >= 0:
        raise ValueError(f"bound is {bound}: expected a rounding bound >= 0.")
    return top2_gap(logits_v) <= bound


@dataclass(frozen=True)
class Divergence:
    """A first divergence: where, the two ids (-1 past an end), the top-2 gap there (None past an end)."""

    row: int
    position: int
    baseline: int
    other: int
    gap: float | None


@dataclass(frozen=True)
class GreedyComparison:
    """Rows that are equal, that part at a near-tie (legitimate at this precision), and that are wrong."""

    equal: int
    near_ties: tuple[Divergence, ...]
    different: tuple[Divergence, ...]

    @property
    def matches(self) -> bool:
        """Whether every row is equal or parts at a near-tie."""
        return not self.different


def compare_greedy(
    baseline: Sequence[ArrayLike],
    other: Sequence[ArrayLike],
    logits_at: Callable[[int, int], ArrayLike],
    bound: float,
) -> GreedyComparison:
    """Greedy output against the autoregressive baseline, near-ties apart.

    A divergence is a near-tie only where both ids are within `bound` of the best logit: rounding cannot
    choose a third token, nor end a sequence early. After a legitimate divergence the texts go their own ways,
    so only the first counts.

    Args:
        baseline: emitted ids of each row, `[n]` each.
        other: emitted ids of each row by the method under test.
        logits_at: (row, position) to the target's logits `[V]` that chose the baseline's token there.
        bound: rounding bound on a difference of two logits.
    """
    if len(baseline) != len(other):
        raise ValueError(f"{len(baseline)} baseline rows and {len(other)} others: expected the same prompts.")
    equal = 0
    near: list[Divergence] = []
    different: list[Divergence] = []
    for row, (tokens_a, tokens_b) in enumerate(zip(baseline, other, strict=True)):
        position = first_divergence(tokens_a, tokens_b)
        if position is None:
            equal += 1
            continue
        id_a, id_b = (int(t[position]) if position < t.size else -1 for t in map(np.asarray, (tokens_a, tokens_b)))
        if -1 in (id_a, id_b):
            different.append(Divergence(row, position, id_a, id_b, gap=None))
            continue
        logits_v = np.asarray(logits_at(row, position), np.float64)
        tied = near_tie(logits_v, bound) and min(logits_v[id_a], logits_v[id_b]) >= logits_v.max() - bound
        (near if tied else different).append(Divergence(row, position, id_a, id_b, gap=top2_gap(logits_v)))
    return GreedyComparison(equal, tuple(near), tuple(different))
