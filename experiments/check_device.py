"""Whether specjax runs on this device as it should: python -m experiments.check_device --config=configs/check_device.py

On a model of random weights: what share of the memory's bandwidth plain decoding reaches, what wider passes cost,
whether greedy texts of a drafter part from plain decoding's at near-ties alone, whether a sampled law is the target's,
whether XLA copies the cache, and steps of training. Times are reported and judge nothing; the others must hold.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import _main, _train_costs
from specjax import build, decoding
from specjax.decoding import Completion, Loop, Request, Weights, make_sampling
from specjax.drafting import DraftModel
from specjax.evaluation import results
from specjax.evaluation.compiled import whole_copies
from specjax.evaluation.next_law import compare_texts
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target, graph, init_decoder, merge
from specjax.models.published import published_config
from specjax.models.target import config_hash
from specjax.testing import contract, tiny_target
from specjax.testing.markov import markov_config, markov_params, random_law
from specjax.training.data import Document, lay_out
from specjax.training.online import with_hidden_states
from specjax.verification import Recursive

FALSE_ALARM = 1e-6
PEAKED = 2.5  # Larger weights than at initialisation: laws are peaked, and near-ties rare.


@dataclasses.dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        check: what was looked at.
        found: what was found.
        ok: whether it is as it should be; None for a time, which judges nothing.
    """

    check: str
    found: str
    ok: bool | None = None


def main(config: ml_collections.ConfigDict) -> None:
    """Runs every check, writes results.json, and ends with an error where one does not hold."""
    console, workdir = _main.console(), _main.first_workdir()
    results.check_writable(workdir)
    target = random_target(config)
    rows: list[Row] = []
    for check in CHECKS:
        with console.status(check.__name__.replace("_", " ")):
            rows += check(config, target)
    precision = {"dtype": config.dtype, "matmul": config.precision, "layout": "plain"}
    meta = results.describe(config.to_dict(), precision, schema="specjax.check_device/1")
    results.write_json(workdir / "results.json", {"meta": meta, "rows": [dataclasses.asdict(row) for row in rows]})
    console.print(table(rows, f"{config.model} in {config.dtype} on {jax.devices()[0].device_kind}"))
    console.print(f"written to {workdir / 'results.json'}", highlight=False)
    if bad := [f"{row.check}: {row.found}" for row in rows if row.ok is False]:
        raise ValueError(f"{len(bad)} of {len(rows)} checks do not hold: {'; '.join(bad)}")


def random_target(config: ml_collections.ConfigDict) -> Target:
    """The shapes of `config.model` with random weights, and a tokenizer that nothing here asks.

    Raises:
        ValueError: an unknown model.
    """
    tiny = tiny_target()
    shapes = tiny.config if config.model == "tiny" else published_config(config.model)
    shapes = dataclasses.replace(shapes, dtype=config.dtype)

    def draw(key: jax.Array) -> Any:
        return jax.tree.map(lambda x: PEAKED * x if x.ndim > 1 else x, init_decoder(shapes, key))

    params = jax.jit(draw)(jax.random.key(config.seed))
    return Target(
        config=shapes,
        graph=graph(shapes)[0],
        params=params,
        tokenizer=tiny.tokenizer,
        name=config.model,
        config_hash=config_hash(shapes),
        eos_ids=(),
        context=shapes.max_position,
    )


def passes(config: ml_collections.ConfigDict, target: Target) -> Iterator[Row]:
    """Bandwidth, and what a pass costs at every width."""
    whole = jnp.zeros((config.copy_mib << 19,), jnp.bfloat16)
    once = jax.jit(lambda x: x + 1)
    copying = median_seconds(lambda: once(whole), config.repeats)
    bandwidth = 2 * whole.nbytes / copying
    yield Row("bandwidth of a copy", f"{bandwidth / 1e9:.0f} GB/s")
    read = sum(x.nbytes for x in jax.tree.leaves(target.params))
    if not target.config.tie_embeddings:
        read -= target.params["embed"]["embedding"].nbytes  # of which a pass looks up a row a token
    seconds = {more: step_seconds(config, target, more) for more in config.widths}
    plain = seconds[config.widths[0]]
    share = read / plain / bandwidth
    yield Row("a step of plain decoding", f"{1e3 * plain:.2f} ms, {share:.0%} of that bandwidth on the weights alone")
    for more, taken in list(seconds.items())[1:]:
        yield Row(f"t({more + 1})/t({config.widths[0] + 1})", f"{taken / plain:.2f}")


def step_seconds(config: ml_collections.ConfigDict, target: Target, more: int) -> float:
    """Of one step in the loop, with `more` further tokens in the pass."""
    loop, weights = program(config, target, "autoregressive", num_nodes=more)
    (request,) = requests(config, target, 1, budget=(1 + config.repeats) * config.steps + 1)
    state = decoding.prefill(loop, weights, [request], context=target.context, seed=0)
    times = []
    for _ in range(1 + config.repeats):
        begun = time.perf_counter()
        state = jax.block_until_ready(loop.run(weights, state, config.steps))
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:]) / config.steps


