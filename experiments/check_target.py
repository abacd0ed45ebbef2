"""Compares a checkpoint with transformers: python -m experiments.check_target --config=configs/check_target.py:<model>.

For each text: the same ids, logits of a full pass and of cached passes, perplexity, and a greedy continuation; and the
perplexity of published sets. Ends with an error where they differ beyond rounding. Writes check_target.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _main
from experiments._prompts import VARIABLE, needs_data
from specjax import build, checkpoints, decoding
from specjax.decoding import Request, check_precision, make_sampling
from specjax.evaluation import results
from specjax.evaluation.prompts import load_prompts
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target, causal_view, init_cache, merge

SCHEMA = "specjax.check_target/1"
CHUNK = 64
# How far apart two right implementations come to lie, as a share of the largest logit.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def main(config: ml_collections.ConfigDict) -> None:
    """Loads both, compares, writes, prints."""
    console, workdir = _main.console(), _main.workdir()
    if not config.texts or not all(config.texts):
        raise ValueError("texts: expected at least one, and none of them empty")
    if config.max_tokens < 2 or config.new_tokens < 1:
        raise ValueError(f"max_tokens={config.max_tokens}, new_tokens={config.new_tokens}; expected >= 2 and >= 1")
    if config.corpus_windows < 1 or not config.perplexity_tolerance > 0:
        said = f"corpus_windows={config.corpus_windows}, perplexity_tolerance={config.perplexity_tolerance}"
        raise ValueError(f"{said}; expected at least 1, and more than 0")
    check_precision(config.precision)
    corpora = read_corpora(config.corpora.to_dict(), console)
    results.check_writable(workdir)
    target = build.target_from_config(config.target)
    reference = Reference(config.target.source, target)
    texts = [target.tokenizer.encode(text)[: min(config.max_tokens, target.context)] for text in config.texts]
    rows = [compare_text(target, reference, text, ids, config) for text, ids in zip(config.texts, texts, strict=True)]
    compare_greedy(target, reference, texts, rows, config)
    sets = [compare_corpus(target, reference, name, text, config) for name, text in corpora.items()]

    tolerance = config.tolerance or TOLERANCE[target.config.dtype]
    precision = {"dtype": target.config.dtype, "matmul": config.precision, "tolerance": tolerance}
    document = {"meta": results.describe(config.to_dict(), precision, SCHEMA), "rows": rows, "sets": sets}
    results.write_json(workdir / "check_target.json", document)
    console.print(table(rows))
    if sets:
        console.print(sets_table(sets))
    console.print(f"written to {workdir / 'check_target.json'}", highlight=False)
    if wrong := faults(rows, tolerance) + set_faults(sets, config.perplexity_tolerance):
        raise ValueError(f"{target.name} does not compute what transformers does: {'; '.join(wrong)}")
    console.print(f"{target.name} agrees with transformers (tolerance {tolerance:g})", highlight=False)


class Reference:
    """The same checkpoint in transformers."""

    def __init__(self, source: str, target: Target):
        """Loads it in the target's dtype.

        Raises:
            ImportError: torch is not installed.
            ValueError: the checkpoint lies where transformers cannot read it.
        """
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ImportError(f"the comparison needs torch ({error}): pip install 'specjax[torch]'") from error
        directory = checkpoints.locate(source)
        if "://" in str(directory):
            raise ValueError(f"transformers cannot read {directory}: copy the model to a local directory")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        dtype = getattr(torch, target.config.dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
        # Without the sampling defaults and penalties that a checkpoint may bring along.
        ends = {"eos_token_id": list(target.eos_ids), "pad_token_id": target.eos_ids[0]}
        self.model.generation_config = transformers.GenerationConfig(**ends)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.tokenizer(text).input_ids

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits `[T, V]` float32."""
        with self.torch.no_grad():
            return self.model(self.torch.tensor([list(ids)])).logits[0].float().numpy()

    def greedy(self, ids: Sequence[int], tokens: int) -> list[int]:
        """Greedy continuation, the end-of-text id included."""
        prompt = self.torch.tensor([list(ids)])
        mask = self.torch.ones_like(prompt)
        out = self.model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=tokens)
        return out[0, len(ids) :].tolist()


