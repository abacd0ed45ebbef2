"""What a target pass costs here: python -m experiments.profile_pass --config=configs/profile_pass.py

By tokens T and by batch, in each layout; by cache capacity at equal valid length, and by valid length; as a share of
the memory bandwidth that a plain read reaches. And the loop, plain and with a chain, against a hand-written one. Writes
profile.json. Everything in one table is timed in turns, and medians are reported.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _main
from experiments._tight_loop import AsTree, check_supported, tight_loop
from specjax import build
from specjax.decoding import Context, Loop, Request, Weights, make_sampling, prefill
from specjax.decoding.tree import chain
from specjax.drafting import PromptLookup
from specjax.evaluation import results
from specjax.evaluation.costs import target_passes
from specjax.models import KVCache, Target, init_cache, native, pack
from specjax.models.cache import CHUNK

SCHEMA = "specjax.profile/1"
LAYOUTS = ("plain", "packed")


def main(config: ml_collections.ConfigDict) -> None:
    """Measures, prints, writes."""
    console, workdir = _main.console(), _main.workdir()
    check(config)
    results.check_writable(workdir)
    target = build.target_from_config(config.target)
    if config.pairs:
        check_supported(target.config)
    targets = {
        name: dataclasses.replace(target, params=pack(target.params)) if name == "packed" else target
        for name in config.layouts
    }
    bandwidth = read_bandwidth(config.read_mib)
    console.print(
        f"plain read: {bandwidth / 1e9:.1f} GB/s; a pass reads {weight_bytes(target) / 1e6:.0f} MB of weights"
    )
    found: dict[str, Any] = {"bandwidth_bytes_per_second": bandwidth, "weight_bytes": weight_bytes(target)}
    found["tokens"] = by_tokens(targets, config, bandwidth, console)
    found["batch"] = by_batch(targets, config, console)
    last = targets[config.layouts[-1]]
    found["capacity"] = by_capacity(last, config, console)
    found["valid_length"] = by_valid_length(last, config, console)
    if config.pairs:
        found["tight_loop"] = against_tight_loop(last, config, console)
    precision = {"dtype": target.config.dtype, "matmul": config.precision, "native_kernel": native.available()}
    results.write_json(
        workdir / "profile.json", {"meta": results.describe(config.to_dict(), precision, SCHEMA), **found}
    )
    console.print(f"written to {workdir / 'profile.json'}", highlight=False)


def check(config: ml_collections.ConfigDict) -> None:
    """Checks the settings.

    Raises:
        ValueError: one is out of range.
    """
    for name in ("tokens", "batches", "capacities", "valid_lengths", "layouts"):
        if not config[name]:
            raise ValueError(f"{name} is empty; expected at least one")
    unknown = [name for name in config.layouts if name not in LAYOUTS]
    if unknown:
        raise ValueError(f"layout {unknown[0]!r}; expected some of {', '.join(LAYOUTS)}")
    for name in ("tokens", "batches", "capacities", "valid_lengths"):
        if min(config[name]) < 1:
            raise ValueError(f"{name}={tuple(config[name])}; expected numbers of at least 1")
    if min(config.rounds, config.repeat, config.read_mib) < 1 or config.pairs < 0:
        raise ValueError("rounds, repeat and read_mib must be at least 1, and pairs at least 0")
    room = config.valid_length + max(config.tokens)
    if min(config.capacities) < room:
        raise ValueError(f"capacity {min(config.capacities)} has no room for valid_length and tokens ({room})")


def read_bandwidth(mebibytes: int) -> float:
    """Bytes a second that a sum over a large array reads, all cores at work: the best of five."""
    threads = results.cores()
    parts = np.array_split(np.ones(mebibytes * 2**20 // 8, np.int64), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = min(best, time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / best


def weight_bytes(target: Target) -> int:
    """Bytes of weights that every pass reads: all but an embedding that only looks tokens up."""
    total = sum(x.nbytes for x in jax.tree.leaves(target.params))
    return total if target.config.tie_embeddings else total - target.params["embed"]["embedding"].nbytes


class Pass:
    """A target pass of a fixed shape, over a cache of its own or a shared one."""

    def __init__(self, target: Target, caches: dict[Hashable, KVCache], key: Hashable, *, tokens: int, precision: str):
        """Takes the cache from `caches[key]`, and puts it back after each run."""
        self._target, self._caches, self._key, self._precision = target, caches, key, precision
        rows = caches[key].length.shape[0]
        self._draft = chain(jnp.zeros((rows, tokens - 1), jnp.int32), laws=None)
        self.valid = 1

    def seconds(self, repeat: int) -> float:
        """Seconds a pass, from `repeat` of them between two readings of the clock."""
        rows = self._caches[self._key].length.shape[0]
        buffer = self._caches[self._key].layers[0].k.shape[1]
        context = Context(
            jnp.ones((rows, buffer), jnp.int32),
            jnp.full((rows,), self.valid, jnp.int32),
            make_sampling([0.0] * rows),
        )
        arguments = jax.block_until_ready((context, jnp.int32(repeat)))
        start = time.perf_counter()
        self._caches[self._key], _ = jax.block_until_ready(
            target_passes(
                self._target.graph,
                (),
                self._precision,
                self._target.params,
                self._caches[self._key],
                arguments[0],
                self._draft,
                arguments[1],
            )
        )
        return (time.perf_counter() - start) / repeat


def in_turns(cases: Mapping[Any, Callable[[], float]], rounds: int, console: Console, what: str) -> dict[Any, float]:
    """Median seconds of each case: once to compile and warm up, then round after round over all of them."""
    times: dict[Any, list[float]] = {name: [] for name in cases}
    with console.status("") as status:
        for turn in range(rounds + 1):
            for name, case in cases.items():
                status.update(f"{what}: {'compiling' if not turn else f'round {turn} of {rounds}'}, {name}")
                seconds = case()
                if turn:
                    times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def by_tokens(
    targets: Mapping[str, Target], config: ml_collections.ConfigDict, bandwidth: float, console: Console
) -> list[dict[str, Any]]:
    """t(T) at batch 1."""
    target = next(iter(targets.values()))
    caches: dict[Hashable, KVCache] = {0: init_cache(target.config, 1, config.valid_length + max(config.tokens) + 1)}
    cases = {}
    for layout, laid_out in targets.items():
        for tokens in config.tokens:
            one = Pass(laid_out, caches, 0, tokens=tokens, precision=config.precision)
            one.valid = config.valid_length
            cases[layout, tokens] = lambda one=one: one.seconds(config.repeat)
    times = in_turns(cases, config.rounds, console, "tokens")
    rows = []
    for layout in targets:
        first = times[layout, config.tokens[0]]
        for tokens in config.tokens:
            seconds = times[layout, tokens]
            share = weight_bytes(target) / seconds / bandwidth
            ratio = seconds / first
            rows.append(dict(layout=layout, tokens=tokens, seconds=seconds, ratio=ratio, bandwidth_share=share))
    show(console, f"t(T), batch 1, {config.valid_length} valid", rows)
    return rows


def by_batch(
    targets: Mapping[str, Target], config: ml_collections.ConfigDict, console: Console
) -> list[dict[str, Any]]:
    """One-token passes over several rows."""
    target = next(iter(targets.values()))
    room = config.valid_length + max(config.tokens) + 1
    caches: dict[Hashable, KVCache] = {b: init_cache(target.config, b, room) for b in config.batches}
    cases = {}
    for layout, laid_out in targets.items():
        for batch in config.batches:
            one = Pass(laid_out, caches, batch, tokens=1, precision=config.precision)
            one.valid = config.valid_length
            cases[layout, batch] = lambda one=one: one.seconds(config.repeat)
    times = in_turns(cases, config.rounds, console, "batch")
    rows = [
        dict(layout=layout, batch=batch, seconds=seconds, ratio=seconds / times[layout, config.batches[0]])
        for (layout, batch), seconds in times.items()
    ]
    show(console, f"t(batch), one token a row, {config.valid_length} valid", rows)
    return rows


def by_capacity(target: Target, config: ml_collections.ConfigDict, console: Console) -> list[dict[str, Any]]:
    """One-token passes at equal valid length, by the cache's capacity: should be flat."""
    caches: dict[Hashable, KVCache] = {c: init_cache(target.config, 1, c) for c in config.capacities}
    cases = {}
    for capacity in config.capacities:
        one = Pass(target, caches, capacity, tokens=1, precision=config.precision)
        one.valid = config.valid_length
        cases[capacity] = lambda one=one: one.seconds(config.repeat)
    times = in_turns(cases, config.rounds, console, "capacity")
    first = times[config.capacities[0]]
    rows = [dict(capacity=c, seconds=seconds, ratio=seconds / first) for c, seconds in times.items()]
    show(console, f"t(capacity), {config.layouts[-1]}, one token, {config.valid_length} valid", rows)
    return rows


