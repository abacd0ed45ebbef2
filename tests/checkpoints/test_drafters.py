import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import drafters
from specjax.checkpoints.drafters import SavedDrafter, load_drafter, save_drafter
from specjax.checkpoints.safetensors import Spec, read_header, write_file
from specjax.models import merge
from specjax.models.target import config_hash
from specjax.testing import tiny_target
from tests.training import common


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def made(target):
    student = common.student(target)
    params = student.init(merge(target.graph, target.params))
    # Values that bfloat16 holds, so that a round trip is exact.
    params = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    tables = {"vocab": jnp.asarray(common.vocabulary())}
    return SavedDrafter("draft_model", student.config, params, tables, ("embed", "head"), {"note": "made for a test"})


@pytest.fixture
def saved(target, tmp_path):
    save_drafter(tmp_path / "d", made(target), target)
    return tmp_path / "d"


def edit_config(directory, change):
    content = json.loads((directory / "config.json").read_text())
    change(content)
    (directory / "config.json").write_text(json.dumps(content))


def edit_tensors(directory, change):
    tensors = {name: t.read() for name, t in read_header(directory / "model.safetensors").items()}
    change(tensors)
    specs = {name: Spec(value.shape, value.dtype) for name, value in tensors.items()}
    write_file(directory / "model.safetensors", specs, lambda name: tensors[name])


@pytest.mark.parametrize("tie", [False, True])
def test_a_drafter_comes_back_with_the_targets_head_rows(target, tmp_path, tie):
    target = common.tied(target) if tie else target
    want = made(target)
    save_drafter(tmp_path, want, target)
    found = load_drafter(tmp_path, target)
    assert (found.method, found.config, found.shares, found.info) == (want.method, want.config, want.shares, want.info)
    owned = {name: group for name, group in found.params.items() if name != "lm_head"}
    assert jax.tree.structure(owned) == jax.tree.structure(want.params)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), owned, want.params)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found.params))
    vocab = common.vocabulary()
    head = target.params["embed"]["embedding"].T if tie else target.params["lm_head"]["kernel"]
    np.testing.assert_array_equal(found.params["lm_head"]["kernel"], np.asarray(head)[:, vocab])
    np.testing.assert_array_equal(found.tables["vocab"], vocab)
    # What the target has already is not stored.
    assert not any("embed" in name or "lm_head" in name for name in read_header(tmp_path / "model.safetensors"))


def test_a_second_save_of_what_was_loaded_is_the_same_file(target, saved, tmp_path):
    save_drafter(tmp_path / "again", load_drafter(saved, target), target)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_a_run_directory_and_the_zoo_are_searched(target, saved, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    saved.rename(tmp_path / "run" / "drafter")
    assert load_drafter(tmp_path / "run", target).method == "draft_model"
    monkeypatch.setattr(drafters, "ZOO", tmp_path / "zoo")
    (tmp_path / "zoo").mkdir()
    (tmp_path / "run" / "drafter").rename(tmp_path / "zoo" / "tiny")
    assert drafters.zoo_entries() == ["tiny"] and drafters.is_drafter("tiny")
    assert load_drafter("tiny", target).method == "draft_model"
    with pytest.raises(FileNotFoundError, match=r"no drafter 'huge'.*of the zoo: tiny"):
        load_drafter("huge", target)


def other(target, **changes):
    config = dataclasses.replace(target.config, **changes)
    return dataclasses.replace(target, name="other", config=config, config_hash=config_hash(config))


def test_another_target_is_refused(target, saved):
    with pytest.raises(
        ValueError, match=r"was trained for 'tiny', not for 'other': it expects config_hash '\w+' \(here '\w+'\)"
    ):
        load_drafter(saved, other(target, num_layers=1, windows=(None,), ropes=target.config.ropes[:1]))
    with pytest.raises(ValueError, match=r"hidden_size 32 \(here 48\)"):
        load_drafter(saved, other(target, hidden_size=48))
    with pytest.raises(ValueError, match=r"vocab_size 259 \(here 300\)"):
        load_drafter(saved, other(target, vocab_size=300, head_size=300))


def test_another_tokenizer_is_refused(target, saved):
    edit_config(saved, lambda c: c["target"].update(tokenizer="0123456789abcdef"))
    with pytest.raises(ValueError, match=r"tokenizer '0123456789abcdef' \(here"):
        load_drafter(saved, target)


def test_all_misfits_are_in_one_error(target, saved):
    def change(tensors):
        del tensors["params.final_norm.weight"]
        tensors["params.extra"] = np.zeros(2, np.float32)
        tensors["params.layers.0.attn.q.kernel"] = np.zeros((3, 4), np.float32)

    edit_tensors(saved, change)
    with pytest.raises(ValueError) as error:
        load_drafter(saved, target)
    for part in ("missing params.final_norm.weight", "unexpected params.extra", "has shape [3, 4], expected [32, 32]"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("vocab", "says"),
    [
        (np.arange(15, dtype=np.int32), r"tables.vocab has shape \[15\], expected \[16\]"),
        (np.arange(16, dtype=np.int32)[::-1].copy(), "not sorted, or has an id twice"),
        (np.zeros(16, np.int32), "not sorted, or has an id twice"),
        (np.arange(16, dtype=np.int32) + 250, "ids 250 to 265, expected 0 to 258"),
        (np.arange(16, dtype=np.int32) - 1, "ids -1 to 14, expected 0 to 258"),
        (np.arange(16, dtype=np.float32), "dtype float32, expected int32"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be_is_refused(target, saved, vocab, says):
    edit_tensors(saved, lambda tensors: tensors.update({"tables.vocab": vocab}))
    with pytest.raises(ValueError, match=says):
        load_drafter(saved, target)


def test_nan_weights_are_refused(target, saved):
    def change(tensors):
        tensors["params.final_norm.weight"][3] = np.nan

    edit_tensors(saved, change)
    with pytest.raises(ValueError, match="holds NaN or infinity in params.final_norm.weight"):
        load_drafter(saved, target)


def test_a_diverged_run_is_not_saved(target, tmp_path):
    broken = made(target)
    broken.params["final_norm"]["weight"] = jnp.full(32, jnp.inf)
    with pytest.raises(ValueError, match="not saved: params.final_norm.weight hold NaN or infinity"):
        save_drafter(tmp_path, broken, target)
    assert not list(tmp_path.iterdir())


def test_a_truncated_file_is_refused(target, saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="truncated"):
        load_drafter(saved, target)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(format=99), "has format 99, this version reads 1"),
        (lambda c: c.pop("model"), "lacks model"),
        (lambda c: c.update(method="hypnosis"), "for method 'hypnosis'; known: draft_model"),
        (lambda c: c.update(shares=["soul"]), "shares soul; expected only embed, head"),
        (lambda c: c["model"].update(wings=2), "unknown fields wings"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(target, saved, change, says):
    edit_config(saved, change)
    with pytest.raises(ValueError, match=says):
        load_drafter(saved, target)


def test_every_zoo_entry_is_complete():
    for name in drafters.zoo_entries():
        directory = drafters.ZOO / name
        content = json.loads((directory / "config.json").read_text())
        assert content["info"]["held_out"], name
        card = (directory / "README.md").read_text()
        for word in ("Command", "Data", "Licence", "held-out"):
            assert word.lower() in card.lower(), (name, word)
        assert sum(p.stat().st_size for p in directory.iterdir()) <= 12 * 2**20, name
