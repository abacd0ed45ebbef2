"""Text that the draft writes while it is trained: it is the present draft's own, and its answers carry the loss."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict

from specjax import build
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import TextRows, lay_out, pack
from specjax.training.objectives import Distill, Medusa
from specjax.training.on_policy import Mixer, OnPolicy, OnPolicyConfig
from tests.training import common

LENGTH = 96


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trainer(target, share=0.5, steps=3, **changes):
    documents = common.documents(target, 40)
    rows, _ = pack(documents, LENGTH)
    prompts = tuple(tuple(d.tokens[: d.prompt_length].tolist()) for d in documents)
    options = dict(every=2, prompts=9, max_new_tokens=12, temperature=0.0, batch=3) | changes
    objective = Distill(common.student(target, layers=(0,)))
    return Trainer(
        target=target,
        objective=objective,
        tables={"vocab": jnp.asarray(common.vocabulary())},
        optimizer=OptimizerConfig(learning_rate=0.05, steps=20),
        config=TrainerConfig(steps=steps, batch=4, log_every=1, eval_every=steps, best="held/match"),
        train=TextRows(lay_out(rows[2:], LENGTH)),
        held_out={"held": TextRows(lay_out(rows[:2], LENGTH))},
        online=(),
        on_policy=OnPolicy(OnPolicyConfig(share=share, row_length=LENGTH, **options), objective.student, prompts),
    )


def first_choices(made, target, params, batch):
    """The draft's likeliest token `[B, T]` behind each position."""
    network, hidden = made.objective.student.hidden(params, common.network(target), made.tables["vocab"], batch)
    return np.asarray(made.tables["vocab"])[np.asarray(jnp.argmax(network.logits(hidden), -1))]


def test_rows_are_the_present_drafts_own_and_their_answers_carry_the_loss(target, tmp_path):
    made = trainer(target)
    state = made.init()
    mixer = Mixer(made.on_policy, epath.Path(tmp_path), seed=0)
    ids = np.arange(4)
    text = made.load(made.train, ids)

    def mixed(step, params):
        return mixer.mixed(step, 0, params, made.objective, target, made.tables, ids, text)

    rows, batch = mixed(0, state.params)
    assert rows.tolist() == [-1, -1, 2, 3]
    for name in ("tokens", "positions", "segments", "response"):
        assert np.array_equal(getattr(batch, name)[2:], getattr(text, name)[2:])
    own = jax.tree.map(lambda x: x[:2], batch)
    follows = own.predicts
    # Greedy: every token of an answer is what the draft says there, and nothing but answers carries loss.
    assert np.array_equal(first_choices(made, target, state.params, own)[follows], np.roll(own.tokens, -1, 1)[follows])
    assert follows.sum() == own.response.sum() > 12 and not own.response[:, 0].any()
    assert set(own.tokens[own.response]) <= set(common.vocabulary().tolist())
    starts = {tuple(p) for p in made.on_policy.prompts}
    prompt = own.tokens[0][(own.segments[0] == 1) & ~own.response[0]]
    assert tuple(prompt.tolist()) in starts
    # Kept for `every` steps, then written anew by the draft as it is then.
    moved = jax.tree.map(lambda x: -x, state.params)
    _, same = mixed(1, moved)
    assert not np.array_equal(same.tokens[:2], batch.tokens[:2])  # the next rows of the same text
    found = {tuple(row) for row in np.concatenate([same.tokens[:2], batch.tokens[:2]]).tolist()}
    assert found <= {tuple(row) for row in mixer._rows.tokens.tolist()}
    _, later = mixed(2, moved)
    own = jax.tree.map(lambda x: x[:2], later)
    follows = own.predicts
    assert np.array_equal(first_choices(made, target, moved, own)[follows], np.roll(own.tokens, -1, 1)[follows])
    assert not (first_choices(made, target, state.params, own)[follows] == np.roll(own.tokens, -1, 1)[follows]).all()
    # A process that begins in between takes what was written; the draft's parameters of then are gone.
    again = Mixer(made.on_policy, epath.Path(tmp_path), seed=0)
    _, resumed = again.mixed(3, 3, state.params, made.objective, target, made.tables, ids, text)
    assert np.array_equal(resumed.tokens[:2], mixed(3, moved)[1].tokens[:2])


@pytest.mark.slow
def test_a_resumed_run_trains_on_the_same_rows(target, tmp_path):
    config = {"what": "on-policy"}
    whole = trainer(target, temperature=1.0).run(tmp_path / "whole", config)
    seen = []
    trainer(target, temperature=1.0).run(tmp_path / "parts", config, stop=lambda: seen.append(0) or len(seen) == 1)
    resumed = trainer(target, temperature=1.0).run(tmp_path / "parts", config)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


def test_what_cannot_be_on_policy_is_named(target, tmp_path):
    made = trainer(target)
    with pytest.raises(ValueError, match="set data.online=True and a mesh of one device, or data.on_policy.share=0"):
        dataclasses.replace(made, online=None)
    with pytest.raises(ValueError, match=r"on_policy.share=1.5; expected a share in \(0, 1\]"):
        trainer(target, share=1.5)
    with pytest.raises(ValueError, match="on_policy.every=0; expected at least 1"):
        trainer(target, every=0)
    data = ConfigDict({"on_policy": {"share": 0.5}})
    medusa = build.OBJECTIVES["medusa"](target, draft_vocab=16, num_heads=2)
    assert isinstance(medusa, Medusa)
    with pytest.raises(ValueError, match="goes with the objective 'distill' alone"):
        build.on_policy_from_config(data, medusa, target, tmp_path)
