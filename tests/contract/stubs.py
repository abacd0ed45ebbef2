"""Drafters of every shape the contract must carry, each as small as it can be while exercising its part of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Draft, Probes, Resume, log_law
from specjax.decoding.loop import emitted_block
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import chain
from specjax.drafting import Autoregressive, PromptLookup
from specjax.models import causal_view


@flax.struct.dataclass
class Pending:
    tokens: jax.Array  # [B, D + 1] what the last step committed
    features: jax.Array  # [B, D + 1, d] the tap at the position before each
    count: jax.Array  # [B]


@dataclasses.dataclass(frozen=True)
class FeatureTree(Autoregressive):
    """EAGLE's shape: a tree that differs by row, built from taps that arrive with the verdict.

    The first level holds the two likeliest tokens under a head on the last feature; the second level's two nodes go
    under whichever parent scored higher in this row, so the topology depends on the data.
    """

    taps: tuple = ("normed",)
    num_nodes: int = 4
    depth: int = 2

    def init_params(self, key, target):
        width, vocab = target.config.hidden_size, target.config.vocab_size
        a, b = jax.random.split(key)
        return {"head": jax.random.normal(a, (width, vocab)), "next": jax.random.normal(b, (vocab, vocab))}, {}

    def init_state(self, params, tables, target, batch, capacity):
        width, wide = target.config.hidden_size, self.depth + 1
        return Pending(
            jnp.zeros((batch, wide), jnp.int32), jnp.zeros((batch, wide, width)), jnp.ones((batch,), jnp.int32)
        )

    def extend(self, params, tables, target, state, tokens, positions, taps, valid):
        last = jnp.maximum(valid.sum(1) - 1, 0)
        picked = jnp.take_along_axis(taps["normed"], last[:, None, None], axis=1)[:, 0]
        keep = valid.any(1)[:, None]
        return state.replace(features=state.features.at[:, 0].set(jnp.where(keep, picked, state.features[:, 0])))

    def propose(self, params, tables, target, cache, state, context, keys):
        rows = jnp.arange(context.tokens.shape[0])
        feature = state.features[rows, state.count - 1]
        logits = feature @ params["head"] + params["next"][context.last(1)[:, 0]]
        score, top = jax.lax.top_k(logits, 2)
        rich = jnp.argmax(score + 0.3 * jnp.cos(top.astype(jnp.float32)), -1).astype(jnp.int32)
        _, below = jax.lax.top_k(params["next"][top[rows, rich]], 2)
        tokens = jnp.concatenate([top, below], axis=1).astype(jnp.int32)
        root = jnp.full_like(rich, -1)
        draft = Draft(
            tokens=tokens,
            parents=jnp.stack([root, root, rich, rich], axis=1),
            valid=jnp.ones(tokens.shape, bool),
            law=jnp.full(tokens.shape, -1, jnp.int32),
            laws=jnp.zeros((tokens.shape[0], 0, 1)),
        )
        return draft, state, cache

    def commit(self, params, tables, target, state, context, draft, scores, verdict):
        index = jnp.concatenate([jnp.zeros_like(verdict.path[:, :1]), verdict.path + 1], axis=1)
        features = jnp.take_along_axis(scores.taps["normed"], jnp.maximum(index, 0)[..., None], axis=1)
        return Pending(emitted_block(draft, verdict), features, verdict.num_accepted + 1)


@dataclasses.dataclass(frozen=True)
class EarlyExit(Autoregressive):
    """Layers below `layer` draft a chain into the target's own cache; verification resumes at `layer`."""

    layer: int = 1
    num_nodes: int = 3
    depth: int = 3

    def kind(self, sampling):
        return "fixed" if sampling.greedy else "iid"

    def propose(self, params, tables, target, cache, state, context, keys):
        token, hidden, tokens, laws = context.last(1)[:, 0], [], [], []
        for i in range(self.num_nodes + 1):  # the last drafted token too: verification needs its hidden state
            view = causal_view(context.length - 1, 1, earlier=i)
            out, cache = target.cached(token[:, None], cache, view, stop=self.layer)
            hidden.append(out.hidden)
            if i == self.num_nodes:
                break
            logits = target.logits(target.final_norm(out.hidden[:, 0]))
            if context.sampling.greedy:
                token = jnp.argmax(logits, -1).astype(jnp.int32)
            else:
                laws.append(log_law(logits, context.sampling))
                token = keys.sample(DRAFT, i, laws[-1])
            tokens.append(token)
        draft = chain(jnp.stack(tokens, 1), laws=jnp.stack(laws, 1) if laws else None)
        return draft.replace(resume=Resume(jnp.concatenate(hidden, 1), self.layer)), state, cache


