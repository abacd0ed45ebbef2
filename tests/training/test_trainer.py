import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from specjax.checkpoints.rundir import RunDirectory
from specjax.checkpoints.train_state import run_params
from specjax.decoding import Loop, Request, Weights, generate
from specjax.drafting import Autoregressive, DraftModel
from specjax.models import graph
from specjax.parallel import AXES, Placement
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import Document, TextRows, lay_out, pack
from specjax.training.feed import batches
from specjax.training.objectives import LanguageModel
from specjax.training.objectives.lm import first_choice, labels
from specjax.verification import Greedy
from tests.training import common

CONFIG = {"what": "a test", "nested": {"rate": 1e-2}}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trainer(target, **changes):
    rows, _ = pack(common.documents(target, 40), 96)
    settings = dict(steps=4, batch=3, seed=1, log_every=1, eval_every=2, best="held/match") | changes
    return Trainer(
        target=target,
        objective=LanguageModel(common.student(target)),
        tables={"vocab": jnp.asarray(common.vocabulary())},
        optimizer=OptimizerConfig(learning_rate=1e-2, steps=max(20, settings["steps"]), warmup=1),
        config=TrainerConfig(**settings),
        train=TextRows(lay_out(rows[2:], 96)),
        held_out={"held": TextRows(lay_out(rows[:2], 96))},
    )


def same(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves)


def _batches(made):
    return (rows for _, rows in batches(made.train.rows, made.config.batch, made.config.seed, 0))


def steps(run):
    return [row["step"] for row in RunDirectory(run).metrics() if "train/loss" in row]


def without_speed(run):
    return [{k: v for k, v in row.items() if "second" not in k} for row in RunDirectory(run).metrics()]


def test_two_and_two_steps_are_four_bit_for_bit(target, tmp_path):
    whole = trainer(target).run(tmp_path / "whole", CONFIG)
    seen = []
    trainer(target).run(tmp_path / "parts", CONFIG, stop=lambda: seen.append(0) or len(seen) == 2)
    resumed = trainer(target).run(tmp_path / "parts", CONFIG)
    assert int(whole.step) == int(resumed.step) == 4
    assert same(whole, resumed)
    assert steps(tmp_path / "whole") == steps(tmp_path / "parts") == [1, 2, 3, 4]
    assert without_speed(tmp_path / "whole") == without_speed(tmp_path / "parts")
    # The layer numbers come back as they went.
    assert resumed.params["layers"].keys() == {0, 1}


def test_an_interrupted_run_is_saved_without_an_evaluation(target, tmp_path):
    """The time between the signal and the end is short."""
    whole = trainer(target).run(tmp_path / "whole", CONFIG)
    seen = []
    trainer(target).run(tmp_path / "parts", CONFIG, stop=lambda: seen.append(0) or len(seen) == 3)
    run = RunDirectory(tmp_path / "parts")
    assert run.checkpointed == 3
    assert [row["step"] for row in run.metrics() if "held/match" in row] == [0, 2]
    assert run_params(run.checkpoints, "held/match")[0] in (0, 2)  # what was not evaluated is not the best
    assert same(whole, trainer(target).run(tmp_path / "parts", CONFIG))
    assert without_speed(tmp_path / "whole") == without_speed(tmp_path / "parts")


def test_an_update_does_not_depend_on_how_its_batch_was_split(target, tmp_path):
    whole = trainer(target, batch=4).run(tmp_path / "whole", CONFIG)
    split = trainer(target, batch=4, accumulate=2).run(tmp_path / "split", CONFIG)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(split.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5)
    for a, b in zip(without_speed(tmp_path / "whole"), without_speed(tmp_path / "split"), strict=True):
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-4)


