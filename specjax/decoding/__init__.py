"""The draft-verify loop, its pytrees and protocols. It is handed drafters and rules and imports none."""

from specjax.decoding.draft import Context, Draft, Drafter, Kind, Probes, Resume, Rule, Scores, Stateless, Verdict
from specjax.decoding.generate import Completion, Request, check_requests, generate, prefill, read_row, stream
from specjax.decoding.loop import Loop, Weights, score
from specjax.decoding.sampling import Keys, Sampling, log_law, make_sampling, request_keys
from specjax.decoding.state import FINISH_NAMES, DecodeState, Statistics, insert_row

__all__ = [
    "Completion",
    "Request",
    "check_requests",
    "generate",
    "prefill",
    "read_row",
    "stream",
    "FINISH_NAMES",
    "Context",
    "DecodeState",
    "Draft",
    "Drafter",
    "Keys",
    "Kind",
    "Loop",
    "Probes",
    "Resume",
    "Rule",
    "Sampling",
    "Scores",
    "Stateless",
    "Statistics",
    "Verdict",
    "Weights",
    "insert_row",
    "log_law",
    "make_sampling",
    "request_keys",
    "score",
]
