r"""Which program to compile for a TPU slice that is not here.

    python -m experiments.compile_for --config=configs/compile_for.py:llama3_8b,decode --topology=v5e:2x4
    python -m experiments.compile_for --config=configs/compile_for.py:llama3_8b,train --topology=v5e:16x16
    python -m experiments.compile_for --config=configs/compile_for.py:llama3_8b,decode --topology=v5e:16x16 \
        --config.mesh.data=-1 --config.mesh.tensor=8 --config.decode.batch=256

Decoding splits heads over all chips of the slice; of a slice with more chips than the model has key heads, the third
command lets `data` take the rest, which rows must divide over.

Arguments, separated by commas: a model of specjax/models/published.py (`llama3_8b`, `llama3_70b`, ...), `decode` or
`train`, and the drafter to decode with. Drawn tokens and another rule: --config.decode.temperature=1.0
--config.decode.rule=block.
"""

from ml_collections import config_dict

PROGRAMS = ("decode", "train")
EXIT, SKIP = {"name": "early_exit", "exit_layer": 4}, {"name": "layer_skip", "skip": (8, 9, 10, 11, 12, 13, 14, 15)}
LOOKUP = {"name": "prompt_lookup", "num_nodes": 4}
DRAFTERS = {
    "autoregressive": {"name": "autoregressive"},
    "draft_model": {"name": "draft_model", "model": "smollm2", "num_nodes": 5},
    "draft_tree": {"name": "draft_tree", "model": "smollm2", "branching": (4, 2, 1, 1)},
    "eagle": {"name": "eagle", "num_nodes": 5},
    "eagle2": {"name": "eagle2", "num_nodes": 60, "levels": 6, "top_k": 10},
    "eagle3": {"name": "eagle3", "topology": "tree", "num_nodes": 60, "levels": 8, "top_k": 10},
    "early_exit": EXIT,
    "ensemble_mixture": {"name": "ensemble_mixture", "members": (EXIT, SKIP)},
    "ensemble_proxy": {"name": "ensemble_proxy", "members": (LOOKUP, SKIP)},
    "ensemble_union": {"name": "ensemble_union", "members": (EXIT, SKIP)},
    "ensemble_vote": {"name": "ensemble_vote", "members": (EXIT, SKIP, LOOKUP)},
    "hydra": {"name": "hydra", "num_nodes": 4},
    "jacobi": {"name": "jacobi"},
    "kangaroo": {"name": "kangaroo", "exit_layer": 2},
    "layer_skip": SKIP,
    "lookahead": {"name": "lookahead"},
    "medusa": {"name": "medusa", "num_nodes": 4},
    "mtp": {"name": "mtp", "depth": 3},
    "prompt_lookup": {"name": "prompt_lookup", "num_nodes": 5},
    "recycling": {"name": "recycling"},
    "redrafter": {"name": "redrafter"},
    "suffix": {"name": "suffix"},
    "suffix_tree": {"name": "suffix_tree"},
}


def get_config(arg: str = "llama3_8b,decode") -> config_dict.ConfigDict:
    """The config of one program."""
    arguments = arg.split(",")
    programs = [a for a in arguments if a in PROGRAMS]
    drafters = [a for a in arguments if a in DRAFTERS]
    models = [a for a in arguments if a not in (*PROGRAMS, *DRAFTERS)]
    if max(map(len, (programs, drafters, models))) > 1:
        raise ValueError(
            f"argument {arg!r} of configs/compile_for.py; expected one model, one of decode, train, and one drafter of "
            f"{', '.join(DRAFTERS)}"
        )

    config = config_dict.ConfigDict()
    config.model = models[0] if models else "llama3_8b"
    config.program = programs[0] if programs else "decode"
    config.dtype = "bfloat16"
    config.precision = "default"

    # Decoding: a chain of 5. The mesh takes all chips of the slice. The rule is the exact one where none is named.
    config.drafter = DRAFTERS[drafters[0] if drafters else "prompt_lookup"]
    config.decode = {"batch": 8, "buffer": 2048, "temperature": 0.0, "rule": ""}

    # Training: an EAGLE-3 head, the target running in the step.
    config.objective = {
        "name": "eagle3",
        "intermediate_size": 14336,
        "draft_vocab": 32000,
        "taps": (),
        "norms": (),
        "steps": 7,
        "decay": 0.8,
    }
    config.data = {"row_length": 2048}
    config.train = {"batch": 256, "accumulate": 1, "remat": "none"}

    if config.program == "decode":
        # Heads and networks of the target's shape are split as it is; a small model's heads may not divide.
        preset = "dp" if "model" in config.drafter else "tp"
        config.mesh = {"data": 1, "fsdp": 1, "tensor": -1, "target": "tp", "drafter": preset}
    else:
        config.mesh = {"data": 1, "fsdp": -1, "tensor": 1, "target": "fsdp", "drafter": "fsdp"}
    return config
