"""Tiny models and checks for tests, one's own included."""

from specjax.testing.tiny import noisy_draft, tiny_target, tiny_tokenizer

__all__ = ["noisy_draft", "tiny_target", "tiny_tokenizer"]
