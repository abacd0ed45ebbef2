"""Certificates of exactness on a model of one's own."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath
from rich.console import Console

from specjax import build
from specjax.analysis import Certificate, write_certificates
from specjax.api.programs import make_program, several, token_ids, token_options, usual_layout
from specjax.build import Drafting
from specjax.decoding import Request, check_requests, request_sampling
from specjax.decoding.sampling import check_seed
from specjax.evaluation import results
from specjax.evaluation.certify import Subject, certify_model, table
from specjax.evaluation.prompts import load_prompts
from specjax.evaluation.teacher import rounding_bound
from specjax.models import Target, native
from specjax.models.linear import NATIVE_ROWS
from specjax.verification.registry import is_lossy

ROWS = 64  # draws that run together where nothing speaks for fewer


def certify(
    target: Target,
    drafting: Drafting,
    rule: str | None = None,
    *,
    rule_options: Mapping[str, Any] | None = None,
    prompts: str | Sequence[str] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    suppress_tokens: Sequence[int] = (),
    contexts: int | None = None,
    max_new_tokens: int = 32,
    tv: float = 0.1,
    draws: int = 0,
    rows: int = 0,
    seed: int = 0,
    layout: str | None = None,
    precision: str = "float32",
    path: str | Path | epath.Path | None = None,
    show: bool = True,
) -> list[Certificate]:
    """Tests on your own models that decoding with a drafter keeps the target's law; prints and returns certificates.

    One row says whether greedy texts equal plain decoding's, near-ties apart. Then, for each of the first prompts, the
    next two tokens are drawn many times over, each time as another request, and held against the law that the target
    states: the 32 likeliest tokens and the rest, and behind the likeliest the same again. A row that passes has power
    0.99 to see a deviation of `tv`; halving it takes four times the draws. What is tested is the program that
    `generate` runs, weights laid out alike; the law is stated by passes of their own, over weights laid out plainly.

    Args:
        target: the model.
        drafting: from `load_drafter`.
        rule: verification rule above temperature 0; the exact one that fits best by default. A lossy one is measured.
        rule_options: of the rule, such as {"epsilon": 0.2} of `typical`.
        prompts: user turns; some of those that ship by default.
        temperature: above 0; greedy texts are certified beside it.
        top_k: 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1).
        repetition_penalty: > 0, 1 for none; this and what follows also of the greedy texts.
        presence_penalty: 0 for none.
        frequency_penalty: 0 for none.
        logit_bias: what to add to the logits of token ids.
        suppress_tokens: ids that are never emitted.
        contexts: prompts whose next-token law is tested; the first two by default.
        max_new_tokens: length of the greedy texts.
        tv: total variation that a test has power against.
        draws: a context; 0 for as many as that takes.
        rows: draws that run together; 0 for 64, and with packed weights for as many as keep to the products that a
            single text is decoded with.
        seed: of all draws.
        layout: of the weights, `packed` or `plain`; None for that of `generate`.
        precision: of matrix products, `float32` or `default`.
        path: of a certificates.json to write, after every row; None for none.
        show: whether to print the table.

    Raises:
        ValueError: a rule that does not fit the drafter, a value out of range, temperature 0 or top-k 1, draws too few
            for a verdict, or a path that cannot be written.
    """
    check_seed(seed)
    for name, value in (("draws", draws), ("rows", rows), ("contexts", contexts or 0)):
        if not isinstance(value, numbers.Integral):
            raise ValueError(f"{name}={value!r}; expected a whole number")
    if not isinstance(temperature, numbers.Real) or not temperature > 0:
        raise ValueError(f"temperature={temperature!r}; expected more than 0: greedy texts are certified beside it")
    if isinstance(top_k, numbers.Real) and top_k == 1:
        raise ValueError("top_k=1 leaves a single token and no law to test; expected 0 (all tokens) or more than 1")
    if not isinstance(tv, numbers.Real) or not 0 < tv <= 1 or draws < 0 or rows < 0:
        raise ValueError(f"tv={tv!r}, draws={draws}, rows={rows}; expected tv in (0, 1], draws >= 0 and rows >= 0")
    turns = several(prompts) or [p.turns[0] for p in load_prompts("shipped", 1)]
    contexts = min(2, len(turns)) if contexts is None else contexts
    if not 0 <= contexts <= len(turns):
        raise ValueError(f"contexts={contexts} of {len(turns)} prompts; expected 0 to {len(turns)}")
    processors: dict[str, Any] = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        **token_options(logit_bias, suppress_tokens),
    }
    warps: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    texts = [Request(token_ids(target, t), max_new_tokens, id=i, **processors) for i, t in enumerate(turns)]
    sampled = [dataclasses.replace(text, max_new_tokens=2, **warps) for text in texts]
    check_requests(texts, target.context, target.config.vocab_size)
    subject = _subject(
        target, drafting, rule, rule_options, texts[0], sampled[0], layout or usual_layout(target), precision
    )
    options: dict[str, Any] = {"tv": tv, "draws": draws or None, "rows": rows or _rows(subject), "seed": seed}
    file = None if path is None else _file(path)
    found: list[Certificate] = []
    bound = rounding_bound(target.config.dtype, precision)
    for row in certify_model(subject, texts, sampled[:contexts], bound=bound, **options):
        found.append(row)
        if file is not None:
            write_certificates(file, found, _meta(subject, options | {"prompts": turns, "contexts": contexts}))
    if show:
        console = Console()
        (console if console.is_terminal else Console(width=120)).print(table(found))
    return found


def _file(path: str | Path | epath.Path) -> epath.Path:
    """Where certificates go, once it is known that they can."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path={path!r}; expected the path of a file to write, such as 'certificates.json', or None")
    file = epath.Path(path)
    if file.is_dir():
        raise ValueError(f"path={str(path)!r} is a directory; give the path of a file, such as certificates.json in it")
    try:
        results.check_writable(file.parent)
    except PermissionError as error:
        raise ValueError(f"path={str(path)!r} cannot be written ({error.__cause__}); give another path") from error
    return file