def by_valid_length(target: Target, config: ml_collections.ConfigDict, console: Console) -> list[dict[str, Any]]:
    """One-token passes in one cache, by how much of it is valid: one program."""
    caches: dict[Hashable, KVCache] = {0: init_cache(target.config, 1, max(config.valid_lengths) + 1)}
    one = Pass(target, caches, 0, tokens=1, precision=config.precision)

    def case(valid: int) -> float:
        one.valid = valid
        return one.seconds(config.repeat)

    cases = {valid: lambda valid=valid: case(valid) for valid in config.valid_lengths}
    times = in_turns(cases, config.rounds, console, "valid length")
    first = times[config.valid_lengths[0]]
    rows = [dict(valid_length=v, seconds=seconds, ratio=seconds / first) for v, seconds in times.items()]
    show(console, f"t(valid length), {config.layouts[-1]}, one token", rows)
    return rows


def against_tight_loop(target: Target, config: ml_collections.ConfigDict, console: Console) -> list[dict[str, Any]]:
    """The loop, plain and with what prompt lookup proposes, against hand-written ones on the same text.

    The chain goes through the loop in two forms: known to be one, and as any tree would, with masks, pointers and
    compaction.
    """
    rows = []
    for nodes in config.pair_nodes:
        options = {"num_nodes": nodes} if nodes else {}
        drafting = build.make_drafter("prompt_lookup" if nodes else "autoregressive", target, **options)
        forms = {"chain": drafting.drafter, "chain as a tree": AsTree(nodes)} if nodes else {"plain": drafting.drafter}
        for form, drafter in forms.items():
            made = dataclasses.replace(drafting, drafter=drafter)
            loop, weights = build.make_loop(
                target, made, make_sampling([0.0]), precision=config.precision, layout=config.layouts[-1]
            )
            # Nothing ends the text, so that both take the same number of steps.
            found = _pairs(dataclasses.replace(loop, eos=()), weights, target, nodes, config, console)
            rows.append({"form": form} | found)
    show(console, f"the loop against a hand-written one, seconds a new token, {config.pairs} pairs", rows)
    return rows


