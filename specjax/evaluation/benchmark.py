"""Measures contenders on prompts: warm, interleaved, prefill and decoding apart.

For every prompt all contenders answer in turn before the next prompt is taken, in an order that rotates: what
disturbs the machine for a while disturbs all of them. The whole is repeated, and medians are taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jax

from specjax.decoding import Completion, Request
from specjax.evaluation.compilations import compilations
from specjax.evaluation.contenders import BatchTime, Contender, Info, LoopContender, Preparation, Timed
from specjax.evaluation.conversations import Asking, Conversation, buffer_for, check_count, fitting
from specjax.evaluation.costs import CostMeter, Costs
from specjax.evaluation.journal import Answer, Answers, Journal
from specjax.evaluation.prompts import Prompt
from specjax.models import Target

# (what is being done, steps done, steps in all)
Progress = Callable[[str, int, int], None]
COST_ROUNDS = 12
# Functions of the loop that may not be compiled while a contender is timed.
PROGRAMS = ("prefill", "_prefill", "run", "step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Asking):
    """How to measure, beside how prompts are put to the model (`Asking`).

    Attributes:
        repeats: timed completions of each prompt by each contender; medians are reported.
        batch: rows that run together. At 1 every prompt is timed on its own; above, all prompts go through
            slot refill and are timed together, repeated with request ids of their own up to a multiple of the batch.
        seed: with a prompt's index, fixes every random choice.
        loop_threshold: prompts whose baseline text has a distinct-bigram ratio below this loop; headline rows are
            given with and without them.
        precision: of matrix products, `float32` or `default`.

    Raises:
        ValueError: a value is out of range.
    """

    repeats: int = 3
    batch: int = 1
    seed: int = 0
    loop_threshold: float = 0.4
    precision: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("repeats", "batch"):
            check_count(name, getattr(self, name))
        if not 0 <= self.loop_threshold <= 1:
            raise ValueError(f"loop_threshold={self.loop_threshold}; expected a ratio in [0, 1]")


@dataclasses.dataclass
class Turn:
    """One answer of one contender.

    Attributes:
        prompt: token ids of the conversation up to here.
        completion: tokens and counts.
        prefill_seconds: of each repeat; empty where answers are not timed one by one, None where prefill is not timed
            apart.
        decode_seconds: likewise, the rest.
        observed: see `Timed`; empty where answers are not timed one by one.
    """

    prompt: tuple[int, ...]
    completion: Completion
    prefill_seconds: list[float | None] = dataclasses.field(default_factory=list)
    decode_seconds: list[float] = dataclasses.field(default_factory=list)
    observed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Measured:
    """Everything that was measured.

    Attributes:
        prompts: in order, without those that were skipped.
        infos: of the contenders, in order.
        preparations: of the contenders.
        turns: answers by (contender, prompt).
        batch_times: of each repeat by contender, over all prompts and what was repeated of them; only above batch 1.
        costs: by contender; peers have none.
        skipped_turns: later turns that no longer fitted the context or the buffer, by contender.
        repeatable: whether every repeat gave the same tokens, by contender.
        skipped_prompts: ids of those beyond the context; always empty with `long_prompts="error"`.
    """

    prompts: tuple[Prompt, ...]
    infos: list[Info]
    preparations: list[Preparation]
    turns: dict[tuple[int, int], list[Turn]]
    batch_times: list[list[BatchTime]]
    costs: list[Costs | None]
    skipped_turns: list[int]
    repeatable: list[bool]
    skipped_prompts: tuple[str, ...] = ()


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    target: Target,
    settings: Settings,
    progress: Progress = lambda what, done, total: None,
    journal: Journal | None = None,
) -> Measured:
    """Prepares every contender, then measures them all.

    Args:
        contenders: with different labels; plain decoding at every temperature among them.
        prompts: at least one.
        target: for its tokenizer and context.
        settings: how.
        progress: is told what is being done.
        journal: of this very run; what it holds is not measured again. At batch 1 alone: above, a pass over all
            prompts is one measurement.

    Raises:
        ValueError: no prompts, equal labels, no baseline, or a prompt that does not fit the context (unless such are
            skipped, and then a category of which none is left).
        RuntimeError: a contender compiled a program while it was timed.
        FloatingPointError: NaN logits.
    """
    _check(contenders, prompts)
    kept, skipped = fitting(target, prompts, settings)
    loops = [c for c in contenders if isinstance(c, LoopContender)]
    margin = max(max(c.loop.drafter.depth + 1, c.loop.chunk) for c in loops)
    run = _Run(contenders, kept, target, settings, margin, progress, journal)
    measured = run.one_by_one() if settings.batch == 1 else run.batched()
    return dataclasses.replace(measured, skipped_prompts=skipped)


def _check(contenders: Sequence[Contender], prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise ValueError("there are no prompts to measure on; expected at least one")
    labels = [c.info.label for c in contenders]
    if len(set(labels)) != len(labels):
        raise ValueError(f"contenders need different labels; got {labels}")
    for c in contenders:
        if not any(b.info.is_baseline and b.info.temperature == c.info.temperature for b in contenders):
            raise ValueError(
                f"{c.info.label!r} has no baseline: add a row of the drafter autoregressive at temperature "
                f"{c.info.temperature}"
            )


class _Run:
    """The state of one measurement."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        prompts: tuple[Prompt, ...],
        target: Target,
        settings: Settings,
        margin: int,
        progress: Progress,
        journal: Journal | None,
    ):
        self.journal = journal
        self.contenders, self.prompts, self.target = contenders, prompts, target
        self.settings, self.margin, self.progress = settings, margin, progress
        self.buffer = buffer_for(target, prompts, settings, margin)
        self.done = 0
        self.total = len(contenders) * (1 + settings.repeats * (len(prompts) if settings.batch == 1 else 1))
        self.turns: dict[tuple[int, int], list[Turn]] = {}
        self.skipped = [0] * len(contenders)
        self.repeatable = [True] * len(contenders)

    def one_by_one(self) -> Measured:
        """Batch 1: each prompt timed on its own."""
        first = self._first_request(0, 0)
        preparations = []
        for c in self.contenders:
            self._tell(f"compiling {c.info.label}")
            preparations.append(c.prepare(first, self.buffer))
            self._step()
        meter = self._meter()
        for repeat in range(self.settings.repeats):
            for p in range(len(self.prompts)):
                if meter is not None and repeat == 0 and p % math.ceil(len(self.prompts) / COST_ROUNDS) == 0:
                    self._tell("timing drafts and target passes")
                    meter.round()
                answers = self.journal.read(repeat, p) if self.journal is not None else None
                if answers is None:
                    answers = self._one_prompt(p, repeat)
                    if self.journal is not None:
                        self.journal.write(repeat, p, answers)
                self._take_in(p, repeat, answers)
        return self._measured(preparations, [[] for _ in self.contenders], meter)

    def batched(self) -> Measured:
        """All prompts through slot refill; the first of the passes compiles and is not timed."""
        loops = [c for c in self.contenders if isinstance(c, LoopContender)]
        if len(loops) != len(self.contenders):
            others = [c.info.label for c in self.contenders if not isinstance(c, LoopContender)]
            raise ValueError(f"{', '.join(others)} can only be measured at batch 1; batch is {self.settings.batch}")
        preparations = []
        for i, c in enumerate(loops):
            self._tell(f"compiling {c.info.label}")
            c.buffer = self.buffer
            with compilations() as seen:
                self._all_prompts(i, c)
            kv = c.kv_bytes(self._first_request(i, 0), self.settings.batch)
            preparations.append(Preparation(seen.seconds, tuple(seen.names), *kv))
            self._step()
        meter = self._meter()
        wall: list[list[BatchTime]] = [[] for _ in loops]
        for repeat in range(self.settings.repeats):
            if meter is not None:
                meter.round()
            for i in self._order(repeat):
                self._tell(loops[i].info.label)
                with compilations() as seen:
                    wall[i].append(self._all_prompts(i, loops[i]))
                _refuse_compilations(loops[i], seen.names)
                self._step()
        return self._measured(preparations, wall, meter)

    def _one_prompt(self, p: int, repeat: int) -> Answers:
        """All contenders answer a prompt's turns, side by side."""
        prompt = self.prompts[p]
        answering = [self._again(i, p) if repeat else self._first_time(i, p) for i in range(len(self.contenders))]
        answers: Answers = [[] for _ in self.contenders]
        for _ in prompt.turns:
            for i in self._order(repeat + p):
                self._tell(f"{prompt.id}: {self.contenders[i].info.label}")
                answers[i] += islice(answering[i], 1)
        return answers

    def _first_time(self, i: int, p: int) -> Iterator[Answer]:
        """Answers turn by turn, as long as the conversation fits."""
        talk = Conversation(self.target, self.prompts[p], p, self.contenders[i].info, self.settings)
        while (request := talk.next_request()) is not None and self._fits(request):
            timed = self._timed(i, request)
            talk.answer(timed.completion)
            yield Answer(request.prompt, timed)

    def _again(self, i: int, p: int) -> Iterator[Answer]:
        """Answers to what was asked the first time."""
        info, budget = self.contenders[i].info, self.settings.max_new_tokens
        for turn in self.turns[i, p]:
            yield Answer(turn.prompt, self._timed(i, info.request(turn.prompt, budget, p)))

    def _take_in(self, p: int, repeat: int, answers: Answers) -> None:
        """Adds what was answered to a prompt to what is known."""
        for i, answered in enumerate(answers):
            if repeat == 0:
                self.turns[i, p] = [Turn(a.prompt, a.timed.completion, observed=a.timed.observed) for a in answered]
                self.skipped[i] += len(self.prompts[p].turns) - len(answered)
            for turn, answer in zip(self.turns[i, p], answered, strict=True):
                self.repeatable[i] &= turn.completion.tokens == answer.timed.completion.tokens
                turn.prefill_seconds.append(answer.timed.prefill_seconds)
                turn.decode_seconds.append(answer.timed.decode_seconds)
            self._step()

    def _timed(self, i: int, request: Request) -> Timed:
        with compilations() as seen:
            timed = self.contenders[i].complete(request)
        _refuse_compilations(self.contenders[i], seen.names)
        return timed

    def _all_prompts(self, i: int, contender: LoopContender) -> BatchTime:
        """One pass over all conversations, turn by turn; fills `turns`, and returns how long it took."""
        first_time = (i, 0) not in self.turns
        talks = {p: Conversation(self.target, x, p, contender.info, self.settings) for p, x in enumerate(self.prompts)}
        total, number, skipped = BatchTime(0.0, 0, self.settings.batch, ()), 0, 0
        while talks:
            wave = {p: r for p, t in talks.items() if (r := t.next_request()) is not None}
            skipped += sum(not self._fits(r) for r in wave.values())
            wave = {p: r for p, r in wave.items() if self._fits(r)}
            if not wave:
                break
            requests = filled(list(wave.values()), self.settings.batch, len(self.prompts))
            done, took = contender.complete_all(requests, self.settings.batch)
            total += took
            talks = {p: talks[p] for p in wave}
            for (p, request), completion in zip(wave.items(), done[: len(wave)], strict=True):
                talks[p].answer(completion)
                if first_time:
                    self.turns.setdefault((i, p), []).append(Turn(request.prompt, completion))
                else:
                    self.repeatable[i] &= self.turns[i, p][number].completion.tokens == completion.tokens
            number += 1
        self.skipped[i] = skipped
        return total

    def _fits(self, request: Request) -> bool:
        full = min(len(request.prompt) + request.max_new_tokens, self.target.context)
        return len(request.prompt) < self.target.context and full + self.margin <= self.buffer

    def _first_request(self, i: int, p: int) -> Request:
        request = Conversation(self.target, self.prompts[p], p, self.contenders[i].info, self.settings).next_request()
        assert request is not None
        return request

    def _meter(self) -> CostMeter | None:
        loops = [c for c in self.contenders if isinstance(c, LoopContender)]
        if all(c.info.is_baseline for c in loops):
            return None
        middle = sorted(range(len(self.prompts)), key=lambda p: len(self._first_request(0, p).prompt))
        request = self._first_request(0, middle[len(middle) // 2])
        self._tell("compiling the passes that are timed apart")
        return CostMeter(loops, request, batch=self.settings.batch)

    def _measured(
        self, preparations: list[Preparation], wall: list[list[BatchTime]], meter: CostMeter | None
    ) -> Measured:
        costs = [
            meter.costs(c) if meter is not None and isinstance(c, LoopContender) else None for c in self.contenders
        ]
        return Measured(
            prompts=self.prompts,
            infos=[c.info for c in self.contenders],
            preparations=preparations,
            turns=self.turns,
            batch_times=wall,
            costs=costs,
            skipped_turns=self.skipped,
            repeatable=self.repeatable,
        )

    def _order(self, offset: int) -> Iterator[int]:
        count = len(self.contenders)
        return ((offset + i) % count for i in range(count))

    def _tell(self, what: str) -> None:
        self.progress(what, self.done, self.total)

    def _step(self) -> None:
        self.done += 1
        self._tell("")


def filled(requests: Sequence[Request], batch: int, ids: int) -> list[Request]:
    """The requests, and as many of them again, in turn, as make a multiple of the batch.

    Args:
        requests: at least one; their ids are below `ids`.
        batch: rows that are to be at work.
        ids: what the ids of each repetition are raised by, so that their draws are others.
    """
    count = -(-len(requests) // batch) * batch
    return [
        dataclasses.replace(requests[k % len(requests)], id=requests[k % len(requests)].id + k // len(requests) * ids)
        for k in range(count)
    ]


def _refuse_compilations(contender: Contender, names: Sequence[str]) -> None:
    loops = [name for name in names if name in PROGRAMS]
    if loops:
        raise RuntimeError(
            f"{contender.info.label} compiled {', '.join(loops)} while it was timed: a shape or a static changed, and "
            f"its time would be that of the compiler (jax {jax.__version__})"
        )


__all__ = ["Measured", "Settings", "Turn", "measure"]
