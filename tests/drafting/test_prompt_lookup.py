"""Lookups by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Context, make_sampling
from specjax.drafting.prompt_lookup import PromptLookup
from tests.drafting import common

TARGET = type("Of13", (), {"config": common.config()})


def propose(rows, drafter, buffer=24):
    padded = jnp.asarray([row + [9] * (buffer - len(row)) for row in rows], jnp.int32)
    context = Context(padded, jnp.asarray([len(row) for row in rows]), make_sampling([0.0] * len(rows)))
    return drafter.propose({}, {}, TARGET, None, {}, context, None)[0]


def look(tokens, num_nodes=1, buffer=24, **options):
    """What is proposed, None for nothing."""
    draft = propose([tokens], PromptLookup(num_nodes, **options), buffer)
    found = np.asarray(draft.tokens)[0, np.asarray(draft.valid)[0]].tolist()
    return found or None


def test_longest_match_wins_then_the_latest():
    assert look([1, 2, 3, 5, 3, 7, 2, 3]) == [5]  # (2, 3) beats the later lone 3
    assert look([3, 5, 3, 6, 3]) == [6]  # two single matches: the later one
    assert look([1, 2, 3, 4]) is None


def test_min_ngram_refuses_short_matches():
    assert look([3, 5, 3], min_ngram=2) is None
    assert look([2, 3, 5, 2, 3], min_ngram=2) == [5]


@pytest.mark.pitfall("vllm#40875", "LookaheadDecoding#41")
def test_the_suffix_itself_is_no_match_and_nothing_is_read_behind_the_text():
    assert look([9, 9]) == [9]  # 9 follows 9 at slot 1, within the text
    assert look([4], buffer=4) is None
    assert look([9], buffer=4) is None  # the padding holds 9s: they are not text


def test_a_text_that_repeats_is_drafted_in_full():
    assert look([7] * 20, num_nodes=8) == [7] * 8
    assert look([1, 2] * 10, num_nodes=8) == [1, 2] * 4
    # A single match with less behind it than is asked for: its continuation comes again.
    assert look([5, 6, 1, 5, 6], num_nodes=8, buffer=6) == [1, 5, 6, 1, 5, 6, 1, 5]


def test_a_match_with_enough_behind_it_comes_before_a_later_one():
    text = [1, 4, 5, 6, 1, 7, 1]  # 1 was followed by 4 5 6 1 7 1, and then by 7 1
    assert look(text, num_nodes=3) == [4, 5, 6] and look(text, num_nodes=2) == [7, 1]


def test_policies():
    text = [3, 5, 1, 3, 5, 2, 3, 6, 4, 3]  # behind 3: 5 1, 5 2, 6 4
    assert look(text, num_nodes=2) == [6, 4]
    assert look(text, num_nodes=2, policy="earliest") == [5, 1]
    assert look(text, num_nodes=2, policy="most_frequent") == [5, 2]
    assert look([1, 2, 3], policy="most_frequent") is None
    with pytest.raises(ValueError, match="policy='first' of prompt lookup; expected one of latest, earliest, most_fr"):
        PromptLookup(policy="first")


def test_rows_do_not_mix():
    draft = propose([[1, 2, 1], [5, 6, 7]], PromptLookup(num_nodes=2), buffer=4)
    np.testing.assert_array_equal(draft.valid, [[True, True], [False, False]])
    assert draft.tokens[0].tolist() == [2, 1]
