"""Races in global memory that the emulator of PTX finds, and what it takes for none."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import addresses, kernel, launched, of_lane, words

from shardfuse.kernels.dev.ptx.launch import run
from shardfuse.kernels.dev.ptx.settings import Settings

OWN, OTHER = of_lane(0, 4), "xor.b32 %r3, %r0, 32; mul.wide.u32 %rd11, %r3, 4; add.s64 %rd11, %rd11, %rd0;"
RESULT = of_lane(1, 4, 12) + "st.global.b32 [%rd12], %r5;"
PUT, TAKE = "st.global.b32 [%rd10], %r0;", "ld.global.b32 %r5, [%rd11];"
FIRST, BARRIER = "setp.lt.u32 %p1, %r0, 32;", "bar.sync 0;"
ONE_PLACE = "and.b32 %r4, %r0, 31; mul.wide.u32 %rd11, %r4, 4; add.s64 %rd11, %rd11, %rd0;"
WRITTEN_TWICE = ONE_PLACE + FIRST + "@%p1 st.global.b32 [%rd11], %r0; bar.sync 0; @!%p1 st.global.b32 [%rd11], %r0;"
COPIED = "mad.lo.s32 %r8, %r0, 4, %r1; cp.async.ca.shared.global [%r8], [%rd11], 0x4; cp.async.commit_group;"
COPIED += "cp.async.wait_group 0; ld.shared.b32 %r5, [%r8];"

WITHIN_A_BLOCK = {
    "read of what another warp wrote": OWN + OTHER + PUT + BARRIER + TAKE + RESULT,
    "write over what another warp read": OWN + OTHER + TAKE + BARRIER + PUT + RESULT,
    "write over what another warp wrote": WRITTEN_TWICE,
    "read of what another warp wrote, by a copy": OWN + OTHER + PUT + BARRIER + COPIED + RESULT,
}


@pytest.mark.parametrize("race", WITHIN_A_BLOCK)
def test_between_warps_without_a_barrier(race: str):
    body = WITHIN_A_BLOCK[race]
    assert launched(body, words(64), words(64), threads=64, shared=256) == []
    [report] = launched(body.replace(BARRIER, ""), words(64), words(64), threads=64, shared=256)
    assert report.startswith(f"race in global memory: {race.partition(',')[0]}")


def test_a_narrow_write_beside_a_narrow_read_is_none():
    """A granule is the kernel's narrowest access, so neighbours in a word are apart."""
    body = "mad.wide.u32 %rd10, %r0, 2, %rd0; cvt.u16.u32 %rs5, %r0;" + FIRST
    body += "@%p1 st.global.b16 [%rd10], %rs5; @!%p1 ld.global.b16 %rs6, [%rd10]; @!%p1 st.global.b16 [%rd1], %rs6;"
    assert launched(body, np.zeros(64, "u2"), np.zeros(1, "u2"), threads=64) == []
    wide = body.replace("ld.global.b16 %rs6, [%rd10]", "ld.global.v2.b16 {%rs6, %rs7}, [%rd0]")
    [report] = launched(wide, np.zeros(64, "u2"), np.zeros(1, "u2"), threads=64)
    assert "read of what another warp wrote" in report


def test_at_once():
    """Whichever threads write: equal values are none."""
    different, equal = "st.global.b32 [%rd0], %r0;", "mov.b32 %r5, 7; st.global.b32 [%rd0], %r5;"
    [report] = launched(different, words(1))
    assert "threads write different values to one place at once" in report
    found = words(1)
    assert launched(equal + BARRIER + equal, found, threads=64) == []
    assert found == 7


BLOCK = "mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 0; add.s32 %r6, %r2, 5;"
STORED = "mad.wide.u32 %rd12, %r2, 4, %rd1; st.global.b32 [%rd12], %r5;"
BETWEEN_BLOCKS = {
    "read of what another block wrote": "@%p1 st.global.b32 [%rd0], %r6; @!%p1 ld.global.b32 %r5, [%rd0];" + STORED,
    "write over what another block read": "@%p1 ld.global.b32 %r5, [%rd0];"
    + STORED
    + "@!%p1 st.global.b32 [%rd0], %r6;",
    "write over what another block wrote": "@%p1 st.global.b32 [%rd0], %r6; @!%p1 st.global.b32 [%rd0], %r6;",
}


@pytest.mark.parametrize("lanes", [32, 4096])
@pytest.mark.parametrize("race", BETWEEN_BLOCKS)
def test_between_blocks(race: str, lanes: int):
    """Nothing orders blocks, whether they run side by side or in turn; of atomics no order is derived."""

    def reports(text: str) -> list[str]:
        whole = kernel(addresses(2) + BLOCK + text, ["ptr", "ptr"])
        return run(whole, words(1), words(4), grid=(2, 1, 1), settings=Settings(lanes=lanes))

    [report] = reports(BETWEEN_BLOCKS[race])
    assert report.startswith(f"race in global memory: {race}: k,")
    assert reports(BETWEEN_BLOCKS[race] + "red.relaxed.gpu.global.add.u32 [%rd1+8], 1;") == []


UPDATE = ONE_PLACE + FIRST + "ld.global.b32 %r5, [%rd11]; add.s32 %r6, %r5, 1; @%p1 st.global.b32 [%rd11], %r6;"


def test_a_value_that_goes_nowhere():
    """Two warps hold an element and one adds to it in memory, as Triton lets them: the other's value is not used."""
    found = words(32)
    expected = found + 1
    assert launched(UPDATE, found, words(64), threads=64) == []
    assert np.array_equal(found, expected)
    for use in (RESULT, "@!%p1 st.global.b32 [%rd11], %r6;", "shfl.sync.bfly.b32 %r7, %r5, 1, 31, -1;"):
        reports = launched(UPDATE + use, words(32), words(64), threads=64)
        assert any("race in global memory: " in report for report in reports), use


def test_an_mbarrier_orders_warps():
    body = OWN + OTHER + "setp.eq.b32 %p2, %r0, 0; @%p2 mbarrier.init.shared::cta.b64 [%r1], 64; bar.sync 0;" + PUT
    body += "mbarrier.arrive.shared::cta.b64 _, [%r1];"
    waited = "$L: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra $L;"
    assert launched(body + waited + TAKE + RESULT, words(64), words(64), threads=64, shared=64) == []
    [report] = launched(body + TAKE + RESULT + waited, words(64), words(64), threads=64, shared=64)
    assert "read of what another warp wrote" in report


def test_tables_that_grow_past_the_limit_say_so():
    found = words(1 << 16)
    whole = kernel(
        addresses(1) + "mov.u32 %r0, %tid.x; mul.wide.u32 %rd10, %r0, 4096;" + "add.s64 %rd10, %rd10, %rd0;" + PUT,
        ["ptr"],
        threads=64,
    )
    assert run(whole, found) == []
    [note] = run(whole, found, settings=Settings(memory=1 << 20))
    assert note.startswith("note: no races in global memory")
