"""Prompts for `experiments.regenerate`: summaries, translations, answers, rewriting, writing, questions by templates.

    python -m experiments.make_prompts --config=configs/make_prompts.py --workdir=runs/prompts
    python -m experiments.regenerate --config=configs/regenerate.py --config.prompts=$PWD/runs/prompts/prompts.jsonl

The argument is a text file of your own; by default WikiText-2's validation text and Shakespeare in SPECJAX_DATA. `zoo`
is what the zoo's drafters learn from besides the shipped text: these templates, and prompts of GSM8K train and
GPTeacher that the shipped text does not answer.
"""

from pathlib import Path

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    zoo = arg == "zoo"
    config = config_dict.ConfigDict()
    # Name -> path, relative to SPECJAX_DATA.
    config.texts = (
        {Path(arg).stem: arg}
        if arg and not zoo
        else {"wikitext2": "text/wikitext2_valid.txt", "shakespeare": "text/tinyshakespeare.txt"}
    )
    config.per_task = 150 if zoo else 200
    config.seed = 0
    # Published sets to draw prompts from, JSONL or JSON lists; those with an answer in `answered` are left out.
    config.collections = (
        {
            "gpteacher-code": {"path": "gpteacher/codegen-instruct.json", "count": 700},
            "gpteacher-roleplay": {"path": "gpteacher/roleplay-instruct.json", "count": 900},
            "gsm8k-train": {"path": "gsm8k/train.jsonl", "count": 500},
        }
        if zoo
        else {}
    )
    text = "target_text/smollm2-135m-instruct"
    config.answered = (f"{text}.train.jsonl.gz", f"{text}.validation.jsonl.gz") if zoo else ()
    config.held_out = 64 if zoo else 0  # prompts to measure on: held_out.jsonl
    config.shuffle_seed = 11
    return config
