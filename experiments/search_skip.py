"""Which layers to skip in drafting: python -m experiments.search_skip --config=configs/search_skip.py:smollm2

Bayesian optimisation (Optuna's TPE) over sets of skipped attention and MLP sublayers, as in Draft & Verify (Zhang et
al. 2023, section 3.2), or over sets of whole layers (`--config.parts=layers`). A trial's score is the speedup that
theory predicts from two measurements: how often the draft's likeliest token is the target's on the target's own greedy
text, and what a draft pass costs. That is the agreement of a draft's first token: later ones, which see the keys of the
draft's own passes, agree a little less, and the prediction is that much too high. Needs the extra `search`. Writes
search.json, which the drafter `layer_skip` takes as its `source`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath
from flax import nnx
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import _main
from experiments._prompts import prompts_from_config
from specjax import build
from specjax.analysis import speedup_predicted
from specjax.decoding import Request, check_requests, generate, make_sampling
from specjax.drafting.layer_skip import LayerSkip, skip_options
from specjax.evaluation import results
from specjax.evaluation.conversations import encode
from specjax.evaluation.prompts import Prompt
from specjax.models import Decoder, KVCache, Target, View, causal_view, init_cache, merge, pack
from specjax.training.data import answers_at

SCHEMA = "specjax.search_skip/2"

Text = tuple[Sequence[int], Sequence[int]]  # a prompt and its answer
Sublayer = tuple[str, int]  # "attention" or "mlp", and the layer
Skip = frozenset[Sublayer]
# What one switch of the search leaves out.
PARTS: dict[str, Callable[[int], dict[str, Skip]]] = {
    "sublayers": lambda i: {f"{kind}_{i}": frozenset({(kind, i)}) for kind in ("attention", "mlp")},
    "layers": lambda i: {f"layer_{i}": frozenset({("attention", i), ("mlp", i)})},
}


def main(config: ml_collections.ConfigDict) -> None:
    """Writes the text, measures the costs, searches, reports."""
    optuna = import_optuna()
    console, workdir = _main.console(), _main.workdir()
    check(config)
    base = os.environ.get("SPECJAX_DATA")
    stored = bool(config.text and base)
    prompts = () if stored else prompts_from_config(config, console)
    results.check_writable(workdir)
    target = build.target_from_config(config.target)
    layers = target.config.num_layers
    switches = {name: part for i in range(layers) for name, part in PARTS[config.parts](i).items()}
    most = config.max_skipped or len(switches) - 1
    if most >= len(switches):
        raise ValueError(
            f"max_skipped={most} leaves none of the target's {layers} layers: they are {len(switches)} {config.parts}; "
            "expected fewer, or 0 for all but one"
        )
    if stored:
        texts = stored_texts(epath.Path(str(base)) / config.text, target, config)
        console.print(f"{len(texts)} texts of {config.text}")
    else:
        console.print(f"plain text of {len(prompts)} prompts: a table over these is no test of the set that is found")
        texts = answered(prompts, target, config.max_new_tokens)
    costs = measure_costs(target, config)
    console.print(
        f"an attention takes {costs['attention']:.4f} of a one-token pass, an MLP {costs['mlp']:.4f}, "
        f"a pass over {config.num_nodes + 1} tokens {costs['t_ratio']:.2f} of it"
    )
    agreement = Agreement(target, texts, config.precision)

    def score(skip: Skip) -> dict[str, Any]:
        # Of a small model, the parts may measure as more than the whole.
        alpha, cost = agreement.rate(skip), max(1 - sum(costs[kind] for kind, _ in skip), 0.0)
        gamma = config.num_nodes
        speedup = speedup_predicted(alpha, gamma, draft_passes=gamma, c=cost, t_ratio=costs["t_ratio"])
        return {**as_options(skip), "alpha": alpha, "draft_cost": cost, "speedup_predicted": speedup}

    trials: list[dict[str, Any]] = []

    def objective(trial: Any) -> float:
        chosen = [part for name, part in switches.items() if trial.suggest_categorical(name, [False, True])]
        if not 0 < len(chosen) <= most:
            raise optuna.TrialPruned()
        trials.append(score(frozenset().union(*chosen)))
        console.print(f"{len(trials):4d}  {sentence(trials[-1])}", highlight=False)
        return trials[-1]["speedup_predicted"]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=config.seed))
    for skip in first_trials(layers):
        on = {name: part <= skip for name, part in switches.items()}
        # Sets of single sublayers are none of whole layers.
        if 0 < sum(on.values()) <= most and skip == frozenset().union(*(switches[name] for name in on if on[name])):
            study.enqueue_trial(on)
    study.optimize(objective, n_trials=config.trials)
    if not trials:
        raise ValueError(f"no trial of {config.trials} left out at most max_skipped={most}: raise one of them")
    best = max(trials, key=lambda trial: trial["speedup_predicted"])
    meta = results.describe(config.to_dict(), {"dtype": target.config.dtype, "matmul": config.precision}, SCHEMA)
    results.write_json(workdir / "search.json", {"meta": meta, "costs": costs, "best": best, "trials": trials})
    console.print(table(trials))
    console.print(f"best: {named(best)}", highlight=False)
    console.print(f"written to {workdir / 'search.json'}", highlight=False)


def stored_texts(path: epath.Path, target: Target, config: ml_collections.ConfigDict) -> list[Text]:
    """Greedy answers that the target wrote before, evenly spaced in the file; those with long prompts are passed over.

    Raises:
        ValueError: there are too few, or another model wrote them.
    """
    documents = [d for d in answers_at(path, target, 0.0) if d.prompt_length <= config.max_prompt_tokens]
    if len(documents) < config.max_texts:
        raise ValueError(
            f"{path} has {len(documents)} greedy answers to prompts of at most {config.max_prompt_tokens} tokens, "
            f"fewer than max_texts={config.max_texts}: lower max_texts or raise max_prompt_tokens"
        )
    chosen = [documents[i * len(documents) // config.max_texts] for i in range(config.max_texts)]
    cut = [d.cut(d.prompt_length + config.max_new_tokens) for d in chosen]
    return [(d.tokens[: d.prompt_length].tolist(), d.tokens[d.prompt_length :].tolist()) for d in cut]


def answered(prompts: Sequence[Prompt], target: Target, max_new_tokens: int) -> list[Text]:
    """The target's own greedy answers to the first turns."""
    requests = [
        Request(encode(target, [{"role": "user", "content": p.turns[0]}]), max_new_tokens, id=i)
        for i, p in enumerate(prompts)
    ]
    check_requests(requests, target.context, target.config.vocab_size)
    loop, weights = build.make_loop(target, build.make_drafter("autoregressive", target), make_sampling([0.0]))
    done = generate(loop, weights, requests, context=target.context, vocab=target.config.vocab_size)
    return [(r.prompt, c.tokens) for r, c in zip(requests, done, strict=True)]


