"""Logits that are no law: they end a row where plain decoding would meet them, and nowhere else."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.api.programs import make_program
from specjax.decoding import (
    Loop,
    Request,
    Stateless,
    Weights,
    generate,
    make_sampling,
    prefill,
    request_sampling,
    stream,
)
from specjax.decoding.tree import chain
from specjax.drafting import Autoregressive
from specjax.models import native
from specjax.testing import tiny_target
from specjax.testing.markov import markov_graph, markov_params
from specjax.testing.sequences import four_token_target
from specjax.verification import Greedy, OneHot

ARGUMENTS = {"context": 64, "vocab": 4}


@dataclasses.dataclass(frozen=True)
class Always(Stateless):
    """Drafts the same tokens at every step."""

    tokens: tuple[int, ...]
    taps: tuple[str, ...] = ()
    num_probes: int = 0

    @property
    def num_nodes(self):
        return len(self.tokens)

    depth = num_nodes

    def kind(self, sampling):
        return "fixed"

    def propose(self, params, tables, target, cache, state, context, keys):
        tokens = jnp.broadcast_to(jnp.asarray(self.tokens, jnp.int32), (context.length.shape[0], len(self.tokens)))
        return chain(tokens, laws=None), state, cache


def loop(graph, drafted: tuple[int, ...], eos=()):
    drafter = Always(drafted) if drafted else Autoregressive()
    return Loop(graph, drafter, Greedy(len(drafted)), eos, chunk=16)


@pytest.fixture(scope="module")
def counting():
    """0, 1, 2, 3, 0, ...; the logits behind token 2 overflow, and its keys and values do not."""
    law = np.full((4, 4), 1e-3) + np.roll(np.eye(4), 1, axis=1)
    params = markov_params(law / law.sum(1, keepdims=True))
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[2, 1].set(3e38)
    return Weights(params, {}, {})


@pytest.mark.parametrize("drafted", [(), (2, 3, 0)])
@pytest.mark.parametrize(
    ("eos", "budget", "stop", "finish"),
    [((2,), 6, (), "stop"), ((), 2, (), "length"), ((), 6, ((2,),), "stop_sequence")],
)
def test_a_text_that_ends_in_front_of_a_fault_is_whole(counting, drafted, eos, budget, stop, finish):
    request = Request((3, 0), budget, stop=stop)
    (found,) = generate(loop(markov_graph(4), drafted, eos), counting, [request], **ARGUMENTS)
    assert (found.tokens, found.finish) == ((1, 2), finish)
    assert found.emitted == 1 and found.steps == 1


@pytest.mark.parametrize("drafted", [(), (2, 3, 0)])
def test_what_is_in_front_of_a_fault_is_streamed(counting, drafted):
    out = []
    with pytest.raises(FloatingPointError, match="at position 3, behind 2 tokens of prompt and 2 of output"):
        for tokens, _ in stream(loop(markov_graph(4), drafted), counting, Request((3, 0), 6), **ARGUMENTS):
            out += tokens
    assert out == [1, 2]


@pytest.mark.parametrize("rule", ["greedy", "one_hot", "recursive", "block", "traversal"])
def test_one_bad_logit_of_many_ends_every_row(rule):
    """It first appears behind the prefill, in arrays of a size at which XLA's maximum on CPUs drops a NaN."""
    target = tiny_target(layers=1, width=16)
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    temperature = 0.0 if rule == "greedy" else 1.0
    requests = [Request((5, 6, 7) * 2, 6, temperature=temperature, id=i) for i in range(8)]
    one, weights = make_program(target, drafting, request_sampling(requests), rule=rule)
    state = prefill(one, weights, requests, context=64, seed=0)
    head = weights.target["lm_head"]["kernel"]
    spoiled = head.at[0, 200].set(jnp.nan) if head.ndim == 3 else head.at[:, 200].set(jnp.nan)
    broken = dataclasses.replace(weights, target={**weights.target, "lm_head": {"kernel": spoiled}})
    state = one.run(broken, state, 1)
    assert (state.fault == 6).all() and (state.length == 7).all()


@pytest.mark.parametrize("kernel", [True, False])
def test_a_drafted_token_that_is_not_accepted_spoils_nothing(kernel, monkeypatch):
    """Its keys and values are NaN; plain decoding never feeds it."""
    if not kernel:
        monkeypatch.setattr(native, "available", lambda: False)
    target = four_token_target()
    spoiled = target.params["embed"]["embedding"].at[3].set(jnp.nan)
    weights = Weights({**target.params, "embed": {"embedding": spoiled}}, {}, {})
    request = Request((0, 1, 2, 1, 0), 12, suppress_tokens=(3,))
    texts = []
    for drafted in ((), (3, 3)):
        one = dataclasses.replace(loop(target.graph, drafted), chunk=16 if kernel else 8)  # programs of its own
        texts += [c.tokens for c in generate(one, weights, [request], **ARGUMENTS)]
    assert texts[0] == texts[1] and len(texts[0]) == 12
    request = Request((0, 1, 3, 1, 0), 12, suppress_tokens=(3,))
    with pytest.raises(FloatingPointError, match="at position 4, behind 5 tokens of prompt and 0 of output"):
        generate(one, weights, [request], **ARGUMENTS)


def test_parameters_beyond_float32_are_refused():
    for name, value in (
        ("presence_penalty", 1e39),
        ("frequency_penalty", -1e39),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{name}={value} in row 0")):
            make_sampling([1.0], **{name: [value]})
    with pytest.raises(ValueError, match=r"temperature=1e\+39 in row 0"):
        make_sampling([1e39])
    with pytest.raises(ValueError, match=r"logit_bias of token 3 is 1e\+39 in row 0"):
        make_sampling([1.0], logit_bias=[{3: 1e39}])


def test_the_first_tokens_logits_are_judged_as_they_are_drawn_from():
    """A bias that overflows with the logits: the prefill says so, and emits no token 0."""
    target = four_token_target()
    loud = jax.tree.map(lambda x: x, target.params)
    loud["lm_head"]["kernel"] = loud["lm_head"]["kernel"] * 1e37
    request = Request((0, 1, 2), 3, temperature=1.0, logit_bias={t: 3.4e38 for t in range(4)})
    one = dataclasses.replace(loop(target.graph, ()), rule=OneHot(0))
    with pytest.raises(FloatingPointError, match="at position 2, behind 3 tokens of prompt and 0 of output"):
        generate(one, Weights(loud, {}, {}), [request], **ARGUMENTS)
