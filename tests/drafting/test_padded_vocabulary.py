"""Models of one family pad their vocabularies to different sizes; a draft says what both have."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import build, checkpoints
from specjax.decoding import Request, generate, make_sampling
from specjax.models import Target, graph
from specjax.testing import tiny_target

PADDING = 5


def padded(target: Target) -> Target:
    """The same with rows behind the tokenizer's ids, which would win every argmax."""
    size = target.config.vocab_size + PADDING
    config = dataclasses.replace(target.config, vocab_size=size, head_size=size)
    embed, head = target.params["embed"]["embedding"], target.params["lm_head"]["kernel"]
    loud = 50 * jax.random.normal(jax.random.key(5), (head.shape[0], PADDING))
    params = target.params | {
        "embed": {"embedding": jnp.pad(embed, ((0, PADDING), (0, 0)))},
        "lm_head": {"kernel": jnp.concatenate([head, loud], axis=1)},
    }
    return dataclasses.replace(target, config=config, graph=graph(config)[0], params=params)


@pytest.mark.pitfall("vllm#5203", "llama.cpp#3812", "Qwen3#326", "mlc-llm#3212")
def test_a_draft_with_more_ids_drafts_those_of_the_target(tmp_path):
    """But for its padding the draft is the target: all that it drafts is accepted."""
    target = tiny_target(layers=1, width=16)
    checkpoints.save_target(padded(target), tmp_path / "draft")
    drafting = build.make_drafter("draft_model", target, source=str(tmp_path / "draft"), num_nodes=3)
    assert drafting.drafter.config.head_size == target.config.vocab_size
    loop, weights = build.make_loop(target, drafting, make_sampling([0.0]))
    loop = dataclasses.replace(loop, eos=())
    arguments = dict(context=target.context, vocab=target.config.vocab_size)
    [done] = generate(loop, weights, [Request((7, 8, 9), 13)], **arguments)
    assert done.accepted.tolist() == [0, 0, 0, 3] and done.emitted == 12


def test_a_draft_with_fewer_ids_keeps_its_head(tmp_path):
    small = tiny_target(layers=1, width=16)
    checkpoints.save_target(small, tmp_path / "draft")
    drafting = build.make_drafter("draft_model", padded(small), source=str(tmp_path / "draft"))
    np.testing.assert_array_equal(drafting.tables["vocab"], np.arange(small.config.vocab_size))
    np.testing.assert_array_equal(drafting.params["lm_head"]["kernel"], small.params["lm_head"]["kernel"])


def test_another_tokenizer_is_refused(tmp_path):
    target = tiny_target(layers=1, width=16)
    checkpoints.save_target(target, tmp_path / "draft")
    path = tmp_path / "draft" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|other|>"))
    with pytest.raises(ValueError, match="do not share a vocabulary .*same family, or drafter 'other_tokenizer'"):
        build.make_drafter("draft_model", target, source=str(tmp_path / "draft"))
