"""Whether specjax runs on this device as it should, on a model of random weights: some minutes on an accelerator.

    python -m experiments.check_device --config=configs/check_device.py

The argument is the model whose shapes are taken: `llama3_1b` (the default), another of `specjax.models.published`, or
`tiny`, which a CPU runs too.
"""

from ml_collections import config_dict

from configs import eagle3


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    tiny = arg == "tiny"
    config = config_dict.ConfigDict()
    config.model = arg or "llama3_1b"
    config.dtype = "bfloat16"
    config.precision = "default"
    config.seed = 0
    config.widths = (0, 3, 7, 59)  # further tokens of a pass, beside the one of plain decoding
    config.prompt_length = 64 if tiny else 512
    config.steps = 16 if tiny else 64  # of the loop, that are timed together
    config.repeats = 3
    config.copy_mib = 16 if tiny else 1024  # of the array that bandwidth is measured with
    config.texts = 4
    config.max_new_tokens = 32
    config.num_nodes = 3  # of prompt lookup, whose texts are compared with plain decoding's
    config.tree_nodes = 16  # of token recycling, whose program is searched for copies of the cache
    config.draws = 1 << 14 if tiny else 1 << 20  # sequences of the law

    # A training step of an EAGLE-3 head, the target's pass before it.
    config.objectives = {"eagle3": eagle3.get_config("smollm2").objective}
    config.objectives.eagle3.update({"taps": (0,), "intermediate_size": 24} if tiny else {"intermediate_size": 8192})
    config.draft_vocab = 64 if tiny else 32000
    config.batch = 2
    config.row_length = 64 if tiny else 1024
    config.train_steps = 6
    config.optimizer = {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "steps": 1000,
        "warmup": 0,
        "b1": 0.9,
        "b2": 0.95,
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    return config
