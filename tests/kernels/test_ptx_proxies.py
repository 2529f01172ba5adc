"""What the asynchronous units of Hopper ask for in the emulator of PTX: live mbarriers, descriptors and fences.

Each body passes as it is, and with one instruction more or less it is reported.
"""

from __future__ import annotations

import pytest
from ptx_copies import REGION, arriving, tensor_arrays, tensor_map, waiting
from ptx_text import FENCED, launched

INIT, INVAL = "@%p2 mbarrier.init.shared::cta.b64 [%r50], 1;", "@%p2 mbarrier.inval.shared::cta.b64 [%r50];"
BEGUN = "setp.eq.b32 %p2, %r0, 0; add.s32 %r50, %r1, 1024; mov.b32 %r3, 0;" + INIT
COPY = "@%p3 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
COPY += " [%r12], [%rd5, {%r10, %r10}], [%r50];"
ZEROS = "mad.lo.s32 %r6, %r0, 16, %r1; st.shared.v4.b32 [%r6+2048], {%r3, %r3, %r3, %r3};"


def _reports(body: str, threads: int = 128) -> list[str]:
    return launched(body, *tensor_arrays(0xA), threads=threads, shared=2 * REGION)


def _loaded(before: str = "", after: str = FENCED) -> str:
    """A tensor copy of 12 rows of 64 bytes to 2048 bytes behind the start of shared memory."""
    body = tensor_map(0xA, 32, 0) + before + BEGUN + after
    body += arriving("%p2", 768, barrier="%r50") + "add.s32 %r12, %r1, 2048; mov.b32 %r10, 0;" + COPY
    return body + waiting(0, barrier="%r50") + "bar.sync 0;" + INVAL


def test_an_mbarrier_is_initialised_once_until_it_is_invalidated():
    again = "mbarrier that is initialised again"
    assert _reports(BEGUN + "bar.sync 0;" + INVAL + "bar.sync 0;" + INIT) == []
    assert any(again in report for report in _reports(BEGUN + "bar.sync 0;" + INIT))
    assert any(again in report for report in _reports(BEGUN.replace("@%p2 mb", "mb"), threads=32))


def test_a_live_mbarrier_is_written_by_its_own_instructions():
    """Beside it, and once it is invalidated, other stores are none of its matter."""
    for offset in (-4, 8):
        assert _reports(BEGUN + f"bar.sync 0; @%p2 st.shared.b32 [%r50+{offset}], %r3;") == []
    assert _reports(BEGUN + INVAL + "bar.sync 0; @%p2 st.shared.b32 [%r50], %r3;") == []
    for offset in (0, 4):
        [report] = _reports(BEGUN + f"bar.sync 0; @%p2 st.shared.b32 [%r50+{offset}], %r3;")
        assert report.startswith("shared write to a live mbarrier"), report


def test_a_tensor_copy_over_a_live_mbarrier_is_reported():
    body = _loaded()
    assert _reports(body) == []
    over = body.replace("add.s32 %r50, %r1, 1024", "add.s32 %r50, %r1, 2048")
    assert any(report.startswith("shared write to a live mbarrier") for report in _reports(over))


@pytest.mark.parametrize("fence", [FENCED, "fence.mbarrier_init.release.cluster; bar.sync 0;"])
def test_an_mbarrier_is_passed_on_to_the_unit_that_completes_it(fence):
    """Triton leaves the fence out: no more than a note."""
    assert _reports(_loaded(after=fence)) == []
    [note] = _reports(_loaded(after="bar.sync 0;"))
    assert note.startswith("note: an asynchronous unit uses an mbarrier, initialised without a fence.proxy.async"), note


def test_a_tensor_copy_over_what_stores_wrote_needs_a_fence():
    assert _reports(_loaded(before=ZEROS)) == []
    initialised = "fence.mbarrier_init.release.cluster; bar.sync 0;"  # which is no fence for other writes
    [report] = _reports(_loaded(before=ZEROS, after=initialised))
    assert report.startswith("an asynchronous unit writes over what was written without a fence.proxy.async"), report


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("box_dim", "mov.b32 %r7, 32;", "mov.b32 %r7, 0;"),
        ("box_dim", "mov.b32 %r7, 12;", "mov.b32 %r7, 257;"),
        ("box_dim", "mov.b32 %r7, 32;", "mov.b32 %r7, 36;"),  # 72 bytes: no multiple of 16
        ("box_dim", "mov.b32 %r7, 12;", "mov.b32 %r7, 256;"),  # more than shared memory holds
        ("rank", "[ %rd9 + 0 ], 0x1;", "[ %rd9 + 0 ], 0x5;"),
        ("element_stride", "mov.b32 %r7, 1;", "mov.b32 %r7, 9;"),
    ],
)
def test_a_descriptor_of_rubbish_is_reported(field, value, instead):
    body = _loaded()
    assert value in body
    assert field in body
    with pytest.raises(RuntimeError, match=r"deadlock.*a tensor copy by what is no descriptor"):
        _reports(body.replace(value, instead))