def _subject(
    target: Target,
    drafting: Drafting,
    rule: str | None,
    rule_options: Mapping[str, Any] | None,
    text: Request,
    drawn: Request,
    layout: str,
    precision: str,
) -> Subject:
    """The loops that are certified, for requests like these two, at temperature 0 and above."""
    greedy, warped = request_sampling([text]), request_sampling([drawn])
    program: dict[str, Any] = {"layout": layout, "precision": precision}
    by_plain = make_program(target, build.make_drafter("autoregressive", target), greedy, **program)
    by_greedy = make_program(target, drafting, greedy, **program)
    name = rule or build.default_rule(drafting.drafter, warped)
    by_rule = make_program(target, drafting, warped, rule=name, rule_options=rule_options, lossless=False, **program)
    assert by_rule[0].rule is not None
    return Subject(
        drafter=drafting.name,
        target=target,
        plain=by_plain,
        greedy=(build.default_rule(drafting.drafter, greedy), *by_greedy),
        sampled=(name, *by_rule),
        lossless=not is_lossy(by_rule[0].rule),
        rule_options=dict(rule_options or {}),
        layout=layout,
    )


def _rows(subject: Subject) -> int:
    """Draws that run together: a pass over few tokens takes native products, one over many does not."""
    if subject.layout != "packed":
        return ROWS
    drafter = subject.sampled[1].drafter
    return max(1, NATIVE_ROWS // (drafter.num_nodes + drafter.num_probes + 1))


def _meta(subject: Subject, config: Mapping[str, Any]) -> dict[str, Any]:
    precision = {
        "dtype": subject.target.config.dtype,
        "matmul": subject.plain[0].precision,
        "layout": subject.layout,
        "native_kernel": native.available(),
    }
    meta = results.describe({"target": subject.target.name, **config}, precision)
    meta.pop("schema")
    return meta
