"""What holds for every rule: strict acceptance, named faults, inputs left alone, chains that end early, refusals."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import build
from specjax.decoding import Draft, Scores, make_sampling
from specjax.decoding.tree import chain
from specjax.drafting import Autoregressive, PromptLookup
from specjax.testing import laws
from specjax.testing.laws import chain_draft, plain, step_keys, tree_draft
from specjax.testing.rule_contract import check_steps
from specjax.verification import Block, Recursive, Sequoia, SpecInfer, Speculative, Threshold, Traversal
from specjax.verification.faults import find_fault
from specjax.verification.k_seq import smallest_rho
from specjax.verification.registry import RULES, is_lossy

ROWS = 3
PRESETS = {"speculative": "iid", "specinfer": "iid", "sequoia": "without_replacement"}
SAMPLED = sorted(set(RULES) - {"greedy", *PRESETS})


def make(name: str):
    """The rule, and a draft of a shape that it takes."""
    rule = RULES[name](2)
    keys, sampling = step_keys(ROWS, 0), plain(ROWS)
    draft = (chain_draft if name == "block" else tree_draft)("iid")(keys, sampling)
    return rule, draft, laws.score(draft), sampling, keys


def verify(rule, *arguments):
    return jax.jit(lambda *given: rule.verify(*given))(*arguments)


@pytest.mark.pitfall("tpu-inference rejection_sampler (code)")
@pytest.mark.parametrize("name", SAMPLED)
def test_what_holds_in_every_step(name):
    """Strict acceptance, named faults, valid paths, temperature 0, rows by themselves, plain decoding."""
    rule = partial(Threshold, bar=0.0) if name == "threshold" else RULES[name]
    check_steps(rule, (chain_draft if name == "block" else tree_draft)("iid"))


def test_a_fault_is_looked_for_along_the_accepted_path():
    logits = jnp.zeros((4, 4, 3)).at[0, 3, 1].set(jnp.inf).at[1, 2].set(-jnp.inf).at[2, 1, 0].set(jnp.nan)
    scores = make("recursive")[2].replace(logits=logits)
    path = jnp.asarray([[0, 2], [1, -1], [1, -1], [-1, -1]], jnp.int32)
    assert find_fault(path, scores).tolist() == [3, 2, -1, -1]


@pytest.mark.pitfall("vllm-ascend#2881")
def test_inputs_are_unchanged():
    for name in ("recursive", "traversal", "k_seq", "block"):
        rule, draft, scores, sampling, keys = make(name)
        before = jax.tree.map(np.array, (draft, scores))
        verify(rule, draft, scores, sampling, keys)
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, (draft, scores)))


COIN_P, COIN_Q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
TOKEN_BY_TOKEN = {2: Fraction(10, 9), 3: Fraction(38, 27), 4: Fraction(130, 81)}
JOINTLY = {2: Fraction(11, 9), 3: Fraction(5, 3), 4: Fraction(166, 81)}


@pytest.mark.parametrize(("rule", "expected"), [(Recursive, TOKEN_BY_TOKEN), (Block, JOINTLY), (Traversal, JOINTLY)])
def test_the_coins_of_the_block_verification_paper(rule, expected):
    """Chains of 2, 3 and 4 tokens in one program: rows end theirs early."""
    each = 1 << 16
    n = each * len(expected)
    keys = step_keys(n, 1)
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, (n,)), make_sampling([1.0]))
    tokens = jax.random.categorical(jax.random.key(5), jnp.log(jnp.asarray(COIN_Q)), shape=(n, 4))
    law = jnp.broadcast_to(jnp.log(jnp.asarray(COIN_Q, jnp.float32)), (n, 4, 2))
    gamma = jnp.repeat(jnp.asarray(sorted(expected)), each)
    draft = dataclasses.replace(chain(tokens, laws=law), valid=jnp.arange(4) < gamma[:, None])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(COIN_P, jnp.float32)), (n, 5, 2))
    depths = jnp.broadcast_to(jnp.arange(5), (n, 5))
    verdict = verify(rule(4), draft, Scores(logits, jnp.argmax(logits, -1), depths, {}), sampling, keys)
    accepted = np.asarray(verdict.num_accepted).reshape(-1, each)
    for found, (length, mean) in zip(accepted, sorted(expected.items()), strict=True):
        assert found.max() == length
        assert abs(found.mean() - float(mean)) < 5 * found.std() / np.sqrt(each)
    # alpha is that of the two coins, wherever a rule got to.
    assert np.nanmean(verdict.overlap) == pytest.approx(2 / 3, abs=1e-6)
    assert np.isnan(verdict.overlap[0, 2:]).all()


def test_rho_is_the_smallest_that_is_valid():
    p = jnp.asarray([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3]])
    q = jnp.asarray([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])
    rho = np.asarray(smallest_rho(p, q, jnp.asarray([2, 4, 3])), np.float64)
    assert rho[2] == 1.0  # p = q: all children pass
    for i, k in enumerate((2, 4)):
        for factor, valid in ((1.0, True), (1 - 1e-4, False)):
            beta = np.minimum(q[i], p[i] / (rho[i] * factor)).sum()
            assert (1 - (1 - beta) ** k <= rho[i] * factor * beta + 1e-6) == valid


# ---- Refusals ----

SAMPLING = make_sampling([1.0])


@dataclasses.dataclass(frozen=True)
class Tree(Autoregressive):
    """Statics of a drafter of trees."""

    num_nodes: int = 6
    depth: int = 2
    how: str = "iid"

    def kind(self, sampling):
        return self.how


@pytest.mark.parametrize(
    ("name", "drafter", "sampling", "message"),
    [
        ("block", Tree(), SAMPLING, "rule 'block' verifies chains, not a tree of 6 nodes; use 'traversal'"),
        ("k_seq", Tree(how="without_replacement"), SAMPLING, "'k_seq' is not exact for a 'without_replacement'.*'rec"),
        ("k_seq", PromptLookup(3), SAMPLING, "'k_seq' is not exact for a 'fixed' draft.*use 'one_hot'"),
        ("speculative", Tree(), SAMPLING, "'speculative' verifies chains, not a tree of 6 nodes; use 'recursive'"),
        ("specinfer", Tree(how="without_replacement"), SAMPLING, "not exact for a 'without_replacement'.*'recursive'"),
        ("sequoia", Tree(), SAMPLING, "'sequoia' is not exact for a 'iid' draft at temperature > 0; use 'recursive'"),
        ("sequoia", PromptLookup(3), SAMPLING, "'sequoia' is not exact for a 'fixed' draft.*use 'one_hot'"),
        ("greedy", PromptLookup(3), SAMPLING, "'greedy' is not exact for a 'fixed' draft at temperature > 0"),
        ("typical", PromptLookup(3), SAMPLING, "rule 'typical' is lossy; use 'one_hot', or set lossless=False"),
        ("lenient", Tree(), SAMPLING, "rule 'lenient' is lossy; use 'recursive'"),
        ("threshold", Tree(), make_sampling([0.0]), "rule 'threshold' is lossy; use 'greedy'"),
        ("blok", Tree(), SAMPLING, "unknown rule 'blok'; did you mean 'block'"),
    ],
)
def test_a_misfit_names_the_rule_to_use(name, drafter, sampling, message):
    with pytest.raises(ValueError, match=message):
        build.make_rule(name, drafter, sampling)


def test_lossy_rules_are_asked_for_and_take_options():
    rule = build.make_rule("threshold", Tree(), SAMPLING, lossless=False, options={"bar": 0.5})
    assert rule == Threshold(2, bar=0.5) and is_lossy(rule)
    assert {name for name in RULES if is_lossy(RULES[name](1))} == {"typical", "lenient", "threshold"}
    with pytest.raises(ValueError, match="'threshold' does not take these options .*; it takes bar$"):
        build.make_rule("threshold", Tree(), SAMPLING, lossless=False, options={"epsilon": 0.5})
    for own in ({"exact_for": frozenset({"iid"})}, {"depth": 1}):
        with pytest.raises(ValueError, match=f"rule 'typical' does not take the option '{min(own)}'"):
            build.make_rule("typical", Tree(), SAMPLING, options=own)
    with pytest.raises(ValueError, match="rule=3; expected a name: block, .*, or 'package.module:maker'"):
        build.make_rule(3, Tree(), SAMPLING)
    assert build.make_rule("block", PromptLookup(3), SAMPLING) == Block(3)
    assert build.make_rule("traversal", Tree(how="mixed"), SAMPLING) == Traversal(2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("threshold", {"bar": 1.0}, r"bar=1.0 of rule 'threshold'; expected a number in \[0, 1\)"),
        ("typical", {"epsilon": 0.0}, "epsilon=0.0 of rule 'typical'"),
        ("typical", {"delta": 2.0}, "delta=2.0 of rule 'typical'"),
        ("lenient", {"leniency": 1.0}, "leniency=1.0 of rule 'lenient'.*or rule 'speculative'"),
    ],
)
def test_options_out_of_range(name, options, message):
    with pytest.raises(ValueError, match=message):
        RULES[name](2, **options)


def test_block_refuses_a_tree_when_traced():
    draft: Draft = tree_draft("fixed")(step_keys(ROWS, 0), plain(ROWS))
    with pytest.raises(ValueError, match="not a tree of 6 nodes; use 'traversal'"):
        Block(2).verify(draft, laws.score(draft), plain(ROWS), step_keys(ROWS, 0))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_recursive_rule(name):
    keys, sampling = step_keys(ROWS, 0), plain(ROWS)
    draft = (chain_draft if name == "speculative" else tree_draft)(PRESETS[name])(keys, sampling)
    given = draft, laws.score(draft), sampling, keys
    jax.tree.map(np.testing.assert_array_equal, RULES[name](2).verify(*given), Recursive(2).verify(*given))


@pytest.mark.parametrize(
    ("rule", "kind", "says"),
    [
        (Speculative, "iid", "'speculative' verifies chains, not a tree of 6 nodes; use 'recursive'"),
        (SpecInfer, "without_replacement", "independent siblings, not 'without_replacement'; use 'sequoia'"),
        (Sequoia, "iid", "siblings drawn without replacement, not 'iid'; use 'specinfer'"),
    ],
)
def test_presets_refuse_other_drafts_when_traced(rule, kind, says):
    keys, sampling = step_keys(ROWS, 0), plain(ROWS)
    draft = tree_draft(kind)(keys, sampling)
    with pytest.raises(ValueError, match=says):
        rule(2).verify(draft, laws.score(draft), sampling, keys)
