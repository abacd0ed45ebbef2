"""Rematerialisation: what the backward pass computes again instead of keeping it (Chen et al. 2016, 1604.06174).

Networks say where (`recomputed`, around a layer or a step of a draft), the trainer says whether (`rematerialised`,
around the trace of a loss). Nothing but memory and time depends on it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax

# By name: what is kept of the inside of a layer; its input always is. None is JAX's default, which keeps all it needs.
POLICIES: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

_POLICY: contextvars.ContextVar[str] = contextvars.ContextVar("remat", default="none")


def check_remat(name: str) -> None:
    """Checks the name of a policy.

    Raises:
        ValueError: it is unknown; lists those that are known.
    """
    if name not in POLICIES:
        raise ValueError(f"remat={name!r}: expected one of {', '.join(POLICIES)}")


@contextlib.contextmanager
def rematerialised(name: str) -> Iterator[None]:
    """Within it, what is traced keeps of each `recomputed` function what the policy of this name says.

    Args:
        name: a key of `POLICIES`. `full` keeps nothing but the function's inputs, `dots` the results of all matrix
            products, `dots_no_batch` of those with weights alone, so that attention is computed again.

    Raises:
        ValueError: see `check_remat`.
    """
    check_remat(name)
    token = _POLICY.set(name)
    try:
        yield
    finally:
        _POLICY.reset(token)


def recomputed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays under the policy in place; itself where there is none.

    What it closes over, such as weights, is kept, and gets its gradient. It must hand out what it makes as results.
    """
    policy = POLICIES[_POLICY.get()]
    return fn if policy is None else jax.checkpoint(fn, policy=policy)
