"""Does a checkpoint compute here what it computes in transformers?

    python -m experiments.check_target --config=configs/check_target.py:path/to/model

The argument is the target: anything that `load_target` takes. Needs torch (the extra `torch`).
"""

from ml_collections import config_dict


def get_config(arg: str = "smollm2") -> config_dict.ConfigDict:
    """The config of one comparison."""
    config = config_dict.ConfigDict()
    config.target = {"source": arg, "dtype": "float32"}
    config.texts = (
        "The lighthouse keeper had not spoken to anyone in eleven days when the boat came into view.",
        "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
        "A train leaves at 9:40 and covers 126 km in 1 h 45 min. Its mean speed is therefore",
        "Die Brücke über den Fluß wurde 1897 gebaut; на русском языке, 漢字かな, 🤖 and €5 test the bytes.",
    )
    # Sets whose perplexity is compared: text files, or anything that benchmarks take as prompts.
    config.corpora = {
        "humaneval": "humaneval:$SPECJAX_DATA/humaneval/HumanEval.jsonl.gz",
        "gsm8k": "gsm8k:$SPECJAX_DATA/gsm8k/test.jsonl",
        "wikitext2": "$SPECJAX_DATA/text/wikitext2_valid.txt",
    }
    config.corpus_windows = 8  # of `max_tokens` each
    config.max_tokens = 256  # of each text
    config.new_tokens = 32  # continued greedily behind each text
    config.precision = "float32"
    config.tolerance = 0.0  # largest difference of logits over the largest logit; 0: from the dtype
    config.perplexity_tolerance = 1e-3  # of a set, as a share
    config.near_tie_bound = 0.0  # 0: from dtype and precision
    return config
