"""The contract of a verification rule, as checks that run from anybody's repository."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Draft, Keys, Kind, Rule, Sampling, Scores, Verdict, make_sampling
from specjax.decoding.loop import emitted_block
from specjax.decoding.tree import chain
from specjax.testing import laws
from specjax.testing.laws import MakeDraft
from specjax.testing.subject import MakeRule

ROWS = 16
FAULT_ROWS = 1 << 12  # XLA's maximum on CPUs drops a NaN in arrays of thousands of logits, and in no smaller ones.
FALSE_ALARM = 1e-6
CHAINS: frozenset[Kind] = frozenset({"fixed", "iid"})

# Draft, scores, sampling and keys of one step.
Step = tuple[Draft, Scores, Sampling, Keys]


def check_rule(make_rule: MakeRule, *, draws: int = 1 << 20, chains_only: bool = False) -> dict[str, float]:
    """The whole contract: single steps (see `check_steps`), then the output law, which must be the target's.

    The law is tested for every kind of draft that the rule declares itself exact for, at temperature 1 and warped (then
    through a draft vocabulary too), on drafts with nodes that are invalid; and over several steps, for rules that look
    ahead at uniforms and meet them again. Trees have two levels, with siblings on both.

    Args:
        make_rule: depth to rule.
        draws: of each law.
        chains_only: for a rule that verifies no trees: drawn and chosen chains instead.

    Returns:
        The p-value of each law.

    Raises:
        AssertionError: names what does not hold; for a law, the case that differs (false alarms: one in a million).
        ValueError: no rule comes of `make_rule`, or it declares itself exact for no kind of draft that could be
            tested, or for an unknown one.
    """
    rule = _made(make_rule)
    make_draft: Callable[[Kind], MakeDraft] = laws.chain_draft if chains_only else laws.tree_draft
    kinds = CHAINS if chains_only else rule.exact_for
    if not rule.exact_for & kinds:
        raise ValueError(
            f"{_name(rule)}.exact_for is {sorted(rule.exact_for)}; expected at least one of "
            f"{', '.join(sorted(kinds) or get_args(Kind))}, else nothing is tested"
        )
    tested = sorted(rule.exact_for & kinds)
    for kind in tested:
        check_steps(make_rule, make_draft(kind))
    found = {"several steps": _law_over_steps(rule, "fixed" if tested == ["fixed"] else "iid", draws)}
    for kind in tested:
        drafts = _part_of_it(make_draft(kind))
        for name, rows, made in (("plain", laws.plain, drafts), ("warped", laws.warped, laws.mapped(drafts))):
            tokens, _ = laws.draw_sequences(rule, made, rows, draws=draws)
            found[f"{kind}, {name}"] = laws.p_value(tokens, rows)
            if found[f"{kind}, {name}"] < FALSE_ALARM:
                raise AssertionError(
                    f"{_name(rule)} does not keep the target's law on a {kind!r} draft with {name} sampling: "
                    f"p = {found[f'{kind}, {name}']:.1e} after {draws} draws"
                )
    return found


def check_steps(make_rule: MakeRule, make_draft: MakeDraft) -> None:
    """What holds for every rule, lossy ones too, in a step: see the checks that it calls.

    Args:
        make_rule: depth to rule.
        make_draft: drafts of a kind that the rule takes.

    Raises:
        AssertionError: names what does not hold, and where.
        ValueError: no rule comes of `make_rule`.
    """
    rule = _made(make_rule)
    check_verdicts(rule, make_draft)
    check_strictness(rule, make_draft)
    check_faults(rule, make_draft)
    check_temperature_0(rule, make_draft)
    check_rows(rule, make_draft)
    _, _, sampling, keys = one_step(make_draft)
    nothing = chain(jnp.zeros((ROWS, 0), jnp.int32), laws=None)
    plain = _made(make_rule, 0)
    assert_well_formed(plain, nothing, verify(plain, nothing, laws.score(nothing), sampling, keys))


def check_verdicts(rule: Rule, make_draft: MakeDraft) -> None:
    """Accepted nodes are valid and lie on one path; an invalid node takes its descendants with it.

    Raises:
        AssertionError: see `assert_well_formed`.
    """
    draft, scores, sampling, keys = one_step(make_draft)
    for lost in (draft.num_nodes, 0, draft.num_nodes - 1):  # The first is out of range: none.
        some = dataclasses.replace(draft, valid=draft.valid.at[::2, lost].set(False, mode="drop"))
        assert_well_formed(rule, some, verify(rule, some, scores, sampling, keys))


def check_strictness(rule: Rule, make_draft: MakeDraft) -> None:
    """A token that the target never says is rejected, even where the uniform is 0.

    Uniforms are forced through `Keys.uniform`; of a rule that takes keys and draws for itself, the law alone tells.

    Raises:
        AssertionError: names the row and the token.
    """
    draft, scores, sampling, keys = one_step(make_draft)
    forced = ZeroKeys(keys.request, keys.length)
    verdict = verify(rule, draft, _impossible(draft, scores), sampling, forced)
    drafted = np.where(np.asarray(draft.parents) < 0, np.asarray(draft.tokens), -1)
    for row, (accepted, token) in enumerate(zip(verdict.num_accepted, verdict.next_token, strict=True)):
        if accepted or token in drafted[row]:
            what = drafted[row, verdict.path[row, 0]] if accepted else token
            raise AssertionError(
                f"{_name(rule)} gave out token {what} in row {row}, of which the target's law is 0, at uniform 0: "
                "accept strictly, u < p / q, and draw the next token from what is left"
            )


def check_faults(rule: Rule, make_draft: MakeDraft) -> None:
    """Logits that are no law are named at the root and at accepted nodes, and at no other.

    Raises:
        AssertionError: names row and node.
    """
    draft, scores, sampling, keys = one_step(make_draft, rows=FAULT_ROWS)
    logits = scores.logits.at[0, 0, 0].set(jnp.nan).at[1, 0, 1].set(jnp.inf).at[2, 0].set(-jnp.inf)
    verdict = verify(rule, draft, dataclasses.replace(scores, logits=logits), sampling, keys)
    _assert_faults(rule, verdict, np.where(np.arange(FAULT_ROWS) < 3, 0, -1), "of three with no law at the root")
    # No node is reached, whatever its own logits are.
    logits = _impossible(draft, scores).logits.at[:, 1:].set(jnp.nan)
    verdict = verify(rule, draft, dataclasses.replace(scores, logits=logits), sampling, keys)
    _assert_faults(rule, verdict, np.full(FAULT_ROWS, -1), "where only nodes that cannot be accepted have no law")
    # The first node is all that the target says.
    certain = jnp.where(jnp.arange(laws.VOCAB) == draft.tokens[:, :1], 0.0, -jnp.inf)
    logits = scores.logits.at[:, 0].set(certain).at[:, 1:].set(jnp.nan)
    verdict = verify(rule, draft, dataclasses.replace(scores, logits=logits), sampling, keys)
    first = np.where(verdict.num_accepted > 0, verdict.path[:, 0] + 1, -1)
    _assert_faults(rule, verdict, first, "where all nodes have no law, those accepted too")


def check_temperature_0(rule: Rule, make_draft: MakeDraft) -> None:
    """At temperature 0 a row's tokens are the target's likeliest, whether or not other rows draw theirs.

    Raises:
        AssertionError: names the row.
    """
    text = [int(np.argmax(laws.TARGET[laws.ROOT]))]
    for _ in range(laws.DEPTH):
        text.append(int(np.argmax(laws.TARGET[text[-1]])))
    for temperatures in ([0.0] * ROWS, [0.0, 1.0] * (ROWS // 2)):
        draft, scores, sampling, keys = one_step(make_draft, make_sampling(temperatures))
        verdict = verify(rule, draft, scores, sampling, keys)
        block = np.asarray(emitted_block(draft, verdict))
        for row in np.flatnonzero(np.asarray(temperatures) == 0):
            count = int(verdict.num_accepted[row]) + 1
            if (found := block[row, :count].tolist()) != text[:count]:
                raise AssertionError(
                    f"{_name(rule)} emits {found} in row {row} at temperature 0; expected {text[:count]}"
                )


def check_rows(rule: Rule, make_draft: MakeDraft) -> None:
    """A row's verdict does not depend on its slot in the batch, nor on whether there are others.

    Raises:
        AssertionError: names the row.
    """
    step = one_step(make_draft)
    verdict = verify(rule, *step)
    turned = verify(rule, *jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), step))
    _assert_same(rule, verdict, jax.tree.map(lambda x: np.roll(x, -1, axis=0), turned), range(ROWS), "in another slot")
    for row in range(3):
        alone = verify(rule, *jax.tree.map(lambda x, row=row: x[row : row + 1], step))
        _assert_same(rule, jax.tree.map(lambda x, row=row: x[row : row + 1], verdict), alone, [row], "alone")


def assert_well_formed(rule: Rule, draft: Draft, verdict: Verdict) -> None:
    """One row's path goes from parent to child over valid nodes, and the counts go with it.

    Raises:
        AssertionError: names the row and what is wrong with it.
    """
    valid, parents = np.asarray(draft.valid), np.asarray(draft.parents)
    for row, (path, count) in enumerate(zip(verdict.path, verdict.num_accepted, strict=True)):
        nodes = path[:count].tolist()
        above = [-1, *nodes][: len(nodes)]
        wrong = [n for n, up in zip(nodes, above, strict=True) if n < 0 or not valid[row, n] or parents[row, n] != up]
        if wrong or len(nodes) != count or (path[count:] != -1).any():
            raise AssertionError(
                f"{_name(rule)} accepts {count} nodes along {path.tolist()} in row {row} (parents "
                f"{parents[row].tolist()}, valid {valid[row].tolist()}); expected valid nodes from the root down"
            )
        overlap = verdict.overlap[row][~np.isnan(verdict.overlap[row])]
        if not 0 <= verdict.next_token[row] < laws.VOCAB or not ((overlap >= 0) & (overlap <= 1 + 1e-5)).all():
            raise AssertionError(
                f"{_name(rule)} gives next token {verdict.next_token[row]} and overlaps {overlap.tolist()} in row "
                f"{row}; expected an id in 0..{laws.VOCAB - 1} and overlaps in [0, 1], or NaN where none was reached"
            )
        if verdict.fault[row] != -1:
            raise AssertionError(
                f"{_name(rule)} finds fault {verdict.fault[row]} in row {row}, whose logits are finite"
            )


def one_step(make_draft: MakeDraft, sampling: Sampling | None = None, *, rows: int = ROWS) -> Step:
    """What a rule is given, in a few rows; at temperature 1 by default."""
    sampling, keys = laws.plain(rows) if sampling is None else sampling, laws.step_keys(rows, 0)
    draft = make_draft(keys, sampling)
    return draft, laws.score(draft), sampling, keys


def verify(rule: Rule, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
    """The rule's verdict, compiled, as NumPy arrays.

    Raises:
        ValueError: it is no `Verdict`.
    """
    found = _verify(rule, draft, scores, sampling, keys)
    if not isinstance(found, Verdict):
        raise ValueError(f"{_name(rule)}.verify returned {type(found).__name__}; expected a specjax.decoding.Verdict")
    return jax.tree.map(np.asarray, found)


@flax.struct.dataclass
class ZeroKeys(Keys):
    """All uniforms are 0; draws are as ever."""

    def uniform(self, purpose: int, slot: jax.Array | int) -> jax.Array:
        """See `Keys.uniform`."""
        return jnp.zeros_like(super().uniform(purpose, slot))


@partial(jax.jit, static_argnames=("rule",))
def _verify(rule: Rule, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Any:
    return rule.verify(draft, scores, sampling, keys)


def _made(make_rule: MakeRule, depth: int = laws.DEPTH) -> Rule:
    """The rule, after a look at what the protocol asks of it."""
    if not callable(make_rule):
        raise ValueError(f"make_rule={make_rule!r}; expected a rule's class, or a function from a depth to a rule")
    try:
        rule = make_rule(depth)
        hash(rule)
    except TypeError as error:
        raise ValueError(f"make_rule({depth}) gives no rule ({error}); expected a frozen dataclass") from error
    exact_for = getattr(rule, "exact_for", None)
    if not callable(getattr(rule, "verify", None)) or not isinstance(exact_for, frozenset | set):
        raise ValueError(
            f"make_rule({depth}) gives {rule!r}; expected verify(draft, scores, sampling, keys), and "
            "exact_for, a frozenset of kinds of draft"
        )
    if unknown := sorted(map(str, exact_for - set(get_args(Kind)))):
        raise ValueError(f"{_name(rule)}.exact_for has {unknown[0]!r}; known kinds: {', '.join(get_args(Kind))}")
    return rule


def _name(rule: Rule) -> str:
    return type(rule).__name__


def _impossible(draft: Draft, scores: Scores) -> Scores:
    """The scores of a target that never says what was drafted, wherever it was."""
    rows = jnp.arange(draft.tokens.shape[0])[:, None]
    logits = scores.logits.at[rows, draft.parents + 1, draft.tokens].set(-jnp.inf)
    return dataclasses.replace(scores, logits=logits, argmax=jnp.argmax(logits, -1).astype(jnp.int32))


def _part_of_it(make_draft: MakeDraft) -> MakeDraft:
    """In a third of the rows the second half of the nodes is invalid, in another the first node."""

    def make(keys: Keys, sampling: Sampling) -> Draft:
        draft = make_draft(keys, sampling)
        valid = draft.valid.at[1::3, draft.num_nodes // 2 :].set(False).at[2::3, 0].set(False)
        return dataclasses.replace(draft, valid=valid)

    return make


def _law_over_steps(rule: Rule, kind: Kind, draws: int) -> float:
    found = laws.decodes_p_value(rule, kind, draws=draws)
    if found < FALSE_ALARM:
        raise AssertionError(
            f"{_name(rule)} does not keep the target's law over several steps: p = {found:.1e} after {draws} draws; "
            "does every step take uniforms of its own (request, committed length, purpose, node)?"
        )
    return found


def _assert_faults(rule: Rule, verdict: Verdict, expected_b: np.ndarray, what: str) -> None:
    if (odd := np.flatnonzero(verdict.fault != expected_b)).size:
        row = odd[0]
        raise AssertionError(
            f"{_name(rule)} gives fault {verdict.fault[row]} in row {row}, {what}; expected {expected_b[row]} (0 the "
            "root, i + 1 accepted node i, -1 none)"
        )


def _assert_same(rule: Rule, expected: Verdict, found: Verdict, rows: Any, where: str) -> None:
    for i, row in enumerate(rows):
        a, b = ((v.path[i].tolist(), int(v.next_token[i])) for v in (expected, found))
        if a != b:
            raise AssertionError(
                f"{_name(rule)} decides otherwise on the same row {row} {where}: path and next token {b}, not {a}; "
                "every choice must take its key from the request"
            )
