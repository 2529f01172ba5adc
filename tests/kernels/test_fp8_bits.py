"""e4m3 made of bits: every number of it in fp16, and fp32 and bf16 rounded as torch casts them."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from kv_cache_case import E4M3, bits

from shardfuse.kernels.kv_cache import write_kv_
from shardfuse.kernels.runtime.fp8_bits import e4m3_bits_to_fp16, fp32_to_e4m3_bits

pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]
interpret = pytest.mark.interpret


def every_bf16():
    """All 65536 of them, in fp32."""
    return torch.arange(65536, device="cpu").to(torch.int16).view(torch.bfloat16).float().to(DEVICE)


def same_e4m3(ours, x):
    """Whether the bytes ``ours`` are those of torch's cast of x, saturated; NaN is NaN whatever its sign."""
    expected = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    nan = x.isnan()
    assert int(nan.sum()) > 0
    return torch.equal(ours[~nan], expected[~nan]) and bool(((ours[nan] & 0x7F) == 0x7F).all())


@triton.jit
def _to_bits_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, fp32_to_e4m3_bits(tl.load(x_ptr + offs)))


@triton.jit
def _from_bits_kernel(bits_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, e4m3_bits_to_fp16(tl.load(bits_ptr + offs)))


@interpret
def test_every_e4m3_number_becomes_itself_in_fp16():
    every = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=torch.float16)
    _from_bits_kernel[(1,)](every, out, 256)
    expected = every.view(E4M3).half()
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(bits(out[~nan]), bits(expected[~nan]))


@interpret
def test_rounding_to_e4m3_by_bits():
    """All bf16, all midpoints between neighbours with what lies just beside them, and fp32 over the whole range."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(math.inf)), numbers])
    spread = torch.rand(4096) * 2.0 ** torch.randint(-14, 11, (4096,))
    x = torch.cat([every_bf16(), near, -near, spread, -spread, torch.tensor([math.inf, -math.inf, 0.0, -0.0])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 4096))
    out = torch.empty(len(x), dtype=torch.uint8)
    _to_bits_kernel[(len(x) // 4096,)](x, out, 4096)
    assert same_e4m3(out, x)


@pytest.mark.parametrize("impl", IMPLS)
def test_every_bf16_is_written_as_torch_casts_it(impl):
    """On a GPU by the conversion that the chip has, elsewhere by the bits."""
    k = every_bf16().view(256, 1, 256).bfloat16()
    cache = torch.zeros(16, 1, 16, 257, dtype=E4M3)
    write_kv_(cache, k, torch.zeros_like(k[..., :1]), torch.arange(256), impl=impl)
    assert same_e4m3(cache[..., :256].view(torch.uint8).flatten(), k.float().flatten())
