"""Heads carried from one format to another by the program."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from huggingface_hub import errors

from experiments._card import UNSERVED, card, rows_of, served_by
from experiments._push import check_push, push
from specjax import build
from specjax.checkpoints.directory import save_target
from specjax.checkpoints.drafters import SavedDrafter, load_drafter
from specjax.checkpoints.formats import OWN, WRITERS, write_head
from specjax.checkpoints.formats.tensors import read_tensors
from specjax.models.eagle import Eagle3Config, EagleConfig, draft_layer, init_feature_layer
from specjax.models.medusa import HydraConfig, MedusaConfig
from specjax.models.mtp import mtp_config
from specjax.testing import tiny_target
from tests.checkpoints.test_eagle_formats import IDS, eagle3
from tests.experiments.programs import ROOT, run_all


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


@functools.cache
def target():
    return tiny_target(layers=8)


def sample(layout, **changes):
    """A head that a layout holds, without parameters."""
    shapes = {"hidden_size": 32, "vocab_size": 259, "head_size": 259}
    layer = draft_layer(target().config, intermediate_size=48, head_size=40)
    if layout.startswith("medusa"):
        method, config = "medusa", MedusaConfig(**shapes)
    elif layout == "hydra":
        method, config = "hydra", HydraConfig(**shapes)
    elif layout.startswith("mtp"):
        method, config = "mtp", mtp_config(target().config, depth=1, kind="sequential")
    elif layout in ("eagle", "eagle-sglang"):
        method, config = "eagle", EagleConfig(**{"layer": layer, "bias": False, **changes})
    else:
        method, config = (
            "eagle3",
            Eagle3Config(**{"layer": layer, "taps": (2, 4, 5), "target_hidden_size": 32, **changes}),
        )
    return SavedDrafter(method, config, {}, {}, ("embed", "head"), {"held_out": {"greedy/accepted": 0.95}})


def test_the_table_of_programs_says_what_the_cards_say():
    rows = [
        line.strip("| ").split(" | ")
        for line in (ROOT / "docs" / "exchange.md").read_text().splitlines()
        if "| `" in line
    ]
    table = {
        name.strip("`"): dict(zip(("vLLM", "SGLang", "llama.cpp", "specjax"), cells, strict=True))
        for name, *cells in rows
    }
    assert table.keys() == {OWN, *WRITERS}
    for layout, cells in table.items():
        served = set(served_by(sample(layout), target(), "there", layout)) - {"specjax"}
        assert served == {program for program, cell in cells.items() if cell == "by source"}, layout
        assert cells["specjax"] == "tested"
        assert served or layout == OWN or layout in UNSERVED


def test_a_card_names_the_target_as_others_know_it():
    smollm2 = dataclasses.replace(target(), name="smollm2")
    text = card(sample("eagle3"), smollm2, "runs/x", "heads/x", "eagle3")
    assert "# eagle3 head for HuggingFaceTB/SmolLM2-135M-Instruct" in text and "loaded as `smollm2`" in text
    assert 'vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --speculative-config \'{"method": "eagle3"' in text
    assert "--target-model-dir" in text and "takes layers" not in text
    assert "| greedy/accepted | 0.9500 |" in text and "none of them is tau" in text
    other = card(sample("eagle3", taps=(1, 3, 6)), smollm2, "runs/x", "heads/x", "eagle3")
    assert "others take layers 2, n // 2, n - 3" in other
    # What vLLM's loader raises for is not offered.
    assert "vLLM" not in served_by(sample("eagle", bias=True), smollm2, "heads/x", "eagle")
    own = card(sample(OWN), target(), "runs/x", "heads/x", OWN)
    assert "--config=configs/generate.py:heads/x --config.target.source=tiny" in own


def test_a_card_has_what_a_benchmark_measured():
    row = {"temperature": 0.0, "prompts": 8, "tau": 1.38, "tau_ci": [1.2, 1.5], "alpha": 0.29, "speedup": None}
    config = {"rows": {"mine chain": {"name": "eagle3", "source": "runs/x"}, "plain": {"name": "autoregressive"}}}
    found = {"meta": {"config": config}, "rows": [{**row, "label": "mine chain T=0", "category": "all"}]}
    text = card(sample("eagle3"), target(), "runs/x", "heads/x", "eagle3", rows_of(found, "runs/x"))
    assert "| mine chain T=0 | 0 | 1.38 [1.20, 1.50] | 0.29 |  | 8 |" in text
    with pytest.raises(ValueError, match="no row of 'runs/y'; they have runs/x"):
        rows_of(found, "runs/y")


class Hub:
    """What `HfApi` does, without a network."""

    def __init__(self, fault=None):
        self.fault, self.calls = fault, []

    def create_repo(self, repository, exist_ok):
        self.calls.append((repository, exist_ok))
        if self.fault is not None:
            raise self.fault

    def upload_folder(self, folder_path, repo_id, commit_message):
        self.calls.append((folder_path, repo_id))
        return f"https://hub/{repo_id}/commit/1"


def test_a_push_uploads_the_directory_or_says_what_is_missing():
    hub = Hub()
    assert push("heads/x", "me/x", hub) == "https://hub/me/x/commit/1"
    assert hub.calls == [("me/x", True), ("heads/x", "me/x")]
    with pytest.raises(PermissionError, match="heads/x is written, but the hub refused me/x .*your token may write"):
        push("heads/x", "me/x", Hub(errors.LocalTokenNotFoundError("none")))
    with pytest.raises(ConnectionError, match="cannot be reached .*push it later with `hf upload me/x heads/x`"):
        push("heads/x", "me/x", Hub(OSError("no route")))
    for name in ("x", "me/x/y", "me/ x"):
        with pytest.raises(ValueError, match=f"--push='{name}'; expected a repository of the hub, owner/name"):
            check_push(name, "token")
    with pytest.raises(PermissionError, match="--push=me/x needs a token of the hub: run `hf auth login` or set HF"):
        check_push("me/x", None)
    check_push("me/x", "token")


def test_a_saved_drafter_of_any_method_answers(tmp_path):
    """What a card of our own layout says works for every method."""
    layer = draft_layer(target().config, intermediate_size=48, head_size=40)
    config = Eagle3Config(layer=layer, taps=(2, 4, 5), target_hidden_size=32)
    tables = {"vocab": np.arange(40, dtype=np.int32)}
    saved = SavedDrafter("eagle3", config, init_feature_layer(config, jax.random.key(0)), tables, ("embed", "head"))
    write_head(tmp_path, saved, target(), OWN)
    drafter = build.load_config("configs/generate.py", str(tmp_path)).drafter
    assert drafter.to_dict() == {"name": "eagle3", "source": str(tmp_path), "num_nodes": 2}
