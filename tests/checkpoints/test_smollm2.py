"""The demo target: its perplexity is the one that transformers finds for the same dequantised weights."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from specjax.checkpoints import load_target, save_target
from specjax.models import merge
from specjax.models.target import Target

pytestmark = pytest.mark.slow

WINDOW, WINDOWS = 512, 8
NextLoss = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def target() -> Target:
    """Fetched on the first run (89 MB), then kept in the user's cache."""
    return load_target("smollm2")


def texts(data_dir: Path) -> dict[str, str]:
    with gzip.open(data_dir / "humaneval" / "HumanEval.jsonl.gz", "rt") as stream:
        code = [row["prompt"] + row["canonical_solution"] for row in map(json.loads, stream)]
    with (data_dir / "gsm8k" / "test.jsonl").open() as stream:
        sums = [f"{row['question']}\n{row['answer']}" for row in map(json.loads, stream)]
    return {
        "humaneval": "\n".join(code[:60]),
        "gsm8k": "\n\n".join(sums[:60]),
        "wikitext2": (data_dir / "text" / "wikitext2_valid.txt").read_text()[:40000],
    }


def windows(target: Target, text: str) -> np.ndarray:
    ids = np.asarray(target.tokenizer.encode(text)[: WINDOW * WINDOWS])
    assert ids.size == WINDOW * WINDOWS
    return ids.reshape(WINDOWS, WINDOW)


def perplexity(loss: NextLoss, ids: np.ndarray) -> float:
    return float(np.exp(np.mean([loss(row) for row in ids])))


@partial(jax.jit, static_argnames="graph")
def run(graph: Any, params: Any, tokens_t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss of each next token of a text, and the best next token."""
    module = merge(graph, params)
    positions = jnp.arange(tokens_t.shape[0])[None]
    out = module.full(tokens_t[None], positions, jnp.zeros_like(positions), taps=("normed",))
    logits = module.logits(out.taps["normed"][0])
    laws = jax.nn.log_softmax(logits[:-1], axis=-1)
    return -jnp.take_along_axis(laws, tokens_t[1:, None], axis=-1), logits.argmax(-1)


def ours(target: Target, params: Any) -> NextLoss:
    return lambda row: np.asarray(run(target.graph, params, jnp.asarray(row))[0])


def theirs(directory: Path) -> NextLoss:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def run(row: np.ndarray) -> np.ndarray:
        ids = torch.tensor(row)[None]
        with torch.no_grad():
            # In float32 torch sums 49,152 terms to five digits, which would be the whole difference.
            laws = model(ids).logits[0, :-1].double().log_softmax(-1)
        return -laws.gather(-1, ids[0, 1:, None]).numpy()

    return run


def test_perplexity_is_that_of_transformers(target: Target, data_dir: Path, tmp_path: Path) -> None:
    save_target(target, tmp_path)
    mine, reference = ours(target, target.params), theirs(tmp_path)
    for name, text in texts(data_dir).items():
        ids = windows(target, text)
        found, expected = perplexity(mine, ids), perplexity(reference, ids)
        print(f"{name}: {found:.4f}, transformers {expected:.4f}, relative {found / expected - 1:.1e}")
        assert abs(found / expected - 1) < 1e-4
        assert 2 < found < 25


def test_interleaved_rows_would_show(target: Target, data_dir: Path) -> None:
    """Weights whose rotary pairs are left as the file has them make a model several times worse, and no error."""
    config = target.config
    ids = windows(target, texts(data_dir)["wikitext2"])[:2]

    def interleaved(kernel_io: jax.Array, heads: int) -> jax.Array:
        halves = kernel_io.reshape(kernel_io.shape[0], heads, 2, -1)
        return halves.swapaxes(2, 3).reshape(kernel_io.shape)

    wrong = jax.tree.map(lambda leaf: leaf, target.params)
    for layer in wrong["layers"].values():
        layer["attn"]["q"]["kernel"] = interleaved(layer["attn"]["q"]["kernel"], config.num_heads)
        layer["attn"]["k"]["kernel"] = interleaved(layer["attn"]["k"]["kernel"], config.num_kv_heads)
    loss = ours(target, target.params)
    right, spoilt = perplexity(loss, ids), perplexity(ours(target, wrong), ids)
    print(f"wikitext2: {right:.2f}, with interleaved rows {spoilt:.2f}")
    assert spoilt > 2.5 * right


def test_the_conversation_format(target: Target) -> None:
    """Digits one by one, the system turn of the template, and the end of the turn."""
    assert target.eos_ids == (2,) and target.context == 8192
    ids = target.tokenizer.apply_chat([{"role": "user", "content": "12+345"}])
    text = target.tokenizer.decode(ids, skip_special=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n12+345<|im_end|>\n<|im_start|>assistant\n"
    )
    digits = [target.tokenizer.decode([i]) for i in ids if target.tokenizer.decode([i]).isdigit()]
    assert digits == list("12345")


def test_answers_recorded_with_transformers_are_continued_alike(target: Target, data_dir: Path) -> None:
    """Greedy answers made with transformers in bfloat16: ours, in float32, agrees on nearly every next token."""
    path = data_dir / "target_text" / "smollm2-135m-instruct.validation.jsonl.gz"
    with gzip.open(path, "rt") as stream:
        rows = [row for row in map(json.loads, stream) if row["temperature"] == 0][:8]

    same = total = 0
    for row in rows:
        prompt = target.tokenizer.apply_chat([{"role": "user", "content": row["prompt"]}])
        answer = row["response_ids"]
        padded = np.zeros(WINDOW, np.int32)
        padded[: len(prompt) + len(answer)] = [*prompt, *answer]
        best = np.asarray(run(target.graph, target.params, jnp.asarray(padded))[1])
        found = best[len(prompt) - 1 : len(prompt) + len(answer) - 1]
        same += int((found == np.asarray(answer)).sum())
        total += len(answer)
    print(f"{same} of {total} recorded tokens are our argmax")
    assert same / total > 0.97
