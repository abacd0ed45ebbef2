"""What takes part in a benchmark: something that completes a request and says how long it took."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import (
    Completion,
    DecodeState,
    Draft,
    Keys,
    Loop,
    Request,
    Segment,
    Weights,
    check_fault,
    read_row,
    request_keys,
    request_sampling,
)
from specjax.decoding import generate as generate_all
from specjax.evaluation.compilations import compilations
from specjax.models import merge
from specjax.parallel import beside, on_mesh_of, to_host

UNTIL_DONE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Info:
    """Who a contender is.

    Attributes:
        label: unique in a run.
        method: drafter's registry name, or a peer's.
        rule: verification rule.
        temperature: 0 for greedy.
        top_k: 0 for all.
        top_p: 1 for all.
        num_nodes: N, draft tokens a pass; 0 for plain decoding.
        topology: `chain`, `static_tree` or `dynamic_tree`.
        draft_passes: draft passes of one step.
        draft_param_bytes: bytes that the drafter adds to the target.
        target_param_bytes: bytes of the target; 0 where they are not known.
        layout: of the weights in memory.
        min_p: 0 for none.
        repetition_penalty: 1 for none; this and what follows as in `Request`.
        presence_penalty: 0 for none.
        frequency_penalty: 0 for none.
        logit_bias: pairs of a token id and what is added to its logit.
        suppress_tokens: ids that are never emitted.
    """

    label: str
    method: str
    rule: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    num_nodes: int = 0
    topology: str = "chain"
    draft_passes: int = 0
    draft_param_bytes: int = 0
    target_param_bytes: int = 0
    layout: str = "plain"
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()

    def request(self, prompt: tuple[int, ...], max_new_tokens: int, index: int) -> Request:
        """A prompt, put with the contender's sampling parameters."""
        return Request(
            prompt,
            max_new_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            id=index,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            suppress_tokens=self.suppress_tokens,
        )

    @property
    def is_baseline(self) -> bool:
        """Whether it is plain decoding by this library, which others are measured against."""
        return self.method == "autoregressive"


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What had to be done before the first measurement.

    Attributes:
        compile_seconds: tracing, lowering, compiling (or reading the compiled program back from its cache).
        programs: names of the compiled functions.
        kv_bytes_target: bytes of the target's cache.
        kv_bytes_draft: bytes of the drafter's state.
    """

    compile_seconds: float = 0.0
    programs: tuple[str, ...] = ()
    kv_bytes_target: int = 0
    kv_bytes_draft: int = 0


@dataclasses.dataclass(frozen=True)
class Timed:
    """A completion and what it cost.

    Attributes:
        completion: tokens and counts.
        prefill_seconds: up to and with the first token; None where it is not timed apart.
        decode_seconds: the rest.
        observed: what the drafter has to say of this answer (its `observed(state)`, where it has one), as JSON has it.
    """

    completion: Completion
    prefill_seconds: float | None
    decode_seconds: float
    observed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BatchTime:
    """What requests took that ran several rows at a time.

    Attributes:
        seconds: of all, prefills and refills included.
        new_tokens: tokens, the prefills' first ones included.
        batch: rows that were asked for.
        segments: stretches of the loop between refills.
    """

    seconds: float
    new_tokens: int
    batch: int
    segments: tuple[Segment, ...]

    @property
    def decode_seconds(self) -> float:
        """Of the loop alone."""
        return sum(s.seconds for s in self.segments)

    @property
    def prefill_seconds(self) -> float:
        """Of the rest: prefills, and what the host does between."""
        return self.seconds - self.decode_seconds

    @property
    def emitted(self) -> int:
        """Tokens of the loop's passes."""
        return sum(s.emitted for s in self.segments)

    @property
    def live_rows(self) -> float:
        """Rows at work, mean over the target passes; NaN without any."""
        passes = sum(s.passes for s in self.segments)
        return sum(s.live * s.passes for s in self.segments) / passes if passes else math.nan

    @property
    def decode_rate(self) -> float:
        """Tokens a second of the loop while every row is at work; NaN where it never was."""
        full = [s for s in self.segments if s.live == self.batch]
        return sum(s.emitted for s in full) / sum(s.seconds for s in full) if full else math.nan

    def __add__(self, other: BatchTime) -> BatchTime:
        """One after the other."""
        segments = self.segments + other.segments
        return BatchTime(self.seconds + other.seconds, self.new_tokens + other.new_tokens, self.batch, segments)


class Contender(Protocol):
    """Completes requests one at a time."""

    @property
    def info(self) -> Info:
        """Who it is."""
        ...

    def prepare(self, request: Request, buffer: int) -> Preparation:
        """Compiles and warms up for requests that fit a token buffer of `buffer`."""
        ...

    def complete(self, request: Request) -> Timed:
        """Completes one request."""
        ...


