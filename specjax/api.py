"""The few calls that most users need; everything else is in the packages."""

from __future__ import annotations

import dataclasses
import difflib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath
from rich.console import Console

from specjax import build, checkpoints, decoding
from specjax.analysis import Certificate
from specjax.build import Drafting
from specjax.checkpoints import drafters
from specjax.decoding import Completion, Request, StopText, cut_text, make_sampling, request_sampling
from specjax.evaluation import tables
from specjax.evaluation.benchmark import Settings, measure
from specjax.evaluation.certify import Subject, certify_model
from specjax.evaluation.certify import table as certificate_table
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.conversations import Message, as_messages, encode, stop_tokens
from specjax.evaluation.lineup import Lineup, enlist
from specjax.evaluation.prompts import Prompt, load_prompts
from specjax.evaluation.rows import summarise
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target, pack
from specjax.verification.registry import is_lossy

_PACKED: weakref.WeakKeyDictionary[Target | Drafting, Any] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Result:
    """One completed prompt.

    Attributes:
        text: the answer, without the end-of-sequence token, up to the first stop string.
        completion: tokens and counts of what the loop emitted. Where a stop string was spelt by other tokens than
            its own, tokens follow that are not in the text.
        finish: why the text ends: `stop` (end of sequence), `stop_sequence` or `length`.
    """

    text: str
    completion: Completion
    finish: str

    @property
    def tau(self) -> float:
        """Tokens per target pass, bonus included; NaN when the prefill's token ended the text."""
        c = self.completion
        return c.emitted / c.steps if c.steps else float("nan")


def load_target(source: str | Path, *, dtype: str = "float32", cache_dir: str | Path | None = None) -> Target:
    """Loads a model: see `specjax.checkpoints.load_target`."""
    return checkpoints.load_target(source, dtype=dtype, cache_dir=cache_dir)


def load_drafter(name: str, target: Target, **options: Any) -> Drafting:
    """A drafting method by registry name (`prompt_lookup`), or a trained drafter by zoo name, path or run directory.

    Args:
        name: what to load.
        target: what it drafts for.
        **options: of the method, `num_nodes` for instance.

    Raises:
        ValueError: no such method, zoo entry or directory, or options that do not fit.
    """
    if name in build.DRAFTERS or ":" in name:
        return build.make_drafter(name, target, **options)
    method = drafters.saved_method(name)
    if method is None:
        zoo = drafters.zoo_entries()
        close = difflib.get_close_matches(name, [*build.DRAFTERS, *zoo])
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown drafter {name!r}; {hint}methods: {', '.join(sorted(build.DRAFTERS))}; in the zoo: "
            f"{', '.join(zoo)}; or the directory of a saved drafter or training run, or 'package.module:maker'"
        )
    return build.make_drafter(method, target, source=name, **options)


def generate(
    target: Target,
    drafting: Drafting,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    suppress_tokens: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    seed: int = 0,
    rule: str | None = None,
    batch: int = 1,
) -> Any:
    """Answers one prompt (a `Result`) or several (a list of them), through the chat template.

    Args:
        target: the model whose law the output has.
        drafting: how to draft.
        prompts: user turns.
        max_new_tokens: budget of each.
        temperature: 0 for greedy.
        top_k: 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1).
        repetition_penalty: > 0, 1 for none; over prompt and answer, as Hugging Face has it.
        presence_penalty: 0 for none; over the answer alone, as OpenAI and vLLM have it.
        frequency_penalty: 0 for none; likewise, for each time that a token was emitted.
        logit_bias: what to add to the logits of token ids.
        suppress_tokens: ids that are never emitted.
        stop: strings that end the answer and are no part of it. Decoding stops where their usual tokens complete one;
            the text is searched as well, since other tokens may spell the same.
        seed: with the prompt's index, fixes every random choice.
        rule: verification rule; the exact one that fits best by default.
        batch: prompts that run together.
    """
    several = _several(prompts)
    stops = _stop_strings(stop)
    options: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(logit_bias or {}),
        suppress_tokens=tuple(suppress_tokens),
        stop=stop_tokens(target, stops),
    )
    requests = [Request(_encode(target, p), id=i, **options) for i, p in enumerate(several)]
    loop, weights = _loop(target, drafting, requests, rule)
    done = decoding.generate(
        loop, weights, requests, context=target.context, vocab=target.config.vocab_size, seed=seed, batch=batch
    )
    results = [_result(target, c, stops) for c in done]
    return results[0] if isinstance(prompts, str) else results


