"""What ties a :class:`Gemm` to the tables of measured configurations: its bucket, and whether an entry still fits."""

from __future__ import annotations

from ..runtime import fences
from ..runtime.chips import INTERPRETER, described
from ..runtime.dtype_names import short_name
from .gemm import Gemm, GemmConfig

OP = "gemm"  # what entries are filed under: they are of one launch, whichever public op made it
SOURCES = tuple(f"linear/{name}.py" for name in ("activations", "launch", "plan", "remote", "tiles", "triton"))
MAX_TOKENS = 16384  # more than this many tokens want what this many want

_ACCUMULATORS = 128  # fp32 per thread; more leave the epilogue too few of a thread's 255 registers


def bucket(gemm: Gemm) -> str | None:
    """The key under which ``gemm`` is measured: the token count rounded up to a power of two, the rest as it is.

    None where no table may decide: with symbolic sizes (asking would fix them), and where rows must come out the same
    whatever the token count.
    """
    if gemm.row_invariant or not all(isinstance(size, int) for size in (gemm.M, gemm.N, gemm.K)):
        return None
    tokens = min(1 << max(gemm.tokens - 1, 0).bit_length(), MAX_TOKENS)
    sizes = (f"m{gemm.M}", f"n{gemm.N}") if gemm.layout == "tn" else (f"n{gemm.N}", f"k{gemm.K}")
    parts = [gemm.layout, f"t{tokens}", *sizes, short_name(gemm.dtype)]
    parts += [f"to_{short_name(gemm.out_dtype)}"] if gemm.out_dtype != gemm.dtype else []
    parts += [f"{gemm.combine}{gemm.pairs}"] if gemm.pairs > 1 else []
    parts += gemm.epilogue
    parts += ["tf32"] if gemm.precision == "tf32" else []
    parts += [] if gemm.aligned else ["odd"]
    parts += [] if gemm.out_aligned else ["odd_out"]
    parts += [gemm.remote] if gemm.remote else []
    return "-".join(parts)


def fits(arch: str, gemm: Gemm, config: GemmConfig) -> bool:
    """Whether ``config`` can run ``gemm`` on ``arch``, by arithmetic: TMA, shared memory, accumulators, block sizes.

    What the compiler makes of it (spills above all) only the compiler knows.
    """
    if config.epilogue_subtile and gemm.combine == "gated":
        return False
    if config.split_k > 1 and (gemm.combine == "chained" or gemm.remote):
        return False
    interpreted = arch == INTERPRETER
    if config.use_tma and not (gemm.aligned and (interpreted or described(arch).asynchronous)):
        return False
    if needs_fence(arch, gemm, config) and not fences.fenced(arch):
        return False
    blocks = (config.block_m, config.block_n, config.block_k, config.num_warps)
    if min(blocks[:3]) < 16 or any(size & (size - 1) for size in blocks):  # tl.dot's and tl.arange's own limits
        return False
    if interpreted:
        return True
    chip = described(arch)
    products = 2 if gemm.combine == "gated" else 1
    accumulators = products * config.block_m * config.block_n / (config.num_warps * chip.warp_size)
    return accumulators <= _ACCUMULATORS and shared_bytes(arch, gemm, config) <= chip.shared_per_block


def needs_fence(arch: str, gemm: Gemm, config: GemmConfig) -> bool:
    """Whether products may read what cp.async copied (``runtime/fences.py``), which it does for 4 bytes and more."""
    return not config.use_tma and _asynchronous(arch, gemm, config)


def shared_bytes(arch: str, gemm: Gemm, config: GemmConfig) -> int:
    """Shared memory of one block, an estimate: the pipeline's tiles, and the epilogue's.

    Right to a percent for operands that are loaded asynchronously, too much for others (unaligned rows are not
    pipelined). Matrix instructions that run asynchronously (wgmma, tcgen05) keep a stage more than the others. On its
    way out a tile passes through shared memory, for TMA or for another layout; what the epilogue loads by TMA has its
    own tiles. Partial products go straight to memory, and on AMD everything does.
    """
    products = 2 if gemm.combine == "gated" else 1
    asynchronous = _asynchronous(arch, gemm, config)
    stages = config.num_stages if asynchronous else config.num_stages - 1
    pipeline = stages * (config.block_m + products * config.block_n) * config.block_k * gemm.dtype.itemsize
    if "row_sum" in gemm.epilogue and asynchronous:  # what is summed is loaded again
        pipeline += config.block_m * config.block_k * gemm.dtype.itemsize
    if arch.startswith("gfx") or config.split_k > 1:
        return pipeline
    by_tma = config.use_tma and "accumulate" not in gemm.epilogue
    width = config.block_n // 2 if config.epilogue_subtile else config.block_n
    itemsize = gemm.out_dtype.itemsize if config.use_tma else min(gemm.out_dtype.itemsize, 2)  # fp32 takes no more
    return pipeline + (1 + gemm.reads * by_tma) * config.block_m * width * itemsize


def _asynchronous(arch: str, gemm: Gemm, config: GemmConfig) -> bool:
    """Whether the product runs beside the code that has issued it."""
    rows = config.block_n if config.swap else config.block_m  # as the matrix instruction sees them
    ieee = gemm.fp32 and gemm.precision == "ieee"
    return fences.asynchronous(arch, rows, config.num_warps) and not ieee
