from __future__ import annotations

import pytest

from experiments import plan_memory
from specjax import build

CONFIG = "configs/papers/eagle3.py"


@pytest.mark.parametrize("argument", ["llama3_8b", "llama3_70b,decode", "small"])
def test_the_published_settings_load(argument):
    config = build.load_config(CONFIG, argument)
    assert config.objective.name == "eagle3" and config.objective.steps == 7
    if argument != "small":
        assert config.optimizer.learning_rate == 5e-5 and config.objective.draft_vocab == 32000
        assert config.target.source.startswith("meta-llama/")


def test_two_models_are_refused():
    with pytest.raises(ValueError, match="expected one model and one of train, decode"):
        build.load_config(CONFIG, "llama3_8b,llama3_70b")


@pytest.mark.slow
def test_every_program_has_its_smallest_slice():
    config = build.load_config(CONFIG, "llama3_8b")
    with config.unlocked():
        config.memory.models = {"llama3_8b": 14336}
    rows = plan_memory.plan(config)
    picked = {(row["program"], row["slice"].split(":")[0]): row for row in rows if row["smallest"]}
    assert len(picked) == 3 * 3
    # 16 GB of weights and a cache: more than a v5e chip holds, less than four do.
    for program in ("decode, chain of 8", "decode, tree of 60"):
        assert picked[program, "v5e"]["slice"] == "v5e:2x2" and picked[program, "v6e"]["slice"] == "v6e:1x1"
    assert all(row["total"] <= row["memory"] for row in picked.values())
