"""Configurations and launches of the kernel in ``triton.py``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ..runtime import alloc, device
from ..runtime.vectors import told
from . import triton as kernels
from .config import NUM_WARPS, pick_config


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    conjugate: bool,
) -> list[torch.Tensor]:
    """q [..., N, H] and k [..., K, H] rotated, with ``conjugate`` back; contiguous, k left out where None."""
    q, k = device.dense_rows(q), None if k is None else device.dense_rows(k)
    outs = [alloc.empty(x.shape, x.dtype, x.device) for x in (q, k) if x is not None]
    _run(q, k, outs[0], None if k is None else outs[1], cos, sin, interleaved, conjugate)
    return outs


def apply_rope_(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """The same in place; the last dimensions of q and k are contiguous."""
    _run(q, k, q, k, cos, sin, interleaved, conjugate)


class Rotation:
    """:func:`apply_rope` for operands of one kind: what remains is to allocate, and to launch.

    With ``heads_first`` q is [..., N, S, H] and k [..., K, S, H], and results have their order in memory, too. With
    ``twice`` the tables are [..., P], and what the kernel reads begins where they do.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        conjugate: bool,
        heads_first: bool,
        twice: bool,
    ) -> None:
        self.heads_first, self.twice = heads_first, twice
        if twice:
            cos, sin = (table.narrow(-1, 0, table.shape[-1] // 2) for table in (cos, sin))
        metas: Any = [None if x is None else torch.empty_like(x, device="meta") for x in (q, k)]
        heads: Any = (q, k, *self._outputs(*metas))  # results without memory, that lie the same
        if heads_first:
            heads = (None if x is None else x.transpose(-2, -3) for x in heads)
        q, k, q_out, k_out = heads
        self._plan = _planned(q, k, q_out, k_out, cos, sin, interleaved, conjugate)

    @property
    def whole(self) -> bool:
        """Whether one launch is all that there is to do."""
        return self._plan is not None and self._plan.programs > 0

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> list[torch.Tensor]:
        outs = self._outputs(q, k)
        assert self._plan is not None
        self._plan.kernel.launch((self._plan.programs, 1, 1), (q, k, *outs, cos, sin), on=q)
        return outs

    def _outputs(self, q: torch.Tensor, k: torch.Tensor | None) -> list[Any]:
        if self.heads_first:
            return [None if x is None else alloc.empty_like(x) for x in (q, k)]
        return [None if x is None else alloc.new_empty(x, *x.shape) for x in (q, k)]


class _Call(NamedTuple):
    """What the arguments of a launch depend on, but for addresses."""

    arch: str
    dtype: torch.dtype
    shape: torch.Size  # of q
    kv_heads: int
    strides: tuple[tuple[int, ...], ...]  # of q and its result, then of k and its own
    table_shape: torch.Size
    table_strides: tuple[int, ...]
    aligned: tuple[bool, ...]
    interleaved: bool
    conjugate: bool
    inplace: bool


class _Plan(NamedTuple):
    kernel: device.Prepared
    programs: int


def _run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    conjugate: bool,
) -> None:
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    plan = _planned(q, k, q_out, k_out, cos, sin, interleaved, conjugate)
    if plan is not None:
        if plan.programs:
            plan.kernel.launch((plan.programs, 1, 1), (q, k, q_out, k_out, cos, sin), on=q)
        return
    # Tokens in three dimensions and more that are no two: a launch for each index of the first.
    cos, sin = (table.expand(*q.shape[:-2], -1) for table in (cos, sin))
    for i in range(q.shape[0]):
        q_i, k_i = q[i], None if k is None else k[i]
        outs = (q_i, k_i) if q_out is q else (q_out[i], None if k_out is None else k_out[i])
        _run(q_i, k_i, *outs, cos[i], sin[i], interleaved, conjugate)


def _planned(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    conjugate: bool,
) -> _Plan | None:
    heads = (q, q_out) if k is None or k_out is None else (q, q_out, k, k_out)
    call = _Call(
        device.architecture(q.device),
        q.dtype,
        q.shape,
        0 if k is None else k.shape[-2],
        tuple([x.stride() for x in heads]),
        cos.shape,
        cos.stride(),
        tuple([not x.data_ptr() & 15 for x in (*heads, cos, sin)]),
        interleaved,
        conjugate,
        q_out is q,
    )
    return _plan(call)


@functools.lru_cache(4096)
def _plan(call: _Call) -> _Plan | None:
    """How a call is launched; None where its tokens do not go into two dimensions."""
    lead, (heads, head_size) = call.shape[:-2], call.shape[-2:]
    tables = _broadcast_strides(call.table_shape[:-1], call.table_strides[:-1], len(lead))
    tokens = _in_two(lead, [*(strides[:-2] for strides in call.strides), tables])
    if tokens is None:
        return None
    inner, of_tokens = tokens
    T, half = math.prod(lead), call.table_shape[-1]
    rest = 0 if call.inplace else head_size - 2 * half
    row = max(2 * half, rest)
    config = pick_config(call.arch, heads, call.kv_heads, row=row, itemsize=call.dtype.itemsize)
    strides = [(*pair, each[-2]) for pair, each in zip(of_tokens, call.strides)]
    if not call.kv_heads:
        strides += [(0, 0, 0)] * 2
    kernel = device.Prepared(
        kernels._rope_kernel,
        {
            "T": T,
            "S": inner,
            "N": heads,
            "K": call.kv_heads,
            "q_strides": strides[0],
            "k_strides": strides[2],
            "q_out_strides": strides[1],
            "k_out_strides": strides[3],
            "table_strides": of_tokens[-1],
            "HALF": half,
            "ALIGN": told([n for each in strides for n in each], call.dtype.itemsize),
            "TABLE_ALIGN": told(of_tokens[-1], 4),
            "DENSE_TABLES": of_tokens[-1][1] == half,
            "PASS": rest,
            "INTERLEAVED": call.interleaved,
            "CONJUGATE": call.conjugate,
            "BLOCK_TQ": config.block_tq,
            "BLOCK_N": config.block_n,
            "BLOCK_TK": config.block_tk,
            "BLOCK_K": config.block_k,
            "BLOCK_HALF": triton.next_power_of_2(half),
            "BLOCK_PASS": triton.next_power_of_2(rest) if rest else 1,
        },
        num_warps=NUM_WARPS,
        num_stages=1,
        config=config,
    )
    q_tiles = triton.cdiv(T, config.block_tq) * triton.cdiv(heads, config.block_n)
    return _Plan(kernel, q_tiles + triton.cdiv(T, config.block_tk) * triton.cdiv(call.kv_heads, config.block_k))


def _broadcast_strides(shape: Sequence[int], strides: Sequence[int], dims: int) -> tuple[int, ...]:
    """The strides of a tensor that is broadcast to ``dims`` dimensions: 0 where it has one element or no dimension."""
    own = [0 if size == 1 else stride for size, stride in zip(shape, strides)]
    return (0,) * (dims - len(own)) + tuple(own)


def _in_two(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, list[tuple[int, int]]] | None:
    """(inner size, (outer stride, inner stride) of each tensor) of tensors that share ``sizes``; None if it takes more.

    Neighbouring dimensions are one where all tensors step through them alike.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []  # from the innermost out: size, stride in each tensor
    for size, *steps in reversed(list(zip(sizes, *strides))):
        if size == 1:
            continue
        if merged:
            inner, inner_steps = merged[-1]
            if all(step == inner * inner_step for step, inner_step in zip(steps, inner_steps)):
                merged[-1] = inner * size, inner_steps
                continue
        merged.append((size, tuple(steps)))
    if len(merged) > 2:
        return None
    none = 1, (0,) * len(strides)
    (inner, inner_steps), (_, outer_steps) = (*merged, none, none)[:2]
    return max(inner, 1), list(zip(outer_steps, inner_steps))
