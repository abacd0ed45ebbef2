"""Suffix decoding, Token Recycling, retrieval: the contract, the law, and lookups by hand."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting import text_store
from specjax.drafting.prefix_tree import prefix_tree
from specjax.drafting.recycling import Recycling, likeliest_tree, top_tokens
from specjax.drafting.retrieval import Retrieval, longest_match, store_tables
from specjax.drafting.suffix import Suffix, follow_votes, match_lengths
from specjax.drafting.suffix_tree import SuffixTree
from specjax.testing import contract, tiny_target
from specjax.verification import Recursive
from tests.drafting import common


def small_store(seed: int = 0, vocab: int = common.VOCAB, size: int = 400) -> text_store.TextStore:
    """Runs of the looping prompts between random tokens, with separators."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, size).astype(np.int32)
    tokens[size // 4 : size // 2] = np.arange(size // 2 - size // 4) % min(vocab, 5)
    tokens[[size // 8, size // 2, size - 1]] = text_store.SEPARATOR
    return text_store.TextStore(tokens, text_store.suffix_array(tokens), "by hand")


DRAFTERS = {
    "suffix": (Suffix(num_nodes=4), None),
    "suffix_tree": (SuffixTree(num_nodes=5, depth=3, max_match=4, candidates=6, factor=2.0), None),
    "recycling": (Recycling(num_nodes=6, candidates=3), None),
    "retrieval": (Retrieval(num_nodes=6, depth=3, candidates=4, max_match=4), store_tables(small_store())),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_contract(name):
    drafter, tables = DRAFTERS[name]
    sub = common.subject(drafter, layers=1, tables=tables)
    contract.check_drafter(sub, Recursive)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == "suffix" else pytest.mark.slow) for x in DRAFTERS])
def test_law(name):
    """Also that drafts are accepted at all."""
    drafter, tables = DRAFTERS[name]
    if name == "retrieval":
        drafter, tables = dataclasses.replace(drafter, min_match=1), store_tables(small_store(vocab=4))
    prompt = (0, 1, 2, 0, 1, 3, 1, 2, 3, 1, 2, 0, 2, 3, 0)
    sub = common.subject(drafter, layers=1, vocab=4, tables=tables)
    assert common.law_p_value(sub, Recursive, prompt=prompt) > common.FALSE_ALARM


# ---- Suffix ----


def row(tokens: list[int], buffer: int = 16) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray([tokens + [9] * (buffer - len(tokens))], jnp.int32), jnp.asarray([len(tokens)], jnp.int32)


def test_match_lengths_count_backwards_and_stop_at_the_longest():
    tokens, length = row([1, 2, 3, 5, 3, 1, 2, 3])
    np.testing.assert_array_equal(match_lengths(tokens, length, 8)[0], [0, 0, 0, 3, 0, 1, 0, 0, *[0] * 8])
    np.testing.assert_array_equal(match_lengths(tokens, length, 2)[0, :8], [0, 0, 0, 2, 0, 1, 0, 0])


@pytest.mark.pitfall("vllm#40875")
def test_nothing_behind_the_text_is_read():
    tokens, length = row([9, 4, 9], buffer=8)
    assert match_lengths(tokens, length, 4)[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    one, short = row([9], buffer=4)
    assert not match_lengths(one, short, 4).any()


def test_the_most_frequent_continuation_then_the_latest():
    tokens, length = row([7, 1, 4, 7, 1, 5, 7, 2, 6, 7])
    voters = match_lengths(tokens, length, 1) == 1
    path, share = follow_votes(tokens, length, voters, 3, 10)
    # Behind 7 come 1, 1 and 2; behind 7 1 come 4 and 5, once each: the later.
    assert path[0].tolist() == [1, 5, 7]
    np.testing.assert_allclose(share[0], [2 / 3, 1 / 3, 1 / 3])


def test_votes_of_a_long_text_do_not_overflow():
    """Votes times slots of this text are beyond int32."""
    tokens = jnp.full((1, 60_000), 3, jnp.int32).at[0, -1].set(4)
    voters = jnp.ones((1, 60_000), bool)
    path, share = follow_votes(tokens, jnp.asarray([60_000]), voters, 1, 10)
    assert path[0].tolist() == [3] and float(share[0, 0]) > 0.99


def propose(drafter: Suffix, tokens: list[int]) -> tuple[list[int], list[bool]]:
    buffer, length = row(tokens)
    target = type("Of13", (), {"config": common.config()})
    context = contract.decoding.Context(buffer, length, contract.decoding.make_sampling([0.0]))
    draft = drafter.propose({}, {}, target, None, {}, context, None)[0]
    return draft.tokens[0].tolist(), draft.valid[0].tolist()


def test_draft_length_follows_the_match():
    text = [1, 2, 3, 4, 5, 6, 7, 2, 3]
    assert propose(Suffix(num_nodes=4), text) == ([4, 5, 6, 7], [True, True, False, False])
    assert propose(Suffix(num_nodes=4, factor=1.5), text)[1] == [True, True, True, False]
    assert propose(Suffix(num_nodes=4, min_match=3), text)[1] == [False] * 4
    # Two of three agree at first, one of three then.
    rare = [7, 1, 4, 7, 1, 5, 7, 2, 6, 7]
    assert propose(Suffix(num_nodes=3, factor=3.0, min_frequency=0.5), rare)[1] == [True, False, False]


# ---- Suffix tree ----


def grown(text: list[int], drafter: SuffixTree) -> tuple[float, dict[int, float]]:
    """The paper's way: for each suffix a tree grown by the worthiest next node.

    Returns:
        The greatest total worth, and that of every suffix by its length.
    """
    totals = {}
    for p in range(drafter.min_match, min(drafter.max_match, len(text) - 1) + 1):
        ends = [i for i in range(p, len(text)) if text[i - p : i] == text[-p:]]
        following = [tuple(text[i : i + drafter.depth]) for i in ends]
        worth = collections.Counter(path[:n] for path in following for n in range(1, len(path) + 1))
        taken: list[tuple[int, ...]] = [()]
        while len(taken) <= min(drafter.num_nodes, int(drafter.factor * p)):
            open_ = [path for path in worth if path not in taken and path[:-1] in taken]
            open_ = [path for path in open_ if worth[path] >= drafter.min_frequency * len(ends)]
            if not open_:
                break
            taken.append(max(open_, key=worth.__getitem__))
        totals[p] = sum(worth[path] for path in taken[1:]) / max(len(ends), 1)
    return max(totals.values(), default=0.0), totals


def drafted_paths(drafter: SuffixTree, texts: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """The valid nodes of each row's tree as paths of tokens."""
    buffer = jnp.asarray([text + [9] * (48 - len(text)) for text in texts], jnp.int32)
    lengths = jnp.asarray([len(text) for text in texts])
    context = contract.decoding.Context(buffer, lengths, contract.decoding.make_sampling([0.0] * len(texts)))
    draft = jax.jit(lambda: drafter.propose({}, {}, None, None, {}, context, None)[0])()
    found: list[list[tuple[int, ...]]] = []
    for tokens, parents, valid in zip(*map(np.asarray, (draft.tokens, draft.parents, draft.valid)), strict=True):
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for node in np.flatnonzero(valid).tolist():
            paths[node] = (*paths[int(parents[node])], int(tokens[node]))
        found.append([path for node, path in paths.items() if node >= 0])
    return found


def test_the_tree_of_the_commonest_continuations_of_the_best_suffix():
    """Behind "1 2" stands 3 4 twice and 5 once; behind "2" alone other things too."""
    text = [1, 2, 3, 4, 6, 1, 2, 5, 6, 1, 2, 3, 4, 7, 2, 8, 0, 1, 2]
    both = SuffixTree(num_nodes=4, depth=2, max_match=2, factor=2.0)
    assert drafted_paths(both, [text]) == [[(3,), (3, 4), (5,), (5, 6)]]
    assert drafted_paths(dataclasses.replace(both, min_frequency=0.5), [text]) == [[(3,), (3, 4)]]
    assert drafted_paths(dataclasses.replace(both, factor=1.5), [text]) == [[(3,), (3, 4), (5,)]]
    assert drafted_paths(both, [[1, 2, 3, 4]]) == [[]]


def test_the_tree_is_worth_what_growing_it_node_by_node_gives():
    rng = np.random.default_rng(3)
    texts = [rng.choice(3, size=int(rng.integers(4, 44)), p=[0.6, 0.3, 0.1]).tolist() for _ in range(24)]
    drafter = SuffixTree(num_nodes=6, depth=3, max_match=5, candidates=48, factor=1.5, min_frequency=0.15)
    for text, paths in zip(texts, drafted_paths(drafter, texts), strict=True):
        assert len(set(paths)) == len(paths)
        best, totals = grown(text, drafter)
        mine = []
        for p in totals:
            ends = [i for i in range(p, len(text)) if text[i - p : i] == text[-p:]]
            counts = [sum(tuple(text[i : i + len(path)]) == path for i in ends) for path in paths]
            mine.append(sum(counts) / max(len(ends), 1) if len(paths) <= int(drafter.factor * p) else 0.0)
        assert max(mine, default=0.0) == pytest.approx(best, abs=1e-6)


# ---- Recycling ----


def test_likeliest_tree_is_ordered_and_nested():
    shares = (0.5, 0.3, 0.1)
    tree = likeliest_tree(6, shares)
    paths = sorted(
        (p for n in (1, 2, 3, 4) for p in itertools.product(range(3), repeat=n)),
        key=lambda p: -np.prod([shares[r] for r in p]),
    )
    chance = [np.prod([shares[r] for r in p]) for p in paths[:6]]
    mine = []
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.child_ranks, strict=True)):
        mine.append(shares[rank] * (mine[parent] if parent >= 0 else 1.0))
        assert parent < node
    np.testing.assert_allclose(mine, chance)
    larger = likeliest_tree(20, shares)
    assert larger.parents[:6] == tree.parents and larger.child_ranks[:6] == tree.child_ranks


def test_top_tokens_are_those_of_a_sort():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 1003))
    np.testing.assert_array_equal(top_tokens(logits, 4, group=16), jax.lax.top_k(logits, 4)[1])
    level = jnp.zeros((2, 1003))  # of equal logits the lowest ids
    np.testing.assert_array_equal(top_tokens(level, 3, group=16), [[0, 1, 2]] * 2)


