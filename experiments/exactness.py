"""Proof that decoding is lossless: python -m experiments.exactness --config=configs/exactness.py

Certificates of every registered drafter with its default rule, of every rule with two drafters, and of every planted
fault, on a target with four tokens; or, on a real model, of the zoo's drafters. Writes certificates.json.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import ml_collections
from rich.console import Console

from experiments import _main
from specjax import api, build, decoding
from specjax.analysis import Certificate, write_certificates
from specjax.checkpoints import drafters as saved
from specjax.decoding import Loop, Request, Weights, make_sampling
from specjax.decoding.tree import TreeSpec
from specjax.drafting import Autoregressive
from specjax.drafting.registry import Drafting
from specjax.evaluation import results
from specjax.evaluation.certify import Claim, certify_greedy, table
from specjax.evaluation.lineup import several_hint
from specjax.evaluation.prompts import load_prompts
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target, native
from specjax.testing.carried import carried
from specjax.testing.faults import SIBLINGS, planted
from specjax.testing.sequences import LETTERS, PROMPT, certify_sequences, four_token_target, markov_target
from specjax.testing.tables import TableTree, table_params
from specjax.verification.registry import is_lossy

PARTS = ("drafters", "rules", "faults")
TREE = TreeSpec((-1, -1, 0, 0))
GREEDY_TOKENS = 24

# Fields of the config that `specjax.certify` takes as they are.
OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("suppress_tokens", "contexts", "max_new_tokens", "tv", "draws", "rows", "seed", "precision"),
)

# A name to show, and what makes the certificates.
Case = tuple[str, Callable[[], Sequence[Certificate]]]


def main(config: ml_collections.ConfigDict) -> None:
    """Draws, tests, writes, prints; ends with an error where a row is not as it should be."""
    console, workdir = _main.console(), _main.workdir()
    results.check_writable(workdir)
    cases = real_cases(config, console) if config.target.source else tiny_cases(config, console)
    precision = {"dtype": config.target.dtype, "matmul": config.get("precision", "float32")}
    if config.target.source:
        precision["native_kernel"] = native.available()
    meta = results.describe(config.to_dict(), precision)
    meta.pop("schema")
    path = workdir / "certificates.json"
    rows: list[Certificate] = []
    started = time.monotonic()
    for name, make in shard_of(cases, config.shard):
        before = time.monotonic()
        new = make()
        rows += new
        write_certificates(path, rows, meta)  # A long run that ends early keeps what it has.
        said = f"{name}: {', '.join(row.verdict for row in new)}, {time.monotonic() - before:.0f} s"
        console.print(said, highlight=False, style=None if all(row.ok for row in new) else "red")
    if not rows:
        raise ValueError(f"only={tuple(config.only)} and shard={config.shard!r} leave nothing to certify")
    console.print(table(rows))
    seconds = time.monotonic() - started
    console.print(f"{len(rows)} certificates in {seconds:.0f} s: {path}", highlight=False)
    if bad := [f"{row.drafter} with {row.rule} ({row.planted or row.verdict})" for row in rows if not row.ok]:
        raise ValueError(f"{len(bad)} rows are not as they should be: {'; '.join(bad)}")


def shard_of(cases: Iterator[Case], shard: str) -> Iterator[Case]:
    """Every n-th case from the i-th (from 0) on, where `shard` is "i/n"; all n runs together certify each case once.

    Raises:
        ValueError: no such shard.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(f"shard={shard!r}: expected i/n with 0 <= i < n, as in 0/2")
    return islice(cases, int(found[1]), None, int(found[2]))


def kept(config: ml_collections.ConfigDict, *names: str) -> bool:
    """Whether `config.only` keeps a row of these names."""
    return not config.only or any(name in config.only for name in names)


def check_only(config: ml_collections.ConfigDict, names: Sequence[str], what: str) -> None:
    """Raises ValueError where `config.only` has a name that is none of these."""
    if unknown := [name for name in config.only if name not in names]:
        close = difflib.get_close_matches(unknown[0], names, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"only names {unknown[0]!r}; {hint}expected {what}: {', '.join(names)}{several_hint(unknown[0])}"
        )


# ---- Targets with four tokens ----


