"""Every config loads with each of its arguments, and what it says can be used."""

from __future__ import annotations

import inspect

import pytest

from experiments import _main
from specjax import build
from specjax.checkpoints import drafters

ARGUMENTS = {
    "quickstart": ("", "quick", "full", "sampled", "full,sampled", "full,quick"),
    "peers": ("", "quick"),
    "self_drafting": ("", "quick", "sampled", "spec_bench", "spec_bench,quick"),
    "equality": ("", "quick"),
    "profile_pass": ("", "quick"),
    "plan": ("", "smollm2", "quick", "sweep", "batches"),
}


def load(name: str, argument: str = ""):
    return build.load_config(f"configs/{name}.py", argument or None)


@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, arguments in ARGUMENTS.items() for a in arguments])
def test_it_loads(name: str, argument: str) -> None:
    config = load(name, argument)
    assert config.is_locked and config.target.source == "smollm2"
    if name in ("quickstart", "peers", "self_drafting"):
        build.settings_from_config(config)
    if name != "profile_pass":
        lineup = build.lineup_from_config(config)
        assert any(row["name"] == "autoregressive" for row in lineup.kept.values())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_unknown_argument_names_the_known(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown argument 'fast' of configs/{name}.py; known: .*quick"):
        load(name, "fast")


def test_quickstart_is_one_prompt_a_category() -> None:
    config = load("quickstart")
    assert (config.prompts_per_category, config.max_new_tokens, tuple(config.temperatures)) == (1, 64, (0.0,))


def test_full_sweeps_lengths_over_every_prompt() -> None:
    config = load("quickstart", "full")
    assert config.rows.draft.num_nodes == (1, 2, 3, 4, 6)
    assert tuple(config.temperatures) == (0.0,) and config.prompts_per_category == 0
    assert config.max_new_tokens == 64
    assert tuple(load("quickstart", "full,sampled").temperatures) == (1.0,)


def test_the_first_look_measures_one_drafter_of_each_trained_family() -> None:
    rows = load("quickstart").rows
    assert len(rows) <= 6
    assert {rows[name].source for name in ("draft", "eagle3", "hydra")} <= set(drafters.zoo_entries())


def test_generate_takes_any_drafter() -> None:
    assert load("generate", "plain").drafter.name == "autoregressive"
    assert load("generate", "lookup").drafter.name == "prompt_lookup"
    assert load("generate", "some/draft").drafter.source == "some/draft"


@pytest.mark.parametrize("entry", drafters.zoo_entries())
def test_generate_takes_every_drafter_of_the_zoo(entry: str) -> None:
    options = load("generate", entry).drafter.to_dict()
    name = options.pop("name")
    assert name == drafters.saved_method(entry) and options["source"] == entry
    inspect.signature(build.DRAFTERS[name]).bind(None, **options)  # the maker takes them


@pytest.mark.parametrize("name", ["quickstart", "peers", "equality"])
def test_the_draft_that_is_measured_ships(name: str) -> None:
    assert load(name).rows.draft.source in drafters.zoo_entries()
    assert load("generate").drafter.source == load(name).rows.draft.source
    assert load("quickstart").rows.eagle3.source in drafters.zoo_entries()


def test_every_peer_is_measured_by_default() -> None:
    lineup = build.lineup_from_config(load("peers"))
    assert not lineup.left_out
    assert drafters.saved_method(lineup.rows["transformers_assisted"]["source"]) == "draft_model"


def test_on_a_pod_rows_go_to_all_devices_and_no_host_needs_a_store() -> None:
    config = load("eagle3", "smollm2,pod")
    assert config.mesh.data == -1 and config.data.online and config.train.batch % 256 == 0
    assert config.target.source == "smollm2" and config.objective == load("eagle3").objective
    with pytest.raises(ValueError, match="expected a target, and 'pod' or nothing"):
        load("eagle3", "smollm2,pods")


def test_the_data_directory_may_be_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECJAX_DATA", "gs://bucket/data")
    assert str(_main.data_dir() / "target_text/a.jsonl.gz") == "gs://bucket/data/target_text/a.jsonl.gz"


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("x"), 2), (FileNotFoundError("x"), 2), (TimeoutError("x"), 1), (OSError("x"), 1)]
)
def test_what_a_second_start_may_put_right_has_a_code_of_its_own(error: Exception, code: int) -> None:
    with pytest.raises(SystemExit) as ended, _main.one_line_errors():
        raise error
    assert ended.value.code == code


def test_local_devices_are_numbers() -> None:
    assert _main._device_ids(None) is None and _main._device_ids(["0", "3"]) == [0, 3]
    with pytest.raises(ValueError, match="--local_devices='all'; expected numbers"):
        _main._device_ids(["all"])