def near_ties(config: ml_collections.ConfigDict, target: Target) -> Iterator[Row]:
    """Greedy texts of prompt lookup beside plain decoding's."""
    asked = requests(config, target, config.texts, budget=config.max_new_tokens)

    def complete(name: str, nodes: int) -> list[Completion]:
        loop, weights = program(config, target, name, num_nodes=nodes)
        options: dict[str, Any] = {"context": target.context, "vocab": target.config.vocab_size, "batch": len(asked)}
        return decoding.generate(loop, weights, asked, **options)

    plain, drafted = complete("autoregressive", 0), complete("prompt_lookup", config.num_nodes)
    accepted = sum(int(np.arange(c.accepted.size) @ c.accepted) for c in drafted)
    teacher = Teacher(target.graph, target.params, precision=config.precision)
    texts = [c.tokens for c in plain], [c.tokens for c in drafted]
    found = compare_texts(teacher, asked, *texts, bound=rounding_bound(config.dtype, config.precision))
    said = f"{len(asked)} texts, {len(found.near_ties)} part at a near-tie; {accepted} draft tokens accepted"
    yield Row("greedy texts of prompt lookup", said, found.matches)


def law(config: ml_collections.ConfigDict, target: Target) -> Iterator[Row]:
    """Sequences of three tokens of a Markov target, drawn with a draft model."""
    del target
    params = markov_params(random_law(4, 1))
    drafter = DraftModel(markov_config(4), num_nodes=3)
    p = contract.law_p_value(drafter, params, {}, Recursive, draws=config.draws)
    yield Row("law of sampled sequences", f"p = {p:.2g} after {config.draws:,} draws", p > FALSE_ALARM)


def copies(config: ml_collections.ConfigDict, target: Target) -> Iterator[Row]:
    """Copies of the cache in the compiled loop, with a chain and with a tree."""
    drafts = ("prompt_lookup", config.num_nodes), ("recycling", config.tree_nodes)
    for name, nodes in drafts:
        loop, weights = program(config, target, name, num_nodes=nodes)
        state = decoding.prefill(loop, weights, requests(config, target, 1, budget=8), context=target.context, seed=0)
        text = Loop.run.lower(loop, weights, state, jnp.int32(8)).compile().as_text()
        found = whole_copies(text or "", state.cache.layers[0].k.shape)
        yield Row(f"copies of the cache with {name}", f"{len(found)}", not found)


def training(config: ml_collections.ConfigDict, target: Target) -> Iterator[Row]:
    """Steps of an EAGLE-3 head on the same made-up rows: the loss is finite and falls."""
    made = _train_costs.trainer(config, "eagle3", target)
    rng = np.random.default_rng(config.seed)
    texts = [rng.integers(0, config.draft_vocab, config.row_length).astype(np.int32) for _ in range(config.batch)]
    rows = lay_out([[Document(text, config.row_length // 4)] for text in texts], config.row_length)
    taps = _train_costs.taps(made.objective)
    batch = jax.jit(lambda params, b: with_hidden_states(merge(target.graph, params), b, taps))(target.params, rows)
    state, losses, times = made.init(), [], []
    step = made.lower(batch).compile()
    for _ in range(1 + config.train_steps):
        begun = time.perf_counter()
        state, metrics = step(state, target.params, made.tables, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - begun)
    rate = config.batch * config.row_length / statistics.median(times[1:])
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    memory = "" if peak is None else f", {peak / 1e9:.1f} GB at most so far"
    said = f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {rate:,.0f} tokens/s{memory}"
    yield Row("training steps of EAGLE-3", said, bool(np.isfinite(losses).all() and losses[-1] < losses[0]))


CHECKS: tuple[Callable[[ml_collections.ConfigDict, Target], Iterator[Row]], ...] = (
    passes,
    near_ties,
    law,
    copies,
    training,
)


def program(config: ml_collections.ConfigDict, target: Target, name: str, **options: Any) -> tuple[Loop, Weights]:
    """The greedy loop of a drafter that needs no training."""
    drafting = build.make_drafter(name, target, **options)
    return build.make_loop(target, drafting, make_sampling([0.0]), precision=config.precision)


def requests(config: ml_collections.ConfigDict, target: Target, count: int, *, budget: int) -> list[Request]:
    """Random prompts, the first half of each said twice, so that lookups find something."""
    rng = np.random.default_rng(config.seed)
    half = rng.integers(0, target.config.vocab_size, (count, config.prompt_length // 2))
    return [Request(tuple(np.tile(row, 2).tolist()), budget, id=i) for i, row in enumerate(half)]


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Of a call whose first run compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def table(rows: list[Row], title: str) -> Table:
    """For the terminal; what does not hold is red."""
    out = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for name in ("check", "found", ""):
        out.add_column(name)
    for row in rows:
        verdict = {None: "", True: "holds", False: "does not hold"}[row.ok]
        out.add_row(row.check, row.found, verdict, style="red" if row.ok is False else None)
    return out


if __name__ == "__main__":
    _main.run(main, config="configs/check_device.py", workdir="runs/check_device")
