"""Shards share the tests out without loss or repetition."""

import pytest

from tests import shards


def test_every_item_is_in_exactly_one_shard():
    items = list(range(11))
    parts = [shards.part(items, i, 4) for i in range(4)]
    assert sorted(x for chosen, _ in parts for x in chosen) == items
    for chosen, others in parts:
        assert sorted([*chosen, *others]) == items and chosen == sorted(chosen)
    assert shards.part(items, 0, 1) == (items, [])


def test_what_the_option_says():
    assert shards.parse("0/1") == (0, 1) and shards.parse("11/12") == (11, 12)
    for wrong in ("1/1", "4/4", "0/0", "-1/2", "1", "1/2/3", ""):
        with pytest.raises(ValueError, match="expected index/count"):
            shards.parse(wrong)
