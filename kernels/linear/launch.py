"""Launches of the kernels in ``triton.py``, on tensors. All other arguments come from ``plan.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ..runtime import alloc, device, dispatch
from ..runtime.signals import Gathered, Remote, Scattered
from .config import forced
from .plan import Operand, Plan, operands_of, plan_act_grad, plan_launch

Matrices = tuple[torch.Tensor, ...]
Optional = tuple["torch.Tensor | None", ...]


_LARGEST = 2**31 - 2**10  # of a size, which a kernel holds in 32 bits: the last tile's end still fits


def _own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the alignment of ``tensor`` would decide which instructions its rows are multiplied with."""
    (operand,) = operands_of((tensor,))
    return tensor if Operand._make(operand).fits_tma else tensor.clone(memory_format=torch.contiguous_format)


def run_gemm(
    layout: str,
    a: Matrices,
    b: Matrices,
    targets: tuple[Matrices, ...],
    *,
    combine: str = "grouped",
    epilogue: str = "act",
    activation: str = "identity",
    biases: Optional | None = None,
    sources: tuple[Matrices, ...] | None = None,
    row_sums: Optional | None = None,
    scales: Matrices | None = None,
    remote: Remote | None = None,
) -> None:
    """C = op(A) @ op(B) and its epilogue, with operands and modes as ``_gemm_kernel`` takes them.

    ``targets`` and ``sources`` hold one tuple of contiguous matrices [M, N] for each output. ``layout``: see ``Gemm``.
    With ``remote`` A's rows come from other ranks, or C's go to them (``remote.py``).
    """
    on = targets[0][0]
    if not on.numel() and not any(target[0].numel() for target in targets):
        return
    row_invariant = layout != "tn" and dispatch.row_invariant()
    if row_invariant and not isinstance(remote, Gathered):  # rows that arrive lie as they must
        a = tuple(map(_own_rows, a))
    if biases is not None:
        biases = tuple([bias if bias is None else bias.contiguous() for bias in biases])
    nothing = (None,) * len(targets)
    around = (biases or (None,) * len(a), scales, sources or nothing, targets, row_sums or nothing)
    plan = planned(on.device, layout, a, b, around, combine, epilogue, activation, remote)
    launched(plan, grid_of(plan, on.device), a, b, around, combine, _ends(remote))


def planned(
    where: torch.device,
    layout: str,
    a: Matrices,
    b: Matrices,
    around: tuple[Any, ...],
    combine: str,
    epilogue: str,
    activation: str,
    remote: Remote | None = None,
) -> Plan:
    """The plan of a launch with these arguments on a device, ``around`` as :func:`launched` takes it.

    Their memory is not looked at: they may be on the meta device.
    """
    biases, scales, sources, targets, row_sums = around
    find = plan_launch if forced.config is None else plan_launch.__wrapped__
    return find(  # the fields of a Call
        device.architecture(where),
        layout,
        combine,
        epilogue,
        activation,
        operands_of(a),
        operands_of(b),
        operands_of(biases),
        None if scales is None else operands_of(scales),
        None if sources[0] is None else operands_of(sources[0]),
        tuple([operands_of(target) for target in targets]),
        operands_of(row_sums),
        a[0].dtype is torch.float32 and device.allow_tf32(),
        layout != "tn" and dispatch.row_invariant(),
        *_remoteness(remote),
    )


def grid_of(plan: Plan, where: torch.device) -> tuple[int, int, int]:
    return min(plan.tiles, device.program_slots(where)), 1, 1


NO_ENDS = (None, None, 0)


def launched(
    plan: Plan,
    grid: tuple[int, int, int],
    a: Matrices,
    b: Matrices,
    around: tuple[Any, ...],
    combine: str,
    ends: tuple[Any, Any, int] = NO_ENDS,
) -> None:
    """Launch a plan. ``around``: biases, scales, sources, targets and row sums, as the kernel takes them."""
    _, _, _, targets, row_sums = around
    on = targets[0][0]
    if plan.split_sum is None:
        plan.product.launch(grid, (a, b, *around, *ends), on=on)
        return
    outs = tuple([target[0] for target in targets])
    parts, part_sums = _workspaces(plan.config.split_k, outs, combine, row_sums)
    nothing = (None,) * len(targets)
    plan.product.launch(grid, (a, b, (None,) * len(a), None, nothing, parts, part_sums, *ends), on=on)
    plan.split_sum.launch((plan.split_sum_tiles, 1, 1), (parts, part_sums, *around), on=on)