@partial(jax.jit, static_argnames=("graph", "precision"))
def both_logits(graph: Any, precision: str, params: Any, tokens_l: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits `[L, V]` of one pass over a text, and of cached passes over its chunks; L a multiple of the chunk."""
    with jax.default_matmul_precision(precision):
        module = merge(graph, params)
        positions = jnp.arange(tokens_l.size)[None]
        full = module.full(tokens_l[None], positions, jnp.zeros_like(positions), taps=("normed",)).taps["normed"]

        def chunk(cache: Any, piece: jax.Array) -> tuple[Any, jax.Array]:
            out, cache = module.cached(piece[None], cache, causal_view(cache.length, CHUNK), taps=("normed",))
            return cache.replace(length=cache.length + CHUNK), out.taps["normed"][0]

        cache = init_cache(module.config, 1, tokens_l.size)
        cached = jax.lax.scan(chunk, cache, tokens_l.reshape(-1, CHUNK))[1]
        return module.logits(full[0]), module.logits(cached.reshape(tokens_l.size, -1))


def compare_text(
    target: Target, reference: Reference, text: str, ids: list[int], config: ml_collections.ConfigDict
) -> dict[str, Any]:
    """Ids, logits and perplexity of one text; the ids alone decide where the text is empty."""
    padded = np.zeros(-(-len(ids) // CHUNK) * CHUNK, np.int32)
    padded[: len(ids)] = ids
    precision = config.precision
    full, cached = both_logits(target.graph, precision, target.params, jnp.asarray(padded))
    expected = reference.logits(ids)
    found = {"full": np.asarray(full)[: len(ids)], "cached": np.asarray(cached)[: len(ids)]}
    top = np.abs(expected).max()
    return {
        "text": text,
        "tokens": len(ids),
        "same_ids": not text or reference.encode(text)[: len(ids)] == ids,
        "full": float(np.abs(found["full"] - expected).max() / top),
        "cached": float(np.abs(found["cached"] - expected).max() / top),
        "argmax": float((found["full"].argmax(-1) == expected.argmax(-1)).mean()),
        "perplexity": perplexity(found["full"], ids),
        "perplexity_transformers": perplexity(expected, ids),
    }


def perplexity(logits_tv: np.ndarray, ids: Sequence[int]) -> float:
    """Of the tokens after the first."""
    laws = jax.nn.log_softmax(logits_tv[:-1].astype(np.float32), axis=-1)
    return float(np.exp(-np.mean(np.asarray(laws)[np.arange(len(ids) - 1), ids[1:]])))


def read_corpora(corpora: Mapping[str, str], console: Console) -> dict[str, str]:
    """The text of each corpus: of a `.txt` file all of it, of anything else the first turns of its prompts.

    Those that lie in SPECJAX_DATA are left out where that is not set.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds no such prompts, or no text.
    """
    found = {}
    for name, source in corpora.items():
        if needs_data(source):
            console.print(f"SPECJAX_DATA is not set: the set {name!r} is left out", style="yellow")
            continue
        path = source.replace(VARIABLE, os.environ.get("SPECJAX_DATA", ""))
        if path.endswith(".txt"):
            found[name] = Path(path).read_text(encoding="utf-8")
        else:
            found[name] = "\n\n".join(prompt.turns[0] for prompt in load_prompts(path))
        if not found[name].strip():
            raise ValueError(f"the set {name!r} ({path}) holds no text")
    return found


def compare_corpus(
    target: Target, reference: Reference, name: str, text: str, config: ml_collections.ConfigDict
) -> dict[str, Any]:
    """Perplexity of the first windows of a text, each on its own, here and in transformers."""
    size = min(config.max_tokens, target.context)
    # Tokens have far fewer than 64 characters in the mean: what lies behind that need not be cut into ids.
    ids = target.tokenizer.encode(text[: 64 * size * config.corpus_windows])
    windows = [ids[i * size : (i + 1) * size] for i in range(config.corpus_windows)]
    rows = [compare_text(target, reference, "", window, config) for window in windows if len(window) > 1]
    counts = [row["tokens"] - 1 for row in rows]

    def mean(key: str) -> float:
        return float(np.exp(np.average([np.log(row[key]) for row in rows], weights=counts)))

    ours, theirs = mean("perplexity"), mean("perplexity_transformers")
    return {
        "set": name,
        "tokens": sum(counts),
        "perplexity": ours,
        "perplexity_transformers": theirs,
        "ratio": ours / theirs,
    }


def compare_greedy(
    target: Target,
    reference: Reference,
    texts: Sequence[list[int]],
    rows: list[dict[str, Any]],
    config: ml_collections.ConfigDict,
) -> None:
    """Adds to each row how the greedy continuations compare: equal, near_tie or different."""
    bound = rounding_bound(target.config.dtype, config.precision, config.near_tie_bound)
    limit = min(config.new_tokens, target.context - max(len(ids) for ids in texts))
    drafting = build.make_drafter("autoregressive", target)
    sampling = make_sampling([0.0], [0], [1.0])
    loop, weights = build.make_loop(target, drafting, sampling, precision=config.precision)
    requests = [Request(tuple(ids), limit, id=i) for i, ids in enumerate(texts)]
    done = decoding.generate(loop, weights, requests, context=target.context, vocab=target.config.vocab_size)
    theirs = [reference.greedy(ids, limit) for ids in texts]
    teacher = Teacher(target.graph, target.params, precision=config.precision)
    found = teacher.compare(texts, theirs, [c.tokens for c in done], bound)
    for row in rows:
        row["greedy"] = "equal"
    for kind, divergences in (("near_tie", found.near_ties), ("different", found.different)):
        for divergence in divergences:
            rows[divergence.row] |= {"greedy": kind, "parts_at": divergence.position, "gap": divergence.gap}


def faults(rows: Sequence[dict[str, Any]], tolerance: float) -> list[str]:
    """What is beyond rounding, text by text."""
    found = []
    for i, row in enumerate(rows):
        if not row["same_ids"]:
            found.append(f"text {i} is cut into other ids")
        for kind in ("full", "cached"):
            if not row[kind] <= tolerance:
                found.append(f"text {i}: logits of the {kind} pass differ by {row[kind]:.1e}, tolerance {tolerance:g}")
        if row["greedy"] == "different":
            found.append(f"text {i}: greedy text parts at token {row['parts_at']} with a gap of {row['gap']:.3g}")
    return found


def set_faults(sets: Sequence[dict[str, Any]], tolerance: float) -> list[str]:
    """Sets whose perplexities are further apart than the tolerance, as a share."""
    return [
        f"perplexity of {row['set']}: {row['perplexity']:.4f}, transformers {row['perplexity_transformers']:.4f}"
        for row in sets
        if not abs(row["ratio"] - 1) <= tolerance
    ]


def sets_table(sets: Sequence[dict[str, Any]]) -> Table:
    """One line a set."""
    made = Table(box=SIMPLE_HEAD)
    made.add_column("set")
    for column in ("tokens", "perplexity", "transformers", "ratio"):
        made.add_column(column, justify="right")
    for row in sets:
        figures = f"{row['perplexity']:.4f}", f"{row['perplexity_transformers']:.4f}", f"{row['ratio']:.6f}"
        made.add_row(row["set"], str(row["tokens"]), *figures)
    return made


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a text."""
    made = Table(box=SIMPLE_HEAD)
    made.add_column("text", no_wrap=True, max_width=24)
    for column in ("tokens", "ids", "full", "cached", "argmax", "perplexity", "transformers", "greedy"):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            row["text"].replace("\n", " "),
            str(row["tokens"]),
            "same" if row["same_ids"] else "other",
            f"{row['full']:.1e}",
            f"{row['cached']:.1e}",
            f"{row['argmax']:.1%}",
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_transformers']:.3f}",
            row["greedy"].replace("_", " "),
        )
    return made


if __name__ == "__main__":
    _main.run(main, config="configs/check_target.py", workdir="runs/check_target")
