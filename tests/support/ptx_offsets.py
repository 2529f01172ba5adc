"""Run compiled kernels on the emulator of PTX with tensors whose offsets pass 2^31 elements.

    python ptx_offsets.py

It prints JSON: for each operand the kernels that ran, the emulator's reports, and the largest error of the result, as a
share of the largest number expected. The tensors lie in a mapping without memory behind it, of which each touches some
pages. A separate program because it replaces Triton's driver.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable

import torch

from shardfuse import rms_norm
from shardfuse.kernels.cross_entropy import launch as cross_entropy
from shardfuse.kernels.cross_entropy.reference import STATISTICS, Loss
from shardfuse.kernels.dev.ptx import driver
from shardfuse.kernels.linear import linear_act
from shardfuse.kernels.paged_attention import paged_attention

FAR = 2**31 + 16  # elements from a row to the next
GIGABYTES = 9
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.12 on

Results = list[tuple[torch.Tensor, torch.Tensor]]  # of the kernel, and what is expected in fp64


def far(values: torch.Tensor) -> torch.Tensor:
    """``values`` in bf16, with rows FAR elements apart."""
    mapping = mmap.mmap(-1, GIGABYTES << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    strides = (FAR, *values.stride()[1:])
    return torch.frombuffer(mapping, dtype=torch.bfloat16).as_strided(values.shape, strides).copy_(values)


def rows_of_a() -> Results:
    x, weight = far(torch.randn(3, 64)), torch.randn(48, 64).bfloat16()
    return [(linear_act(x, weight, impl="triton"), x.double() @ weight.double().T)]


def rows_of_b() -> Results:
    x, weight = torch.randn(5, 64).bfloat16(), far(torch.randn(3, 64))
    return [(linear_act(x, weight, impl="triton"), x.double() @ weight.double().T)]


def pages() -> Results:
    cache = far(torch.randn(3, 2, 16, 128))
    q, table = torch.randn(3, 4, 64).bfloat16(), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    batch = (table, torch.tensor([35], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32))
    expected = paged_attention(q.double(), cache.double(), *batch, impl="reference")
    return [(paged_attention(q, cache, *batch, impl="triton"), expected)]


def rows_of_norm() -> Results:
    x, weight = far(torch.randn(3, 256)), torch.randn(256).bfloat16()
    square = x.double().square().mean(1, keepdim=True)
    return [(rms_norm(x, weight, impl="triton"), x.double() * (square + 1e-6).rsqrt() * weight.double())]


def logits() -> Results:
    """The statistics, then the gradient of the sum of the losses in place of the logits."""
    given, targets = far(torch.randn(3, 1000)), torch.tensor([5, 999, 17])
    leaf = given.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    losses.sum().backward()
    loss = Loss(1000, 0, 1000, -100, 0.0, 0.0, None)
    stats, found, gain = torch.empty(STATISTICS, 3), torch.empty(3), torch.ones(3)
    cross_entropy.statistics(given, targets, loss, stats)
    highest = given.amax(1)
    cross_entropy.gradient_(given, targets, stats[None], gain, loss, found)
    assert leaf.grad is not None
    return [(stats[0], highest.double()), (found, losses.detach()), (given, leaf.grad)]


CASES: dict[str, Callable[[], Results]] = {
    "a GEMM's A": rows_of_a,
    "a GEMM's B": rows_of_b,
    "paged attention's cache": pages,
    "rms_norm's rows": rows_of_norm,
    "cross-entropy's logits": logits,
}


def main() -> None:
    driver.install("sm_90")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {}
    for name, run in CASES.items():
        driver.log.clear()
        error = max(float((got.double() - wish).abs().max() / wish.abs().max()) for got, wish in run())
        reports = [report for result in driver.log for report in result.reports if not report.startswith("note: ")]
        found[name] = {"ran": [result.kernel for result in driver.log], "reports": reports, "error": error}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
