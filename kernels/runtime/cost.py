"""What one GEMM launch costs on paper: work, traffic, waves, and the time that follows from them.

A model, not a measurement. Per launch it takes the longest of

    math     the FLOPs of all tiles, padding included, at the chip's dense peak, over the share of the last wave's
             multiprocessors that have a tile (wave quantisation: NVIDIA's "Matrix Multiplication Background User's
             Guide"; a part of a split K counts as a tile of its own: Osama et al., Stream-K, arXiv:2301.03598)
    memory   the bytes that must pass between chip and device memory, at its bandwidth or at what the pipelines keep in
             flight, whichever is less (Little's law: bytes in flight = bandwidth x latency)
    L2       the bytes that tiles draw from the level that all multiprocessors share: every tile streams its own panels

(Williams et al., Roofline, doi:10.1145/1498765.1498785), and adds what nothing can overlap: filling the first pipeline,
the epilogue of the last wave, and with split K the start of the second launch.

It assumes the peaks of ``chips.py`` (clocks fall under load, so the share of the peak is an upper bound), operands that
come from device memory once, matrix instructions at full rate in every tile shape (Hopper's older ones, which blocks of
fewer than 64 rows use, are slower), epilogues that hide under the next tile's loads, one output where several pairs
have one each, and nothing spilled. The constants below are assumptions too. Good for ranking configurations and for
saying what bounds a shape; a time that is to be believed is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .chips import Chip
from .dtype_names import short_name

if TYPE_CHECKING:
    from ..linear.gemm import Gemm, GemmConfig

LATENCY_US = 1.0  # of device memory under load
SECOND_LAUNCH_US = 2.0  # between two dependent kernels of one stream
PARTIAL_BYTES = 4  # partial products are fp32

# What eager torch does beside its GEMMs, in passes over [T, F] that an epilogue saves. Forward: act(z) reads z and
# writes h; gated, act(g) and the product. Backward: act' reads dh and z and writes dz, which the bias gradient reads
# again; gated (no bias), du = dh * act(g), the product's other factor, and act'.
PASSES = {"forward": 2, "backward": 4, "gated forward": 5, "gated backward": 9}


@dataclass(frozen=True)
class _Shared:
    """The cache that all multiprocessors share: bytes, and bytes/s from it. No data sheet has both."""

    size: int
    bandwidth: float


# A100: 5120 bytes/clock (NVIDIA's A100 white paper) at the clock of its peak rate. H100: NVIDIA gives no figure; the
# same per clock. B200: no figure either; twice that, for two dies. MI300X: its Infinity Cache (AMD's CDNA 3 white
# paper).
_SHARED = {
    "NVIDIA A100": _Shared(40 << 20, 7.2e12),
    "NVIDIA H100": _Shared(50 << 20, 9.4e12),
    "NVIDIA B200": _Shared(126 << 20, 19e12),
    "AMD MI300X": _Shared(256 << 20, 17.2e12),
}


@dataclass(frozen=True)
class Cost:
    """One GEMM launch (with split K: the second one included) in one configuration on one chip.

    FLOPs count a multiply-add as two, without padding and without the epilogue's. Bytes and microseconds; shares from
    0 to 1.
    """

    flops: int
    bytes: int  # to and from device memory, each operand and result once
    shared_bytes: int  # to and from the shared cache
    tiles: int  # times the parts of K
    waves: int  # rounds of tiles over all resident programs
    efficiency: float  # of the waves: tiles / (waves x programs)
    math_us: float
    memory_us: float
    shared_us: float
    epilogue_us: float  # of the last wave, under which nothing runs
    time_us: float
    peak_share: float  # of the chip's dense peak in this precision
    bound: str  # "math", "memory", "latency" (too few bytes in flight to use the memory), "L2"


def predict(chip: Chip, gemm: Gemm, config: GemmConfig, *, programs_per_sm: int = 1) -> Cost:
    """The model's figures for ``gemm`` with ``config``; every size at least 1.

    ``programs_per_sm``: how many persistent programs share a multiprocessor (the launcher starts one). ValueError where
    the chip has no rate for the precision.
    """
    peak = peak_flops(chip, gemm)
    size, out_size = gemm.dtype.itemsize, gemm.out_dtype.itemsize
    products = 2 if gemm.combine == "gated" else 1
    tiles_m, tiles_n = _cdiv(gemm.M, config.block_m), _cdiv(gemm.N, config.block_n)
    tiles = tiles_m * tiles_n * config.split_k
    programs = chip.sms * programs_per_sm
    waves = _cdiv(tiles, programs)
    active = min(tiles, programs)

    part = _cdiv(_cdiv(gemm.K, config.block_k), config.split_k) * config.block_k
    tile_flops = 2 * products * config.block_m * config.block_n * part
    math_us = waves * programs * tile_flops / peak * 1e6

    outside = _epilogue_bytes(gemm)
    partial = 2 * products * config.split_k * gemm.M * gemm.N * PARTIAL_BYTES if config.split_k > 1 else 0
    shared = _SHARED.get(chip.name, _Shared(0, float("inf")))
    moved = size * (gemm.M + products * gemm.N) * gemm.K + outside
    moved += partial if partial > shared.size // 2 else 0  # what is written and read at once stays in the cache
    streamed = size * (tiles_n * gemm.M + products * tiles_m * gemm.N) * gemm.K + outside + partial

    stages = max(1, config.num_stages - 1)
    in_flight = active * stages * size * (config.block_m + products * config.block_n) * config.block_k
    pulled = in_flight / (LATENCY_US * 1e-6)
    times = {
        "math": math_us,
        "latency" if pulled < chip.bandwidth else "memory": moved / min(chip.bandwidth, pulled) * 1e6,
        "L2": streamed / shared.bandwidth * 1e6,
    }
    bound = max(times, key=times.__getitem__)

    per_element = products * PARTIAL_BYTES if config.split_k > 1 else out_size * (gemm.reads + gemm.writes)
    epilogue_us = active * config.block_m * config.block_n * per_element / chip.bandwidth * 1e6
    time_us = times[bound] + LATENCY_US + epilogue_us + (SECOND_LAUNCH_US if config.split_k > 1 else 0.0)
    flops = 2 * products * gemm.M * gemm.N * gemm.K
    return Cost(
        flops=flops,
        bytes=moved,
        shared_bytes=streamed,
        tiles=tiles,
        waves=waves,
        efficiency=tiles / (waves * programs),
        math_us=math_us,
        memory_us=times.get("memory", times.get("latency", 0.0)),
        shared_us=times["L2"],
        epilogue_us=epilogue_us,
        time_us=time_us,
        peak_share=flops / (time_us * 1e-6 * peak),
        bound=bound,
    )


def peak_flops(chip: Chip, gemm: Gemm) -> float:
    """The chip's dense rate for the precision that ``gemm`` multiplies in, FLOP/s; ValueError where it has none."""
    name = "tf32" if gemm.precision == "tf32" else "fp8" if gemm.dtype.itemsize == 1 else short_name(gemm.dtype)
    if name not in chip.flops:
        raise ValueError(f"{chip.name} has no rate for {name}: it has {', '.join(chip.flops)}")
    return chip.flops[name]


