"""Launches of the kernels in ``triton.py``: from tensors to arguments. Configurations are in ``config.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from .. import alloc, device, dispatch
from . import triton as kernels
from .config import Gemm, GemmConfig, pick_config

Matrices = tuple[torch.Tensor, ...]
Optional = tuple["torch.Tensor | None", ...]


def _aligned(tensor: torch.Tensor) -> bool:
    """Rows contiguous, and base and row pitch multiples of 16 bytes (CUDA's rule for tensor maps)."""
    rows, cols = tensor.shape
    pitch = tensor.stride(0)
    return (
        rows > 0
        and cols > 0
        and tensor.stride(1) == 1
        and pitch >= cols
        and pitch * tensor.element_size() % 16 == 0
        and (tensor.is_meta or tensor.data_ptr() % 16 == 0)
    )


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Where device-made TMA descriptors live. From torch's allocator, so CUDA graphs capture it."""
    return torch.empty(size, dtype=torch.int8, device="cuda" if torch.cuda.is_available() else "cpu")


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
) -> None:
    """C = op(A) @ op(B) and its epilogue, with operands and modes as ``_gemm_kernel`` takes them.

    ``targets`` and ``sources`` hold one tuple of contiguous matrices [M, N] for each output. ``layout``: see ``Gemm``.
    """
    outs = tuple(target[0] for target in targets)
    if not any(out.numel() for out in outs):
        return
    where = outs[0].device
    trans_a, trans_b = layout == "tn", layout == "nt"
    biases = biases or (None,) * len(a)
    sources_of_all = sources or (None,) * len(outs)
    read = sources[0] if sources else ()
    row_sums = row_sums or (None,) * len(outs)
    sizes = [tuple(out.shape) for out in outs] * (len(a) // len(outs))
    gemm = Gemm(
        layout,
        M=sum(m for m, _ in sizes[: len(outs)]) if trans_a else sizes[0][0],
        N=sizes[0][1] if trans_a else sum(n for _, n in sizes[: len(outs)]),
        K=sum(t.shape[1] for t in a) if combine == "chained" else a[0].shape[0 if trans_a else 1],
        dtype=a[0].dtype,
        out_dtype=outs[0].dtype,
        combine=combine,
        pairs=len(a),
        epilogue=_steps(epilogue, activation, biases, len(read), len(targets[0]), row_sums, scales),
        reads=len(read) + (epilogue == "accumulate"),
        writes=len(targets[0]),
        precision="tf32" if a[0].dtype == torch.float32 and device.allow_tf32() else "ieee",
        aligned=all(_aligned(t) for ts in (a, b, *targets, read) for t in ts),
        # Gradients (e5m2) are summed in fp32, as TransformerEngine does; activations and weights on the fast path.
        fp32_sums=any(t.dtype == torch.float8_e5m2 for t in (*a, *b)),
        row_invariant=dispatch.row_invariant() and not trans_a,
    )
    arch = device.architecture(where)
    config = pick_config(arch, gemm)
    row_scales = scales is not None and any(scale.numel() > 1 for scale in scales)
    shape = {
        "T": a[0].shape[0],
        "Ms": tuple(m for m, _ in sizes) if trans_a else None,
        "Ns": tuple(n for _, n in sizes),
    }
    after = {
        "bias_ptrs": biases,
        "scale_ptrs": scales,
        "source_ptrs": sources_of_all,
        "target_ptrs": targets,
        "row_sum_ptrs": row_sums,
        "EPILOGUE": epilogue,
        "ACTIVATION": activation,
        "ROW_SCALES": row_scales,
    }
    product = after
    if config.split_k > 1:
        parts, part_sums = _workspaces(config.split_k, targets, combine, row_sums)
        product = {
            "bias_ptrs": (None,) * len(a),
            "scale_ptrs": None,
            "source_ptrs": (None,) * len(outs),
            "target_ptrs": parts,
            "row_sum_ptrs": part_sums,
            "EPILOGUE": "partial",
            "ACTIVATION": "identity",
            "ROW_SCALES": False,
        }
    args = {
        "a_ptrs": a,
        "b_ptrs": b,
        **product,
        **shape,
        "Ks": None if trans_a else tuple(t.shape[1] for t in a),
        "a_strides": tuple(t.stride() for t in a),
        "b_strides": tuple(t.stride() for t in b),
        "splits": config.split_k,
        "COMBINE": combine,
        "TRANS_A": trans_a,
        "TRANS_B": trans_b,
        "SWAP": config.swap,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "PRECISION": gemm.precision,
        "LONGEST_SUM": config.block_k if gemm.fp32_sums else None,
        "UPCAST": arch == device.INTERPRETER,
        "USE_TMA": config.use_tma,
        "HALVES": config.halves,
        # AMD's pipeliner gains nothing from it; several main loops in one tile cannot be flattened.
        "FLATTEN": combine != "chained" and not arch.startswith("gfx"),
    }
    if config.use_tma:
        # The allocator is a context variable: autograd's threads do not inherit it, so every launch sets it.
        triton.set_allocator(_scratch)
    tiles = config.split_k * sum(_tiles(m, n, config.block_m, config.block_n) for m, n in sizes[: len(outs)])
    device.launch(
        kernels._gemm_kernel,
        (min(tiles, device.program_slots(where)),),
        args,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        on=outs[0],
        config=config,
        gemm=gemm,
    )
    if config.split_k > 1:
        _sum_splits(config, sizes[: len(outs)], where, outs[0], shape | after, parts, part_sums)


def _sum_splits(
    config: GemmConfig,
    sizes: Sequence[tuple[int, ...]],
    where: torch.device,
    on: torch.Tensor,
    args: dict[str, Any],
    parts: tuple[Matrices, ...],
    part_sums: Optional,
) -> None:
    block_m, block_n = (16, 32) if device.architecture(where) == device.INTERPRETER else (16, 128)
    blocks = {"splits": config.split_k, "BLOCK_M": block_m, "BLOCK_N": block_n}
    device.launch(
        kernels._split_sum_kernel,
        (max(_tiles(m, n, block_m, block_n) for m, n in sizes),),
        {"partial_ptrs": parts, "partial_sum_ptrs": part_sums, **args, **blocks},
        num_warps=4,
        num_stages=2,
        on=on,
        config=f"{block_m}x{block_n}",
    )


def _tiles(m: int, n: int, block_m: int, block_n: int) -> int:
    return -(-m // block_m) * -(-n // block_n)


def _workspaces(
    splits: int, targets: tuple[Matrices, ...], combine: str, row_sums: Optional
) -> tuple[tuple[Matrices, ...], Optional]:
    """Where the parts of a split GEMM go: [splits, M, N] for each product of each output, [splits, M] for row sums."""
    outs = tuple(target[0] for target in targets)
    products = 2 if combine == "gated" else 1
    parts = tuple(
        tuple(alloc.empty((splits, *out.shape), torch.float32, out.device) for _ in range(products)) for out in outs
    )
    sums = tuple(
        None if row_sum is None else alloc.empty((splits, out.shape[0]), torch.float32, out.device)
        for out, row_sum in zip(outs, row_sums)
    )
    return parts, sums


def _steps(
    epilogue: str,
    activation: str,
    biases: Optional,
    sources: int,
    targets: int,
    row_sums: Optional,
    scales: Matrices | None,
) -> tuple[str, ...]:
    """The epilogue as ``Gemm`` names it."""
    gradient = epilogue.endswith("_grad")
    steps = ["scale"] if scales is not None else []
    steps += ["bias"] if biases[0] is not None else []
    steps += ["act_grad"] if gradient else []
    steps += [activation] if activation != "identity" else []
    steps += ["preact"] if epilogue in ("act", "gated") and targets > 1 else []
    steps += ["residual"] if epilogue == "act" and sources else []
    steps += ["rebuild"] if gradient and targets > 1 + epilogue.startswith("gated") else []
    steps += ["row_sum"] if any(t is not None for t in row_sums) else []
    steps += ["accumulate"] if epilogue == "accumulate" else []
    return tuple(steps)


def linear_act_fwd(
    x: torch.Tensor,
    weights: Matrices,
    biases: Optional,
    residual: torch.Tensor | None,
    activation: str,
    save_preact: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """y_i = act(z_i) + residual in one launch, and the z_i = x @ W_i^T + b_i if they are to be saved.

    x [T, D], W_i [F_i, D], b_i [F_i] or None, residual [T, F] (with one weight) or None -> y_i, z_i [T, F_i].
    """
    shapes = [(x.shape[0], w.shape[0]) for w in weights]
    ys = [alloc.empty(shape, x.dtype, x.device) for shape in shapes]
    zs = [alloc.empty(shape, x.dtype, x.device) for shape in shapes] if save_preact else []
    run_gemm(
        "nt",
        (x,) * len(weights),
        weights,
        tuple(zip(ys, zs)) if save_preact else tuple((y,) for y in ys),
        activation=activation,
        biases=biases,
        sources=None if residual is None else ((residual.contiguous(),),),
    )
    return ys, zs


def gated_linear_fwd(
    x: torch.Tensor, weights: Matrices, biases: Optional, activation: str, save_preacts: bool
) -> list[torch.Tensor]:
    """h = act(g) * u in one launch, and g = x @ W_g^T + b_g, u = x @ W_u^T + b_u if they are to be saved.

    x [T, D], W_g and W_u [F, D], biases [F] or None -> h, g, u [T, F].
    """
    outs = [alloc.empty((x.shape[0], weights[0].shape[0]), x.dtype, x.device) for _ in range(3 if save_preacts else 1)]
    run_gemm(
        "nt", (x, x), weights, (tuple(outs),), combine="gated", epilogue="gated", activation=activation, biases=biases
    )
    return outs


def linear_dgrad(dzs: Matrices, weights: Matrices) -> torch.Tensor:
    """dx = sum_i dz_i @ W_i, added up in the accumulator. dz_i [T, F_i], W_i [F_i, D] -> dx [T, D]."""
    dx = alloc.empty((dzs[0].shape[0], weights[0].shape[1]), dzs[0].dtype, dzs[0].device)
    run_gemm("nn", dzs, weights, ((dx,),), combine="chained" if len(dzs) > 1 else "grouped")
    return dx


def linear_dgrad_act(
    dy: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, activation: str, rebuild: bool
) -> list[torch.Tensor]:
    """dz = (dy @ W) * act'(z), and h = act(z) with ``rebuild``. dy [T, D], W [D, F], z [T, F] -> dz, h [T, F]."""
    outs = [alloc.empty(z.shape, z.dtype, z.device) for _ in range(2 if rebuild else 1)]
    run_gemm(
        "nn", (dy,), (weight,), (tuple(outs),), epilogue="act_grad", activation=activation, sources=((z.contiguous(),),)
    )
    return outs


def linear_dgrad_gated(
    dy: torch.Tensor, weight: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str, rebuild: bool
) -> list[torch.Tensor]:
    """With dh = dy @ W: dg = dh * u * act'(g), du = dh * act(g), and h = act(g) * u with ``rebuild``.

    dy [T, D], W [D, F], g and u [T, F] -> dg, du, h [T, F].
    """
    outs = [alloc.empty(g.shape, g.dtype, g.device) for _ in range(3 if rebuild else 2)]
    run_gemm(
        "nn",
        (dy,),
        (weight,),
        (tuple(outs),),
        epilogue="gated_grad",
        activation=activation,
        sources=((g.contiguous(), u.contiguous()),),
    )
    return outs


def linear_wgrad(
    dzs: Matrices, x: torch.Tensor, want_bias: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """dW_i = dz_i^T @ x and, where wanted, db_i = sum_T dz_i, in one launch.

    dz_i [T, F_i], x [T, D] -> dW_i [F_i, D], db_i [F_i].
    """
    dws = [alloc.empty((dz.shape[1], x.shape[1]), x.dtype, x.device) for dz in dzs]
    dbs = [alloc.empty((dz.shape[1],), x.dtype, x.device) if want else None for dz, want in zip(dzs, want_bias)]
    run_gemm("tn", dzs, (x,) * len(dzs), tuple((dw,) for dw in dws), row_sums=tuple(dbs))
    return dws, dbs


def linear_wgrad_(dzs: Matrices, x: torch.Tensor, dws: Matrices, dbs: Optional) -> None:
    """The same, added to what ``dws`` and ``dbs`` hold, in their own precision. They are contiguous."""
    run_gemm("tn", dzs, (x,) * len(dzs), tuple((dw,) for dw in dws), epilogue="accumulate", row_sums=dbs)


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
    block_t, block_f = (16, 64) if device.architecture(on.device) == device.INTERPRETER else (8, 256)
    args = {
        "dy_ptr": dy,
        "source_ptrs": sources,
        "target_ptrs": targets,
        "T": T,
        "F": F,
        "dy_strides": dy.stride(),
        "EPILOGUE": epilogue,
        "ACTIVATION": activation,
        "BLOCK_T": block_t,
        "BLOCK_F": block_f,
    }
    if on.numel():
        grid = (triton.cdiv(T, block_t), triton.cdiv(F, block_f))
        config = f"{block_t}x{block_f}"
        device.launch(kernels._act_grad_kernel, grid, args, num_warps=4, num_stages=1, on=on, config=config)
