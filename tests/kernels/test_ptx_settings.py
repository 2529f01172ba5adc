"""What the emulator of PTX may vary without a result's changing, and how much it may use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ptx_text import addresses, kernel, of_lane

from shardfuse.kernels.dev.ptx.launch import run
from shardfuse.kernels.dev.ptx.settings import Settings
from shardfuse.kernels.dev.ptx.specialised import problems
from shardfuse.kernels.runtime.dispatch import triton_version

driver = pytest.importorskip("shardfuse.kernels.dev.ptx.driver")

START = "mov.u32 %r0, %tid.x; mov.u32 %r2, %ctaid.x; mov.b32 %r1, global_smem;"
BLOCK_STORES = START + "setp.eq.s32 %p1, %r0, 0; @%p1 st.global.b32 [%rd0], %r2;"
COPIED = START + of_lane(0, 4) + "mad.lo.s32 %r8, %r0, 4, %r1; cp.async.ca.shared.global [%r8], [%rd10], 0x4;"
COPIED += "cp.async.commit_group; WAIT ld.shared.b32 %r5, [%r8]; cp.async.wait_group 0; st.global.b32 [%rd10], %r5;"

# What a kernel may not depend on -> the kernel, and the variations that show it.
DEPENDENT = {
    "a register that nothing has written": (
        START + of_lane(0, 4) + "st.global.b32 [%rd10], %r300;",
        {"numbers", "zeros"},
    ),
    "a predicate that nothing has written": (START + of_lane(0, 4) + "@%p9 st.global.b32 [%rd10], %r1;", {"numbers"}),
    "shared memory that nothing has written": (
        START + of_lane(0, 4) + "ld.shared.b32 %r5, [%r1]; st.global.b32 [%rd10], %r5;",
        {"numbers", "zeros"},
    ),
    "which block comes last": (BLOCK_STORES, {"blocks"}),
    "whether a block has ended": (
        START
        + "setp.eq.s32 %p1, %r0, 0; ld.global.b32 %r5, [%rd0]; add.s32 %r5, %r5, 1; @%p1 st.global.b32 [%rd0], %r5;",
        {"one"},
    ),
    "when a copy lands": (COPIED.replace("WAIT", ""), {"copies"}),
    "": (COPIED.replace("WAIT", "cp.async.wait_group 0;"), set()),
}


def _results(body: str) -> Callable[[], dict[str, torch.Tensor]]:
    def results() -> dict[str, torch.Tensor]:
        found = np.arange(32, dtype="u4")
        run(kernel(addresses(1) + body, ["ptr"]), found, grid=(3, 1, 1), shared=128, settings=driver.settings)
        return {"y": torch.from_numpy(found.view("i4"))}

    return results


@pytest.mark.parametrize("what", DEPENDENT)
def test_differences_name_the_variations(what: str):
    body, shown_by = DEPENDENT[what]
    found = driver.differences(_results(body))
    assert {each.partition("with ")[2].split()[0] for each in found} == shown_by
    assert driver.settings == Settings()


def test_too_large_a_launch_is_refused_by_name():
    whole = kernel(addresses(1) + START + of_lane(0, 4) + "st.global.b32 [%rd10], %r0;", ["ptr"])
    with pytest.raises(MemoryError, match=r"k: 1 blocks of 32 threads.* need .*Settings.memory"):
        run(whole, np.zeros(32, "u4"), settings=Settings(memory=1 << 10))
    waiting = whole.replace("ret;", "ld.acquire.gpu.global.b32 %r5, [%rd0]; ret;")
    with pytest.raises(MemoryError, match="1000000 blocks"):
        run(waiting, np.zeros(32, "u4"), grid=(1000000, 1, 1))


def test_fewer_blocks_run_side_by_side_where_memory_is_short(monkeypatch):
    from shardfuse.kernels.dev.ptx import launch

    sizes = []

    class Noted(launch.Launch):
        def run(self, limit_s: float = 600.0) -> None:
            sizes.append(self.blocks)
            super().run(limit_s)

    monkeypatch.setattr(launch, "Launch", Noted)
    body = START + "mad.lo.s32 %r4, %r2, 32, %r0; mul.wide.u32 %rd10, %r4, 4; add.s64 %rd10, %rd10, %rd0;"
    whole, found = kernel(addresses(1) + body + "st.global.b32 [%rd10], %r4;", ["ptr"]), np.zeros(100 * 32, "u4")
    assert run(whole, found, grid=(100, 1, 1), settings=Settings(memory=2_000_000)) == []
    assert max(sizes) < 50
    assert sum(sizes) == 100
    assert np.array_equal(found, np.arange(3200))


def test_a_huge_grid_ends_with_its_time():
    whole = kernel(addresses(1) + START, ["ptr"])
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="k: not done in time"):
        run(whole, np.zeros(1, "u4"), grid=(2**31 - 1, 65535, 65535), settings=Settings(seconds=0.2))
    assert time.monotonic() - begun < 20


def test_parameters_of_several_bytes():
    body = "ld.param.b64 %rd0, [k_param_0]; mov.u32 %r0, %tid.x; ld.param.v2.b32 {%r5, %r6}, [given+8];"
    body += "ld.param.v4.b16 {%rs1, %rs2, %rs3, %rs4}, [given]; mov.b64 %rd1, {%rs1, %rs2, %rs3, %rs4};"
    body += "mov.b64 {%r7, %r8}, %rd1; st.global.v4.b32 [%rd0], {%r7, %r8, %r5, %r6};"
    whole = kernel(body, ["ptr", "b8"]).replace(".b8 k_param_1", ".align 16 .b8 given[16]")
    found, value = np.zeros(4, "u4"), 0x0123456789ABCDEF_0011223344556677
    assert run(whole, found, value) == []
    assert int.from_bytes(found.tobytes(), "little") == value
    with pytest.raises(ValueError, match="past the parameter"):
        run(whole.replace("[given+8]", "[given+12]"), found, value)


@pytest.mark.parametrize(
    ("kind", "value", "constants", "attrs", "wrong"),
    [
        ("i32", 2**31 - 1, {}, {}, ""),
        ("i32", 2**31, {}, {}, "out of range"),
        ("i64", 2**31, {}, {}, ""),
        ("u8", -1, {}, {}, "out of range"),
        ("i32", 32, {}, {(0,): [["tt.divisibility", 16]]}, ""),
        ("i32", 40, {}, {(0,): [["tt.divisibility", 16]]}, "compiled for multiples of 16"),
        ("constexpr", 1, {(0,): 1}, {}, ""),
        ("constexpr", 2, {(0,): 1}, {}, "compiled for 1"),
        ("constexpr", None, {(0,): None}, {(0,): []}, ""),
        ("constexpr", "silu", {(0,): "gelu"}, {}, "compiled for 'gelu'"),
        ("constexpr", float("nan"), {(0,): float("nan")}, {}, ""),
        (("i32", ("constexpr",)), (3, (5,)), {(0, 1, 0): 4}, {(0, 0): [["tt.divisibility", 16]]}, "0.1.0"),
    ],
)
def test_arguments_that_the_code_was_not_compiled_for(kind, value, constants, attrs, wrong):
    found = problems([kind], [value], constants, attrs)
    assert wrong in " ".join(found) if wrong else found == []


def test_tensors_that_the_code_was_not_compiled_for():
    room = torch.empty(64, dtype=torch.uint8)
    aligned = room[-room.data_ptr() % 16 :]
    divisible = {(0,): [["tt.divisibility", 16]]}
    assert problems(["*fp32"], [aligned[:4].view(torch.float32)], {}, divisible) == []
    [report] = problems(["*fp32"], [aligned[4:8].view(torch.float32)], {}, divisible)
    assert "compiled for multiples of 16" in report
    assert problems(["*u8"], [aligned[1:]], {}, {}) == []


# What the compiler emits has fences, whatever its version's number; a plan for aligned rows is taken for odd ones.
PROGRAM = """
import torch
from shardfuse import rms_norm
from shardfuse.kernels.dev.ptx import driver
from shardfuse.kernels.runtime import device, dispatch, fences

dispatch._TRITON_VERSION = "3.6.0"
driver.install("sm_90")
known = device.kinds_of
device.kinds_of = lambda tensors: tuple([kind and (kind[0], True) for kind in known(tensors)])
x = torch.randn(129)
for rows in (x[:128], x[1:]):
    rms_norm(rows.view(2, 64), torch.ones(64), impl="triton")
found = [[each for each in result.reports if each.startswith("specialisation: ")] for result in driver.log]
print(fences.fenced("sm_90"), *map(len, found))
"""


@pytest.mark.codegen
@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver")
@pytest.mark.skipif((triton_version() or "") < "3.7", reason="Triton 3.6 does leave fences out")
def test_a_process_asks_the_compiler_and_checks_the_arguments():
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SHARDFUSE_POISON")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0", "1"], done.stderr