def _remoteness(remote: Remote | None) -> tuple[str, int, int]:
    """Which end of the product lies on other ranks, and the kernel's PIECES and FLAGS."""
    if remote is None:
        return "", 0, 0
    if isinstance(remote, Gathered):
        return "gather", remote.pieces, triton.next_power_of_2(remote.pieces * len(remote.peers))
    return "send", 0, triton.next_power_of_2(len(remote.peers))


def _ends(remote: Remote | None) -> tuple[Any, Any, int]:
    """wait_ptrs, send_ptrs and epoch, as the kernel takes them."""
    if remote is None:
        return NO_ENDS
    signals = remote.signals
    assert signals.epoch is not None, "the host counts the exchanges of a GEMM"
    if isinstance(remote, Gathered):
        return (signals.pads[signals.rank], signals.state, signals.report), None, signals.epoch
    return None, (signals.table, signals.state), signals.epoch


def _workspaces(splits: int, outs: Matrices, combine: str, row_sums: Optional) -> tuple[tuple[Matrices, ...], Optional]:
    """Where the parts of a split GEMM go: [splits, M, N] for each product of each output, [splits, M] for row sums."""
    products = 2 if combine == "gated" else 1
    parts = tuple(
        tuple(alloc.empty((splits, *out.shape), torch.float32, out.device) for _ in range(products)) for out in outs
    )
    sums = tuple(
        None if row_sum is None else alloc.empty((splits, out.shape[0]), torch.float32, out.device)
        for out, row_sum in zip(outs, row_sums)
    )
    return parts, sums


def _sizes(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[int, list[int]]:
    """T and the F_i. ValueError for sizes that 32 bits cannot hold, before anything is allocated; offsets have 64."""
    T, D = x.shape
    Fs = [w.shape[0] for w in weights]
    if max(T, D, *Fs) > _LARGEST:
        matrix = next(matrix for matrix in (x, *weights) if max(matrix.shape) > _LARGEST)
        raise ValueError(
            f"{'x' if matrix is x else 'weight'} has shape {tuple(matrix.shape)}: the kernel's sizes may not exceed "
            f"{_LARGEST}; split the call, or pass impl='reference'"
        )
    return T, Fs


def linear_act_fwd(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
    activation: str,
    save_preact: bool,
    arriving: Gathered | None = None,
) -> list[torch.Tensor]:
    """y_i = act(z_i) + residual in one launch, then the z_i = x @ W_i^T + b_i if they are to be saved.

    x [T, D], W_i [F_i, D], b_i [F_i] or None, residual [T, F] (with one weight) or None -> y_i, z_i [T, F_i].
    """
    T, Fs = _sizes(x, weights)
    ys = [alloc.new_empty(x, T, F) for F in Fs]
    zs = [alloc.new_empty(x, T, F) for F in Fs] if save_preact else []
    run_gemm(
        "nt",
        (x,) * len(Fs),
        tuple(weights),
        tuple(zip(ys, zs) if save_preact else zip(ys)),
        activation=activation,
        biases=tuple(biases),
        sources=None if residual is None else ((residual.contiguous(),),),
        remote=arriving,
    )
    return ys + zs


def gated_linear_fwd(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activation: str,
    save_preact: bool,
    arriving: Gathered | None = None,
) -> list[torch.Tensor]:
    """h = act(g) * u in one launch, and g = x @ W_g^T + b_g, u = x @ W_u^T + b_u if they are to be saved.

    x [T, D], W_g and W_u [F, D], biases [F] or None -> h, g, u [T, F].
    """
    T, (F, _) = _sizes(x, weights)
    outs = [alloc.new_empty(x, T, F) for _ in range(3 if save_preact else 1)]
    run_gemm(
        "nt",
        (x, x),
        tuple(weights),
        (tuple(outs),),
        combine="gated",
        epilogue="gated",
        activation=activation,
        biases=tuple(biases),
        remote=arriving,
    )
    return outs


def linear_dgrad(
    dzs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], arriving: Gathered | None = None
) -> torch.Tensor:
    """dx = sum_i dz_i @ W_i, added up in the accumulator. dz_i [T, F_i], W_i [F_i, D] -> dx [T, D]."""
    dx = alloc.new_empty(dzs[0], dzs[0].shape[0], weights[0].shape[1])
    combine = "chained" if len(dzs) > 1 else "grouped"
    run_gemm("nn", tuple(dzs), tuple(weights), ((dx,),), combine=combine, remote=arriving)
    return dx


