"""What the emulator of PTX refuses or reports, where going on would hide a fault of the kernel or of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from ptx_text import PREFIX, kernel, launched, of_lane

from shardfuse.kernels.dev.ptx.launch import run
from shardfuse.kernels.dev.ptx.settings import Settings
from shardfuse.kernels.runtime.dispatch import triton_version

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
        "red.global.gpu.relaxed.add.bf16x2 [%rd0], %r5",
        "atom.global.gpu.relaxed.add.noftz.f32 %r5, [%rd0], %r6",
        "atom.global.gpu.relaxed.max.f32 %r5, [%rd0], %r6",
        "atom.global.gpu.relaxed.add.v2.f32 %r5, [%rd0], %r6",
        "atom.global.gpu.relaxed.add.v2.u32 {%r5, %r6}, [%rd0], {%r5, %r6}",
        "atom.global.gpu.relaxed.add.L2::cache_hint.u32 %r5, [%rd0], %r6, %rd6",
        "atom.shared.add.u32 %r5, [%r1], %r6",
        "st.shared.b128 [%r1], %rd5",
        "ld.local.b32 %r5, [%r6]",
        "ld.param.b32 %r5, [%rd5]",
        "ld.param.b32 %r5, [retval0]",
        "ld.param.b32 %r5, [retval0+0]",
        "call.uni (retval0), vprintf, (param0, param1)",
        "mov.b32 %r5, k_param_0",
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


def test_a_parameter_is_read_within_its_bytes():
    with pytest.raises(ValueError, match="reads past the parameter"):
        launched("ld.param.b64 %rd5, [k_param_0+8];", _array())


@pytest.mark.parametrize("early", [False, True])
def test_a_copy_by_no_thread_or_of_no_bytes_reads_nothing(early: bool):
    """Here there is no global memory that it could read."""
    none = "setp.gt.s32 %p1, %r0, 99; @%p1 cp.async.ca.shared.global [%r1], [%rd5], 0x4;"
    zeros = "mad.lo.s32 %r5, %r0, 4, %r1; mov.b32 %r6, 0; cp.async.ca.shared.global [%r5], [%rd5], 0x4, %r6;"
    waited = "cp.async.commit_group; cp.async.wait_group 0;"
    for body in (none, zeros + waited):
        text = kernel(PREFIX + "mov.b64 %rd5, 64;" + body, [])
        assert run(text, shared=128, settings=Settings(early=early)) == []


@pytest.mark.parametrize("bits", [0, 1 << 64 | 1 << 224, 0xFF << 64, 13 << 96 | 1 << 224])
def test_what_is_no_descriptor_is_reported(bits: int):
    """Boxes of no elements, too many dimensions, a type of elements that there is not."""
    body = "mov.b64 %rd5, k_param_0; mov.b32 %r10, 0; add.s32 %r12, %r1, 128;" + ONE
    body += "@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;"
    body += "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    body += " [%r12], [%rd5, {%r10, %r10}], [%r1];"
    text = kernel(PREFIX + body, ["b64"]).replace(".b64 k_param_0", ".align 64 .b8 k_param_0[128]")
    [report] = run(text, bits, shared=512)
    assert report.startswith("a tensor copy by what is no descriptor"), report


def test_a_descriptor_and_a_wrapped_tensor_are_memory_of_the_launch():
    driver = pytest.importorskip("shardfuse.kernels.dev.ptx.driver")
    triton = pytest.importorskip("triton")
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.zeros(8, 32, dtype=torch.int8)
    wrapped = triton.reinterpret(x[:2], triton.language.float8e5)
    given = [("tensordesc<i8[4,16]>", TensorDescriptor.from_tensor(x[:3], [4, 16])), ("*fp8e5", driver._plain(wrapped))]
    assert [(each.address, each.size) for each in driver._allocations(given)] == [
        (x.data_ptr(), 96),
        (x.data_ptr(), 64),
    ]
    assert driver._plain((1, (wrapped,)))[1][0].shape == (2, 32)


def test_an_allocator_of_scratch_memory_is_asked_for_what_the_kernel_needs():
    """Its memory is used if it is aligned, or else its bytes in memory that is."""
    driver = pytest.importorskip("shardfuse.kernels.dev.ptx.driver")
    room, asked = torch.arange(512, dtype=torch.int16).view(torch.uint8), []
    aligned, start = -room.data_ptr() % 128, 0

    def allocate(size: int, align: int, stream: object) -> torch.Tensor:
        asked.append((size, align))
        return room[start : start + size]

    for start in (aligned, aligned + 8):
        driver._memory.clear()
        given = driver._recorded(allocate)(256, 128, 0)
        assert given.data_ptr() % 128 == 0
        assert (given.data_ptr() == room[start:].data_ptr()) is (start == aligned)
        assert torch.equal(given, room[start : start + 256])
        assert [each[:2] for each in driver._memory] == [(given.data_ptr(), 256)]
    assert asked == [(256, 128)] * 2
    driver._memory.clear()


def test_an_int64_tensor_is_no_table_unless_it_holds_addresses():
    driver = pytest.importorskip("shardfuse.kernels.dev.ptx.driver")
    view, slots = torch.zeros(64)[:4], torch.arange(3)
    assert [each.size for each in driver._allocations([("*fp32", view), ("*i64", slots)])] == [16, 24]
    table = torch.tensor([view.data_ptr()])
    assert any(each.size == 256 for each in driver._allocations([("*fp32", view), ("*i64", table)]))


PROGRAM = """
import sys, torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from shardfuse.kernels.dev.ptx import driver

