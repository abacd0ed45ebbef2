"""Prompts that templates make from plain text: kinds of tasks that a drafter's training text should not lack.

A draft head accepts what it has seen the target do. Collections of instructions are mostly maths and code; summarising,
translating, answering from a passage and rewriting can be made from any text, and free writing and questions from a
list of subjects.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from specjax.training.regenerate import Prompt

# Lengths of a passage in characters: long enough to say something, short enough to be cheap as a prompt.
SHORTEST, LONGEST = 120, 700

# What is asked about a whole passage, and about one sentence.
PASSAGE_TASKS: Mapping[str, tuple[str, ...]] = {
    "summarise": (
        "Summarize the following text in one or two sentences.\n\n{text}",
        "{text}\n\nWhat is the main point of this text?",
        "Give me a short summary of this passage:\n\n{text}",
        "Sum this up for someone in a hurry.\n\n{text}",
    ),
    "answer": (
        "Read the passage and answer the question.\n\n{text}\n\nQuestion: What is this passage about?",
        "{text}\n\nBased on the text above, who or what is described, and what happens?",
        "Use only the passage below to answer. Which names, places and dates does it mention?\n\n{text}",
        "Context: {text}\n\nQuestion: Why does this matter?\nAnswer:",
    ),
    "rewrite": (
        "Rewrite the following text in simpler words.\n\n{text}",
        "Turn this text into a list of bullet points:\n\n{text}",
        "Write a title and a one-sentence introduction for this text:\n\n{text}",
        "Rewrite this as a letter to a friend.\n\n{text}",
    ),
    "continue": (
        "Continue this text in the same style:\n\n{text}",
        "What could happen next? Write the next paragraph.\n\n{text}",
    ),
}
SENTENCE_TASKS: Mapping[str, tuple[str, ...]] = {
    "translate": tuple(
        f"Translate {what} to {language}: {{text}}"
        for language in ("German", "French", "Spanish", "Italian")
        for what in ("the following sentence from English", "this")
    ),
    "explain": (
        "Explain what this sentence means: {text}",
        "Write three questions that this sentence answers: {text}",
    ),
}
SUBJECT_TASKS: Mapping[str, tuple[str, ...]] = {
    "write": (
        "Write a short poem about {text}.",
        "Write a short story of about 150 words that has to do with {text}.",
        "Write a friendly email to a colleague about {text}.",
        "Write the first paragraph of a newspaper article about {text}.",
        "Draft a one-minute speech on {text} for an audience of students.",
        "Write a dialogue between two friends who disagree about {text}.",
        "Describe {text} to someone who has never heard of it.",
        "Write a persuasive paragraph in favour of {text}.",
    ),
    "ask": (
        "What should everyone know about {text}?",
        "What are the advantages and disadvantages of {text}?",
        "Explain {text} to a ten-year-old.",
        "Give me five practical tips about {text}.",
        "Why is {text} important?",
        "How has {text} changed over the last hundred years?",
        "What are common misunderstandings about {text}, and what is true instead?",
        "Make a step-by-step plan for a beginner who is interested in {text}.",
    ),
}
TASKS = {**PASSAGE_TASKS, **SENTENCE_TASKS, **SUBJECT_TASKS}
SUBJECTS = (
    "gardening,rainwater,public transport,wind power,the stock market,chess,mountain hiking,recycling,photography,"
    "volunteering,sleep,healthy eating,electric cars,space travel,the solar system,earthquakes,volcanoes,forests,"
    "birdwatching,pottery,jazz music,learning a language,reading aloud,museums,local history,time management,"
    "working from home,job interviews,saving money,house repairs,knitting,swimming,football,yoga,meditation,friendship,"
    "parenting,school uniforms,homework,the printing press,the steam engine,vaccines,the human heart,photosynthesis,"
    "gravity,magnets,batteries,computer security,social media,artificial intelligence,video games,online shopping,"
    "farmers' markets,coffee,tea,chocolate,cheese making,street food,winter holidays,birthday parties,weddings,"
    "road safety,cycling to work,sailing,deserts,coral reefs,whales,wolves,cats,dogs,horses,urban planning,bridges,"
    "architecture,democracy,elections,public libraries,newspapers,copyright,handwriting,maps,calendars,clocks,"
    "the ocean,glaciers,thunderstorms,gemstones,perfume,fashion,theatre,puppetry,circus arts,folk tales,poetry,"
    "detective novels,science fiction,travel by train,camping,cooking for a crowd,growing vegetables"
).split(",")


def template_prompts(texts: Mapping[str, str], per_task: int, seed: int = 0) -> list[Prompt]:
    """Prompts of every task, made from passages, and from subjects and forms, drawn without replacement.

    Args:
        texts: name -> plain text; paragraphs are separated by line breaks.
        per_task: prompts of each task in `TASKS`, spread evenly over the texts.
        seed: with texts and number it fixes the prompts.

    Returns:
        Prompts whose source is `<text>-<task>`, or `subjects-<task>`.

    Raises:
        ValueError: the number is below 1, or there are too few texts or subjects for it.
    """
    if per_task < 1:
        raise ValueError(f"per_task={per_task}; expected at least 1")
    if not texts:
        raise ValueError("texts is empty; expected at least one text to make prompts from")
    made: list[Prompt] = []
    for n, (name, text) in enumerate(texts.items()):
        wanted = per_task // len(texts) + (n < per_task % len(texts))
        rng = np.random.default_rng((seed, n))
        found = passages(text)
        sentences = [sentence for passage in found for sentence in _sentences(passage) if 40 <= len(sentence) <= 200]
        for pool, tasks in ((found, PASSAGE_TASKS), (sentences, SENTENCE_TASKS)):
            made += _fill(name, pool, tasks, wanted, rng)
    return made + _about_subjects(per_task, np.random.default_rng(seed))


def _about_subjects(wanted: int, rng: np.random.Generator) -> list[Prompt]:
    """`wanted` prompts of each task, no question asked twice."""
    made = []
    for task, templates in SUBJECT_TASKS.items():
        asked = [template.format(text=subject) for template, subject in itertools.product(templates, SUBJECTS)]
        if wanted > len(asked):
            raise ValueError(f"{wanted} prompts of the task {task} are wanted; there are subjects for {len(asked)}")
        order = rng.permutation(len(asked))[:wanted]
        made += [Prompt(f"subjects-{task}", i, asked[place]) for i, place in enumerate(order)]
    return made


def passages(text: str) -> list[str]:
    """Runs of whole sentences of `SHORTEST` to `LONGEST` characters, in order.

    Headings, paragraphs that are too short, and sentences with a hole (`<unk>`) are left out; the spaces that tokenised
    corpora put around punctuation are taken out.
    """
    found = []
    # A blank line ends a paragraph; so does a break behind a space, as corpora with a paragraph a line have them.
    for paragraph in re.split(r"\n\s*\n|(?<= )\n", text):
        paragraph = _untokenised(" ".join(paragraph.split()))
        run = ""
        for sentence in [*_sentences(paragraph), ""]:
            whole = bool(sentence) and "<unk>" not in sentence
            if run and (not whole or len(run) + len(sentence) >= LONGEST):
                if len(run) >= SHORTEST:
                    found.append(run)
                run = ""
            if whole and len(sentence) <= LONGEST:
                run = f"{run} {sentence}".strip()
    return found


def _fill(
    name: str, pool: Sequence[str], tasks: Mapping[str, Sequence[str]], wanted: int, rng: np.random.Generator
) -> list[Prompt]:
    """`wanted` prompts of each task, no piece of text used twice."""
    if wanted * len(tasks) > len(pool):
        raise ValueError(
            f"text {name!r} has {len(pool)} pieces for the tasks {', '.join(tasks)}; {wanted} prompts of each need "
            f"{wanted * len(tasks)}: ask for fewer, or give more text"
        )
    order = iter(rng.permutation(len(pool)))
    return [
        Prompt(f"{name}-{task}", i, templates[i % len(templates)].format(text=pool[next(order)]))
        for task, templates in tasks.items()
        for i in range(wanted)
    ]


def _sentences(paragraph: str) -> list[str]:
    # A closing mark, and behind it a capital: initials ("H. americanus") and figures are not ends.
    return re.split(r"(?<=[a-z\d)\"'][.!?]) (?=[\"'A-Z])", paragraph) if paragraph else []


def _untokenised(text: str) -> str:
    if re.fullmatch(r"(= )+.*( =)+", text):
        return ""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)\]%]|'s\b|n't\b)", r"\1", text)
    text = re.sub(r"([(\[$]) ", r"\1", text)
    return re.sub(r'" ([^"]*?) "', r'"\1"', text)
