"""What verification costs here: python -m experiments.profile_rules --config=configs/profile_rules.py

The time of each rule, and of each processor over every node's logits, alone on random logits, as a share of a step:
the time given in the config, or that of a measured pass over root and nodes, by the target with as large a vocabulary.
Everything of one vocabulary and draft size is timed in turns, and medians are reported. Writes profile_rules.json.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from experiments import _main
from experiments.profile_pass import Pass, in_turns, show
from specjax import build
from specjax.decoding import Draft, Keys, Sampling, Scores, log_law, make_sampling, request_keys
from specjax.decoding.processors import init_history, process
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import TreeSpec, ancestors, depths, from_branching
from specjax.evaluation import results
from specjax.models import KVCache, Target, graph, init_cache, pack
from specjax.verification import Block, Greedy, Speculative
from specjax.verification.registry import RULES, label

SCHEMA = "specjax.profile_rules/1"
# Each processor's settings, at values that people use.
WARPS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
}
BEFORE_WARPS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "logit_bias": {"logit_bias": {token: -1.0 for token in range(20)}},
    "suppress_tokens": {"suppress_tokens": tuple(range(20))},
}
PROCESSORS = WARPS | BEFORE_WARPS


def main(config: ml_collections.ConfigDict) -> None:
    """Measures, prints, writes."""
    console, workdir = _main.console(), _main.workdir()
    check(config)
    results.check_writable(workdir)
    target = build.target_from_config(config.target) if config.target.source else None
    rows: list[dict[str, Any]] = []
    for vocab, step_ms in zip(config.vocabularies, config.step_ms, strict=True):
        for branching in config.trees.values():
            tree = from_branching(branching) if branching else TreeSpec(())  # N = 0: plain decoding
            cases: dict[Any, Callable[[], float]] = rule_cases(config, vocab, tree) | processor_cases(
                config, vocab, tree
            )
            if not step_ms and target is not None:
                cases["step", ""] = step_case(config, with_vocabulary(target, vocab), tree)
            seconds = in_turns(cases, config.rounds, console, f"V = {vocab}, N = {tree.num_nodes}")
            step = seconds.pop(("step", ""), step_ms / 1e3)
            found = [
                {
                    "vocab": vocab,
                    "nodes": tree.num_nodes,
                    "kind": kind,
                    "name": name,
                    "seconds": value,
                    "step_seconds": step or None,
                    "share": value / step if step else None,
                }
                for (kind, name), value in seconds.items()
            ]
            show(console, f"V = {vocab}, N = {tree.num_nodes}, batch {config.batch}", printable(found))
            rows += found
    meta = results.describe(config.to_dict(), {"dtype": "float32", "matmul": config.precision}, SCHEMA)
    results.write_json(workdir / "profile_rules.json", {"meta": meta, "rows": rows})
    console.print(f"written to {workdir / 'profile_rules.json'}", highlight=False)


def check(config: ml_collections.ConfigDict) -> None:
    """Checks the settings.

    Raises:
        ValueError: one is out of range or unknown.
    """
    for name, known in (("rules", RULES), ("processors", PROCESSORS)):
        if unknown := [value for value in config[name] if value not in known]:
            raise ValueError(f"unknown name {unknown[0]!r} in {name}; known: {', '.join(sorted(known))}")
    if len(config.vocabularies) != len(config.step_ms) or min(config.step_ms, default=0) < 0:
        raise ValueError(f"step_ms={tuple(config.step_ms)}; expected a time >= 0 for each of {config.vocabularies}")
    if min(config.rounds, config.repeat, config.batch, *config.vocabularies) < 1:
        raise ValueError("rounds, repeat, batch and vocabularies must be at least 1")


def rule_cases(
    config: ml_collections.ConfigDict, vocab: int, tree: TreeSpec
) -> dict[tuple[str, str], Callable[[], float]]:
    """Every rule that takes this tree, on one draft drawn from a law that is near the target's."""
    sampling = make_sampling([1.0] * config.batch)
    keys = Keys(request_keys(config.seed, list(range(config.batch))), jnp.full((config.batch,), 7))
    draft, scores = jax.block_until_ready(random_draft(tree, vocab, config.noise, sampling, keys))
    cases: dict[tuple[str, str], Callable[[], float]] = {}
    for name in config.rules:
        rule = RULES[name](tree.depth)
        if isinstance(rule, Block | Speculative) and not tree.is_chain:
            continue
        rows = make_sampling([0.0] * config.batch) if isinstance(rule, Greedy) else sampling
        verify = jax.jit(rule.verify)
        cases["rule", label(name, rule)] = partial(clocked, verify, (draft, scores, rows, keys), config.repeat)
    return cases


