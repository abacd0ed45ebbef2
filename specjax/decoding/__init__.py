"""The draft-verify loop, its pytrees and protocols. It is handed drafters and rules and imports none."""

from specjax.decoding.draft import (
    Context,
    Draft,
    Drafter,
    Kind,
    Probes,
    Resume,
    Rule,
    Scores,
    Stateless,
    Verdict,
    Widths,
    draft_passes,
)
from specjax.decoding.generate import (
    Completion,
    Request,
    Segment,
    check_fault,
    check_requests,
    end_text,
    generate,
    prefill,
    read_row,
    request_sampling,
    stream,
)
from specjax.decoding.loop import Loop, Weights, check_precision, score
from specjax.decoding.processors import History
from specjax.decoding.sampling import Keys, Sampling, log_law, make_sampling, request_keys
from specjax.decoding.state import DecodeState, Statistics, insert_row
from specjax.decoding.stop_strings import StopText, TextEnd, check_stop_strings, cut_text
from specjax.decoding.termination import FINISH_NAMES, MAX_STOP_TOKENS
from specjax.decoding.tree import TreeSpec

__all__ = [
    "Completion",
    "Request",
    "check_fault",
    "check_precision",
    "check_requests",
    "check_stop_strings",
    "cut_text",
    "end_text",
    "generate",
    "prefill",
    "read_row",
    "request_sampling",
    "stream",
    "FINISH_NAMES",
    "MAX_STOP_TOKENS",
    "Context",
    "DecodeState",
    "draft_passes",
    "Draft",
    "Drafter",
    "History",
    "Keys",
    "Kind",
    "Loop",
    "Probes",
    "Resume",
    "Rule",
    "Sampling",
    "Scores",
    "Segment",
    "Stateless",
    "Statistics",
    "StopText",
    "TextEnd",
    "TreeSpec",
    "Verdict",
    "Weights",
    "Widths",
    "insert_row",
    "log_law",
    "make_sampling",
    "request_keys",
    "score",
]
