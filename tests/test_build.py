"""Names, options and overrides that mean nothing are refused, and what would have meant something is said."""

import dataclasses
import json
import warnings

import pytest
from tokenizers import Tokenizer

import specjax
from specjax import build
from specjax.checkpoints.vocabularies import byte_level_bpe
from specjax.decoding import make_sampling
from specjax.drafting import PromptLookup
from specjax.testing import tiny_target
from specjax.training.identity import target_identity

QUICKSTART = "configs/quickstart.py"


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=2, width=16)


def other_run(folder, **made_for):
    """A run directory as far as its record."""
    folder.mkdir()
    (folder / "target.json").write_text(json.dumps(made_for))
    return folder


def test_parameters_of_a_run_for_another_target_are_refused(target, tmp_path):
    mine = target_identity(target)
    theirs = mine | {"target": "theirs", "tokenizer": "78", "chat_template": "other"}
    run = other_run(tmp_path / "run", **theirs)
    says = f"'theirs', not for {target.name!r} .tokenizer: that run has '78', here '{mine['tokenizer']}'.: give a run"
    with pytest.raises(ValueError, match=says):
        build.params_of(str(run), target)
    run = other_run(tmp_path / "deep", **mine | {"target_config": "9"})
    with pytest.raises(ValueError, match=f"target_config: that run has '9', here '{target.config_hash}'"):
        build.params_of(run, target)


def test_parameters_whose_target_is_not_known_are_taken_and_said_so(target, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "best_params", lambda run: (1, {}, f"of {run.name}"))
    with pytest.warns(UserWarning, match="has no record of the target .* .target_config, tokenizer; older versions"):
        assert build.params_of(other_run(tmp_path / "old"), target)() == "of old"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = other_run(tmp_path / "same", **target_identity(target) | {"target": "elsewhere"})
        assert build.params_of(same, target)() == "of same"
        # A run goes on without the one it began from.
        build.params_of(tmp_path / "removed", target)


def halved(target, num_nodes=3):
    """A maker of one's own."""
    return build.Drafting("halved", PromptLookup(num_nodes=num_nodes / 2), {}, {})


def test_a_drafter_made_for_another_target_is_refused(target):
    plain = specjax.load_drafter("prompt_lookup", target)
    deeper = tiny_target(layers=3, width=16)
    skips = specjax.load_drafter("early_exit", deeper, exit_layer=1)
    tokens = [target.tokenizer.backend.id_to_token(i) for i in range(target.tokenizer.vocab_size)]
    tokens[10], tokens[11] = tokens[11], tokens[10]
    swapped = byte_level_bpe("gpt-2", tokens, [3] * 3 + [1] * 256, [])
    other = dataclasses.replace(target, tokenizer=dataclasses.replace(target.tokenizer, backend=swapped), name="other")
    mine, theirs = target.tokenizer.fingerprint(), other.tokenizer.fingerprint()
    sampling = make_sampling([0.0])
    says = f"'early_exit' was made for .* architecture {deeper.config_hash} .here {target.config_hash}"
    with pytest.raises(ValueError, match=says):
        build.make_loop(target, skips, sampling)
    says = f"'prompt_lookup' was made for the target 'tiny', not for 'other': tokenizer {mine} .here {theirs}.. Load it"
    with pytest.raises(ValueError, match=says):
        specjax.generate(other, plain, "a")
    with pytest.raises(ValueError, match=says):
        specjax.benchmark(other, plain, ["a"])
    # Other weights, and a tokenizer that was read again, are the same to a drafter.
    again = dataclasses.replace(target.tokenizer, backend=Tokenizer.from_str(target.tokenizer.backend.to_str()))
    build.make_loop(dataclasses.replace(target, tokenizer=again, name="again"), plain, sampling)
    # One that was put together by hand says nothing.
    build.make_loop(other, dataclasses.replace(plain, made_for=None), sampling)