def test_the_table_holds_the_prompt_then_what_the_target_said():
    drafter = Recycling(num_nodes=3, candidates=2)
    target = type("Of13", (), {"config": common.config()})
    state = drafter.init_state({}, {}, target, 1, 64)
    tokens = jnp.asarray([[4, 5, 4, 6, 4, 5, 0, 0]])
    state = drafter.extend({}, {}, target, state, tokens, jnp.arange(8)[None], {}, jnp.arange(8)[None] < 6)
    assert state.successors[0, 4].tolist() == [5, 6] and state.successors[0, 5].tolist() == [4, -1]
    assert int(state.last[0]) == 5 and (state.successors[0, 0] == -1).all()
    buffer, length = row([4, 5, 4, 6, 4, 5, 4])
    context = contract.decoding.Context(buffer, length, contract.decoding.make_sampling([0.0]))
    draft = drafter.propose({}, {}, target, None, state, context, None)[0]
    # Under the root 4: 5, below it 4, below that 5 again (the likeliest three nodes are a chain here).
    assert drafter.tree.parents == (-1, 0, -1) and draft.tokens[0].tolist() == [5, 4, 6]
    assert draft.valid[0].tolist() == [True, True, True]
    logits = jnp.zeros((1, 4, 13)).at[0, 0, 7].set(3.0).at[0, 0, 8].set(2.0)  # behind the root
    logits = logits.at[0, 1, 9].set(3.0).at[0, 1, 1].set(2.0)  # behind 5
    logits = logits.at[0, 2, 10].set(3.0).at[0, 2, 11].set(2.0)  # behind the 4 below 5: later than the root's
    scores = contract.decoding.Scores(logits, jnp.argmax(logits, -1), jnp.zeros((1, 4), jnp.int32), {})
    state = drafter.commit({}, {}, target, state, context, draft, scores, None)
    assert state.successors[0, 5].tolist() == [9, 1] and state.successors[0, 4].tolist() == [10, 11]


