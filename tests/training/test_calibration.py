"""Ranks of the tokens to come at heads of other projects, counted again in plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import merge
from specjax.models.medusa import HydraConfig, MedusaConfig, heads_graph
from specjax.testing import tiny_target
from specjax.training import hidden_states
from specjax.training.calibration import calibrate
from specjax.training.data import lay_out
from tests.training import common

HEADS, RANKS, LENGTH = 2, 3, 256


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=1, width=16)


@pytest.fixture(scope="module")
def batches(target):
    """Two rows of documents, as a store holds them."""
    made = common.documents(target, 4)
    batch = lay_out([made[:2], made[2:]], LENGTH)
    arrays = hidden_states._compute(target, batch, hidden_states.StoreConfig(pass_rows=2, shard_rows=2))
    return [batch.replace(normed=arrays["normed"], lse=arrays["lse"])]


def heads(target, method, vocab=None):
    """Heads with vocabulary matrices of their own, drawn at random."""
    kind = MedusaConfig if method == "medusa" else HydraConfig
    size = target.config.vocab_size if vocab is None else len(vocab)
    config = kind(hidden_size=16, vocab_size=target.config.vocab_size, head_size=size, num_heads=HEADS, own_head=True)
    leaves, structure = jax.tree.flatten(heads_graph(config)[1])
    keys = jax.random.split(jax.random.key(3), len(leaves))
    params = jax.tree.unflatten(structure, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    tables = {} if vocab is None else {"vocab": jnp.asarray(vocab, jnp.int32)}
    return SavedDrafter(method, config, params, tables, ("embed",) if method == "hydra" else ())


def counted(saved, target, batch):
    """The table, position by position."""
    network = merge(heads_graph(saved.config)[0], saved.params)
    table = np.asarray(target.params["embed"]["embedding"])
    ids = list(np.asarray(saved.tables.get("vocab", np.arange(target.config.vocab_size))))
    counts, totals = np.zeros((HEADS, RANKS)), np.zeros(HEADS)
    for b, tokens in enumerate(batch.tokens):
        for t in range(LENGTH):
            for i in range(HEADS):
                ahead = np.arange(t + 1, t + 3 + i)
                if ahead[-1] >= LENGTH or not batch.segments[b, t]:
                    continue
                if not (batch.response[b, ahead].all() and (batch.segments[b, ahead] == batch.segments[b, t]).all()):
                    continue
                hidden = np.asarray(batch.normed[b, t], np.float32)
                if saved.method == "medusa":
                    logits = network.logits(network(jnp.asarray(hidden)[None]))[0, i]
                else:
                    read = jnp.concatenate([hidden, *(table[tokens[t + 1 + j]] for j in range(i + 1))])
                    logits = network.logits(i, network(i, read))
                totals[i] += 1
                label = tokens[ahead[-1]]
                if label in ids and (rank := int((logits > logits[ids.index(label)]).sum())) < RANKS:
                    counts[i, rank] += 1
    return counts / totals[:, None], totals


@pytest.mark.parametrize(("method", "reduced"), [("medusa", False), ("medusa", True), ("hydra", False)])
def test_ranks_are_those_that_decoding_would_see(target, batches, method, reduced):
    saved = heads(target, method, common.vocabulary() if reduced else None)
    found = calibrate(saved, target, batches, RANKS)
    table, totals = counted(saved, target, batches[0])
    np.testing.assert_allclose(found.tables["accuracy"], table, atol=1e-6)
    assert found.config.ranks == RANKS and found.info["calibration_positions"] == totals[0] > 10
    assert table.sum() > 0


def test_what_cannot_be_calibrated_is_refused(target, batches):
    saved = heads(target, "medusa")
    with pytest.raises(ValueError, match="method 'eagle' has no table by head and rank; expected medusa or hydra"):
        calibrate(dataclasses.replace(saved, method="eagle"), target, batches)
    with pytest.raises(ValueError, match="ranks=0; expected at least 1"):
        calibrate(saved, target, batches, 0)
    with pytest.raises(ValueError, match="head 0 has no position in this text"):
        calibrate(saved, target, [])
