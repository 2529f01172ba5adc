"""What a launch of the GEMM is made of: from shapes, strides and kinds of its tensors to every argument beside them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime import device, tuning
from ..runtime.signals_triton import clock_of
from . import triton as kernels
from .config import pick_config
from .gemm import Gemm, GemmConfig

Optional = tuple["torch.Tensor | None", ...]

# Shape and strides of a matrix.
Extent = tuple[torch.Size, tuple[int, ...]]


def extent_of(tensor: torch.Tensor) -> Extent:
    return tensor.shape, tensor.stride()


def _pitch(extent: Extent) -> int:
    """The distance of rows, in elements. A single row may claim any."""
    (rows, cols), (stride, _) = extent
    return stride if rows > 1 else cols


def fits_tma(extent: Extent, itemsize: int) -> bool:
    """Rows contiguous, and their pitch a multiple of 16 bytes (CUDA's rule for tensor maps); the base is to be too."""
    (rows, cols), (_, step) = extent
    pitch = _pitch(extent)
    return rows > 0 and cols > 0 and (step == 1 or cols == 1) and pitch >= cols and pitch * itemsize % 16 == 0


class Call(NamedTuple):
    """What the arguments of a launch depend on, but for addresses."""

    arch: str
    layout: str
    combine: str
    epilogue: str
    activation: str
    a: tuple[Extent, ...]
    b: tuple[Extent, ...]
    outs: tuple[Extent, ...]
    kinds: tuple[Any, ...]  # of the kernel's tensors
    scales: str  # "", "tensor" or "row"
    tf32: bool
    row_invariant: bool
    remote: str  # "", "gather" or "send"
    pieces: int  # these two as the kernel takes them
    flags: int


@dataclass(frozen=True)
class Plan:
    """How a call is launched: every argument of the kernel that is no tensor."""

    gemm: Gemm
    config: GemmConfig
    tiles: int  # times the parts of K
    product: device.Prepared
    split_sum: device.Prepared | None  # the second launch of a split product
    split_sum_tiles: int


@functools.lru_cache(4096)
def plan_launch(call: Call) -> Plan:
    trans_a, chained = call.layout == "tn", call.combine == "chained"
    a_kinds, b_kinds, _, _, source_kinds, target_kinds, _ = call.kinds
    (of_a, _), (of_b, _), (of_out, _) = a_kinds[0], b_kinds[0], target_kinds[0][0]
    around = [kind for kinds in (*target_kinds, source_kinds or ()) for kind in kinds]
    sizes = [tuple(shape) for shape, _ in call.outs]
    sizes_of_pairs = sizes * (len(call.a) // len(sizes))
    gemm = Gemm(
        call.layout,
        M=sum(m for m, _ in sizes) if trans_a else sizes[0][0],
        N=sizes[0][1] if trans_a else sum(n for _, n in sizes),
        K=sum(shape[1] for shape, _ in call.a) if chained else call.a[0][0][0 if trans_a else 1],
        dtype=of_a,
        out_dtype=of_out,
        combine=call.combine,
        pairs=len(call.a),
        epilogue=_steps(call),
        reads=len(source_kinds or ()) + (call.epilogue == "accumulate"),
        writes=len(target_kinds[0]),
        precision="tf32" if call.tf32 else "ieee",
        aligned=all(aligned for _, aligned in (*a_kinds, *b_kinds))
        and all(fits_tma(extent, of_a.itemsize) for extent in (*call.a, *call.b)),
        out_aligned=call.epilogue == "accumulate"
        or (all(aligned for _, aligned in around) and all(fits_tma(extent, of_out.itemsize) for extent in call.outs)),
        # Gradients (e5m2) are summed in fp32, as TransformerEngine does; activations and weights on the fast path.
        fp32_sums=torch.float8_e5m2 in (of_a, of_b),
        row_invariant=call.row_invariant,
        remote=call.remote,
    )
    config = pick_config(call.arch, gemm)
    sizes_args = {
        "T": call.a[0][0][0],
        "Ms": tuple(m for m, _ in sizes_of_pairs) if trans_a else None,
        "Ns": tuple(n for _, n in sizes_of_pairs),
    }
    split = config.split_k > 1
    modes = {
        "EPILOGUE": call.epilogue,
        "ACTIVATION": call.activation,
        "APPROX": approximates(call.arch, call.activation, of_out),
    }
    row_scales = {"ROW_SCALES": call.scales == "row"}
    product = device.Prepared(
        kernels._gemm_kernel,
        {
            **sizes_args,
            "Ks": None if trans_a else tuple(shape[1] for shape, _ in call.a),
            "a_strides": tuple((_pitch(extent), extent[1][1]) for extent in call.a),
            "b_strides": tuple((_pitch(extent), extent[1][1]) for extent in call.b),
            "splits": config.split_k,
            "COMBINE": call.combine,
            **({"EPILOGUE": "partial", "ACTIVATION": "identity", "APPROX": False} if split else modes),
            "TRANS_A": trans_a,
            "TRANS_B": call.layout == "nt",
            "SWAP": config.swap,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "PRECISION": gemm.precision,
            "MAX_IMPRECISE_ACC": config.block_k if gemm.fp32_sums else None,
            **({"ROW_SCALES": False} if split else row_scales),
            "UPCAST": call.arch == device.INTERPRETER,
            "USE_TMA": config.use_tma,
            "OUT_ALIGNED": config.use_tma and gemm.out_aligned,
            "EPILOGUE_SUBTILE": config.epilogue_subtile and not split,
            # AMD's pipeliner gains nothing from it; several main loops in one tile cannot be flattened.
            "FLATTEN": gemm.K > 0 and not chained and not call.arch.startswith("gfx"),
            "PIECES": call.pieces,
            "FLAGS": call.flags,
            "CLOCK": clock_of(call.arch) if call.remote else "",
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        config=config,
        gemm=gemm,
    )
    tiles = config.split_k * sum(_tiles(m, n, config.block_m, config.block_n) for m, n in sizes)
    if not split:
        return Plan(gemm, config, tiles, product, None, 0)
    block_m, block_n = (16, 32) if call.arch == device.INTERPRETER else (16, 128)
    split_sum = device.Prepared(
        kernels._split_sum_kernel,
        {**sizes_args, "splits": config.split_k, **modes, **row_scales, "BLOCK_M": block_m, "BLOCK_N": block_n},
        num_warps=4,
        num_stages=2,
        config=f"{block_m}x{block_n}",
    )
    return Plan(gemm, config, tiles, product, split_sum, max(_tiles(m, n, block_m, block_n) for m, n in sizes))


def approximates(arch: str, activation: str, stored: torch.dtype) -> bool:
    """Whether the kernels' activations need to be good to 16 bits only, and the chip has the instructions for that."""
    return activation != "identity" and stored.itemsize <= 2 and arch.startswith("sm_")


tuning.also_forget.append(plan_launch.cache_clear)


def _steps(call: Call) -> tuple[str, ...]:
    """The epilogue as ``Gemm`` names it."""
    _, _, biases, _, source, (target, *_), row_sums = call.kinds
    gradient = call.epilogue.endswith("_grad")
    steps = ["scale"] if call.scales else []
    steps += ["bias"] if biases and biases[0] else []
    steps += ["act_grad"] if gradient else []
    steps += [call.activation] if call.activation != "identity" else []
    steps += ["preact"] if call.epilogue in ("act", "gated") and len(target) > 1 else []
    steps += ["residual"] if call.epilogue == "act" and source else []
    steps += ["recompute_act"] if gradient and len(target) > 1 + call.epilogue.startswith("gated") else []
    steps += ["row_sum"] if row_sums and any(row_sums) else []
    steps += ["accumulate"] if call.epilogue == "accumulate" else []
    return tuple(steps)


def _tiles(m: int, n: int, block_m: int, block_n: int) -> int:
    return -(-m // block_m) * -(-n // block_n)
