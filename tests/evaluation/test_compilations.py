from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.evaluation.compilations import compilations


def test_programs_are_counted_by_name_and_only_once() -> None:
    @jax.jit
    def an_odd_name(x: jax.Array) -> jax.Array:
        return x * 3 + 1

    x, y = jax.block_until_ready((jnp.ones((3,)), jnp.ones((4,))))
    with compilations() as first:
        an_odd_name(x)
    with compilations() as again:
        an_odd_name(x)
    with compilations() as wider:
        an_odd_name(y)
    assert first.names == ["an_odd_name"] and first.seconds > 0
    assert again.names == [] and again.seconds == 0
    assert wider.count("an_odd_name") == 1


def test_contexts_nest_and_end() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return x - 5

    x = jax.block_until_ready(jnp.ones((2,)))
    with compilations() as outside, compilations() as closed:
        pass
    with compilations() as outside:
        with compilations() as inside:
            inner(x)
    assert outside.names == inside.names == ["inner"]
    assert closed.names == []
