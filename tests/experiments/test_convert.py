"""Heads carried from one format to another by the program."""

import json

import numpy as np

from specjax.checkpoints.directory import save_target
from specjax.checkpoints.drafters import load_drafter
from specjax.checkpoints.formats.tensors import read_tensors
from specjax.testing import tiny_target
from tests.checkpoints.test_eagle_formats import IDS, eagle3
from tests.experiments.programs import run_all


def test_there_and_back(tmp_path):
    target = tiny_target(layers=8)
    save_target(target, tmp_path / "target")
    eagle3(tmp_path / "published", eagle_something=1)
    config = f"--config=configs/convert.py:{tmp_path}/target"
    published, own, back = (str(tmp_path / name) for name in ("published", "own", "back"))
    nothing, there, again = run_all(
        "experiments.convert",
        [
            [config, f"--to={own}"],
            [config, f"--from={published}", f"--to={own}"],
            [config, f"--from={tmp_path}/missing", f"--to={published}"],
        ],
        tmp_path,
    )
    assert nothing.code == 2 and nothing.err.startswith("error: --from is missing")
    assert there.code == 0, there.err
    assert "eagle3, method eagle3" in there.out and "config_unused" in there.out and "eagle_something" in there.out
    np.testing.assert_array_equal(load_drafter(own, target).tables["vocab"], IDS)
    assert again.code == 2 and "holds a model already" in again.err
    case = [config, f"--from={own}", f"--to={back}", "--config.layout=speculators"]
    (done,) = run_all("experiments.convert", [case], tmp_path)
    assert done.code == 0, done.err
    stored, before = (read_tensors(tmp_path / name / "model.safetensors") for name in ("back", "published"))
    for name, value in before.items():
        np.testing.assert_array_equal(stored[name.replace("midlayer.", "layers.0.")], value)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["speculators_model_type"] == "eagle3"
    assert "vllm serve" in (tmp_path / "back" / "README.md").read_text()
