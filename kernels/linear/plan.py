"""What a launch of the GEMM is made of: from shapes, strides and kinds of its tensors to every argument beside them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime import device, tuning
from ..runtime.signals_triton import clock_of
from . import triton as kernels
from .config import pick_config
from .gemm import Gemm, GemmConfig

Optional = tuple["torch.Tensor | None", ...]


class Operand(NamedTuple):
    """What a launch depends on of one of its tensors."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool  # whether its address is a multiple of 16 bytes

    @property
    def pitch(self) -> int:
        """The distance of rows, in elements. A single row may claim any."""
        return self.strides[0] if self.shape[0] > 1 else self.shape[1]

    @property
    def fits_tma(self) -> bool:
        """An aligned address, rows contiguous, and their pitch a multiple of 16 bytes: CUDA's rule for tensor maps."""
        (rows, cols), pitch = self.shape, self.pitch
        dense = (self.strides[1] == 1 or cols == 1) and pitch >= cols
        return self.aligned and rows > 0 and cols > 0 and dense and pitch * self.dtype.itemsize % 16 == 0


def operands_of(tensors: Sequence[torch.Tensor | None]) -> Any:
    """The fields of :class:`Operand`, or None, for each; plain tuples, because each launch makes them."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, not t.data_ptr() & 15) for t in tensors])


class Call(NamedTuple):
    """What the arguments of a launch depend on."""

    arch: str
    layout: str
    combine: str
    epilogue: str
    activation: str
    # Of the kernel's tensors, what operands_of says:
    a: Any
    b: Any
    biases: Any
    scales: Any
    source: Any  # of the first output, as the others' are like it
    targets: Any
    row_sums: Any
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
def plan_launch(*fields: Any) -> Plan:
    """The plan of a :class:`Call`, whose fields are the arguments: one fewer value to make for every launch."""
    call = Call._make(fields)
    trans_a, chained = call.layout == "tn", call.combine == "chained"
    a, b, source, *targets = (
        [Operand._make(each) for each in operands] for operands in (call.a, call.b, call.source or (), *call.targets)
    )
    of_a, of_b, of_out = a[0].dtype, b[0].dtype, targets[0][0].dtype
    sizes = [tuple(target[0].shape) for target in targets]
    sizes_of_pairs = sizes * (len(a) // len(sizes))
    by_row = any(scale.numel() > 1 for scale, *_ in call.scales or ())
    gemm = Gemm(
        call.layout,
        M=sum(m for m, _ in sizes) if trans_a else sizes[0][0],
        N=sizes[0][1] if trans_a else sum(n for _, n in sizes),
        K=sum(each.shape[1] for each in a) if chained else a[0].shape[0 if trans_a else 1],
        dtype=of_a,
        out_dtype=of_out,
        combine=call.combine,
        pairs=len(a),
        epilogue=_steps(call),
        reads=len(source) + (call.epilogue == "accumulate"),
        writes=len(targets[0]),
        precision="tf32" if call.tf32 else "ieee",
        aligned=all(each.fits_tma for each in (*a, *b)),
        out_aligned=call.epilogue == "accumulate"
        or all(each.fits_tma for operands in (source, *targets) for each in operands),
        # Gradients (e5m2) are summed in fp32, as TransformerEngine does; activations and weights on the fast path.
        fp32_sums=torch.float8_e5m2 in (of_a, of_b),
        row_invariant=call.row_invariant,
        remote=call.remote,
    )
    config = pick_config(call.arch, gemm)
    sizes_args = {
        "T": a[0].shape[0],
        "Ms": tuple(m for m, _ in sizes_of_pairs) if trans_a else None,
        "Ns": tuple(n for _, n in sizes_of_pairs),
    }
    split = config.split_k > 1
    modes = {
        "EPILOGUE": call.epilogue,
        "ACTIVATION": call.activation,
        "APPROX": approximates(call.arch, call.activation, of_out),
    }
    row_scales = {"ROW_SCALES": by_row}
    product = device.Prepared(
        kernels._gemm_kernel,
        {
            **sizes_args,
            "Ks": None if trans_a else tuple(each.shape[1] for each in a),
            "a_strides": tuple((each.pitch, each.strides[1]) for each in a),
            "b_strides": tuple((each.pitch, each.strides[1]) for each in b),
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
            # A tile that a sum reads too has no swizzle in shared memory either: ldmatrix takes 32 wavefronts for 4.
            "RELOAD": call.arch.startswith("sm_"),
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
    # Four numbers to a thread: eight of fp32, as wide as bf16 is stored by, take two requests for the same sectors.
    block_m, block_n = (16, 32) if call.arch == device.INTERPRETER else (4, 128)
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


@functools.lru_cache(4096)
def plan_act_grad(
    arch: str, operands: Any, epilogue: str, activation: str
) -> tuple[device.Prepared, tuple[int, int, int]]:
    """The launch of ``_act_grad_kernel`` on its tensors, the first of which is dy, and its grid."""
    dy, z, *_ = (Operand._make(each) for each in operands)
    (T, F), (block_t, block_f) = dy.shape, (16, 64) if arch == device.INTERPRETER else (8, 256)
    kernel = device.Prepared(
        kernels._act_grad_kernel,
        {
            "T": T,
            "F": F,
            "dy_strides": dy.strides,
            "EPILOGUE": epilogue,
            "ACTIVATION": activation,
            "APPROX": approximates(arch, activation, z.dtype),
            "BLOCK_T": block_t,
            "BLOCK_F": block_f,
        },
        num_warps=4,
        num_stages=1,
        config=f"{block_t}x{block_f}",
    )
    return kernel, (-(-T // block_t), -(-F // block_f), 1)


def _steps(call: Call) -> tuple[str, ...]:
    """The epilogue as ``Gemm`` names it."""
    biases, source, target, row_sums = call.biases, call.source, call.targets[0], call.row_sums
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