ACQUIRE = "@%p1 fence.proxy.tensormap::generic.acquire.gpu [ %rd1 + 0 ], 0x80;"
UNPUBLISHED = "a tensor copy by what is no descriptor"


def test_a_descriptor_is_acquired_by_a_warp_that_knows_of_its_publication():
    body = _loaded()
    assert ACQUIRE in body
    name = "a tensor copy by a descriptor that no fence.proxy.tensormap"
    [report] = _reports(body.replace(ACQUIRE, ""))
    assert report.startswith(name), report
    other, met = ACQUIRE.replace("%p1", "%p4"), "setp.eq.b32 %p4, %r0, 32; bar.sync 0;"
    assert _reports(body.replace(ACQUIRE, met + other)) == []
    [report] = _reports(body.replace(ACQUIRE, met.replace("bar.sync 0;", "") + other))
    assert report.startswith(name), report


def test_a_descriptor_is_published_where_it_is_used():
    body = _loaded().replace("cvta.global.u64 %rd5, %rd1;", "mov.b64 %rd5, %rd2;")
    with pytest.raises(RuntimeError, match=f"deadlock.*{UNPUBLISHED}"):
        _reports(body)


def test_lanes_meet_between_a_descriptors_zeros_and_its_fields():
    body = _loaded()
    assert body.count("bar.warp.sync -1;") == 1
    reports = _reports(body.replace("bar.warp.sync -1;", ""))
    name = "a descriptor's field is written after stores of other lanes"
    assert reports
    assert all(report.startswith(name) for report in reports)
    assert _reports(body.replace("bar.warp.sync -1;", "bar.sync 0;")) == []


FENCE = "wgmma.fence.sync.aligned;"
SUMS = ", ".join(f"%r{100 + n}" for n in range(8))
COMMITTED = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {{{SUMS}}}, %rd12, %rd12, %p1, 1, 1, 0, 0;"
OF_REGISTERS = PRODUCT.replace("%rd12, %rd12", "{%r20, %r21, %r22, %r23}, %rd12").replace("1, 0, 0;", "1, 0;")


def _products(text: str) -> list[str]:
    """With zeros as operands and a matrix descriptor in %rd12."""
    body = "mov.b32 %r3, 0; mad.lo.s32 %r8, %r0, 16, %r1;"
    body += "".join(f"st.shared.v4.b32 [%r8+{n}], {{%r3, %r3, %r3, %r3}};" for n in (0, 2048)) + FENCED
    body += "".join(f"mov.b32 %r{n}, 0;" for n in (*range(20, 24), *range(100, 108)))
    body += "bfe.u32 %r9, %r1, 4, 14; cvt.u64.u32 %rd12, %r9; or.b64 %rd12, %rd12, 0xC000001000010000;"
    return launched(body + "setp.eq.b32 %p1, %r0, %r0;" + text, threads=128, shared=4096)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (FENCE + PRODUCT + COMMITTED, PRODUCT.replace("%p1, 1", "0, 1") + COMMITTED),
        (FENCE + PRODUCT + PRODUCT + COMMITTED, FENCE + "mov.b32 %r100, %r3;" + PRODUCT + COMMITTED),
        (
            FENCE + PRODUCT + COMMITTED + "mov.b32 %r9, %r100;" + FENCE + PRODUCT + COMMITTED,
            FENCE + PRODUCT + COMMITTED + "mov.b32 %r9, %r100;" + PRODUCT + COMMITTED,
        ),
        (
            FENCE + OF_REGISTERS + OF_REGISTERS + COMMITTED,
            FENCE + OF_REGISTERS + COMMITTED + "mov.b32 %r9, %r20;" + OF_REGISTERS + COMMITTED,
        ),
        (
            f"{FENCE} mov.b32 %r5, 0; $L: {FENCE} {PRODUCT} {COMMITTED} add.s32 %r100, %r100, 1; add.s32 %r5, %r5, 1;"
            "setp.lt.s32 %p2, %r5, 2; @%p2 bra $L;",
            f"{FENCE} mov.b32 %r5, 0; $L: {PRODUCT} {COMMITTED} add.s32 %r100, %r100, 1; add.s32 %r5, %r5, 1;"
            "setp.lt.s32 %p2, %r5, 2; @%p2 bra $L;",
        ),
    ],
)
def test_a_fence_before_the_first_product_and_after_what_touches_its_registers(good, bad):
    assert _products(good) == []
    [report] = _products(bad)
    assert report.startswith("a wgmma is the first, or its registers are touched, without a wgmma.fence before"), report