def import_optuna() -> Any:
    """The optimiser.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("the search needs Optuna: pip install 'specjax[search]'") from error
    return optuna


def check(config: ml_collections.ConfigDict) -> None:
    """Checks the settings.

    Raises:
        ValueError: one is out of range.
    """
    for name in ("max_new_tokens", "max_texts", "max_prompt_tokens", "num_nodes", "trials", "rounds"):
        if config[name] < 1:
            raise ValueError(f"{name}={config[name]}; expected at least 1")
    if config.parts not in PARTS:
        raise ValueError(f"parts={config.parts!r}; expected one of {', '.join(PARTS)}")
    if config.max_skipped < 0:
        raise ValueError(f"max_skipped={config.max_skipped}; expected 0 for all but one, or a positive number")


def as_options(skip: Skip) -> dict[str, tuple[int, ...]]:
    """What a set of sublayers is as options of the drafter."""
    attention, mlp = ([layer for kind, layer in skip if kind == wanted] for wanted in ("attention", "mlp"))
    return skip_options(attention, mlp)


def first_trials(layers: int) -> list[Skip]:
    """Sets to begin with, of the middle: every other, third and fifth layer, its later half, its attentions."""
    middle = range(layers // 5, layers - max(layers // 10, 1))
    sets = [tuple(middle[1::step]) for step in (2, 3, 5)] + [tuple(middle[len(middle) // 2 :])]
    whole = [frozenset((kind, i) for i in found for kind in ("attention", "mlp")) for found in sets]
    attentions = [frozenset(("attention", i) for i in found) for found in (middle, middle[1::2])]
    return list(dict.fromkeys([*whole, *attentions]))


class Agreement:
    """How often the target without some layers would draft the target's own next token.

    One pass of the whole target fills a cache with its keys and values. A trial then feeds every position of the text
    at once, each seeing the cache in front of it and itself, as the first draft token of a step does. What is left
    out is an array, so all trials share one program.
    """

    def __init__(self, target: Target, texts: Sequence[Text], precision: str):
        """Fills the cache."""
        self._graph, self._params, self._precision = target.graph, target.params, precision
        width = max(len(prompt) + len(answer) for prompt, answer in texts) - 1
        self._tokens = np.zeros((len(texts), width), np.int32)
        self._next = np.zeros((len(texts), width), np.int32)
        self._counts = np.zeros((len(texts), width), bool)
        for row, (prompt, answer) in enumerate(texts):
            text = [*prompt, *answer]
            self._tokens[row, : len(text) - 1], self._next[row, : len(text) - 1] = text[:-1], text[1:]
            # Every token but the first of the answer, which the prefill emits.
            self._counts[row, len(prompt) : len(text) - 1] = True
        if not self._counts.any():
            raise ValueError("every answer ended with its first token: choose other prompts")
        self._cache = fill(target.graph, precision, target.params, jnp.asarray(self._tokens))

    def rate(self, skip: Skip) -> float:
        """Share of the answers' tokens that the draft would have said."""
        layers = range(len(self._cache.layers))
        mask = jnp.asarray([[(kind, i) in skip for i in layers] for kind in ("attention", "mlp")])
        said = drafted(self._graph, self._precision, self._params, self._cache, jnp.asarray(self._tokens), mask)
        return float((np.asarray(said) == self._next)[self._counts].mean())


