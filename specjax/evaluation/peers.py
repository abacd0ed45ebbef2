"""Other people's decoders on the same weights, timed beside ours: transformers on torch."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from specjax.checkpoints import drafters, save_target
from specjax.decoding import Completion, Request
from specjax.evaluation.contenders import Info, Preparation, Timed
from specjax.evaluation.results import cores
from specjax.models import Target, graph

PEERS = ("transformers_greedy", "transformers_lookup", "transformers_assisted")


class TransformersContender:
    """`model.generate` of transformers, greedy. Its own time is one piece: prefill is not timed apart."""

    def __init__(self, info: Info, model: Any, eos: tuple[int, ...], options: Mapping[str, Any]):
        """Takes a loaded model.

        Args:
            info: who it is.
            model: a causal language model.
            eos: ids that end a text.
            options: further arguments of `generate`.
        """
        self.info = info
        self._model, self._eos, self._options = model, list(eos), dict(options)

    def prepare(self, request: Request, buffer: int) -> Preparation:
        """Two short completions, which warm torch up; its cache grows as needed, so `buffer` says nothing here."""
        del buffer
        for _ in range(2):
            self._generate(request.prompt, min(4, request.max_new_tokens))
        return Preparation()

    def complete(self, request: Request) -> Timed:
        """One completion."""
        if request.temperature:
            raise ValueError(f"{self.info.label} decodes greedily; temperature is {request.temperature}")
        with self._counting() as passes:
            start = time.perf_counter()
            tokens = self._generate(request.prompt, request.max_new_tokens)
            seconds = time.perf_counter() - start
        completion = Completion(
            tokens=tokens,
            finish="stop" if tokens and tokens[-1] in self._eos else "length",
            # Its first pass over the prompt verifies a draft already: that pass and its tokens count.
            steps=len(passes),
            emitted=len(tokens),
            accepted=np.zeros((1,), np.int32),
            reached=np.zeros((0,), np.int32),
            overlap=np.zeros((0,), np.float32),
            prompt_length=len(request.prompt),
        )
        return Timed(completion, None, seconds)

    def _generate(self, prompt: tuple[int, ...], budget: int) -> tuple[int, ...]:
        import torch

        inputs = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=budget,
                do_sample=False,
                eos_token_id=self._eos,
                pad_token_id=self._eos[0],
                **self._options,
            )
        return tuple(out[0, len(prompt) :].tolist())

    @contextmanager
    def _counting(self) -> Iterator[list[int]]:
        """Collects an entry for every pass of the model itself (an assistant's do not count)."""
        passes: list[int] = []
        handle = self._model.register_forward_pre_hook(lambda *_: passes.append(1))
        try:
            yield passes
        finally:
            handle.remove()


def make_peers(rows: Mapping[str, Mapping[str, Any]], target: Target) -> list[TransformersContender]:
    """The peers of a lineup, all on one copy of the target's weights in float32.

    Args:
        rows: by label, `name` of `PEERS` and options: `num_nodes` for lookup, `source` for assisted (a draft model of
            the zoo or a directory of one, see `whole_draft`; or a model directory or hub id of the same vocabulary),
            `threads` for all of them (0 for all cores).
        target: whose weights they get.

    Raises:
        ImportError: torch is not installed.
        ValueError: an option that a peer does not take, or a peer that would be handed none it needs.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(
            f"the rows {', '.join(rows)} need torch, which is not installed ({error}): "
            "pip install 'specjax[torch]', or leave them out with --config.only"
        ) from error
    options = {label: _options(label, row) for label, row in rows.items()}
    threads = {row.get("threads", 0) for row in rows.values()}
    if len(threads) > 1:
        raise ValueError(f"peers run in one process: threads must agree, got {sorted(threads)}")
    torch.set_num_threads(threads.pop() or cores())
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        save_target(target, f"{directory}/model")
        model = _load(f"{directory}/model")
    contenders = []
    for label, row in rows.items():
        extra = options[label]
        if "source" in row:
            extra = {**extra, "assistant_model": _assistant(row["source"], int(row["num_nodes"]), target)}
        nodes = int(row.get("num_nodes", 0))
        info = Info(label, row["name"], "greedy", num_nodes=nodes, layout="torch")
        contenders.append(TransformersContender(info, model, target.eos_ids, extra))
    return contenders


def _options(label: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` for one row."""
    allowed = {
        "transformers_greedy": set(),
        "transformers_lookup": {"num_nodes"},
        "transformers_assisted": {"source", "num_nodes"},
    }[row["name"]]
    unknown = set(row) - allowed - {"name", "threads"}
    if unknown:
        raise ValueError(f"row {label!r} ({row['name']}) does not take {sorted(unknown)}; it takes {sorted(allowed)}")
    missing = allowed - set(row)
    if missing:
        raise ValueError(f"row {label!r} ({row['name']}) needs {sorted(missing)}")
    if row["name"] == "transformers_lookup":
        return {"prompt_lookup_num_tokens": int(row["num_nodes"])}
    return {}


def _assistant(source: str, num_nodes: int, target: Target) -> Any:
    """A draft model that always drafts `num_nodes` tokens; by default transformers adapts the number, and stops earlier
    behind a token that the draft is unsure of.
    """
    if drafters.is_drafter(source):
        with tempfile.TemporaryDirectory() as directory:
            save_target(whole_draft(source, target), f"{directory}/draft")
            model = _load(f"{directory}/draft")
    else:
        model = _load(source)
    model.generation_config.num_assistant_tokens = num_nodes
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def whole_draft(source: str, target: Target) -> Target:
    """A saved draft model as a model of its own: with the target's embedding and whole head where it shares them.

    transformers knows no draft vocabulary, so its assistant has more of a head to go through than ours.

    Args:
        source: a zoo entry, or a directory of a drafter.
        target: that it was trained for.

    Raises:
        ValueError: it is no draft model, or has a head of its own over a part of the vocabulary.
    """
    saved = drafters.load_drafter(source, target)
    if saved.method != "draft_model":
        raise ValueError(f"{source!r} is a drafter of method {saved.method!r}; transformers runs draft models alone")
    config, params, size = saved.config, dict(saved.params), target.config.vocab_size
    if "embed" in saved.shares:
        params["embed"] = target.params["embed"]
    if "head" in saved.shares:
        config = dataclasses.replace(config, head_size=size, tie_embeddings=target.config.tie_embeddings)
        params.pop("lm_head", None)
        params |= {} if config.tie_embeddings else {"lm_head": target.params["lm_head"]}
    if config.head_size != size:
        raise ValueError(
            f"{source!r} has a head of its own over {config.head_size} of {size} ids, which transformers does not run: "
            "give a draft that shares the target's head, or a model with the whole vocabulary"
        )
    return dataclasses.replace(target, config=config, graph=graph(config)[0], params=params, name=source)


def _load(source: str) -> Any:
    import torch
    import transformers

    # The argument was called torch_dtype before transformers 4.56.
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
