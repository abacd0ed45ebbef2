"""What the planner needs, measured: acceptance on a few prompts, and what passes and drafts cost."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from rich.console import Console

from experiments.profile_pass import Pass, in_turns
from specjax.analysis import Candidate, Curve, Timing, chain_acceptance
from specjax.decoding import DecodeState, Keys, Loop, Request, Weights, read_row
from specjax.decoding.tree import TreeSpec
from specjax.evaluation.benchmark import Settings
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.conversations import encode, opening
from specjax.evaluation.costs import CostMeter
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.rows import TOKEN_BY_TOKEN
from specjax.models import KVCache, Target, init_cache, merge

# Parts are timed at these: batch size, and tokens in the cache.
Place = tuple[int, int]
STEPS = 16  # of the loop, for the seconds of a step


@dataclasses.dataclass(frozen=True)
class Parts:
    """What was timed at one place.

    Attributes:
        timings: target passes.
        drafting: seconds of a step's drafts by label.
        steps: seconds of a step of the whole loop by label: of plain decoding, and of each row's longest draft.
        plain: label of plain decoding.
        noise: what the median of the one-token pass is known to, relative: twice its standard error.
    """

    timings: list[Timing]
    drafting: dict[str, float]
    steps: dict[str, float]
    plain: str
    noise: float


def requests(prompts: Sequence[Prompt], contender: LoopContender, target: Target, settings: Settings) -> list[Request]:
    """First turns as a contender is asked them."""
    info, start = contender.info, opening(settings)
    return [
        info.request(
            encode(target, [*start, {"role": "user", "content": prompt.turns[0]}], settings.template),
            settings.max_new_tokens,
            index,
        )
        for index, prompt in enumerate(prompts)
    ]


def acceptance(contender: LoopContender, asked: Sequence[Request]) -> np.ndarray:
    """Acceptance `[D, R]` over all requests; by rank where the drafter has a static tree (`drafter.tree`), else R is 1.

    The contender is prepared.

    Raises:
        ValueError: a static tree whose nodes at one depth have different numbers of children, or a dynamic one.
    """
    drafter: Any = contender.loop.drafter
    spec = getattr(drafter, "tree", None)
    if contender.info.topology != "chain" and not isinstance(spec, TreeSpec):
        raise ValueError(
            f"{contender.info.label!r} drafts a {contender.info.topology}: plans are for chains and static trees"
        )
    if contender.info.topology == "chain":
        done = [contender.complete(request).completion for request in asked]
        accepted, overlap = (np.sum([getattr(c, name) for c in done], axis=0) for name in ("accepted", "overlap"))
        if contender.info.rule not in TOKEN_BY_TOKEN:
            overlap = accepted[::-1].cumsum()[::-1][1:]  # The laws at one depth do not say what such a rule accepts.
        return chain_acceptance(accepted, overlap)
    assert isinstance(spec, TreeSpec)
    check_even(spec)
    counts = np.zeros((spec.depth, spec.max_children + 1))
    for request in asked:
        counts += rank_counts(contender, spec, request)
    reached = counts.sum(axis=1)
    deep = int((reached > 0).cumprod().sum())
    return counts[:deep, :-1] / reached[:deep, None]


def check_even(spec: TreeSpec) -> None:
    """Checks that acceptance by rank can be read off a tree: every node at a depth tries the same ranks.

    Raises:
        ValueError: it does not.
    """
    ranks: dict[int, set[tuple[int, ...]]] = {}
    for node in range(-1, spec.num_nodes):
        depth = 0 if node < 0 else spec.node_depths[node]
        below = tuple(spec.child_ranks[child] for child, parent in enumerate(spec.parents) if parent == node)
        ranks.setdefault(depth, set()).add(below)
    uneven = [depth for depth, found in ranks.items() if found != {tuple(range(len(next(iter(found)))))}]
    if uneven:
        raise ValueError(
            f"the nodes at depth {uneven[0]} of the calibration's tree do not all have children of the same ranks "
            "0, 1, ...: give it a full tree, of every path of ranks below some counts"
        )


def rank_counts(contender: LoopContender, spec: TreeSpec, request: Request) -> np.ndarray:
    """Counts `[D, R + 1]` of the steps whose accepted node at each depth had each rank; the last column: none had.

    Decodes step by step and asks for each draft a second time, which gives the same one: choices are keyed.
    """
    counts = np.zeros((spec.depth, spec.max_children + 1))
    state = contender.prefill(request)
    while not np.asarray(state.done).all():
        tokens = np.asarray(proposal(contender.loop, contender.weights, state))[0]
        before = len(read_row(state, 0).tokens)
        state = contender.run(state, jnp.int32(1))
        emitted = read_row(state, 0).tokens[before:]
        node = -1
        for token in emitted:
            children = [child for child, parent in enumerate(spec.parents) if parent == node]
            if not children:
                break
            depth = spec.node_depths[children[0]] - 1
            node = next((child for child in children if tokens[child] == token), -1)
            counts[depth, spec.child_ranks[node] if node >= 0 else -1] += 1
            if node < 0:
                break
    return counts


@partial(jax.jit, static_argnames=("loop",))
def proposal(loop: Loop, weights: Weights, state: DecodeState) -> jax.Array:
    """Tokens `[B, N]` of the draft that the next step makes."""
    with jax.default_matmul_precision(loop.precision):
        target, keys = merge(loop.graph, weights.target), Keys(state.request, state.length)
        own = (weights.drafter, weights.tables, target, state.cache, state.drafter, state.context, keys)
        return loop.drafter.propose(*own)[0].tokens


def time_parts(
    contenders: Sequence[LoopContender],
    longest: Mapping[str, LoopContender],
    asked: Request,
    target: Target,
    config: ml_collections.ConfigDict,
    console: Console,
) -> dict[Place, Parts]:
    """Seconds of target passes, of drafts and of whole steps, at every batch size and context of the config.

    Passes and drafts are timed in turns.

    Args:
        contenders: plain decoding and all drafts that are to be timed.
        longest: by row, those of which whole steps are timed.
        asked: whose text fills the contexts.
        target: the model.
        config: `batches`, `contexts`, `tokens`, `repeat`, `rounds`, `precision`.
        console: for progress.
    """
    plain = next(c for c in contenders if c.info.is_baseline)
    laid_out = dataclasses.replace(target, params=plain.weights.target)
    found: dict[Place, Parts] = {}
    for batch in config.batches:
        for context in config.contexts:
            cases: dict[Any, Any] = {}
            caches: dict[Hashable, KVCache] = {0: init_cache(target.config, batch, context + max(config.tokens) + 1)}
            for tokens in config.tokens:
                one = Pass(laid_out, caches, 0, tokens=tokens, precision=config.precision)
                one.valid = context
                cases[tokens] = partial(one.seconds, config.repeat)
            ones: list[float] = []
            cases[1] = partial(_noted, cases[1], ones)
            prompt = (asked.prompt * -(-context // len(asked.prompt)))[:context]
            meter = CostMeter(
                contenders,
                dataclasses.replace(asked, prompt=prompt, max_new_tokens=2),
                batch=batch,
                repeat=config.repeat,
            )
            cases["drafts"] = lambda meter=meter: meter.draft_round() or 0.0
            seconds = in_turns(cases, config.rounds, console, f"batch {batch}, context {context}")
            room = min(plain.buffer - context, config.max_new_tokens, STEPS)
            long = dataclasses.replace(asked, prompt=prompt, max_new_tokens=max(room, 2))
            found[batch, context] = Parts(
                timings=[Timing(tokens, batch, context, seconds[tokens]) for tokens in config.tokens],
                drafting={c.info.label: meter.drafting(c) for c in contenders},
                steps={c.info.label: step_seconds(c, long, batch) for c in (plain, *longest.values())},
                plain=plain.info.label,
                noise=relative_noise(ones[1:]),
            )
    return found


def _noted(case: Callable[[], float], into: list[float]) -> float:
    into.append(case())
    return into[-1]


def relative_noise(seconds: Sequence[float]) -> float:
    """Twice the median's standard error, over the median; from the median deviation, which outliers do not move."""
    middle = statistics.median(seconds)
    spread = 1.4826 * statistics.median(abs(s - middle) for s in seconds)
    return 2 * 1.2533 * spread / middle / len(seconds) ** 0.5


