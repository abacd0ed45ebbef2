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


@pytest.mark.parametrize(
    "drafter",
    [LayerSkip((1,), num_nodes=1), LayerSkip((2,), num_nodes=1, skip_attention=(0,), skip_mlp=(1,))],
    ids=["layer", "sublayers"],
)
def test_agreement_is_that_of_the_first_drafted_token(drafter):
    target = tiny_target(layers=3, width=16)
    rng = np.random.default_rng(0)
    prompt, answer = tuple(rng.integers(3, 250, 9).tolist()), tuple(rng.integers(3, 250, 30).tolist())
    agreement = search_skip.Agreement(target, [(prompt, answer)], "float32")
    text = jnp.asarray([[*prompt, *answer]], jnp.int32)
    left_out = (*drafter.skip, *drafter.skip_attention), (*drafter.skip, *drafter.skip_mlp)
    skip = jnp.asarray([[i in part for i in range(3)] for part in left_out])
    said = search_skip.drafted(target.graph, "float32", target.params, agreement._cache, text[:, :-1], skip)

    lengths = jnp.asarray([5, 12, 20, 33])
    rows = len(lengths)

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, rows, axis=0)

    layers = tuple(LayerCache(repeat(layer.k), repeat(layer.v)) for layer in agreement._cache.layers)
    context = Context(repeat(text), lengths, make_sampling([0.0] * rows))
    keys = Keys(request_keys(0, list(range(rows))), lengths)
    draft, _, _ = jax.jit(
        lambda params, cache: drafter.propose({}, {}, merge(target.graph, params), cache, {}, context, keys)
    )(target.params, KVCache(layers, lengths - 1))
    np.testing.assert_array_equal(draft.tokens[:, 0], said[0][lengths - 1])
    hits = np.asarray(said)[0, 9:] == np.asarray(text)[0, 10:]
    parts = zip(("attention", "mlp"), left_out, strict=True)
    names = frozenset((kind, i) for kind, part in parts for i in part)
    assert agreement.rate(names) == pytest.approx(hits.mean())
    assert search_skip.as_options(names) == {
        "skip": drafter.skip,
        "skip_attention": drafter.skip_attention,
        "skip_mlp": drafter.skip_mlp,
    }


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
@pytest.mark.parametrize("parts", ["sublayers", "layers"])
def test_it_searches_and_reports(parts: str, in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=4, width=16)
    monkeypatch.setattr(build, "target_from_config", lambda config: target)
    options = {"max_new_tokens": 12, "trials": 5, "rounds": 1, "layout": "plain", "max_skipped": 3, "text": ""}
    options["parts"] = parts
    search_skip.main(build.load_config("configs/search_skip.py", "quick", options))
    found = json.loads((in_workdir / "search.json").read_text())
    assert found["best"]["speedup_predicted"] == max(t["speedup_predicted"] for t in found["trials"])
    most = 3 if parts == "sublayers" else 6
    assert found["trials"] and all(1 <= search_skip.count(t) <= most and 0 <= t["alpha"] <= 1 for t in found["trials"])
    singles = [t for t in found["trials"] if t["skip_attention"] or t["skip_mlp"]]
    assert bool(singles) == (parts == "sublayers")
    assert found["costs"]["t_ratio"] > 0 and found["meta"]["schema"] == search_skip.SCHEMA
    made = build.make_drafter("layer_skip", target, source=str(in_workdir / "search.json"))
    best = {name: tuple(found["best"][name]) for name in ("skip", "skip_attention", "skip_mlp")}
    assert made.drafter == LayerSkip(**best) and made.param_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials=0; expected at least 1"),
        ({"max_skipped": -1}, "max_skipped=-1; expected 0"),
        ({"parts": "heads"}, "parts='heads'; expected one of sublayers, layers"),
    ],
)
def test_settings_out_of_range(options, message, in_workdir: Path) -> None:
    with pytest.raises(ValueError, match=message):
        search_skip.main(build.load_config("configs/search_skip.py", "quick", options))


@pytest.mark.parametrize(("parts", "most"), [("sublayers", 4), ("layers", 2)])
def test_a_set_that_leaves_no_layer(parts: str, most: int, in_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "target_from_config", lambda config: tiny_target(layers=2, width=16))
    options = {"max_skipped": most, "parts": parts}
    with pytest.raises(ValueError, match=f"max_skipped={most} leaves none of the target's 2 layers"):
        search_skip.main(build.load_config("configs/search_skip.py", "quick", options))


def test_the_config_takes_a_target() -> None:
    assert build.load_config("configs/search_skip.py", "some/model,quick").target.source == "some/model"
    with pytest.raises(ValueError, match="unknown argument 'b' of configs/search_skip.py"):
        build.load_config("configs/search_skip.py", "a,b")