def stream(
    target: Target,
    drafting: Drafting,
    prompt: str | Sequence[Message],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    suppress_tokens: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    seed: int = 0,
    rule: str | None = None,
) -> Iterator[tuple[str, bool]]:
    """Yields `(piece of text, whether it was drafted)` as steps are taken, over the same compiled step.

    Arguments are those of `generate`. Text that may begin a stop string is held back until it is decided.
    """
    stops = _stop_strings(stop)
    request = Request(
        _encode(target, prompt),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(logit_bias or {}),
        suppress_tokens=tuple(suppress_tokens),
        stop=stop_tokens(target, stops),
    )
    loop, weights = _loop(target, drafting, [request], rule)
    decoder, watch = target.tokenizer.stream(), StopText(stops)
    steps = decoding.stream(loop, weights, request, context=target.context, vocab=target.config.vocab_size, seed=seed)
    try:
        for tokens, drafted in steps:
            for i, token in enumerate(tokens):
                if token not in target.eos_ids:
                    yield watch.push(decoder.push(token)), i < drafted
                if watch.found:
                    return
    except FloatingPointError:  # What was held back stands before the fault.
        yield watch.push(decoder.finish()) + watch.finish(), False
        raise
    yield watch.push(decoder.finish()) + watch.finish(), False


def certify(
    target: Target,
    drafting: Drafting,
    rule: str | None = None,
    *,
    prompts: str | Sequence[str] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    contexts: int | None = None,
    max_new_tokens: int = 32,
    tv: float = 0.1,
    draws: int = 0,
    rows: int = 64,
    seed: int = 0,
    show: bool = True,
) -> list[Certificate]:
    """Tests on your own models that decoding with a drafter keeps the target's law; prints and returns certificates.

    One row says whether greedy texts equal plain decoding's, near-ties apart. Then, for each of the first prompts, the
    next two tokens are drawn many times over, each time as another request, and held against the law that the target
    states: the 32 likeliest tokens and the rest, and behind the likeliest the same again. A row that passes has power
    0.99 to see a deviation of `tv`; halving it takes four times the draws.

    Args:
        target: the model.
        drafting: from `load_drafter`.
        rule: verification rule above temperature 0; the exact one that fits best by default. A lossy one is measured.
        prompts: user turns; some of those that ship by default.
        temperature: above 0; greedy texts are certified beside it.
        top_k: 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1).
        contexts: prompts whose next-token law is tested; the first two by default.
        max_new_tokens: length of the greedy texts.
        tv: total variation that a test has power against.
        draws: a context; 0 for as many as that takes.
        rows: draws that run together.
        seed: of all draws.
        show: whether to print the table.

    Raises:
        ValueError: a rule that does not fit the drafter, temperature 0 or top-k 1, or draws too few for a verdict.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}; expected more than 0: greedy texts are certified beside it")
    if top_k == 1:
        raise ValueError("top_k=1 leaves a single token and no law to test; expected 0 (all tokens) or more than 1")
    if not 0 < tv <= 1 or draws < 0 or rows < 1:
        raise ValueError(f"tv={tv}, draws={draws}, rows={rows}; expected tv in (0, 1], draws >= 0 and rows >= 1")
    several = _several(prompts)
    several = several or [p.turns[0] for p in load_prompts("shipped", 1)]
    contexts = min(2, len(several)) if contexts is None else contexts
    if not 0 <= contexts <= len(several):
        raise ValueError(f"contexts={contexts} of {len(several)} prompts; expected 0 to {len(several)}")
    ids = [_encode(target, prompt) for prompt in several]
    texts = [Request(prompt, max_new_tokens, id=i) for i, prompt in enumerate(ids)]
    warps = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampled = [Request(prompt, 2, id=i, **warps) for i, prompt in enumerate(ids[:contexts])]  # type: ignore[arg-type]
    greedy, warped = make_sampling([0.0]), make_sampling([temperature], [top_k], [top_p], [min_p])
    plain, name = build.make_drafter("autoregressive", target), rule or build.default_rule(drafting.drafter, warped)
    subject = Subject(
        drafter=drafting.name,
        target=target,
        plain=build.make_loop(target, plain, greedy),
        greedy=(build.default_rule(drafting.drafter, greedy), *build.make_loop(target, drafting, greedy)),
        sampled=(name, *build.make_loop(target, drafting, warped, rule=name, lossless=False)),
        lossless=not is_lossy(build.make_rule(name, drafting.drafter, warped, lossless=False)),
    )
    bound = rounding_bound(target.config.dtype, "float32")
    found = list(certify_model(subject, texts, sampled, bound=bound, tv=tv, draws=draws or None, rows=rows, seed=seed))
    if show:
        console = Console()
        (console if console.is_terminal else Console(width=120)).print(certificate_table(found))
    return found


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
    rule: str | None = None,
    batch: int = 1,
    repeats: int = 2,
    seed: int = 0,
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
        rule: verification rule; the exact one that fits best by default. A lossy one is measured, and named so.
        batch: prompts that run together.
        repeats: timed answers to each prompt; medians count.
        seed: with a prompt's index, fixes every random choice.
        show: whether to print the table.

    Returns:
        Rows as in a run's results.json, by label and category: `all`, `all_without_loops`, and the prompts' own.

    Raises:
        ValueError: a label twice or taken, a value out of range, unknown prompts, or a prompt beyond the context.
    """
    several = {draftings.name: draftings} if isinstance(draftings, Drafting) else dict(draftings)
    plain = build.make_drafter("autoregressive", target)
    if not several or plain.name in several:
        raise ValueError(f"drafters {list(several)}; expected at least one, and none labelled {plain.name!r}")
    if isinstance(prompts, str):
        asked: Sequence[Prompt] = load_prompts(prompts, prompts_per_category or None)
    else:
        asked = [Prompt(f"prompt-{i}", "own", (turn,)) for i, turn in enumerate(prompts)]
    settings = Settings(max_new_tokens=max_new_tokens, repeats=repeats, batch=batch, seed=seed)
    made = {plain.name: plain, **several}
    rows = {
        label: {"name": label, "rule": (rule or "") if label in several else "", "lossless": False} for label in made
    }
    layout = "packed" if jax.default_backend() == "cpu" else "plain"
    lineup = Lineup(rows, temperatures=(temperature,), top_k=top_k, top_p=top_p, layout=layout, seed=seed)
    contenders = enlist(
        lineup,
        target,
        make_drafter=lambda label, _: made[label],
        make_loop=build.make_loop,
        default_rule=build.default_rule,
    )
    measured = measure(contenders, asked, target, settings)
    first = contenders[0]
    assert isinstance(first, LoopContender)
    teacher = Teacher(first.loop.graph, first.weights.target, precision="float32", chunk=first.loop.chunk)
    found = summarise(measured, settings, teacher, rounding_bound(target.config.dtype, "float32"))
    if show:
        console = Console()
        (console if console.is_terminal else Console(width=120)).print(tables.headline_table(found))
    return found


