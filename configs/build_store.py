"""A text store for the drafter `retrieval` (REST): a file, or a directory of files, tokenised and indexed.

    python -m experiments.build_store --config=configs/build_store.py:$HOME/notes --workdir=runs/rest
    python -m experiments.benchmark --config=configs/self_drafting.py --config.rows.retrieval.source=runs/rest/store.npz

The argument is the path. Files that end in .jsonl, or .jsonl.gz, hold a document a line; any other file is one.
"""

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}  # whose tokenizer it is
    config.path = arg or ""
    config.pattern = "*"  # names of the files below a directory, such as *.md
    config.fields = ("text", "prompt", "response")  # of a JSON line: those that it has, one after the other
    return config
