"""What a zoo entry says that its run does not: see experiments.pack_zoo.

    python -m experiments.pack_zoo --from=runs/zoo/medusa --to=runs/zoo/entries/smollm2-135m-medusa

The argument is the target that the run trained for.
"""

from ml_collections import config_dict


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one entry."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    config.target_name = "SmolLM2-135M-Instruct"
    config.target_licence = "Apache-2.0"
    config.prompts = (
        "GSM8K train (MIT), MBPP ids 1-10 and 511-974 (CC BY 4.0), Self-Instruct seed and user-oriented tasks "
        "(Apache-2.0), GPTeacher code and roleplay prompts (MIT); where the command reads the store `smollm2_more`, "
        "also what templates make of WikiText-2's validation text (CC BY-SA 3.0) and of Shakespeare. No prompt of "
        "Spec-Bench, MT-bench, HumanEval or GSM8K test was used"
    )
    # What stands for absolute paths of the run: (("/data/hidden", "runs/hidden/smollm2"), ...).
    config.paths = ()
    config.max_mib = 10.5  # a larger one is refused
    return config
