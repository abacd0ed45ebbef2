"""Prompts from plain text and from collections: python -m experiments.make_prompts --config=configs/make_prompts.py

Writes prompts.jsonl, which `experiments.regenerate` takes, in an order that mixes all kinds; and held_out.jsonl, with
the prompts to measure on, where the config holds some out.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence

import ml_collections
from etils import epath

from experiments import _main
from experiments._collections import asked, entries
from specjax.checkpoints.rundir import write_whole
from specjax.training.data import read_answers
from specjax.training.prompt_templates import template_prompts
from specjax.training.regenerate import Prompt


def main(config: ml_collections.ConfigDict) -> None:
    """Reads the texts, fills the templates, draws from the collections, writes the prompts in one go."""
    base, rng = _main.data_dir(), random.Random(config.shuffle_seed)
    texts = {name: (base / path).read_text() for name, path in config.texts.items()}
    prompts = template_prompts(texts, config.per_task, config.seed)
    prompts += collected(config, base, rng)
    rng.shuffle(prompts)
    if not 0 <= config.held_out < len(prompts):
        raise ValueError(
            f"held_out={config.held_out} of {len(prompts)} prompts; expected 0 or more, and fewer than all"
        )
    for source, count in sorted(Counter(p.source for p in prompts).items()):
        print(f"{source}: {count}")
    if config.held_out:
        _write("held_out.jsonl", prompts[: config.held_out])
    _write("prompts.jsonl", prompts[config.held_out :])


def collected(config: ml_collections.ConfigDict, base: epath.Path, rng: random.Random) -> list[Prompt]:
    """So many prompts of each collection as the config asks for, drawn from those without an answer in its texts.

    Raises:
        ValueError: a collection has fewer.
    """
    answered = {answer.prompt.strip() for path in config.answered for answer in read_answers(base / path)}
    found: dict[str, list[Prompt]] = {}
    for name, collection in config.collections.items():
        texts = [asked(entry)[0] for entry in entries(base / collection.path)]
        found[name] = [Prompt(name, i, text) for i, text in enumerate(texts) if text and text not in answered]
        if not 0 <= collection.count <= len(found[name]):
            raise ValueError(
                f"collections.{name}.count={collection.count}; expected 0 to {len(found[name])}, the prompts of "
                f"{collection.path} that have no answer yet"
            )
    for prompts in found.values():
        rng.shuffle(prompts)
    return [prompt for name, prompts in found.items() for prompt in prompts[: config.collections[name].count]]


def _write(name: str, prompts: Sequence[Prompt]) -> None:
    path = epath.Path(_main.workdir()) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"source": p.source, "id": p.id, "prompt": p.text}) + "\n" for p in prompts)
    write_whole(path, "".join(lines))
    print(f"{len(prompts)} prompts: {path}")


if __name__ == "__main__":
    _main.run(main, config="configs/make_prompts.py", workdir="runs/prompts")
