import json

import jax
import numpy as np
import pytest
from etils import epath

from specjax.decoding import Loop, Weights
from specjax.drafting import PromptLookup
from specjax.testing import tiny_target
from specjax.training.data import read_answers
from specjax.training.regenerate import Prompt, RegenerateConfig, read_prompts, regenerate
from specjax.verification import Greedy, OneHot
from tests.training import common

PROMPTS = [Prompt("made", i, text) for i, text in enumerate(["a loop", "the tree", "some tokens it", "runs", "then"])]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def loop(target):
    """One program for all tests that draw at a temperature, and one for greedy ones."""
    drafter, weights = PromptLookup(num_nodes=2), Weights(target.params, {}, {})
    rules = {0.0: Greedy(2), 1.0: OneHot(2)}
    return {t: (Loop(target.graph, drafter, rule, eos=target.eos_ids), weights) for t, rule in rules.items()}


def run(target, loop, directory, prompts=PROMPTS, **changes):
    config = RegenerateConfig(**(dict(max_new_tokens=12, batch=2, part=2) | changes))
    return regenerate(prompts, target, *loop[config.temperature], directory, config)


def by_id(directory):
    return {a.id: a.response_ids for a in read_answers(directory)}


def test_greedy_answers_are_the_targets_own(target, loop, tmp_path):
    assert run(target, loop, tmp_path) == 5
    for answer in read_answers(tmp_path):
        ids = target.tokenizer.apply_chat([{"role": "user", "content": answer.prompt}])
        tokens = np.asarray([*ids, *answer.response_ids], np.int32)
        logits = common.logits(target, common.Document(tokens, len(ids)))[len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(answer.response_ids)
        assert (answer.finish == "stop") == (answer.response_ids[-1] in target.eos_ids)
        assert answer.finish == "stop" or len(answer.response_ids) == 12
        assert answer.response == target.tokenizer.decode(answer.response_ids)


def test_an_interrupted_run_answers_the_rest(target, loop, tmp_path):
    run(target, loop, tmp_path / "whole")
    run(target, loop, tmp_path / "parts", PROMPTS[:3])
    before = {p: p.read_bytes() for p in (tmp_path / "parts").iterdir()}
    assert run(target, loop, tmp_path / "parts") == 2
    assert by_id(tmp_path / "parts") == by_id(tmp_path / "whole")
    assert all(p.read_bytes() == content for p, content in before.items())
    assert run(target, loop, tmp_path / "parts") == 0


def test_a_part_that_was_removed_costs_no_other(target, loop, tmp_path):
    run(target, loop, tmp_path)
    whole, kept = by_id(tmp_path), (tmp_path / "part-000002.jsonl").read_bytes()
    (tmp_path / "part-000000.jsonl").unlink()
    assert run(target, loop, tmp_path) == 2
    assert (tmp_path / "part-000002.jsonl").read_bytes() == kept and by_id(tmp_path) == whole


def test_a_part_is_whole_or_not_there(target, loop, tmp_path, monkeypatch):
    def killed(self, text):
        self.write_bytes(text.encode()[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for kind in {tmp_path.__class__, epath.Path(tmp_path).__class__}:
            patch.setattr(kind, "write_text", killed)
        run(target, loop, tmp_path, PROMPTS[:2])
    assert run(target, loop, tmp_path, PROMPTS[:2]) == 2 and len(by_id(tmp_path)) == 2


def test_processes_answer_a_share_each(target, loop, tmp_path):
    config = RegenerateConfig(max_new_tokens=12, batch=2, part=2)
    run(target, loop, tmp_path / "whole")

    def part(index, count=2):
        return regenerate(PROMPTS, target, *loop[0.0], tmp_path / "parts", config, share=(index, count))

    assert part(1) == 2  # one that starts late answers its own share all the same
    assert sorted(by_id(tmp_path / "parts")) == [1, 3]
    assert part(0) == 3 and part(0) == part(1) == part(0, 1) == 0
    assert by_id(tmp_path / "parts") == by_id(tmp_path / "whole")
    names = {p.name for p in (tmp_path / "parts").iterdir()}
    assert {"part-000000-0001.jsonl", "part-000001-0000.jsonl"} <= names and len(names) == 3
    with pytest.raises(ValueError, match=r"share=\(2, 2\): expected"):
        part(2)


def test_a_prompt_answered_twice_counts_once(target, loop, tmp_path):
    run(target, loop, tmp_path, PROMPTS[:2])
    first = tmp_path / "part-000000.jsonl"
    (tmp_path / "part-000001.jsonl").write_text(first.read_text().replace('"response": "', '"response": "again'))
    found = read_answers(tmp_path)
    assert [a.id for a in found] == [0, 1] and not any(a.response.startswith("again") for a in found)
    (tmp_path / "all.jsonl").write_text(2 * first.read_text())
    assert len(read_answers(tmp_path / "all.jsonl")) == 4  # a file of somebody's own is taken as it is


def test_a_sampled_answer_does_not_depend_on_its_neighbours(target, loop, tmp_path):
    run(target, loop, tmp_path / "a", temperature=1.0)
    run(target, loop, tmp_path / "b", PROMPTS[::-1], temperature=1.0, batch=1, part=5)
    run(target, loop, tmp_path / "c", temperature=1.0, seed=1)
    assert by_id(tmp_path / "a") == by_id(tmp_path / "b") != by_id(tmp_path / "c")


def test_answers_have_the_keys_that_training_reads(target, loop, tmp_path):
    run(target, loop, tmp_path, PROMPTS[:1])
    (line,) = (tmp_path / "part-000000.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == ["source", "id", "temperature", "prompt", "response_ids", "response", "finish"]


def write(path, *entries):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    return path


def test_prompts_are_read_once_each(tmp_path):
    entry = {"source": "s", "id": 1, "prompt": "p", "response": "not needed"}
    found = read_prompts(write(tmp_path / "p.jsonl", entry, entry | {"id": 2}, entry | {"temperature": 1.0}))
    assert found == [Prompt("s", 1, "p"), Prompt("s", 2, "p")]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"source": "s", "prompt": "p"}, "p.jsonl:1 lacks id; it has source, prompt"),
        ({"source": "s", "id": 1, "prompt": "  "}, "p.jsonl:1 has an empty prompt"),
    ],
)
def test_bad_prompts_are_one_clear_error(tmp_path, entry, says):
    with pytest.raises(ValueError, match=says):
        read_prompts(write(tmp_path / "p.jsonl", entry))


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="batch=0; expected at least 1"):
        RegenerateConfig(batch=0)


