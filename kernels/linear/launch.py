"""Configurations and launches of the kernels in ``triton.py``.

``pick_config`` is a pure function of chip, shape, dtype and epilogue; nothing is tuned while a model runs, and all
ranks agree without asking each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from .. import alloc, device
from . import triton as kernels

Matrices = tuple[torch.Tensor, ...]
Optional = tuple["torch.Tensor | None", ...]


@dataclass(frozen=True)
class GemmConfig:
    """Tile and pipeline of one GEMM launch."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    use_tma: bool
    group_m: int = 8

    def __str__(self) -> str:
        tma = "-tma" if self.use_tma else ""
        return f"{self.block_m}x{self.block_n}x{self.block_k}-w{self.num_warps}-s{self.num_stages}{tma}"


def pick_config(
    arch: str, M: int, N: int, dtype: torch.dtype, *, activation: str, precision: str, aligned: bool
) -> GemmConfig:
    """The configuration for an output of [M, N] with inputs of ``dtype`` on ``arch``.

    ``aligned`` says that every operand has the alignment TMA asks for. Blocks are the largest whose accumulator,
    epilogue and pipeline fit the register file and shared memory without a spill; the codegen tests hold that.
    """
    if arch == device.INTERPRETER:
        return GemmConfig(32, 32, 32, 4, 2, use_tma=aligned)
    if dtype == torch.float32:
        if precision == "ieee":  # no tensor cores: plain FMAs
            return GemmConfig(64, 64, 16, 8, 2, use_tma=False)
        if arch in ("sm_90", "sm_100"):
            return GemmConfig(128, 128, 32, 8, 3 if arch == "sm_90" else 2, use_tma=aligned)
        return GemmConfig(64, 128, 32, 4, 2, use_tma=False)
    if arch in ("sm_90", "sm_100"):
        if M <= 16:
            return GemmConfig(16, 64, 128, 4, 4, use_tma=aligned)
        if M <= 64:
            return GemmConfig(64, 128, 64, 4, 4, use_tma=aligned)
        if not aligned:
            return GemmConfig(128, 64, 64, 8, 3, use_tma=False)
        # The epilogue of erf-GeLU spills in the wide tile, and on sm_100 so does every epilogue but the plain one.
        narrow = ("gelu_erf",) if arch == "sm_90" else ("gelu_erf", "gelu_tanh", "silu", "relu")
        if activation in narrow or M * N < 2 * 132 * 128 * 128:
            return GemmConfig(128, 128, 64, 8, 4 if arch == "sm_90" else 3, use_tma=True)
        return GemmConfig(128, 256, 64, 8, 3, use_tma=True)
    if arch.startswith("gfx"):
        if M <= 64:
            return GemmConfig(32, 64, 64, 4, 2, use_tma=False)
        return GemmConfig(128, 128, 64, 8, 2, use_tma=False)
    if M <= 64:
        return GemmConfig(32, 64, 64, 4, 4, use_tma=False)
    return GemmConfig(128, 128 if aligned else 64, 32, 8, 4, use_tma=False)


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


def _gemm_args(
    arch: str,
    a: Matrices,
    b: Matrices,
    c: Matrices,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Optional | None = None,
    preact: Optional | None = None,
    row_sum: Optional | None = None,
    activation: str = "identity",
    precision: str = "ieee",
) -> tuple[dict[str, Any], GemmConfig]:
    """Every argument of ``_gemm_kernel`` by name, and the configuration, for C = act(op(A) @ op(B) + bias).

    One C for several pairs adds the pairs up; otherwise there is one C per pair.
    """
    chained = len(c) == 1 and len(a) > 1
    none = (None,) * len(c)
    sizes = [(out.shape[0], out.shape[1]) for out in (c * len(a) if chained else c)]
    tensors = (*a, *b, *c, *(z for z in preact or () if z is not None))
    config = pick_config(
        arch,
        M=max(m for m, _ in sizes),
        N=sum(n for _, n in sizes[: len(c)]),
        dtype=a[0].dtype,
        activation=activation,
        precision=precision,
        aligned=all(_aligned(t) for t in tensors),
    )
    args = {
        "a_ptrs": a,
        "b_ptrs": b,
        "c_ptrs": c,
        "bias_ptrs": bias or none,
        "preact_ptrs": preact or none,
        "row_sum_ptrs": row_sum or none,
        "T": a[0].shape[0],
        "Ms": tuple(m for m, _ in sizes) if trans_a else None,
        "Ns": tuple(n for _, n in sizes),
        "Ks": None if trans_a else tuple(t.shape[1] for t in a),
        "a_strides": tuple(t.stride() for t in a),
        "b_strides": tuple(t.stride() for t in b),
        "c_strides": tuple(t.stride() for t in c),
        "CHAINED": chained,
        "TRANS_A": trans_a,
        "TRANS_B": trans_b,
        "ACTIVATION": activation,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "PRECISION": precision,
        "UPCAST": arch == device.INTERPRETER,
        "USE_TMA": config.use_tma,
        # AMD's pipeliner gains nothing from it; several main loops in one tile cannot be flattened.
        "FLATTEN": not chained and not arch.startswith("gfx"),
    }
    return args, config


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Where device-made TMA descriptors live. From torch's allocator, so CUDA graphs capture it."""
    return torch.empty(size, dtype=torch.int8, device="cuda" if torch.cuda.is_available() else "cpu")