@flax.struct.dataclass
class Window:
    tokens: jax.Array  # [B, W]


@dataclasses.dataclass(frozen=True)
class JacobiWindow(Autoregressive):
    """Lookahead's shape: probes refine a window in the same pass that verifies a chain taken from it."""

    num_nodes: int = 2
    num_probes: int = 4
    depth: int = 2

    def init_state(self, params, tables, target, batch, capacity):
        return Window(jnp.zeros((batch, self.num_probes), jnp.int32))

    def propose(self, params, tables, target, cache, state, context, keys):
        batch = state.tokens.shape[0]
        draft = chain(state.tokens[:, : self.num_nodes], laws=None)
        index = jnp.arange(self.num_probes, dtype=jnp.int32) + self.num_nodes
        parents = jnp.broadcast_to(jnp.where(index == self.num_nodes, -1, index - 1), (batch, self.num_probes))
        return draft.replace(probes=Probes(state.tokens, parents)), state, cache

    def commit(self, params, tables, target, state, context, draft, scores, verdict):
        root, window = scores.argmax[:, :1], scores.argmax[:, self.num_nodes + 1 :]
        guess = jnp.concatenate([root, window], axis=1)  # the target's guess at positions length, length + 1, ...
        slots = jnp.minimum(verdict.num_accepted[:, None] + 1 + jnp.arange(self.num_probes), self.num_probes)
        return Window(jnp.take_along_axis(guess, slots, axis=1))


@dataclasses.dataclass(frozen=True)
class MixedEnsemble(Autoregressive):
    """Under the root, two draws from one law and one fixed choice; under the first draw, one more draw."""

    num_nodes: int = 4
    depth: int = 2

    def kind(self, sampling):
        return "fixed" if sampling.greedy else "mixed"

    def init_params(self, key, target):
        vocab = target.config.vocab_size
        return {"next": 2 * jax.random.normal(key, (vocab, vocab))}, {}

    def propose(self, params, tables, target, cache, state, context, keys):
        last = context.last(1)[:, 0]
        logits = params["next"][last]
        fixed, found = PromptLookup(1).propose({}, {}, target, cache, {}, context, keys)[0], None
        found = fixed.valid[:, 0]
        if context.sampling.greedy:
            _, top = jax.lax.top_k(logits, 2)
            first, second = top[:, 0], top[:, 1]
            below, law, laws = jnp.argmax(params["next"][first], -1), [-1, -1, -1, -1], jnp.zeros((len(last), 0, 1))
        else:
            q = log_law(logits, context.sampling)
            first, second = keys.sample(DRAFT, 0, q), keys.sample(DRAFT, 1, q)
            q_below = log_law(params["next"][first], context.sampling)
            below = keys.sample(DRAFT, 3, q_below)
            law, laws = [0, 0, -1, 1], jnp.stack([q, q_below], axis=1)
        tokens = jnp.stack([first, second, fixed.tokens[:, 0], below], axis=1).astype(jnp.int32)
        always = jnp.ones_like(found)
        return (
            Draft(
                tokens=tokens,
                parents=jnp.broadcast_to(jnp.asarray([-1, -1, -1, 0], jnp.int32), tokens.shape),
                valid=jnp.stack([always, always, found, always], axis=1),
                law=jnp.broadcast_to(jnp.asarray(law, jnp.int32), tokens.shape),
                laws=laws,
            ),
            state,
            cache,
        )


STUBS: dict[str, Any] = {
    "feature_tree": FeatureTree(),
    "early_exit": EarlyExit(),
    "jacobi_window": JacobiWindow(),
    "mixed_ensemble": MixedEnsemble(),
}