@partial(jax.jit, static_argnames=("graph", "precision"))
def fill(graph: nnx.GraphDef[Decoder], precision: str, params: Any, tokens_rt: jax.Array) -> KVCache:
    """The whole target's keys and values of texts `[R, T]`, in a cache with room for as many again."""
    with jax.default_matmul_precision(precision):
        target = merge(graph, params)
        rows, width = tokens_rt.shape
        cache = init_cache(target.config, rows, 2 * width)
        return target.cached(tokens_rt, cache, causal_view(jnp.zeros((rows,), jnp.int32), width))[1]


@partial(jax.jit, static_argnames=("graph", "precision"))
def drafted(
    graph: nnx.GraphDef[Decoder], precision: str, params: Any, cache: KVCache, tokens_rt: jax.Array, skip: jax.Array
) -> jax.Array:
    """What the target would say behind every token `[R, T]` without the attentions `skip[0]` and the MLPs `skip[1]`."""
    with jax.default_matmul_precision(precision):
        target = merge(graph, params)
        rows, width = tokens_rt.shape
        # Scratch entry j < T is the whole target's entry of token j, entry T + j this pass's.
        before, self_ = np.tril(np.ones((width, width), bool), -1), np.eye(width, dtype=bool)
        position = np.tile(np.arange(width, dtype=np.int32), 2)
        view = View(
            prefix=jnp.zeros((rows,), jnp.int32),
            mask=jnp.broadcast_to(np.concatenate([before, self_], axis=1), (rows, width, 2 * width)),
            depths=jnp.broadcast_to(position, (rows, 2 * width)),
        )
        hidden = target.embed_tokens(tokens_rt)
        for i in range(target.config.num_layers):
            mixed, _ = target.cached(hidden, cache, view, start=i, stop=i + 1, skip_mlp=(i,))
            hidden = jnp.where(skip[0, i], hidden, mixed.hidden)
            transformed, _ = target.cached(hidden, cache, view, start=i, stop=i + 1, skip_attention=(i,))
            hidden = jnp.where(skip[1, i], hidden, transformed.hidden)
        normed = target.final_norm(hidden)
        return jax.lax.map(lambda row: jnp.argmax(target.logits(row), -1).astype(jnp.int32), normed)


