"""Tiny models and the contract of drafters and rules, for tests, one's own included."""

from specjax.testing.contract import Subject, check_drafter, law_p_value
from specjax.testing.laws import check_rule
from specjax.testing.tiny import noisy_draft, tiny_target, tiny_tokenizer, with_noise

__all__ = [
    "Subject",
    "check_drafter",
    "check_rule",
    "law_p_value",
    "noisy_draft",
    "tiny_target",
    "tiny_tokenizer",
    "with_noise",
]
