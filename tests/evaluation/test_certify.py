"""Certificates on a model of one's own: the law of the next two tokens, and greedy texts."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from specjax.analysis import certificate, g_test, required_draws
from specjax.decoding import Loop, Request, Weights, generate, log_law, make_sampling
from specjax.drafting import Autoregressive, DraftModel, PromptLookup
from specjax.drafting.registry import Drafting
from specjax.evaluation import certify
from specjax.evaluation.certify import Claim
from specjax.evaluation.next_law import at_edge, make_cells
from specjax.evaluation.teacher import Teacher
from specjax.testing import noisy_draft, tiny_target
from specjax.verification import Greedy, Recursive

PROMPT = tuple(b"abcabcabdabc")
CLAIM = Claim("draft_model", "recursive")


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=1, width=16)


@pytest.fixture(scope="module")
def drafting(target):
    return Drafting("draft_model", DraftModel(target.config, 2), noisy_draft(target, 0.5), {})


def next_tokens(target, drafting, rule, **options):
    loop = Loop(target.graph, drafting.drafter, rule, target.eos_ids)
    weights = Weights(target.params, drafting.params, drafting.tables)
    teacher = Teacher(target.graph, target.params, precision="float32")
    settings = {"bound": 1e-3, "tv": 0.1, "rows": 1024, "draws": 4096} | options
    request = settings.pop("request", Request(PROMPT, 2, temperature=0.4))
    return certify.certify_next_tokens(CLAIM, target, loop, weights, request, teacher, **settings)


@dataclasses.dataclass(frozen=True)
class Eager(Recursive):
    """Takes the first drafted token of every second request, whatever the target says."""

    def verify(self, draft, scores, sampling, keys):
        verdict = super().verify(draft, scores, sampling, keys)
        accepted = draft.valid[:, 0] & (keys.request[:, 1] % 2 == 0)
        path = verdict.path.at[:, 0].set(jax.numpy.where(accepted, 0, verdict.path[:, 0]))
        count = jax.numpy.where(accepted & (verdict.num_accepted == 0), 1, verdict.num_accepted)
        return verdict.replace(path=path, num_accepted=count)


def test_a_lossless_rule_passes_and_a_forced_token_fails(target, drafting):
    row = next_tokens(target, drafting, Recursive(2))
    assert (row.verdict, row.check, row.draws) == ("pass", "next tokens", 4096)
    assert row.power > 0.99 and row.accepted > 0 and 10 < row.cells <= 65
    assert next_tokens(target, drafting, Eager(2)).verdict == "fail"


def test_few_draws_are_no_proof(target, drafting):
    with pytest.raises(ValueError, match="draw .* or more"):
        next_tokens(target, drafting, Recursive(2), draws=1024, tv=0.02)


def test_cells_are_the_likely_tokens_that_expect_draws():
    law = np.array([0.5, 0.005, 0.3, 0.195])
    none = np.zeros(4, bool)
    assert make_cells(law, none, 1000, 2).ids.tolist() == [0, 2]
    assert make_cells(law, none, 1000, 9).ids.tolist() == [0, 2, 3]


def test_tokens_at_the_edge_of_the_support_are_in_the_rest():
    law, edge = np.array([0.6, 0.0, 0.3, 0.1, 0.0]), np.array([False, True, False, True, False])
    cells = make_cells(law, edge, 1000, 9)
    assert cells.ids.tolist() == [0, 2] and np.allclose(cells.sums(law), [0.6, 0.3, 0.1, 0])
    assert cells.sums(np.array([1, 2, 3, 4, 5])).tolist() == [1, 3, 6, 5]
    # The edge's only token has no mass: a draw of it is no fault.
    cells = make_cells(law, np.array([False, True, False, False, False]), 1000, 9)
    assert cells.ids.tolist() == [0, 2] and np.allclose(cells.sums(law), [0.6, 0.3, 0.1, 0])


@pytest.mark.parametrize("warp", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.0999}])
def test_rounding_moves_the_edge_of_every_warp(warp):
    request = Request(PROMPT, 2, temperature=1.0, **warp)
    logits = np.log(np.array([0.6, 0.2401, 0.06, 0.0599, 0.04]))  # cuts: behind the third; at 0.9001; at 0.05994
    assert not at_edge(logits, request, 1e-5).any()
    moved = np.flatnonzero(at_edge(logits, request, 1e-2))
    assert moved.size and set(moved) <= {2, 3}


@pytest.mark.parametrize("warp", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.7}])
def test_no_rounding_moves_a_token_that_is_not_at_the_edge(warp):
    request = Request(PROMPT, 2, temperature=0.7, **warp)
    rng, bound, moved = np.random.default_rng(0), 0.1, 0
    alone = 2 * np.eye(30) - 1  # one token against all others
    for _ in range(10):
        logits = rng.normal(size=30)
        noise = 0.499 * bound * np.concatenate([np.zeros((1, 30)), alone, -alone, rng.uniform(-1, 1, (200, 30))])
        inside = support(logits + noise, request)
        changed, edge = (inside != inside[0]).any(axis=0), at_edge(logits, request, bound)
        assert not (changed & ~edge).any() and edge.sum() <= 8
        moved += changed.sum()
    assert moved


def support(logits_nv, request):
    n = len(logits_nv)
    warps = make_sampling([request.temperature] * n, [request.top_k] * n, [request.top_p] * n, [request.min_p] * n)
    return np.isfinite(np.asarray(log_law(jax.numpy.asarray(logits_nv, jax.numpy.float32), warps)))


def test_merged_mass_counts_against_the_power():
    counts, law = np.array([600, 300, 100]), np.array([0.6, 0.3, 0.1])
    whole, merged = g_test(counts, law, tv=0.2), g_test(counts, law, tv=0.2, merged=0.1)
    assert (merged.merged, merged.pooled_mass) == (0.1, 0) and merged.power == g_test(
        counts, law, tv=0.1
    ).power < whole.power
    with pytest.raises(ValueError, match="state a total variation well above 0.25"):
        certificate("a", "b", "T=1", g_test(counts, law, tv=0.2, merged=0.25))
    enough = required_draws(3, tv=0.1)
    with pytest.raises(ValueError, match=f"draw {enough} or more"):
        certificate("a", "b", "T=1", merged)


def test_a_target_that_faults_is_not_certified(target, drafting):
    broken = jax.tree.map(lambda x: x * jax.numpy.nan, target.params)
    with pytest.raises(FloatingPointError, match="the prompt: the target's logits are NaN"):
        next_tokens(dataclasses.replace(target, params=broken), drafting, Recursive(2))
    # A token whose own embedding is broken: behind it the loop faults.
    loop = Loop(target.graph, drafting.drafter, Recursive(2), ())
    request, shape = Request(PROMPT, 2, temperature=0.4), {"tokens": 2, "draws": 1024, "rows": 1024}
    drawn = certify.continuations(
        target, loop, Weights(target.params, drafting.params, drafting.tables), request, **shape
    ).tokens[:, 0]
    often = next(t for t in np.argsort(-np.bincount(drawn)) if t not in PROMPT)
    assert (drawn == often).any()
    broken = jax.tree.map(jax.numpy.copy, target.params)
    broken["embed"]["embedding"] = broken["embed"]["embedding"].at[often].set(jax.numpy.nan)
    with pytest.raises(FloatingPointError, match="a continuation of the prompt: the logits are NaN or infinite at pos"):
        certify.continuations(target, loop, Weights(broken, drafting.params, drafting.tables), request, **shape)


@pytest.mark.slow
def test_the_law_of_a_target_in_16_bits_is_certified_where_it_is_cut_off(target, drafting):
    rounded = dataclasses.replace(target, params=jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), target.params))
    request = Request(PROMPT, 2, temperature=0.4, top_k=12, top_p=0.95)
    row = next_tokens(rounded, drafting, Recursive(2), request=request, bound=0.02)
    assert row.verdict == "pass" and row.cells > 5
    assert next_tokens(rounded, drafting, Eager(2), request=request, bound=0.02).verdict == "fail"


def test_greedy_texts(target):
    requests = [Request(PROMPT[i:], 12, id=i) for i in range(3)]
    plain = Loop(target.graph, Autoregressive(), Greedy(0), target.eos_ids)
    weights = Weights(target.params, {}, {})
    done = generate(plain, weights, requests, context=target.context, vocab=target.config.vocab_size, batch=3)
    loop = dataclasses.replace(plain, drafter=PromptLookup(2), rule=Greedy(2))
    teacher = Teacher(target.graph, target.params, precision="float32")
    claim = Claim("prompt_lookup", "greedy")
    row = certify.certify_greedy(claim, target, loop, weights, requests, done, teacher, bound=1e-3, batch=3)
    assert (row.verdict, row.check, row.p_value, row.near_ties) == ("pass", "greedy text", None, 0)
    assert row.draws == sum(len(c.tokens) for c in done)
    wrong = dataclasses.replace(done[1], tokens=(*done[1].tokens[:3], 7, *done[1].tokens[4:]))
    done = [done[0], wrong, done[2]]
    row = certify.certify_greedy(claim, target, loop, weights, requests, done, teacher, bound=1e-3, batch=3)
    assert row.verdict == "fail"


def test_the_short_call(target, drafting, tmp_path, capsys):
    import specjax

    path = tmp_path / "mine" / "certificates.json"
    rows = specjax.certify(
        target,
        drafting,
        prompts=["abcabcab", "xyxyxy"],
        contexts=1,
        max_new_tokens=8,
        rows=1024,
        temperature=0.4,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={100: 2.0},
        suppress_tokens=(101, 102),
        path=path,
    )
    assert [(r.check, r.verdict) for r in rows] == [("greedy text", "pass"), ("next tokens", "pass")]
    assert [r.rule for r in rows] == ["greedy", "recursive"]
    # What is tested is the program that `generate` runs.
    layout = "packed" if jax.default_backend() == "cpu" else "plain"
    assert all((r.layout, r.precision) == (layout, "float32") for r in rows)
    assert rows[0].sampling["repetition_penalty"] == 1.2 and rows[1].sampling["suppress_tokens"] == (101, 102)
    written = json.loads(path.read_text())
    assert written["meta"]["schema"] == "specjax.certificates/1" and written["meta"]["config"]["tv"] == 0.1
    assert [row["layout"] for row in written["rows"]] == [layout] * 2 and len(list(path.parent.iterdir())) == 1
    said = capsys.readouterr().out
    assert "draft_model" in said and "next tokens" in said
    with pytest.raises(ValueError, match="temperature=0.0; expected more than 0"):
        specjax.certify(target, drafting, temperature=0.0)
    with pytest.raises(ValueError, match="top_k=1 leaves a single token"):
        specjax.certify(target, drafting, top_k=1)
    with pytest.raises(ValueError, match="contexts=3 of 2 prompts"):
        specjax.certify(target, drafting, prompts=["a", "b"], contexts=3)
    with pytest.raises(ValueError, match="layout='paked'; expected 'plain' or 'packed'"):
        specjax.certify(target, drafting, layout="paked")
    with pytest.raises(ValueError, match="precision='bfloat16'; expected 'float32' or 'default'"):
        specjax.certify(target, drafting, precision="bfloat16")
    with pytest.raises(ValueError, match="rule 'typical' does not take these options"):
        specjax.certify(target, drafting, "typical", rule_options={"bar": 0.5})
    with pytest.raises(ValueError, match="logit_bias of prompt 0 names token 999"):
        specjax.certify(target, drafting, logit_bias={999: 1.0})


def test_a_lossy_rule_is_measured_with_its_options(target, drafting):
    import specjax

    (row,) = specjax.certify(
        target, drafting, "typical", rule_options={"epsilon": 0.3}, prompts=["abcabcab"], rows=1024,
        temperature=0.4, draws=1024, max_new_tokens=1, show=False,
    )[1:]  # fmt: skip
    assert (row.rule, row.rule_options, row.verdict) == ("typical", {"epsilon": 0.3}, "lossy")


def test_greedy_near_ties_are_those_of_the_processed_logits(target):
    """A bias that evens two tokens makes a near-tie of what the raw logits tell apart."""
    request = Request(PROMPT, 1)
    teacher = Teacher(target.graph, target.params, precision="float32")
    logits = teacher.logits(PROMPT, (), 0)
    second, first = (int(t) for t in np.argsort(logits)[-2:])
    gap = float(logits[first] - logits[second])
    assert gap > 0.01
    loop = Loop(target.graph, Autoregressive(), Greedy(0), ())
    arguments = dict(context=target.context, vocab=target.config.vocab_size)
    for bias, verdict, ties in ((gap, "pass", 1), (0.0, "fail", 0)):
        asked = dataclasses.replace(request, logit_bias={second: bias, 0: -1.0})
        (done,) = generate(loop, Weights(target.params, {}, {}), [asked], **arguments)
        other = dataclasses.replace(done, tokens=(second if done.tokens == (first,) else first,))
        row = certify.certify_greedy(
            CLAIM, target, loop, Weights(target.params, {}, {}), [asked], [other], teacher, bound=1e-3
        )
        assert (row.verdict, row.near_ties) == (verdict, ties)