@triton.jit
def scaled(x, codes, out, total, scale: "fp16"):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    tile = x.load([4, 32]) * scale
    tl.store(out + rows * 32 + columns, tile + tl.load(codes + columns).to(tl.float32))
    tl.atomic_add(total + columns, tl.sum(tile, 0)[None, :])

driver.install(sys.argv[1])
x, codes = torch.randint(-8, 9, (10, 48)).float(), torch.randint(-8, 9, (32,)).to(torch.float8_e5m2)
out, total = torch.empty(16, 32), torch.zeros(32)
described = TensorDescriptor.from_tensor(x, [16, 32])
scaled[2,](described, triton.reinterpret(codes.view(torch.int8), tl.float8e5), out, total, 0.5)
wish = torch.zeros(16, 32)
wish[:6, :16] = x[4:, 32:] * 0.5
print(torch.equal(out, wish + codes.float()), torch.equal(total, 2 * wish.sum(0)), len(driver.log))
faults = [report for result in driver.log for report in result.reports if not report.startswith("note: ")]
print(faults, [each.name for each in driver._memory])
"""


@pytest.mark.codegen
@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_kernel_gets_what_only_triton_makes(tmp_path, arch):
    """Descriptors, tensors of another type and numbers of 16 bits; two blocks add to one array."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SHARDFUSE_POISON")}
    done = subprocess.run([sys.executable, str(program), arch], env=environment, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "True True 1", done.stdout + done.stderr
    assert done.stdout.split("\n")[1].startswith("[] ['argument 0 (10, 48)', 'argument 1 (32,)',"), done.stdout


LARGE = """
import sys, torch, triton, triton.language as tl
from shardfuse.kernels.dev.ptx import driver

@triton.jit
def product(a, b, out, steps):
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    total = tl.zeros((64, 64), tl.float32)
    for k in range(steps):
        at = k * 4096 + rows * 64 + columns
        total = tl.dot(tl.load(a + at), tl.load(b + at), total)
    tl.store(out + rows * 64 + columns, total)

driver.install(sys.argv[1])
a, b, out = torch.ones(2, 64, 64).half(), torch.ones(2, 64, 64).half(), torch.zeros(64, 64)
try:
    product[1,](a, b, out, 2, num_stages=int(sys.argv[2]))
    print(torch.equal(out, torch.full((64, 64), 128.0)))
except triton.runtime.errors.OutOfResources as error:
    print(error.required > error.limit, error.limit)
"""


@pytest.mark.codegen
@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver")
@pytest.mark.parametrize(
    ("arch", "stages", "result"), [("sm_80", 9, "True"), ("sm_86", 9, "True 101376"), ("sm_86", 3, "True")]
)
def test_shared_memory_is_that_of_the_chip(tmp_path, arch, stages, result):
    """Each stage of the pipeline but one takes 16 KiB: 128 KiB are less than sm_80 has, and more than sm_86."""
    program = tmp_path / "program.py"
    program.write_text(LARGE)
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SHARDFUSE_POISON")}
    command = [sys.executable, str(program), arch, str(stages)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == result, done.stdout + done.stderr
