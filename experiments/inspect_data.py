"""Shows what a config trains on: python -m experiments.inspect_data --config=configs/user_data.py:chats.jsonl

Three rows as the draft will see them, the text that carries loss coloured (in brackets where there are no colours); how
many documents lose their end; token counts. Loads the target's tokenizer, not its weights.
--against="spec_bench:question.jsonl,shipped" also says how many prompts of evaluation sets are in the training text.
"""

from __future__ import annotations

import ml_collections
import numpy as np
from absl import flags
from rich.console import Console
from rich.text import Text

from experiments import _main
from specjax import build
from specjax.checkpoints.sources import locate
from specjax.evaluation.prompts import load_prompts
from specjax.models.tokenizer import Tokenizer
from specjax.training.data import Batch, Document, lay_out, pack, read_answers, render
from specjax.training.overlap import repeated

EXAMPLES = flags.DEFINE_integer("examples", 3, "rows to show", lower_bound=0)
AGAINST = flags.DEFINE_list("against", [], "evaluation sets, as `prompts` of a benchmark config names them")
LONGEST, LISTED = 1500, 100  # Characters of an example, and of a prompt that is in the training text.


def main(config: ml_collections.ConfigDict) -> None:
    """Reads, counts, shows."""
    console, data = _main.console(), config.data
    tokenizer = Tokenizer.from_directory(locate(config.target.source))
    if "dataset" in data:
        found = build.dataset_from_config(data, tokenizer)
        rows, documents, cut, where = found.train.text, found.documents, found.cut, data.dataset.path
        count, whole = found.tokens, [d for row in range(len(rows.tokens)) for d in documents_of(rows, row)]
        texts = [tokenizer.decode(document.tokens.tolist()) for document in whole] if AGAINST.value else []
    elif "text" in data:
        path = _main.data_dir() / data.text
        answers, where = read_answers(path), str(path)
        made, texts = [render(tokenizer, answer) for answer in answers], [answer.prompt for answer in answers]
        packed, cut = pack(made, data.row_length)
        rows, documents, count = lay_out(packed, data.row_length), len(made), sum(len(d.tokens) for d in made)
    else:
        raise ValueError("the config has neither data.dataset nor data.text: there is no text to look at")
    console.print(f"{where}: {documents} documents, {count} tokens", highlight=False, soft_wrap=True)
    console.print(f"{cut} of {documents} ({cut / documents:.1%}) are longer than a row of {data.row_length} tokens")
    used = int((rows.segments > 0).sum())
    console.print(
        f"{len(rows.tokens)} rows to train on: {used} tokens, {used / rows.tokens.size:.1%} of the room; "
        f"{int(rows.predicts.sum())} positions carry loss"
    )
    for name in AGAINST.value:
        turns = [turn for prompt in load_prompts(name) for turn in prompt.turns]
        shared = repeated(texts, turns)
        first = f": {turns[shared[0]][:LISTED]!r}, ..." if shared else ""
        console.print(f"{name}: {len(shared)} of {len(turns)} turns are in the text{first}", highlight=False)
    for number, row in enumerate(rows_to_show(len(rows.tokens), EXAMPLES.value), 1):
        console.rule(f"example {number}: row {row}")
        for document in documents_of(rows, row):
            console.print(shown(document, tokenizer, console), highlight=False, soft_wrap=True)


def rows_to_show(rows: int, count: int) -> list[int]:
    """A few rows spread over all."""
    return sorted({int(i) for i in np.linspace(0, rows - 1, min(count, rows))})


def documents_of(rows: Batch, row: int) -> list[Document]:
    """The documents of a packed row."""
    segments = rows.segments[row]
    found = []
    for number in range(1, int(segments.max()) + 1):
        here = segments == number
        found.append(Document(rows.tokens[row][here], 0, rows.response[row][here]))
    return found


def shown(document: Document, tokenizer: Tokenizer, console: Console) -> Text:
    """A document as text, special tokens included, what carries loss set apart."""
    text, mask = Text(), document.mask
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for start, end in zip(borders, borders[1:], strict=False):
        piece = tokenizer.decode(document.tokens[start:end].tolist(), skip_special=False)
        if mask[start]:
            text.append(piece if console.color_system else f"⟦{piece}⟧", style="bold green")
        else:
            text.append(piece, style="dim")
    if len(text) > LONGEST:
        text.truncate(LONGEST)
        text.append(" ...", style="dim")
    return text


if __name__ == "__main__":
    _main.run(main, config="configs/user_data.py")
