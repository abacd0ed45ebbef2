"""Tiny models and the contract of drafters and rules, for tests, one's own included."""

from specjax.testing.contract import check_drafter, law_p_value
from specjax.testing.decode_law import check_law
from specjax.testing.rule_contract import check_rule
from specjax.testing.sequences import four_token_target
from specjax.testing.subject import Subject
from specjax.testing.tiny import noisy_draft, tiny_target, tiny_tokenizer, with_noise

__all__ = [
    "Subject",
    "check_drafter",
    "check_law",
    "check_rule",
    "four_token_target",
    "law_p_value",
    "noisy_draft",
    "tiny_target",
    "tiny_tokenizer",
    "with_noise",
]