def tiny_cases(config: ml_collections.ConfigDict, console: Console) -> Iterator[Case]:
    """All certificates on targets with four tokens: drafters on a network, rules and faults on a table.

    Raises:
        ValueError: an unknown part or name, no deviation to have power against, or no draws.
    """
    if unknown := [part for part in config.parts if part not in PARTS]:
        raise ValueError(f"parts={tuple(config.parts)}: unknown {unknown[0]!r}; known: {', '.join(PARTS)}")
    if not 0 < config.tv <= 1 or config.draws < 1:
        raise ValueError(f"tv={config.tv} and draws={config.draws}; expected tv in (0, 1] and draws >= 1")
    if not config.temperature > 0 or config.top_k == 1:
        raise ValueError(
            f"temperature={config.temperature} and top_k={config.top_k} leave a single token and no law to test; "
            "expected a temperature above 0 and another top_k than 1"
        )
    names = [*build.DRAFTERS, *build.RULES, *planted()]
    check_only(config, names, "drafters, rules or faults")
    target, markov = four_token_target(), markov_target()
    drafters, left_out = carried(target)
    for name, reason in left_out.items():
        if kept(config, name):
            console.print(f"drafter {name!r} is left out: {reason}", style="yellow")
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    size = {"draws": config.draws, "tv": config.tv, "rows": config.rows, "seed": config.seed}

    def case(claim: Claim, target: Target, loop: Loop, weights: Weights, sampling: Any) -> Case:
        said = claim.planted or f"{claim.drafter} with {claim.rule}"
        return said, lambda: [certify_sequences(claim, target, loop, weights, sampling=sampling, **size)]

    if "drafters" in config.parts:
        for name, drafting in drafters.items():
            if kept(config, name):
                statics = make_sampling([config.temperature], [config.top_k], [config.top_p])
                claim = Claim(name, build.default_rule(drafting.drafter, statics))
                yield case(claim, target, *build.make_loop(target, drafting, statics), sampling)
    for name in build.RULES if "rules" in config.parts else ():
        for drafter, loop, weights in two_drafters(markov, drafters, name) if kept(config, name) else ():
            assert loop.rule is not None
            claim = Claim(drafter, name, lossless=not is_lossy(loop.rule))
            if name == "greedy":
                said = f"{drafter} with {name}"
                yield said, partial(tiny_greedy, markov, claim, loop, weights)
            else:
                yield case(claim, markov, loop, weights, sampling)
    for name, fault in planted().items() if "faults" in config.parts else ():
        if kept(config, name):
            claim = Claim("table_tree", fault.rule_name, planted=name)
            loop = Loop(markov.graph, fault.drafter, fault.rule, ())
            yield case(claim, markov, loop, Weights(markov.params, fault.params, fault.tables), fault.sampling)


def two_drafters(target: Target, drafters: dict[str, Drafting], rule: str) -> Iterator[tuple[str, Loop, Weights]]:
    """The loops of a rule with the first two of some drafters that it fits."""
    distinct = TableTree(TREE, "without_replacement")
    candidates = (
        drafters["draft_model"],
        Drafting("table_tree", TableTree(TREE), table_params(LETTERS, 1), {}),
        drafters["prompt_lookup"],
        Drafting("table_tree_distinct", distinct, table_params(LETTERS, 2), {}),
        Drafting("table_star_distinct", TableTree(SIBLINGS, "without_replacement"), table_params(LETTERS, 2), {}),
    )
    statics, found = make_sampling([0.0 if rule == "greedy" else 1.0]), 0
    for drafting in candidates:
        try:
            loop, weights = build.make_loop(target, drafting, statics, rule=rule, lossless=False)
        except ValueError:  # the rule does not fit this one
            continue
        yield drafting.name, loop, weights
        found += 1
        if found == 2:
            return


def tiny_greedy(target: Target, claim: Claim, loop: Loop, weights: Weights) -> list[Certificate]:
    """Greedy texts behind suffixes of the prompt."""
    requests = [Request(PROMPT[i:], GREEDY_TOKENS, id=i) for i in range(8)]
    baseline = Loop(target.graph, Autoregressive(), build.RULES["greedy"](0), target.eos_ids)
    plain_weights = Weights(target.params, {}, {})
    plain = decoding.generate(
        baseline, plain_weights, requests, context=target.context, vocab=target.config.vocab_size, batch=8
    )
    teacher = Teacher(target.graph, target.params, precision="float32")
    bound = rounding_bound("float32", "float32")
    return [certify_greedy(claim, target, loop, weights, requests, plain, teacher, bound=bound, batch=8)]


# ---- A real model ----


def real_cases(config: ml_collections.ConfigDict, console: Console) -> Iterator[Case]:
    """Greedy texts and next-token laws of the zoo's drafters and of those that the config names; or of one alone.

    Raises:
        ValueError: a drafter or a rule that does not fit, options that are no pairs, no prompts, or an unknown name.
    """
    if config.greedy_prompts < 1:
        raise ValueError(f"greedy_prompts={config.greedy_prompts}; expected at least 1 prompt")
    pairs = {name: _main.pairs(name, config[name]) for name in ("logit_bias", "rule_options")}
    alone = {name: value for name, value in config.drafter.to_dict().items() if value}
    given = alone.get("name") or alone.get("source", "")
    check_only(config, [given] if alone else [*saved.zoo_entries(), *config.drafters], "drafters")
    target = build.target_from_config(config.target)
    draftings = {} if alone else listed(config, target, console)
    if alone:
        name = alone.pop("name", "") or alone.pop("source", "")
        draftings[name] = api.load_drafter(name, target, **alone)
    prompts = load_prompts("shipped", 1)[: config.greedy_prompts]
    options = {name: config[name] for name in OPTIONS} | pairs
    options |= {"prompts": [p.turns[0] for p in prompts], "layout": config.layout or None, "show": False}
    for name, drafting in draftings.items():
        named = dataclasses.replace(drafting, name=name)
        yield name, partial(api.certify, target, named, config.rule or None, **options)


def listed(config: ml_collections.ConfigDict, target: Target, console: Console) -> dict[str, Drafting]:
    """The zoo's drafters that are the target's, and those of `config.drafters`."""
    draftings: dict[str, Drafting] = {}
    for name in saved.zoo_entries():
        if kept(config, name):
            try:
                draftings[name] = api.load_drafter(name, target)
            except ValueError as error:
                console.print(f"drafter {name!r} is left out: {error}", style="yellow")
    for name, row in config.drafters.items():
        if kept(config, name):
            draftings[name] = build.drafter_from_config(row, target)
    return draftings


if __name__ == "__main__":
    _main.run(main, config="configs/exactness.py", workdir="runs/exactness")
