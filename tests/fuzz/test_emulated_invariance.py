"""Row invariance, compiled and emulated: a token's bits depend neither on its batch, nor on how it was cut into chunks,
nor on the number of multiprocessors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import emulated
import numpy as np
import pytest
import torch
from emulated import Trial
from fuzz import Fuzz

from shardfuse.kernels.dev.ptx import lanes, warp_groups
from shardfuse.kernels.linear import gated_linear, linear_act
from shardfuse.kernels.linear.reference import ACTIVATIONS
from shardfuse.kernels.norm import rms_norm
from shardfuse.kernels.paged_attention import paged_attention
from shardfuse.kernels.runtime import device, dispatch
from shardfuse.kernels.runtime.dtypes import BF16, E4M3, FP16, FP32, INT8

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

DTYPES = (BF16, FP16, FP32)
SLOTS = (1, 3, 24, 132)  # multiprocessors
SEQUENCES, LONGEST = 3, 2100  # quanta are 1024 keys


def _drawn(draw: Random, arch: str) -> Trial:
    return draw.choice((_attention, _attention, _product, _norm))(draw)


@contextlib.contextmanager
def _multiprocessors(slots: int) -> Iterator[None]:
    plain = device.program_slots
    device.program_slots = lambda on: slots  # type: ignore[assignment]
    try:
        yield
    finally:
        device.program_slots = plain


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Matrix instructions sum in fp64 and round once: in fp32 the host's BLAS may sum rows in different orders."""
    plain = lanes.numbers
    lanes.numbers = warp_groups.numbers = lambda bits, kind: plain(bits, kind).astype(np.float64)
    try:
        yield
    finally:
        lanes.numbers = warp_groups.numbers = plain


def _differ(what: str, one: torch.Tensor, other: torch.Tensor) -> list[str]:
    same = (one == other) | (one.isnan() & other.isnan())
    if same.all():
        return []
    first = (~same).nonzero()[0].tolist()
    return [f"{what}: {int((~same).sum())} of {same.numel()} numbers differ, the first at {first}"]


# ------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Pages:
    """A cache, and the blocks of each of ``SEQUENCES`` that fill it."""

    cache: torch.Tensor  # [blocks, K, B, 2H]
    tables: torch.Tensor  # [SEQUENCES, P]
    options: dict[str, Any]

    def attend(self, q: torch.Tensor, who: Sequence[int], lengths: Sequence[int], queries: Sequence[int]) -> Any:
        """out and lse side by side [T, N, H + 1] fp32 of those sequences, all of whose queries are in q [T, N, H]."""
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        tensors = self.cache, self.tables[list(who)], torch.tensor(lengths, dtype=torch.int32), starts
        out, lse = paged_attention(q, *tensors, invariant=True, return_lse=True, impl="triton", **self.options)
        return torch.cat((out.float(), lse[..., None]), -1)


def _attention(draw: Random) -> Trial:
    dtype, size, page = draw.choice(DTYPES), draw.choice((32, 64, 80, 128)), draw.choice((1, 4, 16, 64, 100))
    size = min(size, 64) if dtype == FP32 else size
    kv_heads, group = draw.choice(((1, 1), (1, 2), (1, 4), (1, 5), (2, 1), (2, 2)))
    pages = _pages(draw, dtype, kv_heads, group * kv_heads, size, page)
    length, last = draw.choice(((300, 40), (1023, 17), (1024, 3), (1025, 17), (1200, 5), (LONGEST, 1), (LONGEST, 3)))
    lengths = [draw.randint(1, 600), length, draw.randint(1, 1100)]
    queries = [min(lengths[0], draw.randint(1, 5)), last, min(lengths[2], draw.randint(0, 3))]
    all_q = torch.randn(sum(queries), kv_heads * group, size).to(dtype)
    q = all_q[queries[0] :][:last]
    cut, slots = draw.randint(0, last - 1), [draw.choice(SLOTS) for _ in range(3)]

    def check() -> list[str]:
        with _exact_products():
            with _multiprocessors(slots[0]):
                alone = pages.attend(q, [1], [length], [last])
            with _multiprocessors(slots[1]):
                together = pages.attend(all_q, [0, 1, 2], lengths, queries)[queries[0] :][:last]
            with _multiprocessors(slots[2]):
                parts = [(0, cut), (cut, last)] if cut else [(0, last)]
                chunks = [pages.attend(q[a:b], [1], [length - last + b], [b - a]) for a, b in parts]
        return _differ("in a batch", alone, together) + _differ("in chunks", alone, torch.cat(chunks))

    label = f"attention {dtype} over {pages.cache.dtype}, {kv_heads=} {group=} {size=} {page=} {lengths=} {queries=} "
    return Trial("attention", label + f"{cut=} {slots=} {pages.options}", check)