def measure_costs(target: Target, config: ml_collections.ConfigDict) -> dict[str, float]:
    """Seconds of a one-token pass, and relative to it: an attention, an MLP, and the pass that verifies a draft."""
    params = jax.block_until_ready(pack(target.params)) if config.layout == "packed" else target.params
    half = tuple(range(0, target.config.num_layers, 2))
    cases: dict[str, tuple[int, LayerSkip]] = {
        "whole": (1, LayerSkip()),
        "attention": (1, LayerSkip(skip_attention=half)),
        "mlp": (1, LayerSkip(skip_mlp=half)),
        "wide": (config.num_nodes + 1, LayerSkip()),
    }
    cache = init_cache(target.config, 1, 256)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(config.rounds + 1):
        for name, (tokens, skip) in cases.items():
            fed = jax.block_until_ready(jnp.ones((1, tokens), jnp.int32))
            start = time.perf_counter()
            jax.block_until_ready(one_pass(target.graph, config.precision, skip, params, cache, fed))
            if turn:  # the first one compiles
                times[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(found) for name, found in times.items()}
    whole = middle["whole"]
    parts = {kind: max(whole - middle[kind], 0.0) / len(half) / whole for kind in ("attention", "mlp")}
    return {"one_token": whole, **parts, "t_ratio": middle["wide"] / whole}


@partial(jax.jit, static_argnames=("graph", "precision", "skip"))
def one_pass(
    graph: nnx.GraphDef[Decoder], precision: str, skip: LayerSkip, params: Any, cache: KVCache, tokens: jax.Array
) -> jax.Array:
    """The argmax behind each of some tokens, in the middle of a text of 100, without what a drafter leaves out."""
    with jax.default_matmul_precision(precision):
        target = merge(graph, params)
        view = causal_view(jnp.full((1,), 100, jnp.int32), tokens.shape[1])
        out, _ = skip.run(target, tokens, cache, view, taps=("normed",))
        return jnp.argmax(target.logits(out.taps["normed"]), -1)


def count(trial: dict[str, Any]) -> int:
    """Sublayers that a trial leaves out."""
    return 2 * len(trial["skip"]) + len(trial["skip_attention"]) + len(trial["skip_mlp"])


def named(trial: dict[str, Any]) -> str:
    """What a trial leaves out, as options of the drafter."""
    names = ("skip", "skip_attention", "skip_mlp")
    return " ".join(f"{name}={','.join(map(str, trial[name]))}" for name in names if trial[name])


def sentence(trial: dict[str, Any]) -> str:
    """One trial on one line."""
    return (
        f"skip {count(trial)}: alpha {trial['alpha']:.3f}, c {trial['draft_cost']:.3f}, "
        f"predicted {trial['speedup_predicted']:.3f}"
    )


def table(trials: list[dict[str, Any]]) -> Table:
    """The best trial of each number of skipped sublayers."""
    shown = Table("sublayers", "alpha", "c", "predicted", "left out", box=SIMPLE_HEAD)
    best: dict[int, dict[str, Any]] = {}
    for trial in sorted(trials, key=lambda trial: trial["speedup_predicted"]):
        best[count(trial)] = trial
    for number, trial in sorted(best.items()):
        figures = (f"{trial[name]:.3f}" for name in ("alpha", "draft_cost", "speedup_predicted"))
        shown.add_row(f"{number}", *figures, named(trial))
    return shown


if __name__ == "__main__":
    _main.run(main, config="configs/search_skip.py", workdir="runs/search_skip")