def _gemm(a: Matrices, b: Matrices, c: Matrices, **epilogue: Any) -> None:
    where = c[0].device
    precision = "tf32" if a[0].dtype == torch.float32 and device.allow_tf32() else "ieee"
    args, config = _gemm_args(device.architecture(where), a, b, c, precision=precision, **epilogue)
    tiles = sum(triton.cdiv(out.shape[0], config.block_m) * triton.cdiv(out.shape[1], config.block_n) for out in c)
    if tiles == 0:
        return
    if config.use_tma:
        # The allocator is a context variable: autograd's threads do not inherit it, so every launch sets it.
        triton.set_allocator(_scratch)
    device.launch(
        kernels._gemm_kernel,
        (min(tiles, device.program_slots(where)),),
        args,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        on=c[0],
        config=config,
    )


def linear_act_fwd(
    x: torch.Tensor, weights: Matrices, biases: Optional, activation: str, save_preact: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """y_i = act(x @ W_i^T + b_i) in one launch, and the z_i = x @ W_i^T + b_i if they are to be saved.

    x [T, D], W_i [F_i, D], b_i [F_i] or None -> y_i, z_i [T, F_i].
    """
    shapes = [(x.shape[0], w.shape[0]) for w in weights]
    ys = [alloc.empty(shape, x.dtype, x.device) for shape in shapes]
    zs = [alloc.empty(shape, x.dtype, x.device) for shape in shapes] if save_preact else []
    _gemm(
        (x,) * len(weights), weights, tuple(ys),
        trans_b=True, bias=biases, preact=tuple(zs) or None, activation=activation,
    )  # fmt: skip
    return ys, zs


def linear_dgrad(dzs: Matrices, weights: Matrices) -> torch.Tensor:
    """dx = sum_i dz_i @ W_i, added up in the accumulator. dz_i [T, F_i], W_i [F_i, D] -> dx [T, D]."""
    dx = alloc.empty((dzs[0].shape[0], weights[0].shape[1]), dzs[0].dtype, dzs[0].device)
    _gemm(dzs, weights, (dx,))
    return dx


def linear_wgrad(
    dzs: Matrices, x: torch.Tensor, want_bias: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """dW_i = dz_i^T @ x and, where wanted, db_i = sum_T dz_i, in one launch.

    dz_i [T, F_i], x [T, D] -> dW_i [F_i, D], db_i [F_i].
    """
    dws = [alloc.empty((dz.shape[1], x.shape[1]), x.dtype, x.device) for dz in dzs]
    dbs = [alloc.empty((dz.shape[1],), x.dtype, x.device) if want else None for dz, want in zip(dzs, want_bias)]
    _gemm(dzs, (x,) * len(dzs), tuple(dws), trans_a=True, row_sum=tuple(dbs))
    return dws, dbs


def act_grad(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """dz = dy * act'(z). dy [T, F] with any strides, z [T, F] contiguous -> dz [T, F] contiguous."""
    dz = alloc.empty(z.shape, z.dtype, z.device)
    block_t, block_f = (16, 64) if device.architecture(z.device) == device.INTERPRETER else (8, 256)
    args = {
        "dy_ptr": dy,
        "z_ptr": z,
        "dz_ptr": dz,
        "T": z.shape[0],
        "F": z.shape[1],
        "dy_strides": dy.stride(),
        "ACTIVATION": activation,
        "BLOCK_T": block_t,
        "BLOCK_F": block_f,
    }
    if dz.numel():
        grid = (triton.cdiv(z.shape[0], block_t), triton.cdiv(z.shape[1], block_f))
        config = f"{block_t}x{block_f}"
        device.launch(kernels._act_grad_kernel, grid, args, num_warps=4, num_stages=1, on=dz, config=config)
    return dz