def processor_cases(
    config: ml_collections.ConfigDict, vocab: int, tree: TreeSpec
) -> dict[tuple[str, str], Callable[[], float]]:
    """One processor at a time at root and every node: the law by each warp, the logits by what comes before them.

    Penalties count the committed text and each node's own path.
    """
    key = jax.random.key(config.seed)
    logits = jax.random.normal(key, (config.batch, tree.num_nodes + 1, vocab)) * 3
    text = jax.random.randint(key, (config.batch, config.valid_length + tree.num_nodes), 0, vocab)
    written, drafted = jnp.split(text, [config.valid_length], axis=1)
    history = init_history(written, jnp.full(config.batch, config.valid_length // 2), vocab)
    on_path = ancestors(jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), drafted.shape))[:, :, 1:]
    before, law = jax.jit(process), jax.jit(log_law)
    cases: dict[tuple[str, str], Callable[[], float]] = {}
    for name in config.processors:
        sampling = make_sampling([0.7] * config.batch, **{k: [v] * config.batch for k, v in PROCESSORS[name].items()})
        if name in WARPS:
            run = partial(clocked, law, (logits, sampling))
        else:
            run = partial(clocked, before, (logits, sampling, history, drafted, on_path))
        cases["processor", name] = partial(run, config.repeat)
    return cases


def with_vocabulary(target: Target, vocab: int) -> Target:
    """The target with an embedding and a head over so many ids: its own rows, in turn, as often as it takes."""
    if target.config.vocab_size == target.config.head_size == vocab:
        return target
    config, params = dataclasses.replace(target.config, vocab_size=vocab, head_size=vocab), dict(target.params)
    embedding = params["embed"]["embedding"]
    params["embed"] = {"embedding": embedding[jnp.arange(vocab) % len(embedding)]}
    if not config.tie_embeddings:
        kernel = params["lm_head"]["kernel"]
        params["lm_head"] = {"kernel": kernel[:, jnp.arange(vocab) % kernel.shape[1]]}
    return dataclasses.replace(target, config=config, graph=graph(config)[0], params=params)


def step_case(config: ml_collections.ConfigDict, target: Target, tree: TreeSpec) -> Callable[[], float]:
    """A target pass over root and nodes, as a chain: its time does not depend on the mask."""
    if config.layout == "packed":
        target = dataclasses.replace(target, params=pack(target.params))
    room = config.valid_length + tree.num_nodes + 1
    caches: dict[Hashable, KVCache] = {0: init_cache(target.config, config.batch, room)}
    one = Pass(target, caches, 0, tokens=tree.num_nodes + 1, precision=config.precision)
    one.valid = config.valid_length
    return partial(one.seconds, config.repeat)


@partial(jax.jit, static_argnames=("tree", "vocab"))
def random_draft(tree: TreeSpec, vocab: int, noise: jax.Array, sampling: Sampling, keys: Keys) -> tuple[Draft, Scores]:
    """Random logits, and a tree drawn independently from laws that are these with noise."""
    batch, nodes = keys.length.shape[0], tree.num_nodes
    logits = jax.random.normal(jax.random.key(1), (batch, nodes + 1, vocab)) * 3
    owners = sorted(set(tree.parents))  # nodes with children, the root -1 among them
    place = {owner: i for i, owner in enumerate(owners)}
    noisy = logits + noise * jax.random.normal(jax.random.key(2), logits.shape)
    laws = log_law(noisy[:, jnp.asarray(owners, jnp.int32) + 1], sampling)
    law = [place[parent] for parent in tree.parents]
    drawn = [keys.sample(DRAFT, node, laws[:, law[node]]) for node in range(nodes)]
    tokens = jnp.stack(drawn, 1) if nodes else jnp.zeros((batch, 0), jnp.int32)
    rows = jnp.broadcast_to(jnp.asarray(law, jnp.int32), (batch, nodes))
    draft = tree.draft(tokens, law=rows, laws=laws)
    return draft, Scores(logits, jnp.argmax(logits, -1).astype(jnp.int32), depths(draft.parents), {})


def clocked(run: Callable[..., Any], arguments: tuple[Any, ...], repeat: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(repeat):
        jax.block_until_ready(run(*arguments))
    return (time.perf_counter() - start) / repeat


def printable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as they are shown."""
    return [
        {
            "kind": row["kind"],
            "name": row["name"],
            "seconds": row["seconds"],
            "of a step": "" if row["share"] is None else f"{row['share']:.1%}",
        }
        for row in rows
    ]


if __name__ == "__main__":
    _main.run(main, config="configs/profile_rules.py", workdir="runs/profile_rules")
