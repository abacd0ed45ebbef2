"""Ensembles of drafters beside each of their members, at equal draft length, greedy and at T = 1.

    python -m experiments.benchmark --config=configs/ensembles.py --workdir=runs/ensembles

Arguments, separated by commas: `quick` takes 2 prompts, 16 tokens, temperature 0 and one ensemble of each kind;
`target=<alias or anything that load_target takes>`; anything else is a draft model to be a member, a zoo entry or a
path (configs/ensembles.py:runs/a,runs/b). Prompt lookup is always a member. Members of one config run as one where
`stacked` says so; their weights are not packed then. Afterwards, the ensembles against their members:

    python -m experiments.ensembles runs/ensembles
"""

import difflib

from etils import epath
from ml_collections import config_dict

from specjax.checkpoints import drafters

TARGET = "smollm2"
# Draft models that are members where the argument names none; for that target.
DRAFTS = ("smollm2-135m-distilled",)
NUM_NODES = 4


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    arguments = [a for a in (arg or "").split(",") if a]
    quick = "quick" in arguments
    targets = [a.removeprefix("target=") for a in arguments if a.startswith("target=")]
    target = (*targets, TARGET)[0]
    drafts = tuple(a for a in arguments if a != "quick" and not a.startswith("target="))
    check_arguments(target, targets, drafts)
    drafts = drafts or DRAFTS
    config = config_dict.ConfigDict()
    config.target = {"source": target, "dtype": "float32"}
    config.system_prompt = config_dict.placeholder(str)
    config.template = "chat"  # or plain, vicuna, a Jinja file

    config.prompts = "shipped"
    config.prompts_fallback = ""
    config.prompts_per_category = 1 if quick else 0
    config.max_prompts = 2 if quick else 0
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

    members = {
        **{f"draft_{i}": {"name": "draft_model", "source": s, "num_nodes": NUM_NODES} for i, s in enumerate(drafts, 1)},
        "lookup": {"name": "prompt_lookup", "num_nodes": NUM_NODES, "max_ngram": 3, "min_ngram": 1},
    }
    together = {"members": tuple(members.values()), "stacked": False}
    chain = {**together, "num_nodes": NUM_NODES}
    proxy = {"name": "ensemble_proxy", **chain}
    config.rows = {
        "autoregressive": {"name": "autoregressive"},
        **members,
        "union": {"name": "ensemble_union", **together},
        "vote": {"name": "ensemble_vote", **chain},
        "vote_on_runs": {"name": "ensemble_vote", **chain, "run": NUM_NODES},
        "mixture": {"name": "ensemble_mixture", **chain},
        "learned_mixture": {"name": "ensemble_mixture", **chain, "learning_rate": 0.5},
        "proxy": {**proxy, "proxy": "early_exit", "layer": 6},
        "calibrated": {**proxy, "proxy": "calibration"},
        "random": {**proxy, "proxy": "random"},
        # All layers of the target: what the best choice would reach. Its speed says nothing.
        "oracle": {**proxy, "proxy": "oracle"},
    }
    config.only = ("autoregressive", *members, "union", "vote", "mixture", "proxy") if quick else ()

    config.batch = 1
    config.repeats = 1
    config.layout = "packed"
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}  # -1: the other devices
    config.precision = "float32"
    config.near_tie_bound = 0.0
    config.loop_threshold = 0.4
    config.coloured_texts = 0
    return config


def check_arguments(target: str, targets: list[str], drafts: tuple[str, ...]) -> None:
    """Refuses words that are neither options nor drafts.

    Raises:
        ValueError: such a word, two targets, or a target of one's own without drafts for it.
    """
    entries = drafters.zoo_entries()
    for word in drafts:
        if "/" not in word and word not in entries and not epath.Path(word).exists():
            close = difflib.get_close_matches(word, ("quick", *entries), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"unknown argument {word!r} of configs/ensembles.py; {hint}known: quick, target=<source>, the path of "
                f"a draft, or of the zoo: {', '.join(entries)}"
            )
    if len(targets) > 1 or not target:
        raise ValueError(f"configs/ensembles.py takes one target=<source>, not {targets}")
    if target != TARGET and not drafts:
        raise ValueError(
            f"target={target}, but no draft for it: the zoo's belong to {TARGET}. Expected paths of drafts besides, as "
            f"in configs/ensembles.py:target={target},runs/draft"
        )
