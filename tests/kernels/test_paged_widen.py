"""Every code that a quantised cache can hold becomes exactly the number that it stands for."""

from __future__ import annotations

import ptx
import pytest
import torch
import triton
import triton.language as tl

from shardfuse.kernels.dev import registry
from shardfuse.kernels.paged_attention import widen_triton
from shardfuse.kernels.paged_attention.widen_triton import widen, widen_pairs
from shardfuse.kernels.runtime import device
from shardfuse.kernels.runtime.chips import converts_e4m3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = 1 << 16

pytestmark = pytest.mark.usefixtures("kernels_on_device")


def _numbers(codes: torch.Tensor, code: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """What uint8 ``codes`` stand for, as bits; every NaN alike."""
    return _bits(codes.view(code).to(dtype))


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.masked_fill(x.isnan(), float("nan"))
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).cpu()


@triton.jit
def _widen_kernel(codes_ptr, pairs_ptr, out_ptr, even_ptr, odd_ptr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offs, widen(tl.load(codes_ptr + offs), DTYPE))
    even, odd = widen_pairs(tl.load(pairs_ptr + offs), codes_ptr.dtype.element_ty, DTYPE, PTX)
    tl.store(even_ptr + offs, even)
    tl.store(odd_ptr + offs, odd)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", [E4M3, torch.int8], ids=str)
def test_every_code_in_a_kernel(code: torch.dtype, dtype: torch.dtype) -> None:
    """All pairs of codes, and one of each alone; on a GPU by the instructions that the chip has."""
    pairs = torch.arange(PAIRS, dtype=torch.int32).to(torch.int16)
    low, high = (pairs & 0xFF).to(torch.uint8), ((pairs >> 8) & 0xFF).to(torch.uint8)
    arch = device.architecture(pairs.device)
    stored = low.view(code) if code == torch.int8 or converts_e4m3(arch) else low
    out, even, odd = (torch.empty(PAIRS, dtype=dtype) for _ in range(3))
    _widen_kernel[(16,)](stored, pairs, out, even, odd, PAIRS // 16, arch.startswith("sm_"))
    assert torch.equal(_bits(out), _numbers(low, code, dtype).cpu())
    assert torch.equal(_bits(even), _numbers(low, code, dtype).cpu())
    assert torch.equal(_bits(odd), _numbers(high, code, dtype).cpu())


@pytest.mark.parametrize(
    ("name", "code", "dtype"),
    [
        ("E4M3_TO_BF16", E4M3, torch.bfloat16),
        ("E4M3_TO_FP16", E4M3, torch.float16),
        ("INT8_TO_BF16", torch.int8, torch.bfloat16),
        ("INT8_TO_FP16", torch.int8, torch.float16),
    ],
)
def test_every_code_in_assembly(name: str, code: torch.dtype, dtype: torch.dtype) -> None:
    """Two pairs in a register: all pairs in one half, all of them shuffled in the other."""
    first = torch.arange(PAIRS)
    second = first[torch.randperm(PAIRS)]
    found = ptx.run(getattr(widen_triton, name).value, {"$2": first | (second << 16)}, ["$0", "$1"])
    for shift, both in zip((0, 8), found):
        for half, pairs in zip((0, 16), (first, second)):
            ours = ((both >> half) & 0xFFFF).to(torch.int16).view(dtype)
            assert torch.equal(_bits(ours), _numbers(((pairs >> shift) & 0xFF).to(torch.uint8), code, dtype))


@pytest.mark.parametrize("target", registry.TARGETS)
def test_tiles_of_few_rows_read_values_in_pairs(target: str) -> None:
    """Where bytes would be read one by one; elsewhere pairs are of no use."""
    builds = [build.args for build in registry.op("paged_attention").builds(target) if "q_ptr" in build.args]
    found = {(args["BLOCK_M"] < 64, args["PAIRS"]) for args in builds if args["v_ptr"].itemsize == 1}
    assert found == {(True, target.startswith("sm_")), (False, False)}
    assert not any(args["PAIRS"] for args in builds if args["v_ptr"].itemsize > 1)