class LoopContender:
    """A drafter and a rule in the decoding loop."""

    def __init__(self, info: Info, loop: Loop, weights: Weights, *, context: int, vocab: int, seed: int):
        """Nothing is compiled before `prepare`.

        Args:
            info: who it is.
            loop: statics of its program.
            weights: its arrays.
            context: longest sequence of the target.
            vocab: ids below this are valid.
            seed: with a request's id, fixes every random choice.
        """
        self.info = info
        self.loop = loop
        self.weights = weights
        self.context = context
        self.vocab = vocab
        self.seed = seed
        self.buffer = 0  # length of the token buffer; 0 until it is set, by `prepare` for instance
        self._forever = jnp.int32(UNTIL_DONE)
        self._once = jnp.int32(1)

    def prepare(self, request: Request, buffer: int) -> Preparation:
        """Compiles the two programs, prefill and run, by one short completion."""
        self.buffer = buffer
        with compilations() as seen:
            state = self.prefill(request)
            jax.block_until_ready(self.run(state, jnp.int32(2)))
        return Preparation(seen.seconds, tuple(seen.names), *self.kv_bytes(request))

    def kv_bytes(self, request: Request, batch: int = 1) -> tuple[int, int]:
        """Bytes of the target's cache and of the drafter's state; also settles the topology."""
        arguments = self._arguments([request] * batch)
        state = jax.eval_shape(self.loop.prefill, self.weights, *arguments)
        self.info = dataclasses.replace(self.info, topology=topology(self.loop, self.weights, state))
        return _bytes(state.cache), _bytes(state.drafter)

    def complete(self, request: Request) -> Timed:
        """Prefill, then the loop without a transfer; both timed to the last byte of their result."""
        arguments = self._arguments([request])
        start = time.perf_counter()
        state = jax.block_until_ready(self._prefill(arguments))
        prefilled = time.perf_counter()
        state = jax.block_until_ready(self.run(state, self._forever))
        end = time.perf_counter()
        completion = read_row(state, 0)
        check_fault(completion, f"{self.info.label}, request {request.id}")
        observe = getattr(self.loop.drafter, "observed", None)
        observed = observe(state.drafter) if observe else {}
        return Timed(completion, prefilled - start, end - prefilled, observed)

    def complete_all(self, requests: Sequence[Request], batch: int) -> tuple[list[Completion], BatchTime]:
        """Completes all, `batch` rows at a time with slot refill; also how long it took."""
        segments: list[Segment] = []
        start = time.perf_counter()
        done = generate_all(
            self.loop,
            self.weights,
            requests,
            context=self.context,
            vocab=self.vocab,
            seed=self.seed,
            batch=batch,
            buffer=self.buffer or None,
            watch=segments.append,
        )
        seconds = time.perf_counter() - start
        return done, BatchTime(seconds, sum(len(c.tokens) for c in done), batch, tuple(segments))

    def trace(self, request: Request) -> list[tuple[int, bool]]:
        """The completion's tokens, each with whether the draft had it: the same program, one step at a time."""
        state = self.prefill(request)
        tokens = [(t, False) for t in read_row(state, 0).tokens]
        while not to_host(state.done).all():
            before = to_host(state.statistics.accepted)[0]
            state = self.run(state, self._once)
            after = read_row(state, 0)
            accepted = int(np.argmax(after.accepted - before))
            tokens += [(t, i < accepted) for i, t in enumerate(after.tokens[len(tokens) :])]
        return tokens

    def prefill(self, request: Request, batch: int = 1) -> DecodeState:
        """A state of `batch` rows of the same request."""
        return self._prefill(self._arguments([request] * batch))

    def run(self, state: DecodeState, max_steps: jax.Array) -> DecodeState:
        """Runs the loop; a transfer between host and device inside it is an error."""
        max_steps = beside(max_steps, self.weights.target)
        with jax.transfer_guard("disallow"), on_mesh_of(self.weights.target):
            return self.loop.run(self.weights, state, max_steps)

    def _prefill(self, arguments: tuple[Any, ...]) -> DecodeState:
        with on_mesh_of(self.weights.target):
            return self.loop.prefill(self.weights, *arguments)

    def _arguments(self, requests: Sequence[Request]) -> tuple[Any, ...]:
        """The prefill's arguments, on the device."""
        tokens = np.zeros((len(requests), self.buffer), np.int32)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.prompt)] = request.prompt
        lengths = [len(r.prompt) for r in requests]
        limits = [min(len(r.prompt) + r.max_new_tokens, self.context) for r in requests]
        sampling = request_sampling(requests)
        keys = request_keys(self.seed, [r.id for r in requests])
        arguments = (jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), jnp.asarray(limits, jnp.int32))
        return jax.block_until_ready(beside((*arguments, sampling, keys), self.weights.target))


def topology(loop: Loop, weights: Weights, state: DecodeState) -> str:
    """Chain, or what kind of tree the drafter says that it makes (its `topology`, else a static one)."""

    def propose(weights: Weights, state: DecodeState) -> Draft:
        target = merge(loop.graph, weights.target)
        keys = Keys(state.request, state.length)
        return loop.drafter.propose(
            weights.drafter, weights.tables, target, state.cache, state.drafter, state.context, keys
        )[0]

    if jax.eval_shape(propose, weights, state).is_chain:
        return "chain"
    return getattr(loop.drafter, "topology", "static_tree")


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
