"""Which drafters may be asked behind any text, whatever became of their last drafts."""

from __future__ import annotations

from typing import Any

from specjax.decoding import Stateless


def any_context(drafter: Any) -> bool:
    """Whether a drafter proposes behind any text, one that is not committed or was not drafted by it included.

    True of drafters that keep nothing between steps (`Stateless`), and of those that declare it with an attribute
    `any_context = True`: their state does not follow the text token by token, nor does `propose` change it.
    """
    return type(drafter).init_state is Stateless.init_state or bool(getattr(drafter, "any_context", False))
