"""What `python -m experiments.profile_pass` times. The argument `quick` takes a few shapes and rounds."""

from ml_collections import config_dict


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
    """The config of one run."""
    if arg not in (None, "", "quick"):
        raise ValueError(f"unknown argument {arg!r} of configs/profile_pass.py; known: quick")
    quick = arg == "quick"
    config = config_dict.ConfigDict()
    config.target = {"source": "smollm2", "dtype": "float32"}
    config.layouts = ("plain", "packed")  # the last one is used where only one is timed
    config.tokens = (1, 4) if quick else tuple(range(1, 17))
    config.batches = (1, 2) if quick else (1, 2, 4, 8)
    config.valid_length = 128  # of every pass but those that sweep it
    config.capacities = (512, 1024) if quick else (512, 2048, 8192, 32768)
    config.valid_lengths = (128, 512) if quick else (128, 512, 2048, 8192)
    config.rounds = 2 if quick else 9
    config.repeat = 2 if quick else 16  # passes between two readings of the clock; a call by itself costs some ms
    config.read_mib = 256 if quick else 1024
    config.pairs = 2 if quick else 50  # 0 leaves the hand-written loop out
    config.pair_prompt = 64
    config.pair_tokens = 8 if quick else 32
    config.pair_nodes = (0, 4)  # plain, and chains of so many
    config.precision = "float32"
    return config
