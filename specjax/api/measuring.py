"""Drafters measured beside plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from specjax import build
from specjax.api.programs import token_options, usual_layout
from specjax.build import Drafting
from specjax.evaluation import tables
from specjax.evaluation.benchmark import Settings, measure
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.lineup import Lineup, enlist
from specjax.evaluation.prompts import Prompt, load_prompts
from specjax.evaluation.rows import summarise
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target


def benchmark(
    target: Target,
    draftings: Drafting | Mapping[str, Drafting],
    prompts: str | Sequence[str] = "shipped",
    *,
    prompts_per_category: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    suppress_tokens: Sequence[int] = (),
    rule: str | None = None,
    rule_options: Mapping[str, Any] | None = None,
    batch: int = 1,
    repeats: int = 2,
    seed: int = 0,
    template: str = "chat",
    long_prompts: str = "error",
    show: bool = True,
) -> list[dict[str, Any]]:
    """Measures drafters beside plain decoding on your own model: interleaved, warm, compilation apart.

    Args:
        target: the model.
        draftings: from `load_drafter`; several with the labels they get.
        prompts: user turns; or one string, as `specjax.evaluation.prompts.load_prompts` takes it ("shipped",
            "spec_bench:<path>", a file of your own).
        prompts_per_category: the first so many of each category of such a string; 0 for all.
        max_new_tokens: of each answer.
        temperature: 0 for greedy.
        top_k: 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1).
        repetition_penalty: > 0, 1 for none; over prompt and answer.
        presence_penalty: 0 for none; over the answer alone.
        frequency_penalty: 0 for none; likewise.
        logit_bias: what to add to the logits of token ids.
        suppress_tokens: ids that are never emitted.
        rule: verification rule; the exact one that fits best by default. A lossy one is measured, and named so.
        rule_options: of the rule, such as {"epsilon": 0.2} of `typical`.
        batch: prompts that run together.
        repeats: timed answers to each prompt; medians count.
        seed: with a prompt's index, fixes every random choice.
        template: `chat`, the model's own; `plain` for a base model; `vicuna`, or the path of a Jinja file.
        long_prompts: what to do with a prompt beyond the context: `error`, or `skip` it.
        show: whether to print the table.

    Returns:
        Rows as in a run's results.json, by label and category: `all`, `all_without_loops`, and the prompts' own.

    Raises:
        ValueError: no target, no drafter, a label twice or taken, a value out of range, unknown prompts, or a prompt
            beyond the context.
    """
    named = token_options(logit_bias, suppress_tokens)
    several = _labelled(draftings)
    plain = build.make_drafter("autoregressive", target)
    if not several or plain.name in several:
        raise ValueError(f"drafters {list(several)}; expected at least one, and none labelled {plain.name!r}")
    if not isinstance(prompts, str | Sequence):
        raise ValueError(f"prompts={prompts!r}; expected user turns, or the name of a set of prompts")
    if isinstance(prompts, str):
        chosen: Sequence[Prompt] = load_prompts(prompts, prompts_per_category or None)
    else:
        chosen = [Prompt(f"prompt-{i}", "own", (turn,)) for i, turn in enumerate(prompts)]
    settings = Settings(
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        batch=batch,
        seed=seed,
        template=template,
        long_prompts=long_prompts,
    )
    made = {plain.name: plain, **several}
    asked = {"rule": rule or "", "rule_options": rule_options, "lossless": False}
    rows = {label: {"name": label, **(asked if label in several else {})} for label in made}
    layout = usual_layout(target)
    lineup = Lineup(
        rows,
        temperatures=(temperature,),
        top_k=top_k,
        top_p=top_p,
        layout=layout,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple(named["logit_bias"].items()),
        suppress_tokens=named["suppress_tokens"],
    )
    contenders = enlist(
        lineup,
        target,
        make_drafter=lambda label, _: made[label],
        make_loop=build.make_loop,
        default_rule=build.default_rule,
    )
    measured = measure(contenders, chosen, target, settings)
    first = contenders[0]
    assert isinstance(first, LoopContender)
    teacher = Teacher(first.loop.graph, first.weights.target, precision="float32", chunk=first.loop.chunk)
    found = summarise(measured, settings, teacher, rounding_bound(target.config.dtype, "float32"))
    if show:
        console = Console()
        (console if console.is_terminal else Console(width=120)).print(tables.headline_table(found))
    return found


def _labelled(draftings: Any) -> dict[str, Drafting]:
    """Drafters by label; one has its own name."""
    if isinstance(draftings, Drafting):
        return {draftings.name: draftings}
    if not isinstance(draftings, Mapping):
        raise ValueError(
            f"draftings={draftings!r}; expected what load_drafter returns, or several by label: {{'mine': drafter}}"
        )
    for label, drafting in draftings.items():
        if not isinstance(drafting, Drafting):
            raise ValueError(f"the drafter {label!r} is {drafting!r}; expected what load_drafter returns")
    return dict(draftings)