@pytest.mark.slow
def test_the_shipped_greedy_answers_come_out_again(data_dir, tmp_path):
    """Written by another engine in bfloat16: they agree up to a first near-tie, not token for token."""
    from specjax import build
    from specjax.checkpoints import load_target

    target = load_target("smollm2")
    theirs = read_answers(data_dir / "target_text" / "smollm2-135m-instruct.validation.jsonl.gz")
    theirs = [a for a in theirs if a.temperature == 0][:12]
    drafting = build.make_drafter("prompt_lookup", target)
    loop, weights = build.make_loop(target, drafting, build.make_sampling([0.0]))
    prompts = [Prompt(a.source, a.id, a.prompt) for a in theirs]
    regenerate(prompts, target, loop, weights, tmp_path, RegenerateConfig(max_new_tokens=64, batch=4))
    ours = {a.key: a for a in read_answers(tmp_path)}
    agreed = 0
    for answer in theirs:
        mine, other = ours[answer.key].response_ids, answer.response_ids[:64]
        differs = [i for i, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y]
        agreed += not differs
        if differs:
            # Where they part, the two tokens are nearly tied for the target: bfloat16 decides between them.
            ids = target.tokenizer.apply_chat([{"role": "user", "content": answer.prompt}])
            tokens = np.asarray([*ids, *mine[: differs[0]]], np.int32)
            logits = common.logits(target, common.Document(tokens, len(ids)), 512)[-1]
            law = np.asarray(jax.nn.log_softmax(logits))
            assert law[mine[differs[0]]] - law[other[differs[0]]] < 0.5
    assert agreed >= len(theirs) // 4
