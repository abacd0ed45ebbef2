"""Tokens a pass against the number of heads that draft, on held-out code and prose, greedy and at T = 1.

    python -m experiments.pretrain --config=configs/mtp.py:small,heads=4
    python -m experiments.benchmark --config=configs/mtp_benchmark.py --workdir=runs/mtp_benchmark

Arguments, separated by commas: the run directory of the pretraining (runs/mtp, where experiments.pretrain puts it), and
`quick`, which takes 2 prompts and 16 tokens. Every number of heads that the run has is measured.
"""

import difflib
import json

from etils import epath
from ml_collections import config_dict

RUN = "runs/mtp"  # of experiments.pretrain, where no other is named


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    run, quick = run_and_quick(arg, RUN, "mtp_benchmark")
    config = on_pretrained(run, quick)
    depth = depth_of(run)
    # Heads beyond the next token's that draft.
    config.rows.mtp = {
        "name": "mtp",
        "source": f"{run}/drafter",
        "num_nodes": (1,) if quick else tuple(range(1, depth + 1)),
        "rule": "",
    }
    return config


def run_and_quick(arg: str | None, default: str, name: str) -> tuple[str, bool]:
    """A run directory and whether `quick` was given.

    Args:
        arg: of the config; parts separated by commas.
        default: the run where none is named.
        name: of the config, for errors.

    Raises:
        ValueError: a word that is neither `quick` nor a path, or a second run.
    """
    parts = [part for part in (arg or "").split(",") if part]
    runs = [part for part in parts if part != "quick"]
    for run in runs:
        if "/" not in run and not epath.Path(run).exists():
            close = difflib.get_close_matches(run, ("quick",), n=1)
            hint = "did you mean 'quick'? " if close else ""
            raise ValueError(
                f"unknown argument {run!r} of configs/{name}.py; {hint}known: quick, and the directory of a run"
            )
    if len(runs) > 1:
        raise ValueError(f"configs/{name}.py takes one run, not {' and '.join(map(repr, runs))}; known besides: quick")
    return (*runs, default)[0], "quick" in parts


def depth_of(run: str) -> int:
    """How many heads beyond the next token's a run saved; 3 where it is not there yet.

    Raises:
        ValueError: the run trained none.
    """
    saved = epath.Path(run) / "drafter" / "config.json"
    if saved.exists():
        return int(json.loads(saved.read_text())["model"]["depth"])
    if (epath.Path(run) / "target").exists():
        raise ValueError(f"{run} has no drafter: it was trained with heads=1; expected a run of heads=2 or more")
    return 3


def on_pretrained(run: str, quick: bool) -> config_dict.ConfigDict:
    """Plain decoding of a target that experiments.pretrain made, on its own held-out prompts."""
    config = config_dict.ConfigDict()
    config.target = {"source": f"{run}/target", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)

    config.template = "plain"  # it was trained on text alone

    config.prompts = f"{run}/prompts.jsonl"
    config.prompts_fallback = ""
    config.prompts_per_category = 1 if quick else 0
    config.max_prompts = 0
    config.long_prompts = "error"  # or skip, which counts them
    config.max_new_tokens = 16 if quick else 128

    config.temperatures = (0.0,) if quick else (0.0, 1.0)
    config.top_k = 0
    config.top_p = 1.0
    config.seed = 0

    config.rows = {"autoregressive": {"name": "autoregressive"}}
    config.only = ()

    config.batch = 1
    config.repeats = 1
    config.layout = "packed"
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}  # -1: the other devices
    config.precision = "float32"
    config.near_tie_bound = 0.0
    config.loop_threshold = 0.4
    config.coloured_texts = 0
    return config
