"""Every drafter of the zoo, as a chain and as a tree, on Spec-Bench's six categories; greedy and at T = 1, batch 1.

    python -m experiments.benchmark --config=configs/zoo.py --workdir=runs/zoo_benchmark

10 prompts a category, 128 new tokens; the rows are the entries that are in specjax/zoo when the config is read, each
also with a tree that is too large to pay on a CPU. The argument `quick` takes one prompt a category and 16 tokens,
greedy, without those. Spec-Bench is read from SPECJAX_DATA; the shipped prompts take its place where that is not set.
"""

from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from specjax.checkpoints import drafters
from specjax.checkpoints.safetensors import SINGLE, read_header

CHAIN = 3  # draft tokens
# Nodes of trees. A pass over 8 tokens, root and 7 nodes, costs hardly more on CPUs than one over 4 does; the large tree
# shows what acceptance a target would see to which width costs nothing.
TREES = {"tree": 7, "large tree": 24}
BRANCHING = {"tree": (3, 1), "large tree": (4, 2, 1)}  # of a draft model's trees: 6 and 20 nodes
LEVELS, TOP_K = 4, 3  # of dynamic trees
SHAPES = ("chain", *TREES)
SPEC_BENCH = "spec_bench:$SPECJAX_DATA/spec_bench/question.jsonl"


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if arg not in (None, "", "quick"):
        raise ValueError(f"unknown argument {arg!r} of configs/zoo.py; known: quick")
    quick = arg == "quick"
    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)
    config.template = "chat"  # or plain, vicuna, a Jinja file

    config.prompts = SPEC_BENCH
    config.prompts_fallback = "shipped"
    config.prompts_per_category = 1 if quick else 10
    config.max_prompts = 0
    config.long_prompts = "error"  # or skip, which counts them
    config.max_new_tokens = 16 if quick else 128

    config.temperatures = (0.0,) if quick else (0.0, 1.0)
    config.top_k = 0
    config.top_p = 1.0
    config.min_p = 0.0
    config.repetition_penalty = 1.0  # over prompt and answer; 1 is none
    config.presence_penalty = 0.0  # over the answer alone, like the next
    config.frequency_penalty = 0.0
    config.logit_bias = ()  # pairs: ((token id, what to add to its logit), ...)
    config.suppress_tokens = ()  # ids that are never emitted
    config.seed = 0

    rows = zoo_rows(("chain", "tree")) if quick else zoo_rows()
    config.rows = {"autoregressive": {"name": "autoregressive"}, **rows}
    config.only = ()

    config.batch = 1
    config.repeats = 1
    config.layout = "packed"
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}  # -1: the other devices
    config.precision = "float32"
    config.near_tie_bound = 0.0
    config.loop_threshold = 0.4
    config.coloured_texts = 3
    return config


def zoo_rows(shapes: Sequence[str] = SHAPES) -> dict[str, dict[str, Any]]:
    """Rows of every entry of the zoo, by `<entry> chain`, `tree` and `large tree` where its method drafts trees."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in drafters.zoo_entries():
        for shape, row in entry_rows(entry).items():
            if shape in shapes:
                rows[f"{entry} {shape}"] = row
    return rows


def entry_rows(entry: str) -> dict[str, dict[str, Any]]:
    """Rows of one entry, or of any saved drafter, by shape."""
    method, directory = drafters.saved_method(entry), drafters.find_drafter(entry)
    if method is None or directory is None:
        raise ValueError(f"{entry!r} is no saved drafter; the zoo has {', '.join(drafters.zoo_entries()) or 'none'}")
    row = {"name": method, "source": entry}
    if method in ("medusa", "hydra"):
        calibrated = "tables.accuracy" in read_header(directory / SINGLE)
        trees = {shape: {**row, "tree": "calibrated", "nodes": n} for shape, n in TREES.items() if calibrated}
        return {"chain": {**row, "tree": "chain", "nodes": CHAIN}, **trees}
    if method in ("eagle", "eagle3"):
        dynamic = row | {"name": "eagle2" if method == "eagle" else method, "levels": LEVELS, "top_k": TOP_K}
        trees = {shape: {**dynamic, "num_nodes": n} for shape, n in TREES.items()}
        return {"chain": {**row, "num_nodes": CHAIN}, **trees}
    if method == "draft_model":
        trees = {shape: {**row, "name": "draft_tree", "branching": b} for shape, b in BRANCHING.items()}
        return {"chain": {**row, "num_nodes": CHAIN}, **trees}
    if method == "redrafter":
        return {"tree": row}  # its beams
    return {"chain": row}  # as many tokens as it was trained to draft
