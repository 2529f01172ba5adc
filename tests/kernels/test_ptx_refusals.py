"""What the emulator of PTX refuses or reports, where going on would hide a fault of the kernel or of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_text import launched, of_lane

ZEROS, ONE = "mov.b32 %r8, 0;", "setp.eq.s32 %p1, %r0, 0;"
STORED = of_lane(0, 4) + "st.global.b32 [%rd10], %r8;"
SHARED = "mov.b32 %r9, 1; mad.lo.s32 %r5, %r0, 4, %r1; st.shared.b32 [%r5], %r9;"
ROWS = "and.b32 %r7, %r0, 7; mad.lo.s32 %r6, %r7, 16, %r1; setp.lt.s32 %p2, %r0, 31;" + ZEROS


def _array() -> np.ndarray:
    return np.zeros(64, "u4")


@pytest.mark.parametrize(
    "form",
    [
        "fma.rn.relu.bf16x2 %r5, %r6, %r7, %r8",
        "cvt.rn.relu.bf16x2.f32 %r5, %r6, %r7",
        "cvt.rz.bf16.f32 %rs5, %r6",
        "add.sat.s32 %r5, %r6, %r7",
        "add.rz.f32 %r5, %r6, %r7",
        "red.global.gpu.relaxed.add.noftz.bf16x2 [%rd0], %r5",
        "atom.shared.add.u32 %r5, [%r1], %r6",
        "st.shared.b128 [%r1], %rd5",
        "ld.local.b32 %r5, [%r6]",
    ],
)
def test_forms_that_are_not_known_stop_it_by_name(form: str):
    with pytest.raises(NotImplementedError, match=form.split()[0]):
        launched(form + ";", _array(), shared=64)


def test_a_comparison_flushes_denormals():
    found = _array()
    body = "mov.b32 %r5, 5; setp.gt.ftz.f32 %p1, %r5, 0f00000000; selp.b32 %r8, 1, 2, %p1;" + STORED
    assert launched(body, found) == []
    assert set(found[:32]) == {2}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("mov.b64 %rd5, -8; ld.global.b64 %rd6, [%rd5];", "read outside every allocation"),
        ("mov.b64 %rd5, -4; st.global.b32 [%rd5], %r0;", "write outside every allocation"),
        (SHARED + ROWS + "@%p2 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r6];", "by a part of its threads"),
        (SHARED + ROWS + "@%p2 stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r8};", "by a part of its threads"),
        (ROWS + "@%p2 redux.sync.add.s32 %r8, %r0, -1;", "by a part of its threads"),
        (
            ONE + "@%p1 cp.async.ca.shared.global [%r1], [%rd0], 0x4; cp.async.commit_group;",
            "a copy that is never waited for",
        ),
        (ONE + "add.s32 %r5, %r1, 9216; @%p1 mbarrier.inval.shared::cta.b64 [%r5];", "outside the block's memory"),
        (
            "mov.b64 %rd5, 0; mov.b32 %r10, 0;" + ONE + "@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;"
            "add.s32 %r12, %r1, 128; @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
            " [%r12], [%rd5, {%r10, %r10}], [%r1];",
            "read of a descriptor outside every allocation",
        ),
    ],
)
def test_is_reported(body: str, fault: str):
    assert any(fault in report for report in launched(body, _array(), shared=512))


def test_a_fault_is_reported_once_for_all_blocks():
    body = "mov.u32 %r5, %ctaid.x; mad.wide.u32 %rd5, %r5, 4096, %rd0;" + ONE + "@%p1 ld.global.b32 %r6, [%rd5];"
    (report,) = launched(body, _array(), threads=1024, blocks=40)
    assert ": 39; first: " in report


def test_a_view_within_another_argument_hides_nothing_of_it():
    whole = _array()
    assert launched("ld.global.b32 %r5, [%rd0+128];", whole, whole[4:8]) == []


def test_a_deadlock_tells_what_was_reported_before():
    body = "ld.shared.b32 %r9, [%r1]; add.s32 %r50, %r1, 64;" + ONE + "@%p1 mbarrier.init.shared::cta.b64 [%r50], 1;"
    body += "bar.sync 0;\n$L: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r50], 0; @!%p2 bra $L;"
    with pytest.raises(RuntimeError, match=r"deadlock.*shared read of what was never written"):
        launched(body, _array(), shared=256)


def test_an_int64_tensor_is_no_table_unless_it_holds_addresses():
    driver = pytest.importorskip("shardfuse.kernels.dev.ptx.driver")
    view, slots = torch.zeros(64)[:4], torch.arange(3)
    assert [each.size for each in driver._allocations([("*fp32", view), ("*i64", slots)])] == [16, 24]
    table = torch.tensor([view.data_ptr()])
    assert any(each.size == 256 for each in driver._allocations([("*fp32", view), ("*i64", table)]))