def test_the_moving_average_is_what_is_evaluated_and_kept(target, tmp_path):
    made = trainer(target, steps=3, eval_every=3, ema=0.5)
    start = jax.tree.map(np.asarray, made.init().params)
    seen = [start]
    state = made.init()
    expected = start
    for _, rows in zip(range(3), _batches(made), strict=False):
        state, _ = made.step(state, made.load(made.train, rows))
        seen.append(jax.tree.map(np.asarray, state.params))
        expected = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * p, expected, seen[-1])
    final = made.run(tmp_path, CONFIG)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(final.average), strict=True):
        np.testing.assert_allclose(np.asarray(b), a, rtol=1e-5, atol=1e-7)
    assert not same(final.average, final.params)
    held = [row for row in RunDirectory(tmp_path).metrics() if "held/match" in row][-1]
    assert held["held/loss"] == pytest.approx(made.evaluate(final.average)["held/loss"])
    assert (
        same(run_params(RunDirectory(tmp_path).checkpoints, "held/loss", "min")[2], final.average)
        or held["held/loss"] > made.evaluate(start)["held/loss"]
    )


def test_half_precision_keeps_full_parameters_and_moves_them_by_less_than_half_precision_can(target):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params)
    config = dataclasses.replace(target.config, dtype="bfloat16")
    low = dataclasses.replace(target, config=config, graph=graph(config)[0], params=half)
    made = trainer(low, accumulate=3)
    made = dataclasses.replace(made, optimizer=OptimizerConfig(learning_rate=1e-6, schedule="constant", steps=20))
    state, batch = made.init(), made.load(made.train, np.arange(3))
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state))} == {np.dtype("f4"), np.dtype("i4")}
    start, steps = jax.tree.map(np.asarray, state.params), 3
    for _ in range(steps):
        state, metrics = made.step(state, batch)
    moved = [np.abs(np.asarray(a) - b) for a, b in zip(*map(jax.tree.leaves, (state.params, start)), strict=True)]
    assert np.mean([(x > 0).mean() for x in moved]) > 0.5 and max(x.max() for x in moved) < steps * 1.1e-6
    # Computed in half precision: what that cannot hold changes nothing.
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), state.params)
    assert not same(rounded, state.params) and made.evaluate(rounded) == made.evaluate(state.params)
    assert metrics["finite"]


def without_answers(source):
    return TextRows(dataclasses.replace(source.text, response=np.zeros_like(source.text.response)))


def test_what_cannot_be_trained_leaves_the_directory_alone(target, tmp_path):
    made = trainer(target)
    mesh = AbstractMesh((2, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    rows = made.train.rows
    for wrong, message in (
        (dataclasses.replace(made, placement=Placement(mesh)), r"does not fit the mesh \(data=2"),
        (trainer(target, batch=rows + 1), f"batch={rows + 1} rows of a data set of {rows} rows"),
        (trainer(target, best="held/foo"), "best='held/foo' names no figure of 'held'; it has held/loss, held/match"),
        (
            dataclasses.replace(made, train=without_answers(made.train)),
            "no position of the rows to train on .* carries",
        ),
        (
            dataclasses.replace(made, held_out={"held": made.train, "other": without_answers(made.train)}),
            "no position of the held-out set 'other' .* carries loss",
        ),
        (
            dataclasses.replace(made, optimizer=dataclasses.replace(made.optimizer, rates=(("nope", 0.5),))),
            "rates: no parameter lies at 'nope'",
        ),
        (trainer(target, best="greedy/match"), "best='greedy/match' names no held-out set; .*of the sets held"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.run(tmp_path / "run", CONFIG)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 2}, "divisor of batch=3"),
        ({"ema": 1.0}, "ema=1.0"),
        ({"nonfinite": "hope"}, "nonfinite="),
        ({"precision": "foo"}, "precision='foo'; expected 'float32' or 'default'"),
        ({"seed": -1}, "seed=-1; expected a whole number"),
    ],
)
def test_settings_out_of_range_are_named(target, change, message):
    with pytest.raises(ValueError, match=message):
        trainer(target, **change)


