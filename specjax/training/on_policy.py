"""Text that the draft writes while it is trained (DistillSpec, Zhou et al. 2024, section 4.1): on-policy distillation.

Every few steps the draft, as it is then, continues training prompts through the project's own decoding loop, and rows
of its answers take the place of some of each batch's. The target answers to them in the step, as to any text: what the
draft is taught is what it does where it gets to by itself. A share below 1 is the paper's mixed data.

What was written lies in the run directory, one file a time, so that a resumed run trains on the same rows.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from specjax.checkpoints.drafters import target_head
from specjax.checkpoints.rundir import write_whole
from specjax.decoding import Loop, Request, Weights, generate
from specjax.drafting import Autoregressive
from specjax.models import Target, graph, merge
from specjax.training.data import Batch, Document, lay_out, order, pack
from specjax.training.draft import Student
from specjax.training.step import as_computed
from specjax.verification import OneHot

FOLDER = "on_policy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig:
    """How much of the training text the draft writes, and how.

    Attributes:
        share: of the rows of each batch, rounded to whole rows, at least one.
        every: steps between one writing and the next.
        prompts: that are continued each time.
        max_new_tokens: budget of an answer.
        temperature: 0 for greedy.
        batch: answers that are written together.
        row_length: tokens of a packed row, that of the other rows.
    """

    share: float
    row_length: int
    every: int = 50
    prompts: int = 32
    max_new_tokens: int = 128
    temperature: float = 1.0
    batch: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"on_policy.share={self.share}; expected a share in (0, 1], or 0 in the config for none")
        if self.temperature < 0:
            raise ValueError(f"on_policy.temperature={self.temperature}; expected 0 for greedy, or more")
        for name in ("every", "prompts", "max_new_tokens", "batch"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"on_policy.{name}={value}; expected at least 1")


@dataclasses.dataclass(frozen=True, eq=False)
class OnPolicy:
    """The draft as a writer of training text.

    Attributes:
        config: see there.
        student: the draft; only one that is a whole decoder writes by itself.
        prompts: token ids of the prompts of the training text, as the target sees them.
    """

    config: OnPolicyConfig
    student: Student
    prompts: Sequence[tuple[int, ...]]

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("on-policy text continues the prompts of the training text, and there are none")

    def rows_of(self, batch: int) -> int:
        """How many rows of a batch the draft writes."""
        return max(1, round(self.config.share * batch))

    def written(self, params: Any, target: Target, vocab: Any, seed: int, number: int) -> list[Document]:
        """Answers of the draft to some of the prompts.

        Args:
            params: of the draft, in the dtypes that it computes in.
            target: whose embedding, head rows and limits it shares.
            vocab: int `[Vd]` target ids of the draft vocabulary.
            seed: of the run.
            number: of this writing; others continue other prompts, with other draws.
        """
        c, loop, weights = self.config, *self._loop(params, target, np.asarray(vocab))
        chosen = order(len(self.prompts), seed, number)[: c.prompts]
        ids = _to_draft(np.asarray(vocab), target.config.vocab_size)
        requests = [
            Request(tuple(ids[list(self.prompts[i])].tolist()), c.max_new_tokens, temperature=c.temperature, id=int(i))
            for i in chosen
        ]
        own = int(np.random.Generator(np.random.PCG64([seed, number])).integers(2**31))
        limits: dict[str, Any] = {"context": target.context, "vocab": target.config.vocab_size}
        done = generate(loop, weights, requests, seed=own, batch=min(c.batch, len(requests)), **limits)
        documents = []
        for i, completion in zip(chosen, done, strict=True):
            answer = np.asarray(vocab)[np.asarray(completion.tokens, np.int64)]
            prompt = np.asarray(self.prompts[i], np.int32)
            documents.append(Document(np.concatenate([prompt, answer.astype(np.int32)]), len(prompt)))
        return documents

    def _loop(self, params: Any, target: Target, vocab: np.ndarray) -> tuple[Loop, Weights]:
        """Plain decoding with the draft in the target's place.

        Its head has the rows of the draft vocabulary alone, so ids are renumbered: those of the draft vocabulary come
        first, in its order, and what the head says is an id as it is.
        """
        ids = _to_draft(vocab, target.config.vocab_size)
        table = target.params["embed"]["embedding"]
        network = {
            **params,
            "embed": {"embedding": table[np.argsort(ids)]},
            "lm_head": {"kernel": target_head(target.config, target.params, jnp.asarray(vocab))},
        }
        ends = tuple(int(ids[e]) for e in target.eos_ids if ids[e] < len(vocab))
        return Loop(graph(self.student.config)[0], Autoregressive(), OneHot(0), eos=ends), Weights(network, {}, {})


def _to_draft(vocab: np.ndarray, size: int) -> np.ndarray:
    """`[V]`: the new number of each id, the draft vocabulary's first."""
    others = np.setdiff1d(np.arange(size), vocab)
    ids = np.empty(size, np.int64)
    ids[np.concatenate([vocab, others])] = np.arange(size)
    return ids


class Mixer:
    """Puts rows that the draft wrote into the batches of one run."""

    def __init__(self, on_policy: OnPolicy, folder: epath.Path, seed: int):
        """Starts, or goes on.

        Args:
            on_policy: the writer.
            folder: of what was written.
            seed: of the run.
        """
        self._on_policy, self._folder, self._seed = on_policy, folder, seed
        none = np.zeros((0, 0), np.int32)
        self._number, self._rows = -1, Batch(none, none, none, none)

    def mixed(
        self, step: int, start: int, params: Any, objective: Any, target: Target, tables: Any, rows: Any, batch: Batch
    ) -> tuple[np.ndarray, Batch]:
        """The batch of a step with its first rows replaced, and the row ids, -1 for those.

        Args:
            step: updates made before.
            start: updates made when this process began.
            params: the present parameters.
            objective: says what they are computed in.
            target: the target.
            tables: the drafter's.
            rows: ids of the rows of the batch.
            batch: of text alone.
        """
        number = step // self._on_policy.config.every
        if number != self._number:
            self._rows, self._number = self._written(number, step, start, params, objective, target, tables), number
        count = self._on_policy.rows_of(len(rows))
        place = (step % self._on_policy.config.every) * count + np.arange(count)
        own = jax.tree.map(lambda x: x[place % len(x)], self._rows)
        mixed = jax.tree.map(lambda a, b: np.concatenate([a, np.asarray(b)[count:]]), own, batch)
        return np.where(np.arange(len(rows)) < count, -1, rows), mixed

    def _written(
        self, number: int, step: int, start: int, params: Any, objective: Any, target: Target, tables: Any
    ) -> Batch:
        path = self._folder / f"{number:06d}.npz"
        # Resumed in between: on with what was written then, by parameters that are no more.
        if step == start and step % self._on_policy.config.every and path.exists():
            with np.load(io.BytesIO(path.read_bytes())) as kept:
                return Batch(**kept)
        params = as_computed(objective, params, merge(target.graph, target.params), tables)
        documents = self._on_policy.written(params, target, tables["vocab"], self._seed, number)
        length = self._on_policy.config.row_length
        made = lay_out(pack(documents, length)[0], length)
        content = io.BytesIO()
        names = ("tokens", "positions", "segments", "response")
        np.savez(content, **{name: getattr(made, name) for name in names})
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
        return made