def send_product(layout: str, a: Matrices, b: Matrices, remote: Scattered) -> None:
    """Send the rows of x @ W^T (layout "nt"), or of sum_i dz_i @ W_i ("nn"), to the ranks that own them.

    a [T, K_i], b as the layout has it; ``remote.peers`` [R, ceil(T/R), N] of a's dtype.
    """
    own = remote.peers[remote.signals.rank]
    rows = own.view(-1, own.shape[-1])[: a[0].shape[0]]  # a matrix of C's shape; nothing is stored by its address
    combine = "chained" if len(a) > 1 else "grouped"
    run_gemm(layout, a, b, ((rows,),), combine=combine, epilogue="send", remote=remote)


def linear_dgrad_act(
    dy: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor,
    activation: str,
    recompute_act: bool,
    arriving: Gathered | None = None,
) -> list[torch.Tensor]:
    """dz = (dy @ W) * act'(z), and h = act(z) with ``recompute_act``. dy [T, D], W [D, F], z [T, F] -> dz, h [T, F]."""
    outs = [alloc.new_empty(z, *z.shape) for _ in range(2 if recompute_act else 1)]
    run_gemm(
        "nn",
        (dy,),
        (weight,),
        (tuple(outs),),
        epilogue="act_grad",
        activation=activation,
        sources=((z.contiguous(),),),
        remote=arriving,
    )
    return outs


def linear_dgrad_gated(
    dy: torch.Tensor,
    weight: torch.Tensor,
    g: torch.Tensor,
    u: torch.Tensor,
    activation: str,
    recompute_act: bool,
    arriving: Gathered | None = None,
) -> list[torch.Tensor]:
    """With dh = dy @ W: dg = dh * u * act'(g), du = dh * act(g), and h = act(g) * u with ``recompute_act``.

    dy [T, D], W [D, F], g and u [T, F] -> dg, du, h [T, F].
    """
    outs = [alloc.new_empty(g, *g.shape) for _ in range(3 if recompute_act else 2)]
    run_gemm(
        "nn",
        (dy,),
        (weight,),
        (tuple(outs),),
        epilogue="gated_grad",
        activation=activation,
        sources=((g.contiguous(), u.contiguous()),),
        remote=arriving,
    )
    return outs


def linear_wgrad(dzs: Sequence[torch.Tensor], x: torch.Tensor, want_bias: Sequence[bool]) -> list[torch.Tensor]:
    """dW_i = dz_i^T @ x and then, where wanted, db_i = sum_T dz_i, in one launch.

    dz_i [T, F_i], x [T, D] -> dW_i [F_i, D], db_i [F_i].
    """
    D = x.shape[1]
    dws = [alloc.new_empty(x, dz.shape[1], D) for dz in dzs]
    dbs = [alloc.new_empty(x, dz.shape[1]) if want else None for dz, want in zip(dzs, want_bias)]
    run_gemm("tn", tuple(dzs), (x,) * len(dzs), tuple(zip(dws)), row_sums=tuple(dbs))
    return dws + [db for db in dbs if db is not None]


def linear_wgrad_(
    dzs: Sequence[torch.Tensor], x: torch.Tensor, dws: Sequence[torch.Tensor], dbs: Sequence[torch.Tensor | None]
) -> None:
    """The same, added to what the buffers ``dws`` and ``dbs`` hold, in their own precision.

    Raises ValueError for a buffer that is not contiguous.
    """
    for buffer in (*dws, *dbs):
        if buffer is not None and not buffer.is_contiguous():
            raise ValueError(
                f"linear_wgrad_: a buffer has shape {tuple(buffer.shape)} and strides {buffer.stride()}: expected one "
                "that is contiguous"
            )
    run_gemm("tn", tuple(dzs), (x,) * len(dzs), tuple(zip(dws)), epilogue="accumulate", row_sums=tuple(dbs))


def act_grad(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """dz = dy * act'(z). dy, z [T, F] with any strides -> dz [T, F] contiguous."""
    dz = alloc.new_empty(z, *z.shape)
    _act_grad(dy, (z.contiguous(),), (dz,), "act_grad", activation)
    return dz


def gated_act_grad(
    dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """dg = dh * u * act'(g) and du = dh * act(g). All [T, F]; the results contiguous."""
    dg, du = [alloc.new_empty(g, *g.shape) for _ in range(2)]
    _act_grad(dh, (g.contiguous(), u.contiguous()), (dg, du), "gated_grad", activation)
    return dg, du


def _act_grad(dy: torch.Tensor, sources: Matrices, targets: Matrices, epilogue: str, activation: str) -> None:
    if dy.numel():
        operands = operands_of((dy, *sources, *targets))
        kernel, grid = plan_act_grad(device.architecture(dy.device), operands, epilogue, activation)
        kernel.launch(grid, (dy, sources, targets), on=dy)