# ---- Retrieval ----


def test_suffix_array_orders_suffixes():
    tokens = small_store(3, vocab=3, size=90).tokens
    order = text_store.suffix_array(tokens)
    suffixes = [tuple(tokens[i : i + text_store.SORTED_DEPTH]) for i in order]
    assert suffixes == sorted(suffixes) and sorted(order.tolist()) == list(range(90))


def test_longest_match_is_that_of_a_plain_search():
    store = small_store(5, vocab=4, size=120)
    text = store.tokens.tolist()
    find = jax.jit(lambda s, n: longest_match(jnp.asarray(store.tokens), jnp.asarray(store.order), s, n, 2))
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 9, 9, 9, 9):
        suffix = rng.integers(0, 4, 6)
        first, count, size = (int(x) for x in find(jnp.asarray(suffix), length))
        best = next(
            (
                m
                for m in range(min(6, length), 1, -1)
                if any(text[i : i + m] == suffix[-m:].tolist() for i in range(120))
            ),
            0,
        )
        places = [i for i in range(120) if best and text[i : i + best] == suffix[-best:].tolist()]
        assert count == len(places)
        if count:
            assert size == best and sorted(store.order[first : first + count].tolist()) == places


def test_common_prefixes_are_merged_and_rare_ones_left_out():
    candidates = jnp.asarray([[[1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 9, 9]]])
    valid = jnp.asarray([[[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 0]]], bool)
    draft = prefix_tree(candidates, valid, 4)
    # 1 (three candidates), 1 2 (two), then of the single ones the shorter first: 5, and 1 9 before any third token.
    assert draft.tokens[0].tolist() == [1, 2, 5, 9] and draft.parents[0].tolist() == [-1, 0, -1, 0]
    whole = prefix_tree(candidates, valid, 8)
    assert whole.valid[0].tolist() == [True] * 6 + [False] * 2  # 7 is behind a missing token
    assert whole.tokens[0, 4:6].tolist() == [3, 4] and whole.parents[0, 4:6].tolist() == [1, 1]


