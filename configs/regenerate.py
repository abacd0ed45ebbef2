"""Lets the target answer prompts: training text that drafters learn best from.

    python -m experiments.regenerate --config=configs/regenerate.py:smollm2 --workdir=runs/regenerate

Interrupted, the same command goes on. `data.text` of the training configs takes the directory `answers` of the run.
On a host of several accelerators, they share the rows: --config.mesh.data=-1 --config.layout=plain
"""

from ml_collections import config_dict


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one run."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    # JSONL with source, id and prompt, relative to SPECJAX_DATA.
    config.prompts = "target_text/smollm2-135m-instruct.train.jsonl.gz"
    config.max_prompts = 0  # 0 for all
    # Any drafter: the rule is exact, so it changes the speed and not the text. Many rows at once need none.
    config.drafter = {"name": "autoregressive"}
    config.layout = "packed"  # for up to 32 tokens a pass on a CPU; `plain` on accelerators
    # The devices of one host; every host answers a share of the prompts. -1: those that the other axes leave.
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "target": "fsdp_tp", "drafter": "dp"}
    config.decode = {"temperature": 0.0, "max_new_tokens": 192, "batch": 32, "part": 128, "seed": 0}
    return config
