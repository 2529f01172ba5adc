"""Launches of the kernels in ``triton.py``, on tensors. All other arguments come from ``plan.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ..runtime import alloc, device, dispatch
from ..runtime.signals import Gathered, Remote, Scattered
from . import triton as kernels
from .config import forced_config
from .plan import Call, approximates, extent_of, fits_tma, plan_launch

Matrices = tuple[torch.Tensor, ...]
Optional = tuple["torch.Tensor | None", ...]


_LARGEST = 2**31 - 2**10  # of a size, which a kernel holds in 32 bits: the last tile's end still fits


def _own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the alignment of ``tensor`` would decide which instructions its rows are multiplied with."""
    if fits_tma(extent_of(tensor), tensor.element_size()) and not tensor.data_ptr() & 15:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


_CUDA = torch.cuda.is_available()


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Where device-made TMA descriptors live. From torch's allocator, so CUDA graphs capture it."""
    return torch.empty(size, dtype=torch.int8, device="cuda" if _CUDA else "cpu")


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
    outs = tuple(target[0] for target in targets)
    if not any(out.numel() for out in outs):
        return
    row_invariant = layout != "tn" and dispatch.row_invariant()
    if row_invariant and not isinstance(remote, Gathered):  # rows that arrive lie as they must
        a = tuple(map(_own_rows, a))
    if biases is not None:
        biases = tuple([bias if bias is None else bias.contiguous() for bias in biases])
    nothing = (None,) * len(outs)
    around = (biases or (None,) * len(a), scales, sources or nothing, targets, row_sums or nothing)
    call = Call(
        device.architecture(outs[0].device),
        layout,
        combine,
        epilogue,
        activation,
        tuple([extent_of(t) for t in a]),
        tuple([extent_of(t) for t in b]),
        tuple([extent_of(t) for t in outs]),
        (
            device.kinds_of(a),
            device.kinds_of(b),
            device.kinds_of(biases),
            device.kinds_of(scales),
            device.kinds_of(sources[0]) if sources else None,
            tuple([device.kinds_of(target) for target in targets]),
            device.kinds_of(row_sums),
        ),
        "" if scales is None else "row" if any(scale.numel() > 1 for scale in scales) else "tensor",
        a[0].dtype is torch.float32 and device.allow_tf32(),
        row_invariant,
        *_remoteness(remote),
    )
    plan = plan_launch(call) if forced_config() is None else plan_launch.__wrapped__(call)
    on = outs[0]
    grid = (min(plan.tiles, device.program_slots(on.device)), 1, 1)
    if plan.config.use_tma:
        # The allocator is a context variable: autograd's threads do not inherit it, so every launch sets it.
        triton.set_allocator(_scratch)
    ends = _ends(remote)
    if plan.split_sum is None:
        plan.product.launch(grid, (a, b, *around, *ends), on=on)
        return
    parts, part_sums = _workspaces(plan.config.split_k, outs, combine, row_sums or nothing)
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
        return None, None, 0
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


def _check_sizes(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """ValueError for sizes that 32 bits cannot hold, before anything is allocated. Strides and offsets have 64."""
    for name, matrix in (("x", x), *(("weight", weight) for weight in weights)):
        if max(matrix.shape) > _LARGEST:
            raise ValueError(
                f"{name} has shape {tuple(matrix.shape)}: the kernel's sizes may not exceed {_LARGEST}; split the "
                "call, or pass impl='reference'"
            )


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
    _check_sizes(x, weights)
    shapes = [(x.shape[0], w.shape[0]) for w in weights]
    ys = [alloc.empty(shape, x.dtype, x.device) for shape in shapes]
    zs = [alloc.empty(shape, x.dtype, x.device) for shape in shapes] if save_preact else []
    run_gemm(
        "nt",
        (x,) * len(weights),
        tuple(weights),
        tuple(zip(ys, zs)) if save_preact else tuple((y,) for y in ys),
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
    _check_sizes(x, weights)
    outs = [alloc.empty((x.shape[0], weights[0].shape[0]), x.dtype, x.device) for _ in range(3 if save_preact else 1)]
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
    dx = alloc.empty((dzs[0].shape[0], weights[0].shape[1]), dzs[0].dtype, dzs[0].device)
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
    outs = [alloc.empty(z.shape, z.dtype, z.device) for _ in range(2 if recompute_act else 1)]
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
    outs = [alloc.empty(g.shape, g.dtype, g.device) for _ in range(3 if recompute_act else 2)]
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
    dws = [alloc.empty((dz.shape[1], x.shape[1]), x.dtype, x.device) for dz in dzs]
    dbs = [alloc.empty((dz.shape[1],), x.dtype, x.device) if want else None for dz, want in zip(dzs, want_bias)]
    run_gemm("tn", tuple(dzs), (x,) * len(dzs), tuple((dw,) for dw in dws), row_sums=tuple(dbs))
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
    targets = tuple((dw,) for dw in dws)
    run_gemm("tn", tuple(dzs), (x,) * len(dzs), targets, epilogue="accumulate", row_sums=tuple(dbs))


def act_grad(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """dz = dy * act'(z). dy, z [T, F] with any strides -> dz [T, F] contiguous."""
    dz = alloc.empty(z.shape, z.dtype, z.device)
    _act_grad(dy, (z.contiguous(),), (dz,), "act_grad", activation)
    return dz


def gated_act_grad(
    dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """dg = dh * u * act'(g) and du = dh * act(g). All [T, F]; the results contiguous."""
    dg, du = (alloc.empty(g.shape, g.dtype, g.device) for _ in range(2))
    _act_grad(dh, (g.contiguous(), u.contiguous()), (dg, du), "gated_grad", activation)
    return dg, du


def _act_grad(dy: torch.Tensor, sources: Matrices, targets: Matrices, epilogue: str, activation: str) -> None:
    T, F = dy.shape
    on = sources[0]
    arch = device.architecture(on.device)
    block_t, block_f = (16, 64) if arch == device.INTERPRETER else (8, 256)
    args = {
        "dy_ptr": dy,
        "source_ptrs": sources,
        "target_ptrs": targets,
        "T": T,
        "F": F,
        "dy_strides": dy.stride(),
        "EPILOGUE": epilogue,
        "ACTIVATION": activation,
        "APPROX": approximates(arch, activation, on.dtype),
        "BLOCK_T": block_t,
        "BLOCK_F": block_f,
    }
    if on.numel():
        grid = (triton.cdiv(T, block_t), triton.cdiv(F, block_f))
        config = f"{block_t}x{block_f}"
        device.launch(kernels._act_grad_kernel, grid, args, num_warps=4, num_stages=1, on=on, config=config)
