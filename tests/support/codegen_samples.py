"""Kernels with deliberate faults: as a program, it compiles each and prints {name: [report, problems]} as JSON, and
under "fenced" what ``fences.py`` finds of this Triton, under "probed" what its probe is compiled to. Arguments name the
samples to compile; without any, those that are right under this Triton.

It is a separate program because the tests' process interprets its kernels and so cannot compile any.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
import triton
import triton.language as tl

from shardfuse.kernels.dev import codegen, registry
from shardfuse.kernels.dev.registry import Build
from shardfuse.kernels.runtime import fences, fences_triton


@triton.jit
def _tma_gemm_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """C [M, N] = A [M, K] @ B [N, K]^T through tensor descriptors."""
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    start_m, start_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_k in range(0, K, BLOCK_K):
        acc = tl.dot(a.load([start_m, start_k]), b.load([start_n, start_k]).T, acc)
    c.store([start_m, start_n], acc.to(tl.bfloat16))


@triton.jit
def _pointer_gemm_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The same with pointers instead of TMA, for sizes that the blocks divide."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + offs_m[:, None] * K + start_k + offs_k[None, :])
        b = tl.load(b_ptr + offs_n[None, :] * K + start_k + offs_k[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))


@triton.jit(do_not_specialize=["length"])
def _copy_kernel(x_ptr, y_ptr, length, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Rows whose length is a multiple of ALIGN, which the compiler is told only by the division."""
    offs = tl.arange(0, BLOCK)
    mask = offs < length // ALIGN * ALIGN
    row = tl.program_id(0) * (length // ALIGN * ALIGN)
    tl.store(y_ptr + row + offs, tl.load(x_ptr + row + offs, mask=mask), mask=mask)


def _copy(config: str, target: str, align: int, width: int = 4096) -> Build:
    rows = torch.empty(64, width, dtype=torch.bfloat16, device="meta")
    args = {"x_ptr": rows, "y_ptr": rows, "length": width, "ALIGN": align, "BLOCK": 4096}
    return Build("sample", config, target, _copy_kernel, args, 8, 2)


def _build(fn, config: str, target: str, blocks: tuple[int, int, int], num_warps: int, num_stages: int) -> Build:
    size = 4096
    matrix = torch.empty(size, size, dtype=torch.bfloat16, device="meta")
    names = ("a_ptr", "b_ptr", "c_ptr", "M", "N", "K", "BLOCK_M", "BLOCK_N", "BLOCK_K")
    args = dict(zip(names, (matrix, matrix, matrix, size, size, size, *blocks)))
    return Build("sample", config, target, fn, args, num_warps, num_stages, wants_wgmma=True, wants_tma=True)


def _shipped(op: str, config: str, **features) -> Build:
    """The first build of ``op`` on sm_90 with these arguments, under the name ``config``."""
    builds = registry.op(op).builds("sm_90")
    found = next(b for b in builds if all(b.args.get(name) == value for name, value in features.items()))
    return dataclasses.replace(found, config=config)


with fences.assumed(True):
    PREFILL = _shipped("paged_attention", "prefill", BLOCK_M=128)
    OVER_FP8 = _shipped("paged_attention", "over-fp8", BLOCK_M=64, K_SCALES=1)
GATED = _shipped("gated_linear", "gated", EPILOGUE="gated")
ROW_SUM = next(
    dataclasses.replace(build, config="row-sum")
    for build in registry.op("linear_act").builds("sm_90")
    if build.gemm is not None and "row_sum" in build.gemm.epilogue and build.args["USE_TMA"] and build.args["RELOAD"]
)

BUILDS = [
    _build(_tma_gemm_kernel, "good", "sm_90", (128, 128, 64), 8, 3),
    _build(_tma_gemm_kernel, "spills", "sm_90", (256, 256, 32), 4, 2),
    _build(_tma_gemm_kernel, "too-much-shared", "sm_90", (128, 256, 64), 8, 5),
    _build(_tma_gemm_kernel, "short-blocks", "sm_90", (16, 128, 64), 4, 2),
    _build(_pointer_gemm_kernel, "pointers", "sm_90", (64, 64, 32), 4, 2),
    dataclasses.replace(
        _build(_pointer_gemm_kernel, "exempt", "sm_90", (64, 64, 32), 4, 2), exempt="a sample without TMA"
    ),
    _build(_pointer_gemm_kernel, "old-chip", "sm_80", (64, 64, 32), 4, 2),
    _build(_tma_gemm_kernel, "blackwell", "sm_100", (128, 128, 64), 4, 3),
    _build(_tma_gemm_kernel, "blackwell-waits", "sm_100", (128, 128, 64), 4, 1),
    _build(_pointer_gemm_kernel, "spills-on-amd", "gfx942", (256, 256, 32), 2, 2),
    PREFILL,
    dataclasses.replace(PREFILL, config="prefill-waits", num_stages=3),
    OVER_FP8,
    dataclasses.replace(OVER_FP8, config="over-fp8-unexcused", unpipelined=None),
    dataclasses.replace(PREFILL, config="prefill-excused", unpipelined="no reason"),
    _copy("copy", "sm_90", 8),
    _copy("copy-narrow", "sm_90", 1),
    _copy("copy-of-odd-rows", "sm_90", 1, 4095),
    _copy("copy-on-amd", "gfx942", 8),
    _copy("copy-narrow-on-amd", "gfx942", 2),
    GATED,
    dataclasses.replace(GATED, config="gated-unexcused", unpipelined=None),
    ROW_SUM,
    dataclasses.replace(ROW_SUM, config="row-sum-not-reloaded", args={**ROW_SUM.args, "RELOAD": False}),
]
FENCED = {
    "prefill",
    "prefill-waits",
    "prefill-excused",
    "over-fp8",
    "over-fp8-unexcused",
}  # right under a Triton that puts fences where they are needed

if __name__ == "__main__":
    fenced = {arch: fences.fenced(arch) for arch in ("sm_80", "sm_90")}
    ptx = fences_triton.compile_probe("sm_90")
    probed = [name for name in ("cp.async.wait_group", "wgmma.mma_async") if name in ptx]
    asked = sys.argv[1:] or [build.config for build in BUILDS if fenced["sm_90"] or build.config not in FENCED]
    reports = [codegen.compile_build(build) for build in BUILDS if build.config in asked]
    found = {report.config: [dataclasses.asdict(report), codegen.problems(report)] for report in reports}
    print(json.dumps({"fenced": fenced, "probed": probed, **found}))
