"""The pretraining program at its smallest, from corpus to a target and a drafter that decode together."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import ml_collections
import numpy as np
import pytest

from experiments import _main, pretrain
from specjax import build
from specjax.checkpoints import load_target
from specjax.decoding import Request, generate, make_sampling
from specjax.evaluation.prompts import prompt_file
from specjax.testing import tiny_target
from specjax.training import corpus
from specjax.training.data import Answer, TextRows, lay_out
from specjax.training.objectives.registry import OBJECTIVES, PRETRAINING


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    rng = np.random.default_rng(0)
    words = "the old house stood by a river and nobody had been there for years".split()
    text = " ".join(rng.choice(words, 6000))
    (folder / "text" / "made.txt").write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["independent", "sequential"])
def test_it_pretrains_exports_and_drafts(
    kind: str, prose: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECJAX_DATA", str(prose))
    changes = {"model.hidden_size": 32, "train.steps": 60, "optimizer.steps": 60}
    config = build.load_config("configs/mtp.py", f"tiny,heads=3,kind={kind}", changes)
    pretrain.main(config)
    for row in json.loads((in_workdir / "results.json").read_text())["rows"]:
        assert (row["kind"], row["heads"], row["seed"]) == (kind, 3, 0)
        assert 0 < row["loss"] < np.log(config.model.vocab_size) and len(row["by_row"]) == 8
    target = load_target(str(in_workdir / "target"), dtype="float32")
    assert target.config.num_layers == 2 and target.tokenizer.decode(target.tokenizer.encode("def f():")) == "def f():"
    prompts = prompt_file(in_workdir / "prompts.jsonl")
    assert {p.category for p in prompts} == {"code", "prose"}
    drafting = build.make_drafter("mtp", target, source=str(in_workdir))
    assert drafting.drafter.num_nodes == 2 and drafting.drafter.config.kind == kind
    requests = [Request(tuple(target.tokenizer.encode(p.turns[0])), 24, id=i) for i, p in enumerate(prompts[:2])]
    found = []
    for own in (build.make_drafter("autoregressive", target), drafting):
        loop, weights = build.make_loop(target, own, make_sampling([0.0]))
        found.append(generate(loop, weights, requests, context=target.context, vocab=target.config.vocab_size))
    assert [c.tokens for c in found[0]] == [c.tokens for c in found[1]]
    assert sum(c.emitted for c in found[1]) == sum(c.emitted for c in found[0])


@pytest.mark.slow
def test_layerskip_trains_from_scratch_and_further(
    prose: Path, tmp_path: Path, in_workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out is a target that its own first layer drafts for, and the numbers behind every layer."""
    monkeypatch.setenv("SPECJAX_DATA", str(prose))
    config = build.load_config("configs/layerskip.py", "tiny", {"model.hidden_size": 32, "train.steps": 30})
    pretrain.main(config)
    found = json.loads((in_workdir / "results.json").read_text())
    assert found["meta"]["schema"] == "specjax.layerskip/1"
    exits = [(k, n) for k in ("code", "prose") for n in (1, 2, 3)]
    assert [(r["set"], r["exit_layer"]) for r in found["rows"]] == exits
    for row in found["rows"]:
        # Thirty steps teach what letters are frequent.
        assert row["exit_layer"] == 1 or row["perplexity_after"] < 0.9 * row["perplexity_before"]
        assert row["exit_layer"] < 3 or row["accuracy_before"] < row["accuracy_after"] <= 1
    target = load_target(str(in_workdir / "target"), dtype="float32")
    request = Request(tuple(target.tokenizer.encode(prompt_file(in_workdir / "prompts.jsonl")[0].turns[0])), 24)
    told = []
    for own in (build.make_drafter("autoregressive", target), build.make_drafter("early_exit", target, exit_layer=2)):
        loop, weights = build.make_loop(target, own, make_sampling([0.0]))
        told.append(
            generate(loop, weights, [request], context=target.context, vocab=target.config.vocab_size)[0].tokens
        )
    assert told[0] == told[1]

    # Further, on its own answers.
    source = tmp_path / "pretrained"
    shutil.copytree(str(in_workdir / "target"), source)
    shutil.rmtree(str(in_workdir))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    ids = target.tokenizer.encode("the old house stood by a river", add_special=False)
    lines = [dataclasses.asdict(Answer("made", i, float(i % 2), "who", (*ids, 0), "", "stop")) for i in range(40)]
    (prose / "answers.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    changes = {
        "data.text": "answers.jsonl",
        "data.held_out_text": "answers.jsonl",
        "data.row_length": 64,
        "objective.every": 2,
        "train.eval_every": 4,
        "train.steps": 8,
        "optimizer.warmup": 1,
        "optimizer.learning_rate": 1e-2,
    }
    pretrain.main(build.load_config("configs/layerskip.py", str(source), changes))
    rows = json.loads((in_workdir / "results.json").read_text())["rows"]
    assert [(r["set"], r["exit_layer"]) for r in rows] == [(k, n) for k in ("greedy", "sampled") for n in (1, 2, 3)]
    assert rows[2]["perplexity_after"] < rows[2]["perplexity_before"]
    assert load_target(str(in_workdir / "target"), dtype="float32").config == target.config
    assert not (in_workdir / "prompts.jsonl").exists()


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_interrupted_run_asks_to_be_started_again(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained here: what counts is what the program makes of a SIGTERM during training."""

    class Quick(pretrain.Trainer):
        def run(self, *_: object, **__: object) -> None:
            if interrupted:
                os.kill(os.getpid(), signal.SIGTERM)

    rows = TextRows(lay_out([], 16))
    monkeypatch.setattr(_main, "workdir", lambda: Path("run"))
    monkeypatch.setattr(pretrain, "prepare", lambda *_: (tiny_target(layers=1, width=16), corpus.Corpus(rows, {}, {})))
    monkeypatch.setattr(pretrain, "Trainer", Quick)
    monkeypatch.setattr(pretrain, "export", lambda *_: {})
    before = signal.getsignal(signal.SIGTERM)
    try:
        config = build.load_config("configs/mtp.py", "tiny")
        if not interrupted:
            pretrain.main(config)
            return
        with pytest.raises(SystemExit) as ended:
            pretrain.main(config)
        assert ended.value.code == _main.RESTART
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("heads", [1, 4])
def test_the_config_describes_a_small_model(heads: int) -> None:
    config = build.load_config("configs/mtp.py", f"small,heads={heads}")
    shapes = pretrain.model_config(config.model)
    tree = jax.tree.leaves(pretrain.graph(shapes)[1])
    assert sum(int(np.prod(x.shape)) for x in tree) <= 6e6 and config.objective.heads == heads


def test_configs_of_multi_token_prediction_name_what_they_take() -> None:
    with pytest.raises(ValueError, match="unknown argument 'layers=2' of configs/mtp.py; known: small, tiny"):
        build.load_config("configs/mtp.py", "small,layers=2")
    options = build.load_config("configs/mtp.py", "tiny,kind=sequential").objective.to_dict()
    made = PRETRAINING[options.pop("name")](tiny_target(width=16), 100, **options)
    assert (made.heads, made.weights, made.switch) == (2, (0.3, 0.1), 68)
    assert build.load_config("configs/mtp.py", "small,heads=4").objective.decay == 1.0
    assert build.load_config("configs/mtp.py", "smollm2").objective.name == "mtp"
    assert build.load_config("configs/mtp_benchmark.py", "runs/a,quick").target.source == "runs/a/target"
    with pytest.raises(ValueError, match="unknown argument 'fast' of configs/mtp_benchmark.py; known: quick"):
        build.load_config("configs/mtp_benchmark.py", "runs/a,fast")
    with pytest.raises(ValueError, match="unknown argument 'quik' of configs/mtp_benchmark.py; did you mean 'quick'"):
        build.load_config("configs/mtp_benchmark.py", "quik")
    with pytest.raises(ValueError, match="takes one run, not 'runs/a' and 'runs/b'"):
        build.load_config("configs/mtp_benchmark.py", "runs/a,runs/b")


def test_the_benchmark_of_heads_reads_the_run_that_pretraining_wrote(tmp_path: Path) -> None:
    """Without arguments the two commands meet; what is swept is what the run has."""
    program = Path(pretrain.__file__).read_text()
    for argument in (None, "quick"):
        config = build.load_config("configs/mtp_benchmark.py", argument)
        run = config.target.source.removesuffix("/target")
        assert f'config="configs/mtp.py", workdir="{run}"' in program
        assert config.max_new_tokens == (16 if argument else 128) and config.rows.mtp.num_nodes[0] == 1
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({"model": {"depth": 1}}))
    assert build.load_config("configs/mtp_benchmark.py", str(tmp_path)).rows.mtp.num_nodes == (1,)
    shutil.rmtree(tmp_path / "drafter")
    (tmp_path / "target").mkdir()
    with pytest.raises(ValueError, match="has no drafter: it was trained with heads=1; expected a run of heads=2"):
        build.load_config("configs/mtp_benchmark.py", str(tmp_path))


def test_configs_of_own_layers_name_what_there_is() -> None:
    """Their objectives are registered, and take the options that they give."""
    target = tiny_target(layers=30, width=16)
    for argument in ("small", "tiny", "smollm2"):
        options = build.load_config("configs/layerskip.py", argument).objective.to_dict()
        assert PRETRAINING[options.pop("name")](target, 10, **options).schedule.layers == 30
    options = build.load_config("configs/kangaroo.py", "smollm2").objective.to_dict()
    assert OBJECTIVES[options.pop("name")](target, **{**options, "draft_vocab": 16}).config.taps == (2,)
    rows = build.load_config("configs/layerskip_benchmark.py", "runs/a,quick").rows
    assert {row.name for row in rows.values()} == {"autoregressive", "early_exit"}
    with pytest.raises(ValueError, match="unknown argument 'fast' of configs/layerskip_benchmark.py; known: quick"):
        build.load_config("configs/layerskip_benchmark.py", "runs/a,fast")


@pytest.mark.parametrize("argument", ["", "quick", "runs/a,quick"])
def test_the_config_of_ensembles(argument: str) -> None:
    config = build.load_config("configs/ensembles.py", argument or None)
    lineup = build.lineup_from_config(config)
    assert {"autoregressive", "draft_1", "lookup", "union", "vote", "mixture", "proxy"} <= lineup.kept.keys()
    assert all(row["members"][0]["name"] == "draft_model" for row in lineup.kept.values() if "members" in row)


def test_ensembles_for_any_target() -> None:
    config = build.load_config("configs/ensembles.py", "target=some/model,runs/a,runs/b,quick")
    assert config.target.source == "some/model" and config.rows.draft_2.source == "runs/b"
    # Nothing in the rows is one target's own number of layers.
    assert config.rows.oracle.proxy == "oracle" and "layer" not in config.rows.oracle
    with pytest.raises(ValueError, match="unknown argument 'quik' of configs/ensembles.py; did you mean 'quick'"):
        build.load_config("configs/ensembles.py", "quik")
    with pytest.raises(ValueError, match="target=some/model, but no draft for it"):
        build.load_config("configs/ensembles.py", "target=some/model")


def test_a_directory_that_cannot_be_written_and_rows_that_hold_nothing_are_refused_first(
    prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from etils import epath

    monkeypatch.setenv("SPECJAX_DATA", str(prose))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_main, "workdir", lambda: epath.Path("file/x"))
    (tmp_path / "file").write_text("")
    root = Path(__file__).resolve().parents[2]

    def config(**changes: object) -> ml_collections.ConfigDict:
        return build.load_config(f"{root}/configs/mtp.py", "tiny", {f"data.{k}": v for k, v in changes.items()})

    with pytest.raises(PermissionError, match="file/x cannot be written"):
        pretrain.main(config())
    monkeypatch.setattr(_main, "workdir", lambda: epath.Path("runs/x"))
    for changes, message in (({"row_length": 0}, "row_length=0"), ({"held_out_rows": -1}, "held_out_rows=-1")):
        with pytest.raises(ValueError, match=message):
            pretrain.main(config(**changes))
