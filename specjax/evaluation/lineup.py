"""Which contenders take part: rows of settings, swept over temperatures and draft lengths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from specjax.decoding import check_requests, draft_passes, request_sampling
from specjax.evaluation.contenders import Contender, Info, LoopContender
from specjax.evaluation.peers import PEERS, make_peers
from specjax.models import Target, pack
from specjax.verification.registry import label as rule_label

# How all rows are asked, by field of lineup and contender; behind the third they change logits before the warps.
PROCESSORS = (
    *("top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "suppress_tokens"),
)


@dataclasses.dataclass(frozen=True)
class Lineup:
    """What is to be compared.

    Attributes:
        rows: options by label: `name` of a drafter or peer; `rule`, empty for the default, `rule_options`, and
            `lossless`, False to let a lossy one run; `num_nodes`, a tuple to sweep over; what else the drafter's
            maker takes. A row with an empty `source` is left out.
        only: labels to keep; all of them when empty.
        temperatures: each row runs at each of them; peers only decode greedily.
        top_k: 0 for all.
        top_p: 1 for all.
        layout: of the weights, `plain` or `packed`.
        precision: of matrix products, `float32` or `default`.
        seed: of every random choice.
        min_p: 0 for none.
        repetition_penalty: 1 for none; over prompt and answer.
        presence_penalty: 0 for none; over the answer alone, like the next.
        frequency_penalty: 0 for none.
        logit_bias: pairs of a token id and what is added to its logit.
        suppress_tokens: ids that are never emitted.

    Raises:
        ValueError: a value is out of range, or `only` names no row.
    """

    rows: Mapping[str, Mapping[str, Any]]
    only: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    layout: str = "plain"
    precision: str = "float32"
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("temperatures is empty; expected at least one number >= 0")
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in self.logit_bias):
            raise ValueError(f"logit_bias={self.logit_bias}; expected pairs ((token id, what to add), ...)")
        for temperature in self.temperatures:
            request_sampling([self.info("", temperature=temperature).request((), 1, 0)])
        unknown = [name for name in self.only if name not in self.rows]
        if unknown:
            raise ValueError(
                f"only names {unknown[0]!r}; there are the rows {', '.join(self.rows)}{several_hint(unknown[0])}"
            )

    def info(self, label: str, **about: Any) -> Info:
        """A contender of this label, asked as the lineup says."""
        return Info(label, "", "", **about, **{name: getattr(self, name) for name in PROCESSORS})

    @property
    def processes(self) -> bool:
        """Whether logits are changed before the warps, which greedy texts feel too."""
        return any(getattr(self, name) != getattr(Info("", "", ""), name) for name in PROCESSORS[3:])

    @property
    def left_out(self) -> list[str]:
        """Rows that would take part, but name no source yet."""
        return [label for label, row in self._chosen.items() if row.get("source") == ""]

    @property
    def kept(self) -> dict[str, dict[str, Any]]:
        """The rows that take part."""
        return {label: dict(row) for label, row in self._chosen.items() if label not in self.left_out}

    @property
    def _chosen(self) -> dict[str, Mapping[str, Any]]:
        return {label: row for label, row in self.rows.items() if not self.only or label in self.only}


def several_hint(name: str) -> str:
    """How several names are written on a command line, where one name looks like several; else nothing."""
    parts = [part.strip(" '\"()") for part in name.split(",") if part.strip(" '\"()")]
    return f'; several are written "{tuple(parts)}"' if "," in name and parts else ""


def enlist(
    lineup: Lineup,
    target: Target,
    *,
    make_drafter: Callable[..., Any],
    make_loop: Callable[..., Any],
    default_rule: Callable[..., str],
) -> list[Contender]:
    """The contenders of a lineup, peers last.

    Args:
        lineup: what is to be compared.
        target: to decode with.
        make_drafter: of `specjax.build`, as are the other two: name, target and options to a drafter and its arrays.
        make_loop: target, drafter and sampling to a loop and its weights.
        default_rule: drafter and sampling to the name of a rule.

    Raises:
        ValueError: an unknown drafter, option or rule.
        ImportError: a peer's package is missing.
    """
    # One copy of the target for all contenders, whatever its layout.
    packed = lineup.layout == "packed"
    laid_out = dataclasses.replace(target, params=pack(target.params)) if packed else target
    target_bytes = sum(x.nbytes for x in jax.tree.leaves(target.params))

    def ours(label: str, row: dict[str, Any]) -> Iterator[Contender]:
        name, rule, sizes = row.pop("name"), row.pop("rule", "") or None, row.pop("num_nodes", None)
        lossless, rule_options = row.pop("lossless", True), row.pop("rule_options", None)
        sweep = sizes if isinstance(sizes, tuple) else (sizes,)
        made = make_drafter(name, target, **row, **({} if sweep[0] is None else {"num_nodes": sweep[0]}))
        made = dataclasses.replace(made, params=pack(made.params)) if packed else made
        for temperature, size in itertools.product(lineup.temperatures, sweep):
            drafter = made.drafter if size is None else dataclasses.replace(made.drafter, num_nodes=size)
            drafting = dataclasses.replace(made, drafter=drafter)
            asked = lineup.info(
                _label(lineup, label, temperature, size if len(sweep) > 1 else None), temperature=temperature
            )
            check_requests([asked.request((0,), 1, 0)], target.context, target.config.vocab_size)
            sampling = request_sampling([asked.request((0,), 1, 0)])
            options: dict[str, Any] = {"precision": lineup.precision, "layout": lineup.layout}
            options |= {"rule": rule, "rule_options": rule_options, "lossless": lossless}
            loop, weights = make_loop(laid_out, drafting, sampling, **options)
            info = dataclasses.replace(
                asked,
                method=made.name,
                rule=rule_label(rule or default_rule(drafter, sampling), loop.rule),
                num_nodes=drafter.num_nodes,
                draft_passes=draft_passes(drafter),
                draft_param_bytes=made.param_bytes,
                target_param_bytes=target_bytes,
                layout=lineup.layout,
            )
            vocab = target.config.vocab_size
            yield LoopContender(info, loop, weights, context=target.context, vocab=vocab, seed=lineup.seed)

    rows = lineup.kept
    peers = {label: row for label, row in rows.items() if row["name"] in PEERS}
    if peers and lineup.processes:
        raise ValueError(
            f"the rows {', '.join(peers)} are transformers', which is asked for plain greedy texts here: leave them "
            "out with only, or leave out penalties, biases and suppressed tokens"
        )
    found = [contender for label, row in rows.items() if label not in peers for contender in ours(label, row)]
    return [*found, *(make_peers(peers, target) if peers else ())]


def _label(lineup: Lineup, label: str, temperature: float, size: int | None) -> str:
    parts = [label, "" if size is None else f"{size}", f"T={temperature:g}" if len(lineup.temperatures) > 1 else ""]
    return " ".join(part for part in parts if part)