def train(
    config: Any,
    workdir: str | Path | epath.Path,
    *,
    data: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> Drafting:
    """Trains a drafter as `experiments.train` does, from the newest checkpoint of the run directory where there is one.

    Args:
        config: from `load_config`, or the path of its file, `configs/distill.py:smollm2` for instance.
        workdir: run directory; the best checkpoint becomes a drafter in `drafter/` within it.
        data: directory that the config's text is relative to.
        overrides: of a config given by path, as in `load_config`.
        report: called with step and metrics at every logged step and evaluation.

    Returns:
        The trained drafter, with the options that its method has by default.

    Raises:
        FileNotFoundError: config, text or store is missing.
        ValueError: an option is unknown or out of range, or the directory belongs to another config, target,
            tokenizer or data.
        FloatingPointError: a loss or gradient is not finite.
    """
    if isinstance(config, str | Path):
        config = build.load_config(config, overrides=overrides)
    elif overrides:
        raise ValueError("overrides are for a config given by its path; change the loaded one itself")
    target = build.target_from_config(config.target)
    trainer = build.build_training(config, target, Path(data))
    source = config.get("init_from", "")
    start = build.params_of(source, target) if source else None
    trainer.run(epath.Path(workdir), config.to_dict(), init=start, report=report)
    build.export_drafter(config, target, trainer, epath.Path(workdir))
    return load_drafter(str(workdir), target)


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    decoding.check_stop_strings(stops)
    return tuple(stops)


def _several(prompts: str | Sequence[str]) -> list[str]:
    """The prompts as a list; what each of them is, `_encode` looks at."""
    if not isinstance(prompts, str | Sequence):
        raise ValueError(f"prompts={prompts!r}; expected a text, or a list of them")
    return [prompts] if isinstance(prompts, str) else list(prompts)


def _encode(target: Target, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """A user's turn (or a list of messages) through the chat template; plain text where the model has none."""
    if not isinstance(target, Target):
        raise ValueError(f"the target is {target!r}; expected what load_target returns")
    return encode(target, as_messages(prompt))


def _loop(
    target: Target, drafting: Drafting, requests: Sequence[Request], rule: str | None
) -> tuple[decoding.Loop, decoding.Weights]:
    if not isinstance(drafting, Drafting):
        raise ValueError(f"the drafter is {drafting!r}; expected what load_drafter returns")
    decoding.check_requests(requests, target.context, target.config.vocab_size)
    loop, weights = build.make_loop(target, drafting, request_sampling(requests), rule=rule)
    if jax.default_backend() != "cpu":
        return loop, weights
    return loop, dataclasses.replace(weights, target=_packed(target), drafter=_packed(drafting))


def _packed(owner: Target | Drafting) -> Any:
    """Parameters laid out for a few rows on a CPU, once for each loaded model."""
    if owner not in _PACKED:
        _PACKED[owner] = pack(owner.params)
    return _PACKED[owner]


def _result(target: Target, completion: Completion, stops: Sequence[str]) -> Result:
    text = target.tokenizer.decode([t for t in completion.tokens if t not in target.eos_ids])
    text, found = cut_text(text, stops)
    return Result(text, completion, "stop_sequence" if found else completion.finish)
