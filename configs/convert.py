"""Carries a trained head from one format to another: settings of experiments.convert.

    python -m experiments.convert --from=runs/eagle3 --to=heads/eagle3
    python -m experiments.convert --config=configs/convert.py:path/to/target --from=org/some-EAGLE3-head --to=heads/mine

The argument is the target that the head belongs to.
"""

from ml_collections import config_dict


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one conversion."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    # eagle, eagle-sglang, eagle3, speculators, medusa, medusa-vllm, hydra, mtp-deepseek, mtp-mimo, mtp-qwen3-next,
    # specjax; empty: the usual one of the head's method, and specjax for a head that is read in another layout.
    config.layout = ""
    config.dtype = ""  # of the floats; empty: as they were read, bfloat16 for a head that was trained here
    # results.json of a benchmark (`experiments.benchmark`) that has rows of this head: its card shows them.
    config.results = ""
    return config
