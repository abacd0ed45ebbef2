r"""Which program to compile for a TPU slice that is not here.

    python -m experiments.compile_for --config=configs/compile_for.py:llama3_8b,decode --topology=v5e:2x4
    python -m experiments.compile_for --config=configs/compile_for.py:llama3_8b,train --topology=v5e:16x16
    python -m experiments.compile_for --config=configs/compile_for.py:llama3_8b,decode --topology=v5e:16x16 \
        --config.mesh.data=-1 --config.mesh.tensor=8 --config.decode.batch=256

Decoding splits heads over all chips of the slice; of a slice with more chips than the model has key heads, the third
command lets `data` take the rest, which rows must divide over.

Arguments, separated by commas: a model of specjax/models/published.py (`llama3_8b`, `llama3_70b`, ...), and `decode` or
`train`.
"""

from ml_collections import config_dict

PROGRAMS = ("decode", "train")


def get_config(arg: str = "llama3_8b,decode") -> config_dict.ConfigDict:
    """The config of one program."""
    arguments = arg.split(",")
    programs = [a for a in arguments if a in PROGRAMS]
    models = [a for a in arguments if a not in PROGRAMS]
    if len(programs) > 1 or len(models) > 1:
        raise ValueError(f"argument {arg!r} of configs/compile_for.py; expected one model and one of decode, train")

    config = config_dict.ConfigDict()
    config.model = models[0] if models else "llama3_8b"
    config.program = programs[0] if programs else "decode"
    config.dtype = "bfloat16"
    config.precision = "default"

    # Decoding: a chain of 5. The mesh takes all chips of the slice.
    config.drafter = {"name": "prompt_lookup", "num_nodes": 5}
    config.decode = {"batch": 8, "buffer": 2048}

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
    config.train = {"batch": 256, "accumulate": 1}

    if config.program == "decode":
        config.mesh = {"data": 1, "fsdp": 1, "tensor": -1, "target": "tp", "drafter": "dp"}
    else:
        config.mesh = {"data": 1, "fsdp": -1, "tensor": 1, "target": "fsdp", "drafter": "fsdp"}
    return config
