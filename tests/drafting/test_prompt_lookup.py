"""Lookups by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting.prompt_lookup import find_continuation


def look(tokens, max_ngram=3, min_ngram=1, buffer=16):
    padded = jnp.asarray([tokens + [9] * (buffer - len(tokens))], jnp.int32)
    start, found = find_continuation(padded, jnp.asarray([len(tokens)]), max_ngram, min_ngram)
    return int(start[0]) if bool(found[0]) else None


def test_longest_match_wins_then_the_latest():
    assert look([1, 2, 3, 5, 3, 7, 2, 3]) == 3  # (2, 3) beats the later lone 3
    assert look([3, 5, 3, 6, 3]) == 4 - 1  # two single matches: the later one
    assert look([1, 2, 3, 4]) is None


def test_min_ngram_refuses_short_matches():
    assert look([3, 5, 3], min_ngram=2) is None
    assert look([2, 3, 5, 2, 3], min_ngram=2) == 2


@pytest.mark.pitfall("vllm#40875", "LookaheadDecoding#41")
def test_the_suffix_itself_is_no_match_and_nothing_is_read_behind_the_text():
    assert look([9, 9]) == 1  # 9 follows 9 at slot 1, within the text
    assert look([4], buffer=4) is None
    assert look([9], buffer=4) is None  # the padding holds 9s: they are not text


def test_rows_do_not_mix():
    tokens = jnp.asarray([[1, 2, 1, 0], [5, 6, 7, 0]], jnp.int32)
    start, found = find_continuation(tokens, jnp.asarray([3, 3]), 3, 1)
    np.testing.assert_array_equal(found, [True, False])
    assert int(start[0]) == 1
