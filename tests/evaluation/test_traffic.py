"""Bytes moved, of programs whose answer is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from specjax.evaluation.traffic import moved_bytes

# A step of a loop without a known length: a weight fetched early onto the chip, an update in place, a slice, and an
# inner loop of four rounds. 100 floats are 400 bytes.
PROGRAM = """HloModule m

%fused_update (p0: f32[1000], p1: f32[10], p2: s32[]) -> f32[1000] {
  %p0 = f32[1000]{0} parameter(0)
  %p1 = f32[10]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %cast = f32[1000]{0} bitcast(%p0)
  ROOT %put = f32[1000]{0} dynamic-update-slice(%cast, %p1, %p2)
}

%fused_slice (q0: f32[1000], q1: s32[]) -> f32[20] {
  %q0 = f32[1000]{0} parameter(0)
  %q1 = s32[] parameter(1)
  ROOT %take = f32[20]{0} dynamic-slice(%q0, %q1), dynamic_slice_sizes={20}
}

%fused_cast (c0: f32[1000]) -> f32[1000] {
  %c0 = f32[1000]{0} parameter(0)
  ROOT %as = f32[1000]{0} bitcast(%c0)
}

%fused_whole (w0: f32[1000]) -> f32[] {
  %w0 = f32[1000]{0} parameter(0)
  %through = f32[1000]{0} fusion(%w0), kind=kLoop, calls=%fused_cast
  ROOT %sum = f32[] reduce(%through), to_apply=%add
}

%inner_condition (i: (s32[], f32[50])) -> pred[] {
  %i = (s32[], f32[50]{0}) parameter(0)
  %n = s32[] get-tuple-element(%i), index=0
  %end = s32[] constant(4)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}

%inner_body (j: (s32[], f32[50])) -> (s32[], f32[50]) {
  %j = (s32[], f32[50]{0}) parameter(0)
  %x = f32[50]{0} get-tuple-element(%j), index=1
  %y = f32[50]{0} negate(%x)
  ROOT %out = (s32[], f32[50]{0}) tuple(%n, %y)
}

%outer_condition (o: (s32[], f32[1000])) -> pred[] {
  %o = (s32[], f32[1000]{0}) parameter(0)
  ROOT %go = pred[] get-tuple-element(%o), index=0
}

%outer_body (s: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %s = (s32[], f32[1000]{0}) parameter(0)
  %cache = f32[1000]{0} get-tuple-element(%s), index=1
  %at = s32[]{:S(1)} get-tuple-element(%s), index=0
  %fetch = (f32[100]{0:S(1)}, f32[100]{0}, u32[]{:S(2)}) copy-start(%weight)
  %fetched = f32[100]{0:S(1)} copy-done(%fetch)
  %made = f32[10]{0:S(1)} custom-call(%fetched), custom_call_target="x"
  %updated = f32[1000]{0} fusion(%cache, %made, %at), kind=kLoop, calls=%fused_update
  %taken = f32[20]{0:S(1)} fusion(%updated, %at), kind=kLoop, calls=%fused_slice
  %small = (s32[], f32[50]{0}) tuple(%at, %taken)
  %looped = (s32[], f32[50]{0}) while(%small), condition=%inner_condition, body=%inner_body
  ROOT %next = (s32[], f32[1000]{0}) tuple(%at, %updated)
}

ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %before = f32[1000]{0} copy(%a)
  %start = (s32[], f32[1000]{0}) tuple(%zero, %before)
  ROOT %end = (s32[], f32[1000]{0}) while(%start), condition=%outer_condition, body=%outer_body
}
"""


def test_a_step_of_a_loop() -> None:
    # Fetched 100, written in place 10, a slice of 20, four times 50 read and 50 written.
    assert moved_bytes(PROGRAM) == 4 * (100 + 10 + 20 + 4 * 100)


def test_what_is_read_whole_through_a_bitcast() -> None:
    text = PROGRAM.replace("%made = f32[10]{0:S(1)} custom-call(%fetched)", "%made = f32[] fusion(%cache)")
    text = text.replace('custom_call_target="x"', "kind=kLoop, calls=%fused_whole")
    # 1000 read and one float written, which is then read to be put into its place.
    assert moved_bytes(text) == 4 * (100 + 1000 + 1 + 1 + 10 + 20 + 4 * 100)


@pytest.mark.parametrize("rounds", [1, 7])
def test_a_product_in_rounds(rounds: int) -> None:
    """Of what XLA makes here: a scan reads its weight once a round."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=rounds)[0]

    x, w = jnp.zeros((4, 256)), jnp.zeros((256, 256))
    moved = moved_bytes(jax.jit(run).lower(x, w).compile().as_text())
    assert 1 <= moved / (rounds * w.nbytes) < 1.3


def test_no_program() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        moved_bytes("HloModule m")
