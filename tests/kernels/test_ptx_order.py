"""Where the lanes of a warp wait for each other in the emulator of PTX."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import launched, of_lane

RESULT = of_lane(0, 4) + "st.global.b32 [%rd10], %r5;"
FIRST = "setp.eq.s32 %p1, %r0, 0; mov.b32 %r3, 0;"
LOOP = "@!%p1 bra $ALL; $AGAIN: add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, 700; @%p2 bra $AGAIN; $ALL:"
BROADCAST = "shfl.sync.idx.b32 %r5, %r3, 0, 31, -1;"


def test_a_shuffle_waits_for_a_lane_in_a_long_loop():
    found = np.zeros(32, "u4")
    assert launched(FIRST + LOOP + BROADCAST + RESULT, found) == []
    assert found.tolist() == [700] * 32


def test_a_shuffle_before_the_code_of_other_lanes():
    """The lanes that jump back are at an earlier instruction, and still wait."""
    body = FIRST + "bra.uni $SPLIT; $ALL: " + BROADCAST + "bra.uni $DONE;"
    body += "$SPLIT: @!%p1 bra $ALL; mov.b32 %r3, 9; bra.uni $ALL; $DONE: " + RESULT
    found = np.zeros(32, "u4")
    assert launched(body, found) == []
    assert found.tolist() == [9] * 32


@pytest.mark.parametrize("mask", ["65535", "%r9"])
def test_a_shuffle_waits_for_its_mask_alone(mask: str):
    """Lanes 16 and up wait for a flag that lane 0 sets after the lower half's shuffle."""
    body = FIRST + "mov.b32 %r9, 65535; mov.b32 %r5, 0; setp.lt.s32 %p3, %r0, 16; @%p3 bra $LOW;"
    body += "$WAIT: ld.volatile.global.b32 %r5, [%rd1]; setp.eq.s32 %p2, %r5, 0; @%p2 bra $WAIT; bra.uni $DONE;"
    body += f"$LOW: add.s32 %r4, %r0, 3; shfl.sync.idx.b32 %r5, %r4, 0, 31, {mask}; st.volatile.global.b32 [%rd1], %r5;"
    found = np.zeros(32, "u4")
    assert launched(body + "$DONE: " + RESULT, found, np.zeros(1, "u4")) == []
    assert found.tolist() == [3] * 32


def test_a_shuffle_does_not_wait_for_lanes_that_have_ended():
    found = np.zeros(32, "u4")
    body = "setp.lt.s32 %p1, %r0, 4; @!%p1 exit; shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1;"
    assert launched(body + RESULT, found) == []
    assert found[:4].tolist() == [1, 0, 3, 2]
    assert not found[4:].any()


def test_what_others_wait_for_happens_before_a_lane_waits():
    """Lane 0 sets a flag, then comes to the shuffle; the others come there once they have seen it."""
    body = FIRST + "mov.b32 %r4, 1; @%p1 bra $SET; $WAIT: ld.volatile.global.b32 %r6, [%rd1];"
    body += "setp.eq.s32 %p2, %r6, 0; @%p2 bra $WAIT; bra.uni $ALL; $SET: st.volatile.global.b32 [%rd1], %r4;"
    body += "add.s32 %r3, %r3, 8; shfl.sync.idx.b32 %r7, %r3, 0, 31, -1; bra.uni $DONE;"
    body += "$ALL: shfl.sync.idx.b32 %r7, %r3, 0, 31, -1; $DONE: mov.b32 %r5, 1;" + RESULT
    # Two shuffles are not the same: the lanes never meet, and that is said.
    reports = launched(body, np.zeros(32, "u4"), np.zeros(1, "u4"))
    assert any("lanes wait for others of their warp that do not come" in report for report in reports)
    met = body.replace("shfl.sync.idx.b32 %r7, %r3, 0, 31, -1; bra.uni $DONE;", "").replace("$DONE: mov", "mov")
    found = np.zeros(32, "u4")
    assert launched(met.replace("mov.b32 %r5, 1;", "mov.b32 %r5, %r7;"), found, np.zeros(1, "u4")) == []
    assert found.tolist() == [8] * 32
