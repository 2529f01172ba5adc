"""What kernels are told of strides and columns: results where it is true of few, and how often they are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfuse.kernels.dev.registry import Build
from shardfuse.kernels.kv_cache import write_kv_
from shardfuse.kernels.paged_attention import paged_attention
from shardfuse.kernels.rope import apply_rope
from shardfuse.kernels.runtime import device
from shardfuse.kernels.runtime.dispatch import triton_version
from shardfuse.kernels.runtime.vectors import told

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("strides", "itemsize", "expected"),
    [
        ((144, 72), 2, 8),
        ((160, 80), 2, 1),  # 16 divides them, and Triton sees it
        ((144, 76), 2, 1),
        ((40,), 4, 4),
        ((42,), 4, 1),
        ((0, 8, 16), 1, 1),
        ((), 2, 1),
    ],
)
def test_what_is_told_of_strides(strides: tuple[int, ...], itemsize: int, expected: int) -> None:
    assert told(strides, itemsize) == expected


# Heads of 24: rows that 16 bytes divide and 16 elements do not; behind one more element, and with one between them.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "odd": lambda x: torch.cat((x, x[..., :1]), -1)[..., :-1],
}


@pytest.mark.interpret
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_whose_rows_begin_between_multiples_of_sixteen(layout: str) -> None:
    """RoPE and attention of them agree with the reference; what is written is the same, bit for bit."""
    tokens, heads, size, page = 5, 2, 24, 4
    q, k, v = (LAYOUTS[layout](torch.randn(tokens, heads, size, dtype=torch.float16)) for _ in range(3))
    angles = torch.rand(tokens, size // 2)
    tables = LAYOUTS[layout](angles.cos()), LAYOUTS[layout](angles.sin())
    turned = apply_rope(q, k, *tables, impl="triton")
    for ours, expected in zip(turned, apply_rope(q, k, *tables, impl="reference")):
        torch.testing.assert_close(ours, expected)

    cache = LAYOUTS[layout](torch.zeros(3, heads, page, 2 * size, dtype=torch.float16))
    write_kv_(cache, k, v, torch.arange(tokens) + 2, impl="triton")
    stored = cache.transpose(1, 2).reshape(3 * page, heads, 2 * size)[2 : 2 + tokens]
    assert torch.equal(stored, torch.cat((k, v), -1))

    call = (
        q[:1],
        cache,
        torch.arange(3, dtype=torch.int32)[None],
        *(torch.tensor(n, dtype=torch.int32) for n in ([7], [0, 1])),
    )
    ours, expected = (paged_attention(*call, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(T: int) -> None:
    from shardfuse.kernels.norm import launch

    x, weight = _meta(T, 5120), _meta(5120)
    launch.norm_fwd(x, _meta(T, 5120, dtype=FP32), weight, None, None, False, 1e-6, 0.0, 0.0, 0, 0, BF16)
    rstd = _meta(T, dtype=FP32)
    launch.norm_bwd(x, None, x, weight, rstd, None, None, 0.0, 0.0, 0, 0, BF16, BF16, BF16, None)


def _rope(T: int) -> None:
    from shardfuse.kernels.rope import launch

    launch.apply_rope(
        _meta(T, 32, 72), _meta(T, 8, 72), _meta(T, 36, dtype=FP32), _meta(T, 36, dtype=FP32), False, False
    )


def _write(T: int) -> None:
    from shardfuse.kernels.kv_cache import launch
    from shardfuse.kernels.kv_cache.reference import Scale

    k, scale = _meta(T, 8, 72), Scale(None, None)
    launch.write_kv_(_meta(99, 8, 16, 144), None, k, k, _meta(T, dtype=torch.int64), scale, scale)


def _quantize(T: int) -> None:
    from shardfuse.kernels.scaled_linear import launch

    launch.quantize_rows(_meta(T, 4096), FP8, True)
    launch.quantize(_meta(T, 4096), FP8, True, scale=_meta(1, dtype=FP32))


def _kinds() -> dict[str, int]:
    """How many kernels are compiled of each for lengths from 1000 to 1099; needs kernels that are not interpreted."""
    found: dict[str, set[Any]] = defaultdict(set)
    with device.capture("sm_90") as launches:
        for T in range(1000, 1100):
            for call in (_norm, _rope, _write, _quantize):
                call(T)
    for each in launches:
        build = Build("some", "some", "sm_90", each.fn, each.args, each.num_warps, each.num_stages)
        found[each.fn.__name__].add((str(build.specialise()), each.num_warps, each.num_stages))
    return {name: len(kinds) for name, kinds in found.items()}


@pytest.mark.codegen
@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
def test_a_hundred_lengths_of_views_are_compiled_at_most_four_times() -> None:
    """Casts of a transposed view: 16 divides its rows or does not, and its columns."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.run([sys.executable, __file__], env=env, check=True, capture_output=True).stdout)
    assert {"_norm_fwd_kernel", "_norm_bwd_kernel", "_rope_kernel", "_write_kv_kernel", "_cast_kernel"} <= found.keys()
    assert {name: kinds for name, kinds in found.items() if kinds > 4} == {}


if __name__ == "__main__":
    print(json.dumps(_kinds()))
