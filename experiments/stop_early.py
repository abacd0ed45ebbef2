"""Chooses where a draft stops: python -m experiments.stop_early --config=configs/stop_early.py

Decodes a few prompts with drafts that never stop early, and keeps how sure each was of its tokens and how many the
target took. With what draft and target passes cost, `specjax.analysis.stop_threshold` then tries every confidence to
stop at. Writes stop.json.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments import _main
from experiments._calibration import requests
from experiments._prompts import prompts_from_config
from specjax import build
from specjax.analysis import Curve, Stop, stop_threshold
from specjax.decoding import DecodeState, Keys, Loop, Request, Weights
from specjax.drafting.self_chain import confidence_of
from specjax.evaluation import results
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.conversations import buffer_for, fitting
from specjax.evaluation.costs import CostMeter, Costs
from specjax.models import merge

SCHEMA = "specjax.stop_early/1"


def main(config: ml_collections.ConfigDict) -> None:
    """Decodes, times, chooses, writes."""
    console, workdir = _main.console(), _main.workdir()
    check_sampling(config)
    if min(config.rounds, config.repeat) < 1:
        raise ValueError(f"rounds={config.rounds} and repeat={config.repeat}; expected at least 1 of each")
    lineup, settings = build.lineup_from_config(config), build.settings_from_config(config)
    prompts = prompts_from_config(config, console)
    results.check_writable(workdir)
    target = build.target_from_config(config.target)
    contenders = [c for c in build.contenders(lineup, target) if isinstance(c, LoopContender)]
    drafting = [c for c in contenders if not c.info.is_baseline]
    if len(drafting) != 1 or len(contenders) != 2:
        raise ValueError(f"rows {', '.join(lineup.kept)}: expected plain decoding and one drafter of one length")
    check_stops(drafting[0])
    prompts = fitting(target, prompts, settings)[0]
    buffer = buffer_for(target, prompts, settings, drafting[0].loop.chunk)
    for contender in contenders:
        contender.buffer = -(-buffer // contender.loop.chunk) * contender.loop.chunk
    asked = requests(prompts, drafting[0], target, settings)
    with console.status("") as status:
        found = []
        for number, request in enumerate(asked):
            status.update(f"prompt {number + 1} of {len(asked)}")
            found.append(record(drafting[0], request))
        meter = CostMeter(contenders, asked[len(asked) // 2], repeat=config.repeat)
        for number in range(config.rounds):
            status.update(f"round {number + 1} of {config.rounds}")
            meter.round()
    confidence, accepted = (np.concatenate(parts) for parts in zip(*found, strict=True))
    costs = meter.costs(drafting[0])
    best = choose(confidence, accepted, costs)
    meta = results.describe(config.to_dict(), {"matmul": config.precision, "layout": config.layout}, SCHEMA)
    shown = {"meta": meta, "steps": len(accepted), "costs": dataclasses.asdict(costs), "best": dataclasses.asdict(best)}
    results.write_json(workdir / "stop.json", shown)
    console.print(
        f"{len(accepted)} steps: min_confidence={best.threshold:.3f}, {best.mean_length:.2f} tokens a draft, "
        f"{best.expected_tokens:.2f} a step, predicted {best.speedup:.2f}x plain decoding",
        highlight=False,
    )
    console.print(f"written to {workdir / 'stop.json'}", highlight=False)


def check_sampling(config: ml_collections.ConfigDict) -> None:
    """Checks that a draft's laws tell how sure it was.

    Raises:
        ValueError: they are none, at temperature 0, or truncated.
    """
    if min(config.temperatures) <= 0:
        raise ValueError(f"temperatures={tuple(config.temperatures)}; expected above 0: greedy drafts keep no law")
    if config.top_k or config.top_p < 1 or config.get("min_p", 0.0):
        raise ValueError(
            f"top_k={config.top_k}, top_p={config.top_p}, min_p={config.get('min_p', 0.0)}: a draft stops by its law "
            "before truncation, which a truncated one does not tell; expected 0, 1 and 0"
        )


def check_stops(contender: LoopContender) -> None:
    """Checks that a drafter can stop early, and does not.

    Raises:
        ValueError: it cannot, or does.
    """
    drafter = contender.loop.drafter
    least, most = getattr(drafter, "min_confidence", None), getattr(drafter, "max_entropy", math.inf)
    if least is None:
        raise ValueError(f"row {contender.info.label!r}: {contender.info.method} has no min_confidence to choose")
    if least:
        raise ValueError(f"row {contender.info.label!r} stops early, min_confidence={least}: set it to 0 to choose it")
    if most < math.inf:
        raise ValueError(
            f"row {contender.info.label!r} stops early, max_entropy={most}: leave it out to choose another"
        )


def record(contender: LoopContender, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Of every step of one answer, the least confidence up to each draft token `[n, N]`, and how many were accepted."""
    confidence, accepted = [], []
    state = contender.prefill(request)
    while not np.asarray(state.done).all():
        sure = np.asarray(confidences(contender.loop, contender.weights, state))[0]
        before = np.asarray(state.statistics.accepted)[0]
        state = contender.run(state, jnp.int32(1))
        (hit,) = np.flatnonzero(np.asarray(state.statistics.accepted)[0] - before)
        confidence.append(np.minimum.accumulate(sure))
        accepted.append(int(hit))
    nodes = contender.loop.drafter.num_nodes
    return np.asarray(confidence).reshape(-1, nodes), np.asarray(accepted, np.int64)


@partial(jax.jit, static_argnames=("loop",))
def confidences(loop: Loop, weights: Weights, state: DecodeState) -> jax.Array:
    """`[B, N]` probability of the likeliest token at each node of the next draft, at temperature 1: what it stops by.

    Its laws are at the request's temperature, and at the draft's own on top; nothing is truncated (`check_sampling`).
    """
    with jax.default_matmul_precision(loop.precision):
        target, keys = merge(loop.graph, weights.target), Keys(state.request, state.length)
        own = (weights.drafter, weights.tables, target, state.cache, state.drafter, state.context, keys)
        laws = loop.drafter.propose(*own)[0].laws
        warmth_b = state.context.sampling.temperature * getattr(loop.drafter, "temperature", 1.0)
        return confidence_of(laws * warmth_b[:, None, None])


def choose(confidence_ng: np.ndarray, accepted_n: np.ndarray, costs: Costs) -> Stop:
    """The confidence to stop at, from drafts that did not stop and their costs.

    Args:
        confidence_ng: least confidence up to each token.
        accepted_n: accepted tokens.
        costs: of the whole draft.
    """
    nodes = confidence_ng.shape[1]
    one, beyond = costs.drafting / costs.draft_passes, costs.draft_passes - nodes  # passes without a token of their own
    lengths = (1, nodes) if nodes > 1 else (1,)
    drafting = Curve(lengths, tuple(one * (n + beyond) for n in lengths))
    target = Curve((1, nodes + 1), (costs.one_token, costs.scoring))
    survival = np.arange(nodes) < accepted_n[:, None]
    # What is dropped depends on the law alone, not on the token drawn from it.
    return stop_threshold(confidence_ng, survival, drafting=drafting, target=target, unsure="dropped")


if __name__ == "__main__":
    _main.run(main, config="configs/stop_early.py", workdir="runs/stop_early")
