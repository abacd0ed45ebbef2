"""What the choices of trained drafters are worth: pairs of trainings that differ in one thing, at equal tokens.

    python -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --config.store.taps="(2, 15, 27)"
    python -m experiments.ablate --config=configs/ablations.py:smollm2 --workdir=runs/ablations

Each cell is a training (or a way to decode with a trained head), each pair holds one cell against another in a held-out
measure, row by row or prompt by prompt. `--config.only="('steps',)"` takes some pairs; what is done is not done again.
The pair `text` trains on what people wrote in place of the target's own answers, to the same prompts; it runs the
target in every step.

The argument is the target: an alias (`smollm2`) or anything else that `load_target` takes; `,small` behind it makes
cells of 31k positions, and leaves out the pairs of one method against another.
"""

from ml_collections import config_dict

from configs import distill, eagle, eagle3, hydra, medusa

EAGLE_TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))


# Of the small setting: the claims of EAGLE, EAGLE-2, EAGLE-3 and DistillSpec.
SMALL = ("feature", "shifted_token", "tree", "steps", "fusion", "reverse_kl", "jsd", "tvd", "lk", "text")


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run.

    Raises:
        ValueError: something else than `small` stands behind the target.
    """
    arg, _, size = arg.partition(",")
    if size not in ("", "small"):
        raise ValueError(f"unknown argument {size!r} of configs/ablations.py behind the target; known: small")
    config = config_dict.ConfigDict()
    base = distill.get_config(arg)
    base.data.taps = (2, 15, 27)
    base.optimizer.warmup = 10
    # 120 steps of 4 rows of 512 positions: 246k.
    base.optimizer.steps = base.train.steps = 120
    base.train.eval_every = 120
    if size:
        base.train.batch, base.optimizer.warmup = 2, 5
        base.optimizer.steps = base.train.steps = base.train.eval_every = 30
    config.base = base

    reading = {**eagle.get_config(arg).objective, "name": "experiments._eagle_reading:make"}
    unrolled = eagle3.get_config(arg).objective.to_dict()
    kl = base.objective.to_dict()
    config.cells = {
        "eagle_token": {"objective": {**reading, "reads": "token"}},
        "eagle_feature": {"objective": {**reading, "reads": "feature"}},
        "eagle_both": {"objective": {**reading, "reads": "both"}},
        # Both are measured over three steps.
        "one_step": {"objective": {**unrolled, "steps": 1}, "measured_as": {"steps": 3}},
        "three_steps": {"objective": {**unrolled, "steps": 3}, "measured_as": {"steps": 3}},
        # Three steps, of the highest tap alone.
        "one_tap": {"objective": {**unrolled, "steps": 3, "taps": base.data.taps[-1:]}},
        "kl": {"objective": dict(kl)},
        "reverse_kl": {"objective": {**kl, "divergence": "reverse_kl"}},
        "jsd": {"objective": {**kl, "divergence": "jsd"}},
        "tvd": {"objective": {**kl, "divergence": "tvd"}},
        "lk": {"objective": {**kl, "divergence": "lk"}},
        "own_text": {"objective": dict(kl), "data": {"online": True, "taps": ()}},
        "human_text": {"objective": dict(kl), "data": {"online": True, "taps": ()}, "human": True},
        # Decoding with the head of another cell, the same number of nodes.
        "static_tree": {"head": "eagle_both", "drafter": {"name": "eagle", "choices": EAGLE_TREE}},
        "dynamic_tree": {
            "head": "eagle_both",
            "drafter": {"name": "eagle2", "num_nodes": len(EAGLE_TREE), "levels": 4, "top_k": 3},
        },
    }
    # The methods at equal training tokens, each as a chain of four.
    heads = {"medusa": "medusa", "hydra": "hydra", "eagle": "eagle_both", "eagle3": "three_steps", "draft_model": "kl"}
    config.cells.medusa = {"objective": medusa.get_config(arg).objective.to_dict()}
    config.cells.hydra = {"objective": hydra.get_config(arg).objective.to_dict()}
    for name, head in heads.items():
        options = {} if name in ("medusa", "hydra") else {"num_nodes": 4}
        config.cells[f"{name}_chain"] = {"head": head, "drafter": {"name": name, **options}}
    # Each says that `better` beats `worse`, and who says so.
    config.pairs = {
        "feature": pair("eagle_feature", "eagle_token", "sampled/alpha", "EAGLE (2401.15077), section 5.3"),
        "shifted_token": pair("eagle_both", "eagle_feature", "sampled/alpha", "EAGLE (2401.15077), section 5.3"),
        "steps": pair("three_steps", "one_step", "greedy/accepted", "EAGLE-3 (2503.01840), section 3"),
        "fusion": pair("three_steps", "one_tap", "greedy/accepted", "EAGLE-3 (2503.01840), table 2"),
        "reverse_kl": pair("reverse_kl", "kl", "sampled/alpha", "DistillSpec (2310.08461), section 5"),
        "jsd": pair("jsd", "kl", "sampled/alpha", "DistillSpec (2310.08461), section 5"),
        "tvd": pair("tvd", "kl", "sampled/alpha", "DistillSpec (2310.08461), section 5"),
        "lk": pair("lk", "kl", "sampled/alpha", "-log alpha as the loss"),
        "text": pair("own_text", "human_text", "sampled/alpha", "DistillSpec (2310.08461), section 5"),
        "tree": pair("dynamic_tree", "static_tree", "tau", "EAGLE-2 (2406.16858), section 5"),
    }
    # Neighbours in the order that is claimed.
    for better, worse, source in (
        ("eagle3", "eagle", "EAGLE-3 (2503.01840), section 4"),
        ("eagle", "hydra", "no paper holds the two as trained here against each other"),
        ("hydra", "medusa", "Hydra (2402.05109), section 6"),
        ("eagle", "draft_model", "EAGLE (2401.15077), section 4"),
    ):
        config.pairs[f"{better}_{worse}"] = pair(f"{better}_chain", f"{worse}_chain", "tau", source)
    config.only = SMALL if size else ()

    # What people answered to the training prompts, of SPECJAX_DATA: JSONL or JSON lists.
    config.human = ("gsm8k/train.jsonl", "gpteacher/codegen-instruct.json", "gpteacher/roleplay-instruct.json")

    # For the cells that decode; their pairs are also told by category, of MT-bench's eight with
    # "mt_bench:$SPECJAX_DATA/mt_bench/question.jsonl".
    config.prompts = "shipped"
    config.prompts_fallback = ""
    config.prompts_per_category = 0
    config.max_prompts = 0
    config.max_new_tokens = 64

    config.confidence = 0.95
    config.resamples = 2000
    config.seed = 0
    return config


def pair(better: str, worse: str, metric: str, source: str) -> dict[str, str]:
    """A claim."""
    return {"better": better, "worse": worse, "metric": metric, "source": source}
