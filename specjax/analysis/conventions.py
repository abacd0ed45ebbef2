"""The glossary under the names that other harnesses and papers print, so that numbers stand side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax.analysis.metrics import (
    PositionAcceptance,
    acceptance_by_position,
    acceptance_by_position_from_histogram,
    acceptance_rate,
    mean_acceptance_length,
    speedup_spec_bench,
)


def to_spec_bench(accepted_n: ArrayLike, method_tps_p: ArrayLike, baseline_tps_p: ArrayLike) -> dict[str, float]:
    """Spec-Bench's two columns (`evaluation/speed.py`): passes of all prompts pooled, bonus included; ratio
    of means.
    """
    return {
        "#Mean accepted tokens": mean_acceptance_length(accepted_n),
        "Speedup ratio": speedup_spec_bench(method_tps_p, baseline_tps_p),
    }


def to_eagle(accepted_n: ArrayLike, gamma: ArrayLike) -> dict[str, float]:
    """EAGLE's tau and n-alpha: `n-alpha` is acceptance with n self-predicted inputs, all earlier tokens
    accepted.

    On a chain, n-alpha is the conditional acceptance at position n + 1 (Li et al. 2024, EAGLE, section 4).
    """
    conditional = acceptance_by_position(accepted_n, gamma).conditional
    return {"tau": mean_acceptance_length(accepted_n)} | {f"{n}-alpha": float(a) for n, a in enumerate(conditional)}


def to_vllm(accepted_n: ArrayLike, gamma: ArrayLike) -> dict[str, Any]:
    """vLLM's counters and derived rates (`vllm/v1/spec_decode/metrics.py`): per-position rates are
    unconditional.
    """
    positions = acceptance_by_position(accepted_n, gamma)
    return {
        "num_drafts": positions.passes,
        "num_draft_tokens": int(positions.offered.sum()),
        "num_accepted_tokens": int(positions.accepted.sum()),
        "num_accepted_tokens_per_pos": positions.accepted.tolist(),
        "mean_acceptance_length": mean_acceptance_length(accepted_n),
        "draft_acceptance_rate": acceptance_rate(accepted_n, gamma),
        "per_position_acceptance_rate": positions.unconditional.tolist(),
    }


def from_vllm(counters: Mapping[str, Any]) -> PositionAcceptance:
    """Conditional and unconditional acceptance from vLLM's `num_drafts` and `num_accepted_tokens_per_pos`.

    Assumes that every draft had the full length, which vLLM's counters do not say otherwise.

    Raises:
        ValueError: a counter is missing, or the counters rise along positions (no pass can accept position
        k+1
            without position k).
    """
    missing = {"num_drafts", "num_accepted_tokens_per_pos"} - set(counters)
    if missing:
        raise ValueError(f"vLLM counters lack {sorted(missing)}; got {sorted(counters)}.")
    at_least = np.array([counters["num_drafts"], *counters["num_accepted_tokens_per_pos"]])
    if (np.diff(at_least) > 0).any():
        raise ValueError(f"drafts and accepted per position {at_least.tolist()} rise: expected a falling sequence.")
    return acceptance_by_position_from_histogram(-np.diff(np.append(at_least, 0)))


def to_deepspec(accepted_n: ArrayLike, gamma: ArrayLike) -> dict[str, float]:
    """DeepSpec's evaluation columns (`deepspec/eval/base_evaluator.py`).

    `accept_rate@k`, k from 0, is accepted over *offered* passes there, whether or not earlier tokens were
    accepted; the training metric of that name is the conditional one (mean overlap on a reference prefix),
    see `acceptance_by_position` and `alpha`. `verify_rate` is emitted tokens over verified slots, bonus in
    both.
    """
    positions = acceptance_by_position(accepted_n, gamma)
    emitted = positions.accepted.sum() + positions.passes
    return {
        "acceptance_length": float(emitted / positions.passes),
        "verify_rate": float(emitted / (positions.offered.sum() + positions.passes)),
    } | {
        f"accept_rate@{k}": float(a / o)
        for k, (a, o) in enumerate(zip(positions.accepted, positions.offered, strict=True))
    }
