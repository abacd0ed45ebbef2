"""Drafters by name: options reach them, and what does not fit the target is one error."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from specjax.drafting import Adaptive, EarlyExit, LayerSkip, PromptLookup, Retrieval, Suffix, text_store
from specjax.drafting.make import make_drafter
from specjax.drafting.registry import DRAFTERS
from specjax.testing import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=3, width=16)


def test_options_reach_the_drafter(target, tmp_path):
    assert DRAFTERS["early_exit"](target, exit_layer=2, num_nodes=5).drafter == EarlyExit(2, 5)
    assert DRAFTERS["layer_skip"](target, skip=[0, 2]).drafter == LayerSkip((0, 2))
    assert DRAFTERS["prompt_lookup"](target, policy="earliest").drafter == PromptLookup(policy="earliest")
    assert DRAFTERS["suffix"](target, max_match=9).drafter == Suffix(max_match=9)
    assert all(DRAFTERS[name](target).param_bytes == 0 for name in ("lookahead", "jacobi", "recycling"))
    made = DRAFTERS["adaptive"](target, {"name": "suffix", "num_nodes": 4}, [0, 4], probe_every=3)
    assert made.drafter == Adaptive(Suffix(num_nodes=4), (0, 4), probe_every=3)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_an_unknown_option_names_the_known_ones(target, name):
    required = [p.name for p in inspect.signature(DRAFTERS[name]).parameters.values() if p.default is p.empty]
    given = {option: None for option in required[1:] if option != "options"}
    if name == "layer_skip":
        given = {"skip": [1]}
    elif name.startswith("ensemble"):
        given = {"members": [{"name": "suffix"}, {"name": "prompt_lookup"}]}
    elif name == "adaptive":
        given = {"inner": {"name": "suffix"}, "widths": [0, 8]}
    elif name == "early_exit":
        given = {"exit_layer": 1}
    elif name in ("retrieval", "redrafter"):  # they read their source first
        given = {}
    with pytest.raises(ValueError, match=f"drafter '{name}' does not take these options .*; it takes ") as raised:
        make_drafter(name, target, nodse=3, **given)
    takes = str(raised.value).rpartition("it takes (")[2].rstrip(")").split(", ")
    assert "num_nodes" in takes or name in ("adaptive", "lookahead", "draft_tree", "hydra", "medusa", "ensemble_union")
    assert set(given) <= set(takes) and not {"taps", "num_probes", "topology"} & set(takes)


def test_a_set_of_layers_that_was_searched_for(target, tmp_path):
    (tmp_path / "search.json").write_text('{"best": {"skip": [0, 2]}}')
    assert DRAFTERS["layer_skip"](target, source=str(tmp_path / "search.json")).drafter == LayerSkip((0, 2))
    (tmp_path / "parts.json").write_text('{"best": {"skip": [0], "skip_attention": [2], "skip_mlp": [1]}}')
    made = DRAFTERS["layer_skip"](target, source=str(tmp_path / "parts.json"), num_nodes=2)
    assert made.drafter == LayerSkip((0,), num_nodes=2, skip_attention=(2,), skip_mlp=(1,))
    assert DRAFTERS["layer_skip"](target, skip_attention=[1]).drafter == LayerSkip(skip_attention=(1,))
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"other.json holds no best.skip .KeyError.*expected the search.json"):
        DRAFTERS["layer_skip"](target, source=str(tmp_path / "other.json"))
    with pytest.raises(FileNotFoundError, match="no search.json at nowhere"):
        DRAFTERS["layer_skip"](target, source="nowhere")
    with pytest.raises(ValueError, match=r"skip=\(1,\) and source='a' of layer_skip; expected one of them"):
        DRAFTERS["layer_skip"](target, skip=[1], source="a")
    with pytest.raises(ValueError, match=r"skip=\(\) and source='' of layer_skip; expected one of them"):
        DRAFTERS["layer_skip"](target)


def test_a_store_is_read_or_made(target, tmp_path):
    (tmp_path / "notes.txt").write_text("to be or not to be")
    made = DRAFTERS["retrieval"](target, str(tmp_path / "notes.txt"), num_nodes=4, depth=2)
    assert made.drafter == Retrieval(num_nodes=4, depth=2)
    size = made.tables["tokens"].shape[0]
    assert size == len("to be or not to be") + 1 and made.param_bytes == 8 * size
    store = text_store.index_texts(["to be"], target.tokenizer)
    text_store.save_store(tmp_path / "theirs.npz", dataclasses.replace(store, fingerprint="f" * 16))
    with pytest.raises(ValueError, match="made with another tokenizer"):
        DRAFTERS["retrieval"](target, str(tmp_path / "theirs.npz"))
    with pytest.raises(FileNotFoundError, match="no text store at 'nowhere'"):
        DRAFTERS["retrieval"](target, "nowhere")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("early_exit", {"exit_layer": 3}, "exit_layer=3 lies outside the model"),
        ("layer_skip", {"skip": (0, 1, 2)}, "leaves none of the target's 3 layers"),
        ("lookahead", {"ngram": 1}, "ngram=1; expected at least 2"),
        ("suffix", {"min_match": 9, "max_match": 8}, "min_match=9 and max_match=8"),
        ("adaptive", {"inner": {"name": "sufix"}, "widths": (0, 4)}, "the inner drafter is 'sufix'; known: adaptive"),
    ],
)
def test_what_does_not_fit(target, name, options, message):
    with pytest.raises(ValueError, match=message):
        DRAFTERS[name](target, **options)