def test_steps_after_the_last_checkpoint_are_logged_once(target, tmp_path):
    class Killed(Exception):
        pass

    def dies(step, values):
        if step == 3 and "train/loss" in values:
            raise Killed

    with pytest.raises(Killed):
        trainer(target).run(tmp_path, CONFIG, report=dies)
    trainer(target).run(tmp_path, CONFIG)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_finished_run_is_left_alone(target, tmp_path):
    done = trainer(target).run(tmp_path, CONFIG)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.jsonl")}
    again = trainer(target).run(tmp_path, CONFIG)
    assert same(done, again)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*.jsonl")}


def test_the_workdir_of_another_config_is_refused_with_a_diff(target, tmp_path):
    trainer(target, steps=1).run(tmp_path, CONFIG)
    with pytest.raises(
        ValueError, match=r"of another config, target, tokenizer or data:\n  nested.rate: run has 0.01, now 0.02"
    ):
        trainer(target).run(tmp_path, {**CONFIG, "nested": {"rate": 2e-2}})


def test_a_run_whose_data_grew_is_refused_in_one_error(target, tmp_path):
    """Of the same size, another vocabulary gives every column of the head another token; more rows, another order."""

    class Stopped(Exception):
        pass

    def start():
        raise Stopped

    made = trainer(target)
    with pytest.raises(Stopped):
        made.run(tmp_path, {**CONFIG, "data": {"max_shards": 0}}, init=start)
    (tmp_path / "optimizer.log").write_text("")  # Something has come of it.
    rows, _ = pack(common.documents(target, 44), 96)
    vocab = common.vocabulary()
    vocab = np.sort(np.where(vocab == vocab[-1], np.setdiff1d(np.arange(256), vocab)[0], vocab))
    grown = dataclasses.replace(made, train=TextRows(lay_out(rows, 96)), tables={"vocab": jnp.asarray(vocab)})
    with pytest.raises(ValueError) as error:
        grown.run(tmp_path, {**CONFIG, "data": {"max_shards": 0}}, init=start)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:-1]] == ["  draft_vocab", "  rows"]
    assert lines[2] == f"  rows: run has {made.train.rows}, now {len(rows)}"
    assert lines[-1].startswith("give another --workdir, or, to resume it, ") and "data as it was" in lines[-1]
    with pytest.raises(Stopped):  # A store cut to what it was.
        trainer(target).run(tmp_path, {**CONFIG, "data": {"max_shards": 3}}, init=start)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_that_ends_at_0_before_the_run_is_named(target, schedule):
    made, longer = trainer(target), dataclasses.replace(trainer(target).config, steps=30)
    optimizer = dataclasses.replace(made.optimizer, schedule=schedule)
    with pytest.raises(ValueError, match=f"train.steps=30, .*the {schedule} schedule .*optimizer.steps=20") as error:
        dataclasses.replace(made, optimizer=optimizer, config=longer)
    assert "set optimizer.steps=30" in str(error.value) and "\n" not in str(error.value)
    for some in ({"steps": 30}, {"schedule": "constant"}, {"final_fraction": 0.1}):
        dataclasses.replace(made, optimizer=dataclasses.replace(optimizer, **some), config=longer)


def test_a_run_that_goes_on_beyond_its_schedule_may_stretch_it_and_no_other(target, tmp_path):
    class Stopped(Exception):
        pass

    def start():
        raise Stopped

    def run(steps, schedule):
        config = {**CONFIG, "train": {"steps": steps}, "optimizer": {"steps": schedule}}
        trainer(target, steps=steps).run(tmp_path, config, init=start)

    with pytest.raises(Stopped):
        run(20, 20)
    (tmp_path / "optimizer.log").write_text("")  # Something has come of it.
    with pytest.raises(ValueError, match="optimizer.steps: run has 20, now 40"):
        run(20, 40)
    with pytest.raises(Stopped):
        run(40, 40)