def test_a_store_round_trips_and_belongs_to_its_tokenizer(tmp_path):
    tokenizer = tiny_target().tokenizer
    store = text_store.index_texts(["to be or not to be", "", "that is"], tokenizer)
    assert (store.tokens == text_store.SEPARATOR).sum() == 2
    text_store.save_store(tmp_path / "store.npz", store)
    again = text_store.load_store(tmp_path / "store.npz", tokenizer)
    np.testing.assert_array_equal(again.tokens, store.tokens)
    np.testing.assert_array_equal(again.order, store.order)
    text_store.save_store(tmp_path / "other.npz", dataclasses.replace(store, fingerprint="0123456789abcdef"))
    with pytest.raises(ValueError, match="other.npz was made with another tokenizer .fingerprint 0123456789abcdef"):
        text_store.load_store(tmp_path / "other.npz", tokenizer)
    text_store.save_store(tmp_path / "wrong.npz", dataclasses.replace(store, order=store.order[::-1] * 0))
    with pytest.raises(ValueError, match="wrong.npz is damaged"):
        text_store.load_store(tmp_path / "wrong.npz", tokenizer)
    (tmp_path / "short.npz").write_bytes((tmp_path / "store.npz").read_bytes()[:60])
    with pytest.raises(ValueError, match="short.npz is not a whole text store"):
        text_store.load_store(tmp_path / "short.npz", tokenizer)
    with pytest.raises(FileNotFoundError, match="no text store at"):
        text_store.load_store(tmp_path / "none.npz", tokenizer)
    with pytest.raises(ValueError, match="the texts hold no token"):
        text_store.index_texts([""], tokenizer)


# ---- Errors ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Suffix(min_match=3, max_match=2), "min_match=3 and max_match=2; expected 1 <= min_match <= max_match"),
        (lambda: Suffix(num_nodes=0), "num_nodes=0; suffix decoding proposes at least 1 token"),
        (lambda: Suffix(factor=0.0), "factor=0.0 proposes nothing"),
        (lambda: SuffixTree(factor=0.0), "factor=0.0 proposes nothing"),
        (lambda: SuffixTree(min_match=3, max_match=2), "min_match=3 and max_match=2; expected 1 <= min_match"),
        (lambda: SuffixTree(num_nodes=9, depth=2, candidates=4), "depth=2, num_nodes=9 and candidates=4; expected 1"),
        (lambda: SuffixTree(num_nodes=20, depth=17), "depth=17 and num_nodes=20; expected at most 16 and 128"),
        (lambda: SuffixTree(min_frequency=1.5), "min_frequency=1.5; expected a share"),
        (lambda: Suffix(min_frequency=2.0), "min_frequency=2.0; expected a share"),
        (lambda: Retrieval(min_match=5, max_match=4), "min_match=5 and max_match=4"),
        (lambda: Retrieval(max_match=99), "max_match=99; expected 1 <= min_match <= max_match <= 32"),
        (lambda: Retrieval(depth=9, num_nodes=4), "depth=9, num_nodes=4"),
        (lambda: Recycling(candidates=9), "candidates=9; expected 1 to 8"),
        (lambda: Recycling(num_nodes=0), "num_nodes=0; a tree holds at least 1 node"),
        (lambda: Recycling(num_nodes=129), "129 nodes"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_more_candidates_than_tokens():
    with pytest.raises(ValueError, match="candidates=8, but the target has 4 tokens"):
        common.subject(Recycling(), vocab=4)
