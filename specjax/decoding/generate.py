"""From token ids to token ids on the host: buckets, batches, refill of finished rows, streaming."""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.loop import Loop, Weights
from specjax.decoding.sampling import Sampling, make_sampling, request_keys
from specjax.decoding.state import DecodeState, insert_row
from specjax.decoding.termination import FINISH_NAMES, STOP_SEQUENCE, check_stops, stop_array
from specjax.parallel import on_mesh_of, to_host, whole_shares

BUCKET = 128  # Token buffers are whole multiples of this, so that few programs are compiled.
REFILL_STEPS = 1 << 30
MAX_ID = (1 << 32) - 1  # what a key takes in


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: budget, at least 1.
        temperature: 0 for greedy.
        top_k: 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1).
        id: names the request's randomness; results do not depend on where in a batch it runs.
        repetition_penalty: > 0, 1 for none; over prompt and output.
        presence_penalty: 0 for none; over the output alone.
        frequency_penalty: 0 for none; over the output alone.
        logit_bias: what to add to single tokens' logits.
        suppress_tokens: ids that are never emitted.
        stop: sequences of token ids; the text ends with the first that is complete within the output. It ends by
            token ids: a string that other tokens spell too is looked for in the text (`ends` of `generate`).
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    id: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    suppress_tokens: tuple[int, ...] = ()
    stop: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a request got.

    Attributes:
        tokens: emitted ids, the end-of-sequence token or the stop sequence included when there is one.
        finish: `stop` (end of sequence), `stop_sequence`, `length` or `fault`; in this order of precedence where
            several fall on one token, `fault` before all.
        steps: target passes after the prefill.
        emitted: tokens that those passes emitted; `emitted / steps` is tau.
        accepted: `[D + 1]` steps by number of accepted draft tokens that were emitted.
        reached: `[D]` steps whose verification got to each depth, up to where the text ends.
        overlap: `[D]` summed overlap of target and draft law at each depth; over `reached` it is alpha by position.
        prompt_length: tokens of the prompt.
        fault: position (of prompt and output together) whose logits were NaN or infinite; -1 for none.
    """

    tokens: tuple[int, ...]
    finish: str
    steps: int
    emitted: int
    accepted: np.ndarray
    reached: np.ndarray
    overlap: np.ndarray
    prompt_length: int
    fault: int = -1


@dataclasses.dataclass(frozen=True)
class Segment:
    """The loop from one refill to the next.

    Attributes:
        seconds: on the clock, nothing else running.
        passes: target passes.
        live: rows that were not done.
        emitted: tokens, over all rows.
    """

    seconds: float
    passes: int
    live: int
    emitted: int


def check_fault(completion: Completion, what: str) -> None:
    """Raises FloatingPointError, naming the position, where a completion ended in a fault; `what` names the request."""
    if completion.finish == "fault":
        raise FloatingPointError(
            f"{what}: the target's logits are NaN or infinite at position {completion.fault}, behind "
            f"{completion.prompt_length} tokens of prompt and {len(completion.tokens)} of output; check the weights, "
            "and whether their dtype overflows"
        )


def check_requests(requests: Sequence[Request], context: int, vocab: int) -> None:
    """Checks before anything compiles.

    Raises:
        ValueError: no requests, an empty prompt, an id outside the vocabulary, a budget below 1, a request id that is
            no uint32, a prompt that does not fit the context, a bad stop sequence, or no token that is not suppressed.
    """
    if not requests:
        raise ValueError("no prompts were given; expected at least one")
    for i, request in enumerate(requests):
        if not request.prompt:
            raise ValueError(f"prompt {i} is empty; expected at least one token")
        outside = [t for t in request.prompt if not _is_id(t, vocab)]
        if outside:
            raise ValueError(f"prompt {i} holds token {outside[0]!r}; expected whole numbers in 0..{vocab - 1}")
        budget = request.max_new_tokens
        if not isinstance(budget, numbers.Real) or not (1 <= budget < math.inf and budget == int(budget)):
            raise ValueError(f"max_new_tokens={budget!r} for prompt {i}; expected at least 1, a whole number")
        if not _is_id(request.id, MAX_ID + 1):
            raise ValueError(f"id={request.id!r} of prompt {i}; expected a number in 0..{MAX_ID}")
        if len(request.prompt) >= context:
            raise ValueError(
                f"prompt {i} has {len(request.prompt)} tokens, but the model's context is {context}; shorten the prompt"
            )
        for name, ids in (("logit_bias", request.logit_bias), ("suppress_tokens", request.suppress_tokens)):
            if outside := [t for t in ids if not _is_id(t, vocab)]:
                raise ValueError(f"{name} of prompt {i} names token {outside[0]!r}; expected ids in 0..{vocab - 1}")
        if len(set(request.suppress_tokens)) == vocab:
            raise ValueError(f"suppress_tokens of prompt {i} holds the whole vocabulary; leave at least one token")
        check_stops(request.stop, vocab, f"prompt {i}")


def _is_id(token: Any, vocab: int) -> bool:
    return isinstance(token, numbers.Integral) and 0 <= int(token) < vocab


def buffer_length(loop: Loop, requests: Sequence[Request], context: int) -> int:
    """L for these requests: the longest limit plus a whole block, in buckets."""
    return -(-_needed(loop, requests, context) // BUCKET) * BUCKET


def _needed(loop: Loop, requests: Sequence[Request], context: int) -> int:
    longest = max(_limit(r, context) for r in requests) + loop.drafter.depth + 1
    return max(longest, max(-(-len(r.prompt) // loop.chunk) * loop.chunk for r in requests))


@dataclasses.dataclass(frozen=True)
class _Options:
    """What requests ask for, one row each: their sampling and stop sequences in shapes and statics of one program."""

    sampling: Sampling
    stops: jax.Array | None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> _Options:
        sampling = request_sampling(requests)
        stops = stop_array([r.stop for r in requests])
        return cls(sampling, None if stops is None else jnp.asarray(stops))

    def rows(self, chosen: Sequence[int]) -> _Options:
        take = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[list(chosen)]), (self.sampling, self.stops))
        return _Options(*take)


def request_sampling(requests: Sequence[Request]) -> Sampling:
    """The sampling parameters of these requests, one a row, and the statics that suit all of them.

    Raises:
        ValueError: see `make_sampling`.
    """
    return make_sampling(
        [r.temperature for r in requests],
        [r.top_k for r in requests],
        [r.top_p for r in requests],
        [r.min_p for r in requests],
        repetition_penalty=[r.repetition_penalty for r in requests],
        presence_penalty=[r.presence_penalty for r in requests],
        frequency_penalty=[r.frequency_penalty for r in requests],
        logit_bias=[r.logit_bias for r in requests],
        suppress_tokens=[r.suppress_tokens for r in requests],
    )


def prefill(
    loop: Loop,
    weights: Weights,
    requests: Sequence[Request],
    *,
    context: int,
    seed: int | Sequence[int],
    buffer: int | None = None,
) -> DecodeState:
    """Puts requests side by side in one batch and runs their prompts."""
    buffer = buffer or buffer_length(loop, requests, context)
    keys = request_keys(seed, [r.id for r in requests])
    return _prefill(loop, weights, requests, _Options.of(requests), context, keys, buffer)


def _prefill(
    loop: Loop,
    weights: Weights,
    requests: Sequence[Request],
    options: _Options,
    context: int,
    keys: jax.Array,
    buffer: int,
) -> DecodeState:
    if buffer < (needed := _needed(loop, requests, context)):
        raise ValueError(f"buffer={buffer}; these requests need a token buffer of at least {needed}")
    tokens = np.zeros((len(requests), buffer), np.int32)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.prompt)] = request.prompt
    with on_mesh_of(weights.target):
        return loop.prefill(
            weights,
            jnp.asarray(tokens),
            jnp.asarray([len(r.prompt) for r in requests], jnp.int32),
            jnp.asarray([_limit(r, context) for r in requests], jnp.int32),
            options.sampling,
            keys,
            options.stops,
        )


def generate(
    loop: Loop,
    weights: Weights,
    requests: Sequence[Request],
    *,
    context: int,
    vocab: int,
    seed: int | Sequence[int] = 0,
    batch: int = 1,
    buffer: int | None = None,
    ends: Callable[[int, Sequence[int]], int | None] | None = None,
    watch: Callable[[Segment], None] | None = None,
) -> list[Completion]:
    """Completes all requests, `batch` at a time.

    Rows that finish take the next request at once (slot refill); the others go on where they were.

    Args:
        loop: the compiled program's statics.
        weights: parameters.
        requests: what to complete; those that differ in what they use run in one program that has all of it.
        context: longest sequence the target allows.
        vocab: ids below this are valid.
        seed: with each request's id, fixes every random choice; or one a request.
        batch: rows that run together, at least 1; fewer where there are fewer requests, and on a mesh rounded up to
            what its devices divide.
        buffer: token buffer L; what these requests need by default.
        ends: a request's index and its tokens so far to how many of them are its text, once that ends among them. Asked
            on the host after every step, which then waits for it.
        watch: is told of every stretch of the loop, which then waits for the prefills before it.

    Raises:
        ValueError: see `check_requests`; or no row, or a buffer that is too short for a request.
        FloatingPointError: NaN or infinite logits; names request and position.
    """
    check_requests(requests, context, vocab)
    if not isinstance(batch, numbers.Integral) or batch < 1:
        raise ValueError(f"batch={batch!r}; expected a whole number of rows, at least 1")
    buffer = buffer or buffer_length(loop, requests, context)
    done: dict[int, Completion] = {}
    earlier: dict[int, Completion] = {}  # requests whose ends the host looks for, one step ago
    keys = np.asarray(request_keys(seed, [r.id for r in requests]))
    waiting = list(range(len(requests)))
    owners = [waiting.pop(0) for _ in range(min(whole_shares(batch, weights.target), len(waiting)))]
    spare = whole_shares(len(owners), weights.target) - len(owners)  # rows that run along and are not looked at
    # One set of statics and shapes for all, so that a refill keeps the program.
    options = _Options.of(requests)

    def start(chosen: list[int]) -> DecodeState:
        group = [requests[i] for i in chosen]
        return _prefill(loop, weights, group, options.rows(chosen), context, jnp.asarray(keys[chosen]), buffer)

    state = start(owners + owners[-1:] * spare)
    live = dict(enumerate(owners))
    while live:
        finished = to_host(state.done)
        for row, index in list(live.items()):
            if not finished[row] and ends is None:
                continue
            now = read_row(state, row)
            end = None if ends is None else ends(index, now.tokens)
            if end is None and not finished[row]:
                earlier[index] = now
                continue
            done[index] = now if end is None else end_text(earlier.get(index), now, end)
            if not waiting:
                del live[row]
                continue
            live[row] = waiting.pop(0)
            with on_mesh_of(weights.target):
                state = _insert(state, jnp.int32(row), start([live[row]]))
        if live and not any(to_host(state.done)[r] for r in live):
            with on_mesh_of(weights.target):
                state = _run(loop, weights, state, REFILL_STEPS if ends is None else 1, live, watch)
    completions = [done[i] for i in range(len(requests))]
    for i, completion in enumerate(completions):
        check_fault(completion, f"request {i}")
    return completions


def _run(
    loop: Loop,
    weights: Weights,
    state: DecodeState,
    steps: int,
    live: Mapping[int, int],
    watch: Callable[[Segment], None] | None,
) -> DecodeState:
    """Runs until a row is done, at most so many steps."""
    if watch is None:
        return loop.run(weights, state, steps, stop="any_done")
    # Copies: the state is donated.
    before = to_host((state.statistics.steps, state.statistics.emitted))
    jax.block_until_ready(state)
    start = time.perf_counter()
    state = jax.block_until_ready(loop.run(weights, state, steps, stop="any_done"))
    seconds = time.perf_counter() - start
    ran, emitted = (
        after[list(live)] - b[list(live)]
        for after, b in zip(to_host((state.statistics.steps, state.statistics.emitted)), before, strict=True)
    )
    watch(Segment(seconds, max(int(ran.max()), 1), len(live), int(emitted.sum())))
    return state


def stream(
    loop: Loop, weights: Weights, request: Request, *, context: int, vocab: int, seed: int = 0
) -> Iterator[tuple[list[int], int]]:
    """Yields `(new tokens, how many of them were drafted)` after the prefill and after each step.

    Raises:
        ValueError: see `check_requests`.
        FloatingPointError: NaN or infinite logits, once all tokens before them were yielded.
    """
    check_requests([request], context, vocab)
    state = prefill(loop, weights, [request], context=context, seed=seed)
    seen = accepted = 0
    for current in loop.stream(weights, state):
        row = read_row(current, 0)
        # A cut may take the target's own token from the end of a block: then all of it was drafted.
        so_far = int(np.arange(len(row.accepted)) @ row.accepted)
        if len(row.tokens) > seen:
            yield list(row.tokens[seen:]), so_far - accepted
        check_fault(row, "the request")
        seen, accepted = len(row.tokens), so_far


def end_text(before: Completion | None, after: Completion, count: int) -> Completion:
    """A completion whose text ends behind its first `count` tokens, as the loop itself would have cut and counted it.

    Args:
        before: one step earlier; None for right behind the prefill.
        after: behind the step that emitted the last of these tokens.
        count: tokens to keep.
    """
    if before is None:
        zeros = [np.zeros_like(counts) for counts in (after.accepted, after.reached, after.overlap)]
        before = dataclasses.replace(after, steps=0, emitted=0, accepted=zeros[0], reached=zeros[1], overlap=zeros[2])
    emitted = after.emitted - before.emitted - (len(after.tokens) - count)  # of the last step
    accepted, on = before.accepted.copy(), np.arange(len(after.reached)) < emitted
    if emitted > 0:
        accepted[min(int(np.argmax(after.accepted - before.accepted)), emitted)] += 1
    return dataclasses.replace(
        after,
        tokens=after.tokens[:count],
        finish=FINISH_NAMES[STOP_SEQUENCE],
        steps=before.steps + (emitted > 0),
        emitted=before.emitted + max(emitted, 0),
        accepted=accepted,
        reached=np.where(on, after.reached, before.reached),
        overlap=np.where(on, after.overlap, before.overlap),
        fault=-1,
    )


def read_row(state: DecodeState, row: int) -> Completion:
    """One row's completion, copied to the host."""
    # Whole arrays: slicing them on the device would compile a program for every length.
    fields = state.tokens, state.prompt_length, state.length, state.finish, state.fault, state.statistics
    tokens, start, stop, finish, fault, stats = jax.tree.map(lambda x: x[row], to_host(fields))
    return Completion(
        tokens=tuple(tokens[start:stop].tolist()),
        finish=FINISH_NAMES[int(finish)],
        steps=int(stats.steps),
        emitted=int(stats.emitted),
        accepted=stats.accepted,
        reached=stats.reached,
        overlap=stats.overlap,
        prompt_length=int(start),
        fault=int(fault),
    )


_insert = jax.jit(insert_row, donate_argnums=0)


def _limit(request: Request, context: int) -> int:
    return min(len(request.prompt) + int(request.max_new_tokens), context)
