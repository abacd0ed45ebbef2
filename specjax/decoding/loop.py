"""The one draft-verify loop: a public jitted step, and a `while_loop` over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decoding import tree
from specjax.decoding.draft import Context, Draft, Drafter, Rule, Scores, Verdict
from specjax.decoding.processors import init_history, process
from specjax.decoding.sampling import Keys, Sampling, next_token, no_law
from specjax.decoding.state import DecodeState, init_statistics
from specjax.decoding.termination import FAULT, RUNNING, cut, find_stops
from specjax.decoding.widths import at_width
from specjax.models import Decoder, KVCache, compact, init_cache, merge
from specjax.models.attention import causal_view
from specjax.parallel import on_mesh_of, spread_rows, to_host

StopWhen = Literal["all_done", "any_done"]


@flax.struct.dataclass
class Weights:
    """Everything the loop reads and never writes.

    Attributes:
        target: the target's parameter tree.
        drafter: the drafter's trained parameters.
        tables: the drafter's tables.
    """

    target: Any
    drafter: Any
    tables: Any


@dataclasses.dataclass(frozen=True)
class Loop:
    """The statics of one compiled program; all arrays are arguments.

    Attributes:
        graph: the target's static graph.
        drafter: the drafting method.
        rule: the verification rule.
        eos: end-of-sequence ids.
        chunk: prompt tokens a prefill pass takes.
        precision: matmul precision, `float32` (full) or `default` (the platform's).
    """

    graph: nnx.GraphDef[Decoder]
    drafter: Drafter
    rule: Rule | None
    eos: tuple[int, ...]
    chunk: int = 64
    precision: str = "float32"

    def capacity(self, buffer: int) -> int:
        """Cache slots needed for a token buffer of `buffer`: room for root, nodes and probes behind the last token."""
        return buffer + self.drafter.num_nodes + self.drafter.num_probes + 1

    def prefill(
        self,
        weights: Weights,
        tokens_bl: jax.Array,
        prompt_length_b: jax.Array,
        limit_b: jax.Array,
        sampling: Sampling,
        request_b2: jax.Array,
        stops_bsk: jax.Array | None = None,
    ) -> DecodeState:
        """Runs whole prompts in chunks and emits each row's first token.

        Args:
            weights: parameters.
            tokens_bl: `[B, L]` int32 prompts, left-aligned, in a buffer with room for the output; L is a multiple of
                the chunk.
            prompt_length_b: int32, at least 1.
            limit_b: int32 length at which to stop, larger than the prompt's and at most L - D - 1.
            sampling: per-row parameters.
            request_b2: uint32 key data of each request.
            stops_bsk: int32 stop sequences (see `termination.stop_array`), or None.
        """
        # The rule plays no part in a prefill: loops that differ in it share the program.
        ruleless = dataclasses.replace(self, rule=None)
        return ruleless._prefill(weights, tokens_bl, prompt_length_b, limit_b, sampling, request_b2, stops_bsk)

    @partial(jax.jit, static_argnames=("self",), donate_argnames=("state",))
    def step(self, weights: Weights, state: DecodeState) -> DecodeState:
        """One draft, one target pass, one verdict, one commit. Finished rows stand still."""
        with jax.default_matmul_precision(self.precision):
            return self._step(merge(self.graph, weights.target), weights, state)

    @partial(jax.jit, static_argnames=("self", "stop"), donate_argnames=("state",))
    def run(
        self, weights: Weights, state: DecodeState, max_steps: jax.Array, stop: StopWhen = "all_done"
    ) -> DecodeState:
        """Steps until all rows are done (or any newly is), or `max_steps` were taken, without a host round trip."""
        with jax.default_matmul_precision(self.precision):
            target = merge(self.graph, weights.target)
            already = jnp.sum(state.done)

            def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
                taken, state = carry
                more = ~jnp.all(state.done)
                if stop == "any_done":
                    more &= jnp.sum(state.done) <= already
                return more & (taken < max_steps)

            def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
                return carry[0] + 1, self._step(target, weights, carry[1])

            return jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))[1]

    def stream(self, weights: Weights, state: DecodeState) -> Iterator[DecodeState]:
        """Yields the state after each step until all rows are done; each yielded state is consumed by the next."""
        yield state
        while not to_host(state.done).all():
            with on_mesh_of(weights.target):
                state = self.step(weights, state)
            yield state

    @partial(jax.jit, static_argnames=("self",))
    def _prefill(
        self,
        weights: Weights,
        tokens: jax.Array,
        prompt_length: jax.Array,
        limit: jax.Array,
        sampling: Sampling,
        request: jax.Array,
        stops: jax.Array | None,
    ) -> DecodeState:
        with jax.default_matmul_precision(self.precision):
            target = merge(self.graph, weights.target)
            batch, buffer = tokens.shape
            tokens, prompt_length, limit, sampling, request, stops = spread_rows(
                (tokens, prompt_length, limit, sampling, request, stops)
            )
            cache = spread_rows(init_cache(target.config, batch, self.capacity(buffer)))
            capacity = cache.layers[0].k.shape[1]
            state = spread_rows(self.drafter.init_state(weights.drafter, weights.tables, target, batch, capacity))
            last = jnp.zeros((batch, target.config.hidden_size), target.config.dtype)

            def body(c: jax.Array, carry: tuple[KVCache, Any, jax.Array]) -> tuple[KVCache, Any, jax.Array]:
                cache, state, last = carry
                start = jnp.full((batch,), c * self.chunk, jnp.int32)
                piece = jax.lax.dynamic_slice_in_dim(tokens, c * self.chunk, self.chunk, axis=1)
                view = causal_view(start, self.chunk)
                out, cache = target.cached(piece, cache, view, taps=(*self.drafter.taps, "normed"))
                taps = {tap: out.taps[tap] for tap in self.drafter.taps}
                valid = view.positions < prompt_length[:, None]
                state = self.drafter.extend(
                    weights.drafter, weights.tables, target, state, piece, view.positions, taps, valid
                )
                here = (prompt_length - 1) - start
                picked = jnp.take_along_axis(
                    out.taps["normed"], jnp.clip(here, 0, self.chunk - 1)[:, None, None], axis=1
                )[:, 0]
                inside = (here >= 0) & (here < self.chunk)
                return cache, state, jnp.where(inside[:, None], picked, last)

            chunks = (jnp.max(prompt_length) + self.chunk - 1) // self.chunk
            cache, state, last = jax.lax.fori_loop(0, chunks, body, (cache, state, last))
            logits = target.logits(last)
            history = None
            if sampling.penalties is not None:
                history = init_history(tokens, prompt_length, logits.shape[-1])
            logits = process(logits[:, None], sampling, history)[:, 0]
            fault = no_law(logits)
            first = next_token(logits, sampling, Keys(request, prompt_length), prompt_length)
            stopped = None
            if stops is not None:
                stopped = find_stops(stops, tokens, prompt_length, prompt_length, first[:, None])
            one = jnp.ones_like(prompt_length)
            count, finish = cut(first[:, None], one, limit - prompt_length, self.eos, stopped)
            count = jnp.where(fault, 0, count)
            finish = jnp.where(fault, FAULT, finish)
            tokens = tokens.at[jnp.arange(batch), prompt_length].set(first)
            start_state = DecodeState(
                tokens=tokens,
                length=prompt_length + count,
                prompt_length=prompt_length,
                limit=limit,
                done=finish != RUNNING,
                finish=finish,
                fault=jnp.where(fault, prompt_length - 1, -1),
                request=request,
                sampling=sampling,
                cache=dataclasses.replace(cache, length=prompt_length),
                drafter=state,
                statistics=init_statistics(batch, self.drafter.depth),
                history=None if history is None else history.add(first[:, None], count),
                stops=stops,
            )
            return spread_rows(start_state)

    def _step(self, target: Decoder, weights: Weights, state: DecodeState) -> DecodeState:
        keys = Keys(state.request, state.length)
        draft, drafter_state, cache = self.drafter.propose(
            weights.drafter, weights.tables, target, state.cache, state.drafter, state.context, keys
        )
        draft = draft.within(target.config.vocab_size)
        rule = self.rule
        assert rule is not None, "only a prefill does without a rule"

        def judge(draft: Draft, cache: KVCache) -> tuple[Scores, Verdict, KVCache]:
            scores, cache = score(target, cache, draft, state.context, self.drafter.taps)
            return scores, rule.verify(draft, scores, state.sampling, keys), cache

        scores, verdict, cache = at_width(judge, draft, cache, self.drafter.depth)
        state = dataclasses.replace(state, cache=cache, drafter=drafter_state)
        return spread_rows(self._commit(target, weights, state, draft, scores, verdict))

    def _commit(
        self,
        target: Decoder,
        weights: Weights,
        state: DecodeState,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> DecodeState:
        block = emitted_block(draft, verdict)
        stopped = None
        if state.stops is not None:
            stopped = find_stops(state.stops, state.tokens, state.length, state.prompt_length, block)
        count, ended = cut(block, verdict.num_accepted + 1, state.limit - state.length, self.eos, stopped)
        # The token at place d of a block is chosen by the logits at depth d: those in front of a fault are sound, and
        # where the text ends among them, plain decoding would never have met it.
        fault_depth = _fault_depth(scores, verdict)
        faulty = (fault_depth >= 0) & (fault_depth < count) & ~state.done
        count = jnp.where(state.done, 0, jnp.where(faulty, fault_depth, count))
        length = state.length + count
        finish = jnp.where(state.done, state.finish, jnp.where(faulty, FAULT, ended))
        cache = state.cache if draft.is_chain else compact(state.cache, verdict.path)
        drafter_state = self.drafter.commit(
            weights.drafter, weights.tables, target, state.drafter, state.context, draft, scores, verdict
        )
        return dataclasses.replace(
            state,
            tokens=_write_block(state.tokens, block, state.length, count),
            length=length,
            done=finish != RUNNING,
            finish=finish,
            fault=jnp.where(faulty, state.length - 1 + fault_depth, state.fault),
            cache=dataclasses.replace(cache, length=length - 1),
            drafter=drafter_state,
            statistics=state.statistics.add(verdict, count),
            history=None if state.history is None else state.history.add(block, count),
        )


def check_precision(precision: str) -> None:
    """Raises ValueError for a matmul precision other than `float32` (full) and `default` (the platform's)."""
    if precision not in ("float32", "default"):
        raise ValueError(f"precision={precision!r}; expected 'float32' or 'default'")


def score(
    target: Decoder, cache: KVCache, draft: Draft, context: Context, taps: tuple[int | str, ...]
) -> tuple[Scores, KVCache]:
    """One target pass over root, nodes and probes, written to the cache's scratch slots from `length - 1` on."""
    pieces = [context.last(1), draft.tokens]
    if draft.probes is not None:
        pieces.append(draft.probes.tokens)
    view = tree.draft_view(draft, context.length - 1)
    inputs, start = jnp.concatenate(pieces, axis=1), 0
    if draft.resume is not None:
        if draft.probes is not None:
            raise ValueError("a draft with `resume` cannot carry probes: they did not pass the early layers")
        inputs, start = draft.resume.hidden, draft.resume.layer
    out, cache = target.cached(inputs, cache, view, start=start, taps=(*taps, "normed"))
    # A token sees itself and its ancestors, and these are in front of its own next token; the history has the root.
    drafted, on_path = jnp.concatenate(pieces[1:], axis=1), view.mask[:, :, 1:]
    logits = context.process(target.logits(out.taps["normed"]), drafted, on_path)
    scores = Scores(
        logits=logits[:, : draft.num_nodes + 1],
        argmax=jnp.argmax(logits, -1).astype(jnp.int32),
        depths=view.depths[:, : draft.num_nodes + 1],
        taps={tap: out.taps[tap] for tap in taps},
    )
    return scores, cache


def emitted_block(draft: Draft, verdict: Verdict) -> jax.Array:
    """`[B, D + 1]`: the accepted tokens in order, then the next token; undefined behind it."""
    batch, depth = verdict.path.shape
    if not depth:
        return verdict.next_token[:, None]
    path = jnp.concatenate([verdict.path, jnp.full((batch, 1), -1, jnp.int32)], axis=1)
    drafted = jnp.take_along_axis(draft.tokens, jnp.maximum(path, 0), axis=1)
    return jnp.where(jnp.arange(depth + 1) < verdict.num_accepted[:, None], drafted, verdict.next_token[:, None])


def _write_block(tokens_bl: jax.Array, block_bd: jax.Array, start_b: jax.Array, count_b: jax.Array) -> jax.Array:
    """Puts the first `count` tokens of each row's block at its own start."""
    index = jnp.arange(tokens_bl.shape[1])[None] - start_b[:, None]
    picked = jnp.take_along_axis(block_bd, jnp.clip(index, 0, block_bd.shape[1] - 1), axis=1)
    return jnp.where((index >= 0) & (index < count_b[:, None]), picked, tokens_bl)


def _fault_depth(scores: Scores, verdict: Verdict) -> jax.Array:
    """`[B]` int32 depth of the node whose logits are no law, -1 for none."""
    node = jnp.maximum(verdict.fault, 0)[:, None]
    return jnp.where(verdict.fault < 0, -1, jnp.take_along_axis(scores.depths, node, axis=1)[:, 0])
