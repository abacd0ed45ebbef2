import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from specjax.models import ModelConfig
from specjax.models.target import config_hash
from specjax.testing import tiny_target
from specjax.training.hidden_states import HiddenStates, StoreConfig, write_store
from specjax.training.objectives.registry import OBJECTIVES
from tests.training import common

CONFIG = StoreConfig(row_length=96, shard_rows=4, pass_rows=2, taps=(1,))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def store(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store")
    write_store(directory, target, common.documents(target), CONFIG)
    return directory


def content(directory):
    return {p.relative_to(directory): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_law_of_every_document_is_in_the_store(target, store):
    opened = HiddenStates(store, target)
    batch = opened.batch(np.arange(opened.rows))
    head, documents = np.asarray(target.params["lm_head"]["kernel"]), {}
    for document in common.documents(target):
        documents[document.tokens.tobytes()] = document
    seen = 0
    for b, row in enumerate(batch.segments):
        for number in range(1, row.max() + 1):
            where = row == number
            document = documents[batch.tokens[b][where].tobytes()]
            inside = batch.predicts[b][where]
            law = np.exp(batch.normed[b][where].astype(np.float32) @ head - batch.lse[b][where][:, None])[inside]
            # It sums to one over the whole vocabulary although hidden states are rounded to bfloat16.
            np.testing.assert_allclose(law.sum(-1), 1, atol=1e-4)
            if seen < 3:
                want = np.asarray(jax.nn.softmax(common.logits(target, document), -1))[inside]
                assert np.abs(law - want).sum(-1).max() / 2 < 0.05
            seen += 1
    assert seen == len(common.documents(target))
    assert opened.predicted_tokens() == int(batch.predicts.sum()) > 0
    assert batch.taps.keys() == {"1"}


def test_a_token_takes_what_it_should(target, store):
    """Hidden states in half precision, one log-sum-exp and the text: 4.6 KB with three taps of SmolLM2-135M."""
    opened = HiddenStates(store, target)
    positions = opened.batch(np.arange(opened.rows)).tokens.size
    arrays = sum(len(data) for path, data in content(store).items() if path.suffix != ".json")

    def bound(taps, width):
        return 2 * (taps + 1) * width + 64

    assert 2 * 2 * target.config.hidden_size < arrays / positions <= bound(1, target.config.hidden_size)
    assert bound(3, 576) <= 5000


def test_an_interrupted_store_is_continued(target, store, tmp_path):
    documents = common.documents(target)
    write_store(tmp_path, target, documents, CONFIG, max_shards=1)
    first = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.npy")}
    # A shard that was being written when the run died has no shard.json, and counts for nothing.
    torn = tmp_path / "shard-00001"
    torn.mkdir()
    (torn / "normed.npy").write_bytes(b"half")
    assert HiddenStates(tmp_path, target).rows == 4
    write_store(tmp_path, target, documents, CONFIG)
    assert content(tmp_path) == content(store)
    assert all(p.stat().st_mtime_ns == t for p, t in first.items())


def test_what_ties_a_store_together_is_whole_or_not_there(target, tmp_path, monkeypatch):
    """Killed in the middle of the manifest, then in the middle of a shard's checksums."""
    documents = common.documents(target, 6)

    def write(at=None):
        count = itertools.count()

        def killed(self, text):
            half = next(count) == at
            self.write_bytes(text.encode()[: len(text) // 2 if half else None])
            if half:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for kind in {tmp_path.__class__, epath.Path(tmp_path).__class__}:
                patch.setattr(kind, "write_text", killed)
            write_store(tmp_path, target, documents, CONFIG)

    for at in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            write(at)
        if at:
            with pytest.raises(FileNotFoundError, match="no finished shard"):
                HiddenStates(tmp_path, target)
    write()
    assert HiddenStates(tmp_path, target).rows > 0


def test_rows_come_back_in_the_order_asked_for(target, store):
    opened = HiddenStates(store, target)
    rows = np.asarray([5, 0, 3])
    batch = opened.batch(rows)
    for i in range(len(rows)):
        np.testing.assert_array_equal(batch.tokens[i], opened.batch(rows[i : i + 1]).tokens[0])
    assert opened.rows > 5 and len({batch.tokens[i].tobytes() for i in range(3)}) == 3
    assert HiddenStates(store, target, max_shards=1).rows == 4


def test_several_stores_are_read_as_one(target, store, tmp_path):
    second, third = tmp_path / "second", tmp_path / "third"
    write_store(second, target, common.documents(target, 7), CONFIG)
    alone, more = HiddenStates(store, target), HiddenStates(second, target)
    both = HiddenStates([store, second], target)
    assert both.rows == alone.rows + more.rows
    batch = both.batch(np.asarray([alone.rows + 1, alone.rows - 1, alone.rows]))
    np.testing.assert_array_equal(batch.normed[0], more.batch(np.asarray([1])).normed[0])
    np.testing.assert_array_equal(batch.tokens[1], alone.batch(np.asarray([alone.rows - 1])).tokens[0])
    np.testing.assert_array_equal(batch.tokens[2], more.batch(np.asarray([0])).tokens[0])
    write_store(third, target, common.documents(target, 7), dataclasses.replace(CONFIG, row_length=128))
    with pytest.raises(ValueError, match="row_length is 128 in .*third and .* in .*: stores that are trained on tog"):
        HiddenStates([store, third], target)
    with pytest.raises(ValueError, match="no hidden-state store is named"):
        HiddenStates([], target)


def other(target, **changes):
    config: ModelConfig = dataclasses.replace(target.config, **changes)
    return dataclasses.replace(target, config=config, config_hash=config_hash(config))


def test_another_targets_store_is_refused(target, store):
    with pytest.raises(ValueError, match="hidden states of another target .*target_config_hash: found '.*', expected"):
        HiddenStates(store, other(target, norm_eps=1e-6))


def test_a_store_of_other_weights_is_refused(target, store):
    """The same architecture, trained to be something else."""
    tuned = jax.tree.map(lambda x: x + 0.5 * jnp.std(x) * jax.random.normal(jax.random.key(1), x.shape), target.params)
    with pytest.raises(ValueError, match=r"other weights than those of 'tiny': its hidden states differ by \d+% "):
        HiddenStates(store, dataclasses.replace(target, params=tuned))
    with pytest.raises(ValueError, match="was written by other weights"):
        write_store(store, dataclasses.replace(target, params=tuned), common.documents(target), CONFIG)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), target.params)
    assert HiddenStates(store, dataclasses.replace(target, params=halved)).rows


def test_a_store_is_not_continued_with_other_text(target, store):
    with pytest.raises(ValueError, match="store of something else .*text: found"):
        write_store(store, target, common.documents(target, 23), CONFIG)
    with pytest.raises(ValueError, match="config: found"):
        write_store(store, target, common.documents(target), dataclasses.replace(CONFIG, row_length=128))


def test_damage_is_found(target, tmp_path):
    write_store(tmp_path, target, common.documents(target, 6), CONFIG)
    file = next(tmp_path.rglob("normed.npy"))
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"normed.npy is damaged: remove .*shard-00000"):
        HiddenStates(tmp_path, target)
    file.unlink()
    with pytest.raises(ValueError, match=r"normed.npy is missing"):
        HiddenStates(tmp_path, target)


def test_no_store_and_an_empty_one(target, tmp_path):
    with pytest.raises(FileNotFoundError, match="no hidden-state store at"):
        HiddenStates(tmp_path, target)
    (tmp_path / "manifest.json").write_text(
        json.dumps(
            {
                "format": 1,
                "target_config_hash": target.config_hash,
                "tokenizer": target.tokenizer.fingerprint(),
                "hidden_size": target.config.hidden_size,
            }
        )
    )
    with pytest.raises(FileNotFoundError, match="no finished shard"):
        HiddenStates(tmp_path, target)


def test_shards_hold_whole_passes():
    with pytest.raises(ValueError, match="shard_rows=5 is not a multiple of pass_rows=2"):
        StoreConfig(shard_rows=5, pass_rows=2)


def test_a_tap_that_the_target_lacks(tmp_path):
    target = tiny_target(layers=3)
    says = "tap 15 lies outside the model: the target has 3 layers; expected 0 to 2, .* or 3 for the last one's output"
    with pytest.raises(ValueError, match=says):
        write_store(tmp_path / "store", target, [], StoreConfig(taps=(2, 15)))
    with pytest.raises(ValueError, match=says):
        OBJECTIVES["eagle3"](target, intermediate_size=8, draft_vocab=16, taps=(0, 1, 15))