def test_training_learns(target):
    fit = trainer(target)
    state = fit.init()
    batch = fit.train.batch(np.arange(3))
    losses = []
    for _ in range(40):
        state, metrics = fit.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 4


def test_a_loss_that_is_not_finite_stops_the_run(target, tmp_path):
    fit = trainer(target)
    broken = jax.tree.map(lambda x: x * jnp.nan, fit.init().params)
    with pytest.raises(FloatingPointError, match=r"the loss of step 1 is nan \(rows \["):
        fit.run(tmp_path, CONFIG, init=lambda: broken)


@dataclasses.dataclass(frozen=True)
class Poisoned:
    """An objective whose loss is NaN where a row ends in a marked token."""

    inner: LanguageModel
    mark: int = 258

    def init(self, key, target, tables):
        return self.inner.init(key, target, tables)

    def loss(self, params, tables, target, batch, key):
        loss = self.inner.loss(params, tables, target, batch, key)
        return loss.replace(sum=loss.sum * jnp.where(jnp.any(batch.tokens[:, -1] == self.mark), jnp.nan, 1.0))


def poisoned(target, row, **changes):
    made = trainer(target, **changes)
    tokens = made.train.text.tokens.copy()
    tokens[row, -1] = 258
    text = dataclasses.replace(made.train.text, tokens=tokens)
    return dataclasses.replace(made, objective=Poisoned(made.objective), train=TextRows(text))


def test_a_bad_batch_is_skipped_and_its_rows_are_kept(target, tmp_path):
    made = poisoned(target, 2, steps=6, eval_every=6, log_every=3, nonfinite="skip")
    bad = {step + 1: rows.tolist() for step, rows in zip(range(6), _batches(made), strict=False) if 2 in rows}
    assert 0 < len(bad) < 6
    state = made.init()
    rows = next(rows for rows in _batches(made) if 2 in rows)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = made.step(state, made.load(made.train, rows))
    assert not metrics["finite"] and same(before, state.params) and int(state.step) == 1
    final = made.run(tmp_path, CONFIG)
    assert int(final.step) == 6 and all(np.isfinite(x).all() for x in jax.tree.leaves(final.params))
    found = {
        row["step"]: row["train/skipped_rows"]
        for row in RunDirectory(tmp_path).metrics()
        if "train/skipped_rows" in row
    }
    assert found == bad
    assert all(np.isfinite(row["train/loss"]) for row in RunDirectory(tmp_path).metrics() if "train/loss" in row)


def test_a_bad_batch_between_logged_steps_stops_the_run_all_the_same(target, tmp_path):
    made = poisoned(target, 2, steps=12, eval_every=12, log_every=12)
    step, rows = next((i + 1, rows) for i, rows in enumerate(_batches(made)) if 2 in rows)
    with pytest.raises(
        FloatingPointError, match=rf"the loss of step {step} is nan \(rows \[.*last good checkpoint is 0"
    ):
        made.run(tmp_path, CONFIG)


def test_skipping_has_an_end(target, tmp_path):
    made = trainer(target, steps=30, nonfinite="skip")
    broken = jax.tree.map(lambda x: x * jnp.nan, made.init().params)
    with pytest.raises(FloatingPointError, match="the loss of step 10 is nan .*the 10th in a row"):
        made.run(tmp_path, CONFIG, init=lambda: broken)


