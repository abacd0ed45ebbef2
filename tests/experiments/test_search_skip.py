"""The search for layers to skip, on a tiny target: what a trial measures is what the drafter does."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import search_skip
from specjax import build
from specjax.decoding import Context, Keys, make_sampling, request_keys
from specjax.drafting import LayerSkip
from specjax.models import KVCache, merge
from specjax.models.cache import LayerCache
from specjax.testing import tiny_target


def test_agreement_is_that_of_the_first_drafted_token():
    target = tiny_target(layers=3, width=16)
    rng = np.random.default_rng(0)
    prompt, answer = tuple(rng.integers(3, 250, 9).tolist()), tuple(rng.integers(3, 250, 30).tolist())
    agreement = search_skip.Agreement(target, [(prompt, answer)], "float32")
    text = jnp.asarray([[*prompt, *answer]], jnp.int32)
    skip = jnp.asarray([False, True, False])
    said = search_skip.drafted(target.graph, "float32", target.params, agreement._cache, text[:, :-1], skip)

    lengths = jnp.asarray([5, 12, 20, 33])
    rows = len(lengths)

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, rows, axis=0)

    layers = tuple(LayerCache(repeat(layer.k), repeat(layer.v)) for layer in agreement._cache.layers)
    context = Context(repeat(text), lengths, make_sampling([0.0] * rows))
    keys = Keys(request_keys(0, list(range(rows))), lengths)
    draft, _, _ = jax.jit(
        lambda params, cache: LayerSkip((1,), num_nodes=1).propose(
            {}, {}, merge(target.graph, params), cache, {}, context, keys
        )
    )(target.params, KVCache(layers, lengths - 1))
    np.testing.assert_array_equal(draft.tokens[:, 0], said[0][lengths - 1])
    hits = np.asarray(said)[0, 9:] == np.asarray(text)[0, 10:]
    assert agreement.rate((1,)) == pytest.approx(hits.mean())


def test_texts_are_spread_over_the_file_and_belong_to_the_target(tmp_path: Path) -> None:
    target = tiny_target(layers=1, width=16)
    one = {"source": "a", "prompt": "ab", "response": "", "finish": "length"}
    rows = [one | {"id": i, "temperature": i % 2, "response_ids": [5 + i] * 4} for i in range(8)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build.load_config("configs/search_skip.py", "quick", {"max_new_tokens": 3})
    assert [answer for _, answer in search_skip.stored_texts(path, target, config)] == [[5] * 3, [9] * 3]
    with pytest.raises(ValueError, match="4 greedy answers to prompts of at most 128 tokens, fewer than max_texts=9"):
        search_skip.stored_texts(path, target, build.load_config("configs/search_skip.py", "", {"max_texts": 9}))
    path.write_text(path.read_text().replace("[5, 5", "[4000, 5"))
    with pytest.raises(ValueError, match="written with another tokenizer than that of 'tiny': id 4000"):
        search_skip.stored_texts(path, target, config)


@pytest.mark.slow
def test_it_searches_and_reports(tmp_path: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=4, width=16)
    monkeypatch.setattr(build, "target_from_config", lambda config: target)
    options = {"max_new_tokens": 12, "trials": 5, "rounds": 1, "layout": "plain", "max_skipped": 2, "text": ""}
    search_skip.main(build.load_config("configs/search_skip.py", "quick", options))
    found = json.loads((in_workdir / "search.json").read_text())
    assert found["best"]["speedup_predicted"] == max(t["speedup_predicted"] for t in found["trials"])
    assert found["trials"] and all(1 <= len(t["skip"]) <= 2 and 0 <= t["alpha"] <= 1 for t in found["trials"])
    assert found["costs"]["t_ratio"] > 0 and found["meta"]["schema"] == search_skip.SCHEMA
    made = build.make_drafter("layer_skip", target, skip=found["best"]["skip"])
    assert made.drafter.skip == tuple(found["best"]["skip"]) and made.param_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"trials": 0}, "trials=0; expected at least 1"), ({"max_skipped": -1}, "max_skipped=-1; expected 0")],
)
def test_settings_out_of_range(options, message, in_workdir: Path) -> None:
    with pytest.raises(ValueError, match=message):
        search_skip.main(build.load_config("configs/search_skip.py", "quick", options))


def test_a_set_that_leaves_no_layer(in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "target_from_config", lambda config: tiny_target(layers=2, width=16))
    with pytest.raises(ValueError, match="leaves none of the target's 2 layers"):
        search_skip.main(build.load_config("configs/search_skip.py", "quick", {"max_skipped": 2}))


def test_the_config_takes_a_target() -> None:
    assert build.load_config("configs/search_skip.py", "some/model,quick").target.source == "some/model"
    with pytest.raises(ValueError, match="unknown argument 'b' of configs/search_skip.py"):
        build.load_config("configs/search_skip.py", "a,b")
