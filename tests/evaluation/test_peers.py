from __future__ import annotations

import sys

import pytest

from specjax.decoding import Request
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.peers import make_peers
from specjax.models import Target

ROWS = {
    "greedy": {"name": "transformers_greedy", "threads": 1},
    "lookup": {"name": "transformers_lookup", "threads": 1, "num_nodes": 3},
}
REQUEST = Request((5, 9, 5, 9, 7), 12)


def test_peers_write_what_we_write_on_the_same_weights(trio: list[LoopContender], target: Target) -> None:
    pytest.importorskip("torch")
    trio[0].prepare(REQUEST, 128)
    ours = trio[0].complete(REQUEST).completion
    greedy, lookup = make_peers(ROWS, target)
    for peer in (greedy, lookup):
        peer.prepare(REQUEST, 128)
        timed = peer.complete(REQUEST)
        assert timed.completion.tokens == ours.tokens
        assert timed.completion.finish == ours.finish
        assert timed.prefill_seconds is None and timed.decode_seconds > 0
        assert timed.completion.emitted == len(ours.tokens)
    assert greedy.complete(REQUEST).completion.steps == len(ours.tokens), "one pass a token"
    assert lookup.complete(REQUEST).completion.steps <= len(ours.tokens)
    with pytest.raises(ValueError, match="greedy decodes greedily; temperature is 1.0"):
        greedy.complete(Request((5,), 3, temperature=1.0))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"name": "transformers_greedy", "num_nodes": 3}, r"does not take \['num_nodes'\]"),
        ({"name": "transformers_lookup"}, r"needs \['num_nodes'\]"),
        ({"name": "transformers_assisted", "num_nodes": 3}, r"needs \['source'\]"),
    ],
)
def test_options_that_a_peer_does_not_take_or_lacks(target: Target, row: dict, says: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=says):
        make_peers({"x": row}, target)


def test_threads_must_agree(target: Target) -> None:
    pytest.importorskip("torch")
    rows = {"a": {"name": "transformers_greedy", "threads": 1}, "b": {"name": "transformers_greedy", "threads": 2}}
    with pytest.raises(ValueError, match=r"threads must agree, got \[1, 2\]"):
        make_peers(rows, target)


def test_a_missing_torch_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"the rows greedy, lookup need torch, .*pip install 'specjax\[torch\]'"):
        make_peers(ROWS, target)