def test_a_run_whose_newest_checkpoint_is_damaged_trains_those_steps_again(target, tmp_path):
    whole = trainer(target).run(tmp_path, CONFIG)
    for file in (p for p in (tmp_path / "checkpoints" / "4").rglob("d/*") if p.is_file()):
        os.truncate(file, file.stat().st_size // 2)
    with pytest.warns(UserWarning, match="step 4 .* is damaged .*going on from step 2"):
        again = trainer(target).run(tmp_path, CONFIG)
    assert same(whole, again) and steps(tmp_path) == [1, 2, 3, 4]


def test_held_out_figures_count_every_position_once(target):
    fit = trainer(target, batch=3)
    rows, _ = pack(common.documents(target), 96)
    text = TextRows(lay_out(rows[:4], 96))  # not a multiple of the batch
    figures = dataclasses.replace(fit, held_out={"a": text}).evaluate(fit.init().params)
    apart = dataclasses.replace(fit, held_out={"a": text}, config=dataclasses.replace(fit.config, batch=1))
    for key, value in apart.evaluate(fit.init().params).items():
        assert figures[key] == pytest.approx(value, rel=1e-5)


def test_the_step_compiles_once_and_consumes_its_state(target):
    fit = trainer(target, seed=77)
    state = fit.init()
    from specjax.training.step import update

    before = update._cache_size()
    old = state.params["final_norm"]["weight"]
    for i in range(3):
        state, _ = fit.step(state, fit.train.batch(np.arange(3) + i))
    assert update._cache_size() == before + 1
    assert old.is_deleted()


def test_metrics_parts_are_never_appended_to(target, tmp_path):
    trainer(target).run(tmp_path, CONFIG)
    parts = sorted((tmp_path / "metrics").iterdir())
    assert [p.name for p in parts] == [f"part-{i:06d}.jsonl" for i in range(len(parts))]
    assert all(json.loads(p.read_text().splitlines()[0]).keys() == {"resumed_from"} for p in parts)


@pytest.mark.pitfall("SpecForge#455,#473; dflash#41")
def test_teacher_forced_acceptance_is_what_the_loop_accepts(target):
    """The same student on the same greedy text: what it agrees with under teacher forcing, the loop accepts."""
    fit = trainer(target)
    state = fit.init()
    prompt = target.tokenizer.apply_chat([{"role": "user", "content": "a loop"}])
    depth, budget = 3, 60
    # Greedy text of this target, long enough for the last step to look ahead.
    request = Request(tuple(prompt), budget + depth + 1)
    limits = dict(context=target.context, vocab=target.config.vocab_size)
    plain = Loop(target.graph, Autoregressive(), Greedy(0), eos=())
    (text,) = generate(plain, Weights(target.params, {}, {}), [request], **limits)
    vocab = np.unique(text.tokens).astype(np.int32)
    fit = dataclasses.replace(fit, tables={"vocab": jnp.asarray(vocab)})
    fit = dataclasses.replace(fit, objective=LanguageModel(common.student(target, draft_vocab=len(vocab))))
    document = Document(np.asarray([*prompt, *text.tokens], np.int32), len(prompt))
    batch = jax.tree.map(jnp.asarray, lay_out([[document]], 128))
    state = fit.init()
    for _ in range(2):  # Enough to agree often, not always.
        state, _ = fit.step(state, batch)
    network, hidden = fit.objective.student.hidden(state.params, common.network(target), fit.tables["vocab"], batch)
    hits = np.asarray(first_choice(jax.nn.log_softmax(network.logits(hidden), -1), labels(batch, fit.tables["vocab"])))
    agrees = hits[0, len(prompt) - 1 : len(document.tokens) - 1].astype(bool)
    assert 0.1 < agrees.mean() < 0.97

    length, accepted = 1, np.zeros(depth + 1, int)
    while length < budget:
        run = agrees[length : length + depth]
        count = depth if run.all() else int(np.argmin(run))
        accepted[min(count, budget - length)] += 1  # the budget cuts the last block
        length += count + 1
    config = fit.objective.student.config
    drafter = DraftModel(config, depth, shares=("embed",))
    params = {**state.params, "lm_head": {"kernel": target.params["lm_head"]["kernel"][:, vocab]}}
    loop = Loop(target.graph, drafter, Greedy(depth), eos=())
    weights = Weights(target.params, params, {"vocab": jnp.asarray(vocab)})
    (served,) = generate(loop, weights, [Request(tuple(prompt), budget)], **limits)
    assert served.tokens == text.tokens[:budget]
    assert served.accepted.tolist() == accepted.tolist()
