from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from specjax.checkpoints.drafters import SavedDrafter, save_drafter
from specjax.decoding import Request
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.peers import make_peers, whole_draft
from specjax.models import Target
from tests.training import common

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


@pytest.mark.parametrize("tie", [False, True])
def test_a_saved_draft_assists_transformers(target: Target, tmp_path: Path, tie: bool) -> None:
    """The target drafts for itself, saved with half of the head and run with all of it: it is always right."""
    pytest.importorskip("torch")
    target = common.tied(target) if tie else target
    vocab = jnp.arange(0, target.config.vocab_size, 2)
    config = dataclasses.replace(target.config, head_size=len(vocab), tie_embeddings=False)
    params = {name: group for name, group in target.params.items() if name not in ("embed", "lm_head")}
    saved = SavedDrafter("draft_model", config, params, {"vocab": vocab}, ("embed", "head"))
    save_drafter(tmp_path / "draft", saved, target, dtype="float32")
    rows = {
        "greedy": ROWS["greedy"],
        "assisted": {"name": "transformers_assisted", "threads": 1, "source": f"{tmp_path}/draft", "num_nodes": 3},
    }
    greedy, assisted = (peer.complete(REQUEST).completion for peer in make_peers(rows, target))
    assert assisted.tokens == greedy.tokens
    assert assisted.steps == -(-len(greedy.tokens) // 4)


def test_what_is_no_draft_model_does_not_assist(target: Target, tmp_path: Path) -> None:
    config = dataclasses.replace(target.config, head_size=7)
    params = {name: group for name, group in target.params.items() if name != "embed"}
    params["lm_head"] = {"kernel": target.params["lm_head"]["kernel"][:, :7]}
    saved = SavedDrafter("draft_model", config, params, {"vocab": jnp.arange(7)}, ("embed",))
    save_drafter(tmp_path / "draft", saved, target)
    with pytest.raises(ValueError, match="has a head of its own over 7 of 259 ids, which transformers does not run"):
        whole_draft(str(tmp_path / "draft"), target)


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
