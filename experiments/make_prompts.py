"""Prompts from plain text: python -m experiments.make_prompts --config=configs/make_prompts.py

Writes prompts.jsonl, which `experiments.regenerate` takes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import ml_collections
from etils import epath

from experiments import _main
from specjax.checkpoints.rundir import write_whole
from specjax.training.prompt_templates import template_prompts


def main(config: ml_collections.ConfigDict) -> None:
    """Reads the texts, fills the templates, writes the prompts in one go."""
    base = Path(os.environ.get("SPECJAX_DATA", "."))
    texts = {name: (base / path).read_text() for name, path in config.texts.items()}
    prompts = template_prompts(texts, config.per_task, config.seed)
    path = epath.Path(_main.workdir()) / "prompts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"source": p.source, "id": p.id, "prompt": p.text}) + "\n" for p in prompts)
    write_whole(path, "".join(lines))
    for source, count in sorted(Counter(p.source for p in prompts).items()):
        print(f"{source}: {count}")
    print(f"{len(prompts)} prompts: {path}")


if __name__ == "__main__":
    _main.run(main, config="configs/make_prompts.py", workdir="runs/prompts")
