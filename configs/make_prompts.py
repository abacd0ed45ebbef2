"""Prompts for `experiments.regenerate`, by templates: summaries, translations, answers, rewriting, writing, questions.

    python -m experiments.make_prompts --config=configs/make_prompts.py --workdir=runs/prompts
    python -m experiments.regenerate --config=configs/regenerate.py --config.prompts=$PWD/runs/prompts/prompts.jsonl

The argument is a text file of your own; by default WikiText-2's validation text and Shakespeare in SPECJAX_DATA.
"""

from pathlib import Path

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    config = config_dict.ConfigDict()
    # Name -> path, relative to SPECJAX_DATA.
    config.texts = (
        {Path(arg).stem: arg}
        if arg
        else {"wikitext2": "text/wikitext2_valid.txt", "shakespeare": "text/tinyshakespeare.txt"}
    )
    config.per_task = 200
    config.seed = 0
    return config
