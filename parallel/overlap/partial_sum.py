"""Deferred all-reduces: the norm after a row-parallel layer sums over the ranks, one launch in place of two.

    row-parallel product    x @ W^T on this rank: a PartialSum [T, D], not sent yet
    residual stream         carries the partial sum to the next norm
    the norm                s = sum of the ranks' partial sums + bias + stream,  y = RMSNorm(s): ``all_reduce_rmsnorm``

With few tokens a product is over before its all-reduce could hide under it, so only calls can be saved. The kernel
counts its exchanges itself, in its own channels of the group's pool, "decode" for one shot and "decode2" for two, so a
CUDA graph may capture it after one run outside. The channels have room for ``DECODE_TOKENS`` rows from their first use
on: fewer tokens never move them.

A deferred all-reduce is inference-only. It counts as the same all-reduce with the same payload, at the row-parallel
layer's site.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.comm import all_reduce_rmsnorm
from ...kernels.comm.reduce_config import pick_shots
from ...kernels.comm.reduce_op import all_reduce_rmsnorm_shape
from ...kernels.linear.functional import as_rows
from ...kernels.runtime import dispatch
from ..core import collectives
from ..core.mesh import Group
from .memory.channel import capturing
from .memory.pool import SymmetricMemoryPool
from .memory.sizes import DECODE_TOKENS, decode_channel, decode_slots
from .plan import OverlapPlan
from .policy import preview, select

OP = "all_reduce_rmsnorm"


@dataclass(frozen=True)
class PartialSum:
    """A row-parallel layer's result before the sum over the ranks."""

    rows: torch.Tensor  # [..., D], this rank's part
    bias: torch.Tensor | None  # [D], added to the sum
    group: Group
    site: str  # of the collective

    def reduce(self) -> torch.Tensor:
        """Sum it by a separate collective, if no norm can."""
        y = collectives.all_reduce(self.rows, self.group, site=self.site, inplace=True)
        return y if self.bias is None else y.add_(self.bias)


def can_defer_all_reduce(
    x: torch.Tensor,
    features_out: int,
    group: Group,
    *,
    dtype: torch.dtype,
    features_in: int,
    overlap: str,
    impl: str,
) -> bool:
    """Whether a row-parallel layer [features_in, features_out] of this rank may defer its sum for the tokens of ``x``
    [..., D] to a norm; the same on all ranks. The first call in a group is a collective.

    ``dtype`` is the dtype to which the norm's operands promote and ``impl`` the norm's own. A sum is not deferred where
    a gradient may be needed, where autocast changes dtypes, or where a token's result must not depend on the number of
    tokens.
    """
    tokens = x.shape[:-1].numel()
    if torch.is_grad_enabled() or not _eligible(tokens, overlap, x.device):
        return False
    plan = select(
        OP,
        group,
        tokens=tokens,
        features_in=features_in,
        features_out=features_out,
        dtype=dtype,
        device=x.device,
        overlap=overlap,
        impl=impl,
        device_counted=True,
    )
    return plan.kind == "kernel" and _has_room(tokens, features_out, dtype, group, x.device)


def preview_deferred(
    tokens: int | None,
    features_out: int,
    group: Group,
    *,
    dtype: torch.dtype,
    device: torch.device,
    features_in: int,
    overlap: str,
    impl: str,
) -> OverlapPlan | None:
    """The plan that :func:`can_defer_all_reduce` would use, without a collective; None where it would refuse."""
    if tokens is None or not _eligible(tokens, overlap, device):
        return None
    plan = preview(
        OP,
        group,
        tokens=tokens,
        features_in=features_in,
        features_out=features_out,
        dtype=dtype,
        device=device,
        overlap=overlap,
        impl=impl,
    )
    return plan if plan.kind == "kernel" else None


def _eligible(tokens: int, overlap: str, device: torch.device) -> bool:
    if overlap not in ("auto", "kernel") or not 0 < tokens <= DECODE_TOKENS:
        return False
    return not (dispatch.row_invariant() or torch.is_autocast_enabled(device.type))


def fused_allreduce_norm(
    partial: PartialSum, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, s) of ``rms_norm`` with a residual, for the sum of all ranks' ``partial``; ``residual`` [..., D].

    Raises what ``all_reduce_rmsnorm`` raises; RuntimeError where the channel is broken, or would have to move although
    a captured graph holds its addresses.
    """
    rows, group, site = as_rows(partial.rows), partial.group, partial.site
    tokens, width = rows.shape
    collectives.count("all_reduce", rows.nbytes, site)
    pool = SymmetricMemoryPool.of(group, device=rows.device)
    shots = pick_shots(tokens, width, rows.element_size(), group.size)
    name = decode_channel(shots)
    channel = pool.channel(name, decode_slots(width, rows.dtype, group.size)[name])
    shape = all_reduce_rmsnorm_shape(tokens, width, rows.dtype, group.size, rows.device, shots=shots)
    peers, signals = channel.device_counted(shape, rows.dtype, op=site)
    y, s = all_reduce_rmsnorm(
        rows,
        weight,
        peers=peers,
        signals=signals,
        residual=as_rows(residual),
        bias=partial.bias,
        eps=eps,
        weight_offset=weight_offset,
        shots=shots,
        impl=impl,
    )
    return y.view(residual.shape), s.view(residual.shape)


def _has_room(tokens: int, width: int, dtype: torch.dtype, group: Group, device: torch.device) -> bool:
    """Whether the channel has room, or can be allocated now: not during a graph capture."""
    if not capturing():
        return True
    name = decode_channel(pick_shots(tokens, width, dtype.itemsize, group.size))
    return SymmetricMemoryPool.of(group, device=device).ready(name, decode_slots(width, dtype, group.size)[name])