def _pages(draw: Random, dtype: torch.dtype, kv_heads: int, heads: int, size: int, page: int) -> Pages:
    kind = draw.choice((dtype, dtype, E4M3, INT8))
    columns = -(-LONGEST // page)
    tables = torch.randperm(SEQUENCES * columns).view(SEQUENCES, columns).int()
    numbers = torch.randn(SEQUENCES * columns, kv_heads, page, 2 * size)
    cache = (numbers * 40).clamp(-127, 127).round().to(kind) if kind == INT8 else numbers.to(kind)
    options: dict[str, Any] = {}
    if kind in (E4M3, INT8):
        shape = draw.choice(((1,), cache.shape[:3]))
        options = {name: torch.rand(shape) * 0.02 + 0.01 for name in ("k_scale", "v_scale")}
    if draw.random() < 0.4:
        options["window"] = draw.choice((5, 300, 1500))
    if draw.random() < 0.3:
        options["softcap"] = 20.0
    if draw.random() < 0.3:
        options["sinks"] = torch.randn(heads)
    if draw.random() < 0.3:
        options["alibi_slopes"] = torch.rand(heads)
    return Pages(cache, tables, options)


# -------------------------------------------------------------------------------------------------- products, norms


def _product(draw: Random) -> Trial:
    """act(x @ W^T + b), or the gated layer, and the gradient of x."""
    dtype, gated, activation = draw.choice(DTYPES), draw.random() < 0.4, draw.choice(list(ACTIVATIONS))
    most = 130 if dtype == FP32 else 300
    T, D, F = draw.randint(2, most), draw.choice((64, 100, 128, 257)), draw.choice((72, 128, 200))
    x, dy = torch.randn(T, D).to(dtype), torch.randn(T, F).to(dtype)
    weights = [(torch.randn(F, D) * D**-0.5).to(dtype) for _ in range(1 + gated)]
    bias = torch.randn(F).to(dtype) if draw.random() < 0.5 else None

    def rows(chosen: slice) -> torch.Tensor:
        leaf = x[chosen].detach().requires_grad_()
        if gated:
            y = gated_linear(leaf, weights[0], weights[1], bias, bias, activation=activation, impl="triton")
        else:
            y = linear_act(leaf, weights[0], bias, activation=activation, impl="triton")
        (dx,) = torch.autograd.grad(y, leaf, dy[chosen])
        return torch.cat((y.detach(), dx), 1)

    label = f"product {dtype} {T=} {D=} {F=} {gated=} {activation} bias {bias is not None}"
    return _sliced("product", label, rows, T, draw)


def _norm(draw: Random) -> Trial:
    dtype, D = draw.choice(DTYPES), draw.choice((64, 100, 1000, 4096, 9000))
    T = draw.randint(2, 70 if D < 3000 else 9)
    x, residual = torch.randn(T, D).to(dtype), torch.randn(T, D).to(dtype)
    weight = torch.randn(D).to(dtype)

    def rows(chosen: slice) -> torch.Tensor:
        return torch.cat(rms_norm(x[chosen], weight, residual=residual[chosen], impl="triton"), 1)

    return _sliced("norm", f"norm {dtype} {T=} {D=}", rows, T, draw)


def _sliced(kind: str, label: str, rows: Any, T: int, draw: Random) -> Trial:
    """Some rows by themselves, on other multiprocessors, against the same of all T."""
    first = draw.randrange(T)
    chosen, slots = slice(first, draw.randint(first + 1, T)), draw.sample(SLOTS, 2)

    def check() -> list[str]:
        with _exact_products(), dispatch.row_invariance():
            with _multiprocessors(slots[0]):
                whole = rows(slice(None))
            with _multiprocessors(slots[1]):
                some = rows(chosen)
        return _differ(f"rows {chosen.start} to {chosen.stop}", whole[chosen], some)

    return Trial(kind, f"{label}, {chosen}, {slots=}", check)


@emulated.needed
def test_row_invariance(fuzz: Fuzz):
    emulated.run(fuzz, _drawn)