def _pairs(
    loop: Loop, weights: Weights, target: Target, nodes: int, config: ml_collections.ConfigDict, console: Console
) -> dict[str, Any]:
    text = target.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 12)[: config.pair_prompt]
    request = Request(tuple(text), config.pair_tokens + 1)
    ours, theirs = [], []
    with console.status("") as status:
        for pair in range(config.pairs + 1):
            status.update(f"chain of {nodes}: pair {pair} of {config.pairs}")
            order = (_ours, _tight) if pair % 2 else (_tight, _ours)
            took = {one: one(loop, weights, target, request, config) for one in order}
            if not np.array_equal(took[_ours][1], took[_tight][1]):
                raise ValueError("the hand-written loop and the library's wrote different tokens")
            if pair:
                ours.append(took[_ours][0] / config.pair_tokens)
                theirs.append(took[_tight][0] / config.pair_tokens)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "nodes": nodes,
        "tokens": config.pair_tokens,
        "loop_seconds": statistics.median(ours),
        "tight_seconds": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [float(q) for q in np.quantile(ratios, [0.25, 0.75])],
    }


def _ours(
    loop: Loop, weights: Weights, target: Target, request: Request, config: ml_collections.ConfigDict
) -> tuple[float, np.ndarray]:
    state = prefill(loop, weights, [request], context=target.context, seed=0)
    state, steps = jax.block_until_ready((state, jnp.int32(config.pair_tokens)))
    start = time.perf_counter()
    state = jax.block_until_ready(loop.run(weights, state, steps))
    seconds = time.perf_counter() - start
    end = len(request.prompt) + 1 + config.pair_tokens
    return seconds, np.array(state.tokens)[0, :end]


def _tight(
    loop: Loop, weights: Weights, target: Target, request: Request, config: ml_collections.ConfigDict
) -> tuple[float, np.ndarray]:
    state = prefill(loop, weights, [request], context=target.context, seed=0)
    lookup = loop.drafter if isinstance(loop.drafter, PromptLookup) else None
    end = len(request.prompt) + 1 + config.pair_tokens
    room = end + (lookup.num_nodes if lookup else 0)
    slots = -(-room // CHUNK) * CHUNK
    caches = tuple((_grown(layer.k[0], slots), _grown(layer.v[0], slots)) for layer in state.cache.layers)
    arguments = jax.block_until_ready(
        (caches, _grown(state.tokens[0], slots), state.length[0], jnp.int32(config.pair_tokens))
    )
    start = time.perf_counter()
    _, tokens = jax.block_until_ready(tight_loop(loop.graph, config.precision, weights.target, *arguments, lookup))
    seconds = time.perf_counter() - start
    return seconds, np.array(tokens)[:end]


def _grown(x: jax.Array, slots: int) -> jax.Array:
    """The first `slots` entries, behind them zeros where there are fewer."""
    return jnp.pad(x[:slots], [(0, max(0, slots - x.shape[0])), *[(0, 0)] * (x.ndim - 1)])


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows; seconds as milliseconds."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " ").replace("seconds", "ms"), justify="right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    console.print(table)


def _cell(name: str, value: Any) -> str:
    if name.endswith("seconds"):
        return f"{1e3 * value:.2f}"
    if isinstance(value, list):
        return " to ".join(f"{v:.3f}" for v in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    _main.run(main, config="configs/profile_pass.py", workdir="runs/profile_pass")