def step_seconds(contender: LoopContender, asked: Request, batch: int, rounds: int = 3) -> float:
    """Seconds of a step of the loop in every row at once, median over rounds; NaN where the text ends at once."""
    times = []
    for turn in range(rounds + 1):
        state = jax.block_until_ready(contender.prefill(asked, batch))
        start = time.perf_counter()
        state = jax.block_until_ready(contender.run(state, jnp.int32(STEPS)))
        seconds = time.perf_counter() - start
        steps = int(np.array(state.statistics.steps).max())
        if not steps:
            return float("nan")
        if turn:  # the first compiles
            times.append(seconds / steps)
    return statistics.median(times)


def candidate(row: str, members: Sequence[LoopContender], rates: np.ndarray, parts: Parts) -> Candidate:
    """A row of the config as the planner sees it.

    Drafts between the lengths that were timed are interpolated. A single draft pass costs the same at any depth.

    Args:
        row: label in the config.
        members: its contenders, one a draft length or depth of a tree.
        rates: acceptance `[D, R]` of the longest.
        parts: seconds.
    """
    times = {m.loop.drafter.depth: parts.drafting[m.info.label] for m in members}
    if all(m.info.draft_passes <= 1 for m in members):
        times.setdefault(1, times[min(times)])
    depths = sorted(times)
    seconds = Curve(tuple(depths), tuple(times[depth] for depth in depths))
    return Candidate(row, rates, seconds, max([overhead(m, parts) for m in members if m.info.label in parts.steps]))


def overhead(contender: LoopContender, parts: Parts) -> float:
    """Seconds of a step beyond drafts and target pass, over those of a plain step; 0 where they are not known.

    The rule and the commit, that is. Noise may make it negative, which is no cost.
    """
    passes = {timing.tokens: timing.seconds for timing in parts.timings}
    width = contender.info.num_nodes + 1
    curve = Curve(tuple(passes), tuple(passes.values()))
    step, plain = parts.steps[contender.info.label], parts.steps[parts.plain]
    if width > curve.counts[-1] or np.isnan(step) or np.isnan(plain):
        return 0.0
    rest = step - parts.drafting[contender.info.label] - curve(width)
    return max(0.0, rest - (plain - curve(1)))
