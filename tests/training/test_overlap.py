import gzip
import json

import pytest

from specjax.evaluation.prompts import load_prompts
from specjax.training.overlap import repeated

LONG = "One two three four five six, seven eight nine ten eleven twelve thirteen fourteen"


def test_what_is_repeated_is_found_whatever_case_and_punctuation():
    prompts = ["What is it?", LONG, "nothing of the kind", LONG.lower().replace(",", " -"), LONG.replace("seven", "7")]
    assert repeated(["what IS it", f"Well: {LONG.upper()}!"], prompts) == [0, 1, 3]
    # Part of a longer text, a short prompt is no repetition; nor is one of no words.
    assert repeated([f"I ask: what is it? {LONG}"], ["What is it?", "?!"]) == []


@pytest.mark.parametrize(
    "name", ["shipped", "spec_bench:spec_bench/question.jsonl", "mt_bench:mt_bench/question.jsonl"]
)
def test_no_drafter_of_the_zoo_was_trained_on_what_it_is_measured_on(data_dir, name):
    texts = []
    for part in ("train", "validation"):
        path = data_dir / "target_text" / f"smollm2-135m-instruct.{part}.jsonl.gz"
        texts += [json.loads(line)["prompt"] for line in gzip.decompress(path.read_bytes()).splitlines()]
    kind, _, file = name.partition(":")
    prompts = load_prompts(f"{kind}:{data_dir / file}" if file else kind)
    turns = [turn for prompt in prompts for turn in prompt.turns]
    assert len(turns) > 50 and repeated(sorted(set(texts)), turns) == []
