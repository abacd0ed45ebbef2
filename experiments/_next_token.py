"""The next token's loss of a pretrained target, by held-out row, so that runs can be compared row by row."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from experiments import _main
from specjax.analysis import bootstrap_interval
from specjax.evaluation import results
from specjax.models import Decoder, Target, merge
from specjax.training.data import Batch, TextRows

SCHEMA = "specjax.pretraining/1"


def report(config: ml_collections.ConfigDict, target: Target, held_out: Mapping[str, TextRows]) -> None:
    """Writes `results.json` to the run directory: of every held-out set the loss, its interval, and that of each row.

    Args:
        config: of the run.
        target: as it is exported.
        held_out: by name.
    """
    found = [row(name, losses_by_row(target, rows, config.train.batch), config) for name, rows in held_out.items()]
    precision = {"dtype": target.config.dtype, "matmul": config.train.precision}
    meta = results.describe(config.to_dict(), precision, SCHEMA)
    results.write_json(_main.workdir() / "results.json", {"meta": meta, "rows": found})
    for one in found:
        low, high = one["loss_ci"] or (float("nan"),) * 2
        print(f"{one['set']}: next token {one['loss']:.4f} nats [{low:.4f}, {high:.4f}] on {one['tokens']} tokens")


def row(name: str, sums_r2: np.ndarray, config: ml_collections.ConfigDict) -> dict[str, Any]:
    """A held-out set of a run: nats a token with their bootstrap interval over rows, and every row's sum and count."""
    loss = bootstrap_interval(sums_r2, per_token, seed=0)
    return {
        "set": name,
        "kind": config.objective.get("kind", "independent"),
        "heads": config.objective.heads,
        "seed": config.train.seed,
        "steps": config.train.steps,
        "loss": loss.estimate,
        "loss_ci": [loss.low, loss.high] if loss.low <= loss.high else None,
        "tokens": int(sums_r2[:, 1].sum()),
        "by_row": [[float(nats), int(count)] for nats, count in sums_r2],
    }


def per_token(sums_r2: np.ndarray) -> float:
    """Nats a token of rows' sums and counts."""
    return float(sums_r2[:, 0].sum() / sums_r2[:, 1].sum())


def losses_by_row(target: Target, rows: TextRows, batch: int) -> np.ndarray:
    """Float64 `[R, 2]`: of each row the summed cross-entropy of its next tokens, and how many there are."""
    found = []
    for start in range(0, rows.rows, batch):
        index = np.arange(start, start + batch)
        # The last batch is filled up with its last row: one program.
        part = _sums(target.graph, target.params, rows.batch(np.minimum(index, rows.rows - 1)))
        found.append(np.asarray(part, np.float64)[index < rows.rows])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnames=("graph",))
def _sums(graph: nnx.GraphDef[Decoder], params: Any, batch: Batch) -> jax.Array:
    with jax.default_matmul_precision("float32"):
        network = merge(graph, params)
        tokens, predicts = jnp.asarray(batch.tokens), jnp.asarray(batch.predicts)
        out = network.full(tokens, batch.positions, batch.segments, taps=("normed",))
        log_p = jax.nn.log_softmax(network.logits(out.taps["normed"]), axis=-1)
    label = jnp.roll(tokens, -1, axis=1)
    nll = -jnp.take_along_axis(log_p, label[..., None], axis=-1)[..., 0]
    return jnp.stack([jnp.sum(jnp.where(predicts, nll, 0.0), axis=1), jnp.sum(predicts, axis=1)], axis=-1)