def pass_bytes(passes: int, T: int, F: int, *, itemsize: int = 2, accumulated: int = 0) -> int:
    """What fusing saves eager torch from moving: ``passes`` (see PASSES) over [T, F] in elements of ``itemsize`` bytes.

    ``accumulated`` weight elements have their gradient added to an fp32 buffer, for which eager reads the gradient,
    and reads and writes the buffer.
    """
    return passes * T * F * itemsize + accumulated * (itemsize + 2 * 4)


def pass_bound(gemm_us: float, bandwidth: float, saved: int) -> float:
    """All that fusing can win over eager torch, as a share of the GEMMs' time: 0.06 means 6 %.

    ``gemm_us`` are the plain GEMMs of the same work and ``bandwidth`` is that of a device copy (bytes/s, read and
    write counted), both measured; ``saved`` are the :func:`pass_bytes`.
    """
    return saved / bandwidth * 1e6 / gemm_us


def _epilogue_bytes(gemm: Gemm) -> int:
    """Results, and what the epilogue reads beside the accumulators."""
    matrices = (gemm.reads + gemm.writes) * gemm.M * gemm.N * gemm.out_dtype.itemsize
    biases = (2 if gemm.combine == "gated" else 1) * gemm.N * gemm.dtype.itemsize if "bias" in gemm.epilogue else 0
    sums = gemm.M * gemm.out_dtype.itemsize if "row_sum" in gemm.epilogue else 0
    return matrices + biases + sums


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