CONFIGS = {
    "readme.md": ("# text", None, ValueError, r"readme.md is no Python file; expected one \(.py\)"),
    "noarg.py": ("def get_config():\n    pass", "x", ValueError, "noarg.py takes no argument, and was given 'x'"),
    "arg.py": (
        "def get_config(arg):\n    pass",
        None,
        ValueError,
        "arg.py needs an argument: write file.py:<argument>",
    ),
    "raises.py": (
        "def get_config():\n    raise RuntimeError('boom')",
        None,
        ValueError,
        "config file .*raises.py raised RuntimeError in line 2: boom",
    ),
    "at_once.py": ("x = 1\n1 / 0", None, ValueError, "at_once.py raised ZeroDivisionError in line 2: division by zero"),
    "own.py": ("def get_config():\n    raise ValueError('as it is')", None, ValueError, "^as it is$"),
    "lacks.py": ("import no_such_package", None, ImportError, "config file .*lacks.py cannot import .*no_such_package"),
    "binary.py": (b"\xff\xfe\x00", None, ValueError, "binary.py is no valid Python"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files_that_are_none(name, tmp_path):
    content, arg, kind, message = CONFIGS[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(kind, match=message):
        build.load_config(tmp_path / name, arg)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sed": 1}, "unknown config field 'sed'; did you mean 'seed'"),
        ({"target.sorce": "x"}, "unknown config field 'target.sorce'; did you mean 'target.source'"),
        ({"seed.first": 1}, "unknown config field 'seed.first'"),
        (["config.bench=3"], "unknown config field 'bench'"),
        ({"seed": "a"}, "config field 'seed' does not take 'a'"),
    ],
)
def test_overrides_that_do_not_fit(overrides, message):
    with pytest.raises(ValueError, match=message):
        build.load_config(QUICKSTART, overrides=overrides)


def test_overrides_that_do():
    config = build.load_config(
        QUICKSTART, "quick", ["config.seed=3", "target.source=here", "rows.draft.num_nodes=(1, 2)"]
    )
    assert (config.seed, config.target.source, config.rows.draft.num_nodes) == (3, "here", (1, 2))
    assert build.load_config(QUICKSTART, overrides={"only": ("draft",)}).only == ("draft",)


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        (
            "no_such.drafters:make",
            {},
            ImportError,
            "drafter 'no_such.drafters:make' cannot be imported",
        ),
        ("specjax.drafting:nope", {}, ValueError, "module specjax.drafting holds no 'nope'"),
        ("medusa", {}, ValueError, r"missing a required argument: 'source'; it takes \(source, tree, nodes, choices\)"),
        ("prompt_lookup", {"num_nodes": 2.5}, ValueError, "num_nodes=2.5 of drafter 'prompt_lookup'; expected a whole"),
        (f"{__name__}:halved", {}, ValueError, "num_nodes=1.5 of drafter"),
        ("prompt_lookup", {"num_nodes": 17}, ValueError, "'prompt_lookup' drafts 17 tokens deep; expected at most 16"),
        ("early_exit", {"exit_layer": 1, "num_nodes": 40}, ValueError, "drafts 40 tokens deep; expected at most 16"),
        ("jacobi", {"num_nodes": 17}, ValueError, "drafts 17 tokens deep; expected at most 16"),
        (
            "ensemble_union",
            {"members": [{"name": "prompt_lookup", "num_nodes": 20}, {"name": "prompt_lookup"}]},
            ValueError,
            "'ensemble_union' drafts 20 tokens deep; expected at most 16",
        ),
        ("builtins:repr", {}, ValueError, "'builtins:repr' makes a str; expected .* to return a .*Drafting"),
        ("math:pi", {}, ValueError, "'math:pi' is 3.14.*; expected a maker.target, ..options."),
        (None, {}, ValueError, r"drafter=None; expected a name \(adaptive, "),
        (5, {}, ValueError, r"drafter=5; expected a name \(adaptive, "),
        (
            "ensemble_vote",
            {"members": ["prompt_lookup", "suffix"]},
            ValueError,
            "member 0 of the ensemble is 'prompt_lookup'; expected a name with its options",
        ),
        (
            "ensemble_vote",
            {"members": [{"name": "builtins:repr"}]},
            ValueError,
            "member 0 of the ensemble, drafter 'builtins:repr': .*makes a str",
        ),
        (
            "adaptive",
            {"inner": "prompt_lookup", "widths": (0, 3)},
            ValueError,
            "the inner drafter is 'prompt_lookup'; expected a name with its options",
        ),
        ("./runs/none", {}, ValueError, "unknown drafter './runs/none'; .*in the zoo: smollm2.*directory of a saved"),
    ],
)
def test_drafters_that_cannot_be_made(target, name, options, kind, message):
    with pytest.raises(kind, match=message):
        specjax.load_drafter(name, target, **options)


def test_the_deepest_draft_and_the_widest_pass_are_made(target):
    assert specjax.load_drafter("prompt_lookup", target, num_nodes=16).drafter.depth == 16
    assert specjax.load_drafter("autoregressive", target, num_nodes=60).drafter.num_nodes == 60


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("math:sqrt", None, "rule 'math:sqrt' makes a float; expected maker.depth, ..options. to return a rule"),
        ("typical", 5, "rule_options=5 of rule 'typical'; expected options by name"),
        (None, 0, "rule_options=0 of rule 'greedy'; expected options by name"),
    ],
)
def test_rules_that_cannot_be_made(rule, options, message):
    with pytest.raises(ValueError, match=message):
        build.make_rule(rule, PromptLookup(), make_sampling([0.0]), options=options)


def lookup_of_two(target):
    """Another maker of one's own."""
    return build.Drafting("two", PromptLookup(num_nodes=2), {}, {})


def test_an_ensemble_takes_members_of_ones_own(target):
    mine = {"name": f"{__name__}:lookup_of_two"}
    made = build.make_drafter("ensemble_union", target, members=[mine, {"name": "prompt_lookup", "num_nodes": 2}])
    assert made.drafter.num_nodes == 4
    with pytest.raises(ValueError, match="member 1 of the ensemble, drafter 'nowhere:x': .*cannot be imported"):
        build.make_drafter("ensemble_union", target, members=[{"name": "prompt_lookup"}, {"name": "nowhere:x"}])
