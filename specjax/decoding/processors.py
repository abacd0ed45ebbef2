"""Logits processors that come before the warps: bias, repetition, frequency and presence penalties.

A token's logit depends on what is in front of it. For a node of a tree that is the committed text *and* the node's own
path from the root, so every node has a history of its own: the rows' committed counts, which a step carries, and the
few drafted tokens on its path, which are put right one by one. A law that leaves its path out is another law than the
one plain decoding samples from.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding.sampling import Bias, Penalties, Sampling


@flax.struct.dataclass
class History:
    """Which tokens each row's committed text holds; carried only where some row has penalties.

    Attributes:
        prompt: `[B, V]` bool, occurs in the prompt.
        output: `[B, V]` int32, how often it was emitted.
    """

    prompt: jax.Array
    output: jax.Array

    def add(self, tokens_bt: jax.Array, count_b: jax.Array) -> History:
        """Counts the first `count` tokens of each row as emitted."""
        rows = jnp.arange(tokens_bt.shape[0])[:, None]
        emitted = jnp.arange(tokens_bt.shape[1]) < count_b[:, None]
        # An index outside the table is dropped.
        index = jnp.where(emitted, tokens_bt, self.output.shape[1])
        return History(self.prompt, self.output.at[rows, index].add(1, mode="drop"))


def init_history(tokens_bl: jax.Array, prompt_length_b: jax.Array, vocab: int) -> History:
    """The history of rows that have a prompt and no output yet."""
    batch, buffer = tokens_bl.shape
    index = jnp.where(jnp.arange(buffer) < prompt_length_b[:, None], tokens_bl, vocab)
    prompt = jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], index].set(True, mode="drop")
    return History(prompt, jnp.zeros((batch, vocab), jnp.int32))


def process(
    logits_bmv: jax.Array,
    sampling: Sampling,
    history: History | None,
    drafted_ba: jax.Array | None = None,
    on_path_bma: jax.Array | None = None,
    vocab: jax.Array | None = None,
) -> jax.Array:
    """Logits at M places of each row, biased and penalised; the argument itself where nothing of that is on.

    Args:
        logits_bmv: float32.
        sampling: the rows' parameters.
        history: of the committed text; needed where `sampling.penalties` is on.
        drafted_ba: int32 drafted tokens, in the ids of `logits`; None for none.
        on_path_bma: bool; whether drafted token a is in front of place m.
        vocab: `[Vd]` int32 target id of each id of `logits`, or None where they agree.

    Raises:
        ValueError: penalties without a history.
    """
    if sampling.bias is not None:
        logits_bmv = logits_bmv + _dense_bias(sampling.bias, logits_bmv.shape[-1], vocab)[:, None]
    if sampling.penalties is None:
        return logits_bmv
    if history is None:
        raise ValueError("penalties need the rows' history, which the decoding loop keeps: pass Context.history")
    prompt, output = history.prompt, history.output
    if vocab is not None:
        prompt, output = prompt[:, vocab], output[:, vocab]
    seen = (prompt | (output > 0))[:, None]
    processed = _penalise(logits_bmv, sampling.penalties, seen, output[:, None])
    if drafted_ba is None or on_path_bma is None or not drafted_ba.shape[1]:
        return processed
    # Only a drafted token on the path counts differently than in the committed text.
    rows, places = jnp.arange(drafted_ba.shape[0])[:, None, None], jnp.arange(logits_bmv.shape[1])[:, None]
    same_baa = drafted_ba[:, :, None] == drafted_ba[:, None, :]
    on_path_times_bma = (on_path_bma[:, :, None, :] & same_baa[:, None]).sum(-1)
    count_bma = jnp.take_along_axis(output, drafted_ba, axis=1)[:, None] + on_path_times_bma
    raw_bma = jnp.take_along_axis(logits_bmv, jnp.broadcast_to(drafted_ba[:, None], on_path_bma.shape), axis=-1)
    right_bma = _penalise(raw_bma, sampling.penalties, jnp.ones_like(on_path_bma), count_bma)
    index = jnp.where(on_path_bma, drafted_ba[:, None], logits_bmv.shape[-1])
    return processed.at[rows, places, index].set(right_bma, mode="drop")


def _penalise(x_bmv: jax.Array, penalties: Penalties, seen: jax.Array, count: jax.Array) -> jax.Array:
    repetition, presence, frequency = (
        x[:, None, None] for x in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    x = jnp.where(seen, jnp.where(x_bmv < 0, x_bmv * repetition, x_bmv / repetition), x_bmv)
    return x - frequency * count - presence * (count > 0)


def _dense_bias(bias: Bias, size: int, vocab: jax.Array | None) -> jax.Array:
    """`[B, size]` in the ids of the logits."""
    if vocab is not None:
        hit_bkv = bias.tokens[:, :, None] == vocab
        return jnp.where(hit_bkv, bias.values[:, :, None], 0.0).sum(1)
    rows = jnp.arange(bias.tokens.shape[0])[:, None]
    index = jnp.where(bias.tokens < 0, size, bias.tokens)
    return jnp.zeros((bias.tokens.shape[0], size), jnp.float32).at[rows, index].add(bias.values, mode="drop")
