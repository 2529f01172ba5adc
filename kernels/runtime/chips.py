"""The chips that kernels are compiled for: what one of each can hold, and how fast it is on paper.

One entry per name in ``registry.TARGETS``, for the part that most people mean by it. Sources: per-block and per-SM
limits from the CUDA C++ Programming Guide ("Technical Specifications per Compute Capability") and, for gfx942, LLVM's
"User Guide for AMDGPU Backend" and the CDNA3 instruction set; SM counts and dense peak rates (with fp32 sums) from the
vendors' data sheets (A100 80GB SXM, L40S, H100 SXM, B200, MI300X) and NVIDIA's white papers on GA102 (RTX 3090) and on
the RTX Blackwell architecture (RTX 5090).

Configurations follow from what stands here, never from a chip's name: :func:`described` finds the entry for any chip.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1024

# Stands for the chip where kernels are interpreted: small blocks, so that small tests still cross tile borders.
INTERPRETER = "interpreter"

# The register file of every SM here is split evenly among four schedulers (AMD: SIMDs); a warp lives in one of them.
_SCHEDULERS = 4


@dataclass(frozen=True)
class Chip:
    """Limits and peaks of one GPU. "SM" also means AMD's compute unit, "warp" its wavefront, "shared" its LDS."""

    name: str
    matrix: str  # its matrix instruction: "mma" and "mfma" have read their operands when they are issued, "wgmma" and
    # "tcgen05" read shared memory until they are waited for
    sms: int
    warp_size: int
    max_warps_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int  # 32-bit registers; AMD: vector registers, the accumulation half included
    registers_per_thread: int  # the most that one thread can address
    register_step: int  # registers are handed to a warp in multiples of this many per warp
    shared_per_block: int  # bytes, the most that one block may ask for
    shared_per_sm: int  # bytes
    shared_step: int  # bytes, shared memory is handed to a block in multiples of this
    shared_reserved: int  # bytes per block that the driver takes for itself
    flops: Mapping[str, float]  # dense matrix FLOP/s by input dtype; "fp32" without tensor cores
    bandwidth: float  # bytes/s of device memory
    cache: int  # bytes, the last cache before device memory
    spills_early: bool = False  # its assembler (ptxas 12.8) gives up registers for blocks, and spills where others fit

    @property
    def asynchronous(self) -> bool:
        """Whether matrix products of 64 rows and more run beside the code that has issued them."""
        return self.matrix in ("wgmma", "tcgen05")

    def blocks_per_sm(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """How many blocks of one kernel an SM holds at once: the method of NVIDIA's occupancy calculator.

        ``registers`` per thread, ``shared_bytes`` and ``num_warps`` per block. 0 when not even one fits.
        """
        if shared_bytes > self.shared_per_block or registers > self.registers_per_thread:
            return 0
        limits = [self.max_blocks_per_sm, self.max_warps_per_sm // num_warps]
        if registers:
            per_warp = _round_up(registers * self.warp_size, self.register_step)
            warps = self.registers_per_sm // _SCHEDULERS // per_warp * _SCHEDULERS
            limits.append(warps // num_warps)
        shared = _round_up(shared_bytes + self.shared_reserved, self.shared_step)
        if shared:
            limits.append(self.shared_per_sm // shared)
        return min(limits)

    def occupancy(self, registers: int, shared_bytes: int, num_warps: int) -> float:
        """Resident warps as a share of what an SM can hold, 0 to 1."""
        return self.blocks_per_sm(registers, shared_bytes, num_warps) * num_warps / self.max_warps_per_sm


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@functools.cache
def described(arch: str) -> Chip:
    """The entry of CHIPS whose limits a chip is configured by: its own, or that of one whose blocks hold no more.

    That is the nearest below it of the same generation; "sm_86", whose blocks hold the least, for a generation that
    nobody listed. Of AMD's chips gfx942 stands for all.
    """
    if arch in CHIPS:
        return CHIPS[arch]
    if arch.startswith("gfx"):
        return CHIPS["gfx942"]
    generation, number = arch[:-1], int(arch.removeprefix("sm_"))
    listed = {int(name.removeprefix("sm_")): chip for name, chip in CHIPS.items() if name[:-1] == generation}
    below = [listed[each] for each in sorted(listed) if each < number]
    return below[-1] if below else CHIPS["sm_86"]


@functools.cache
def multiplies_asynchronously(arch: str) -> bool:
    """Whether matrix products on a chip, or in the interpreter, run beside the code that has issued them."""
    return arch.startswith("sm_") and described(arch).asynchronous


@functools.cache
def converts_e4m3(arch: str) -> bool:
    """Whether Triton converts float8_e4m3fn on this chip; elsewhere ``fp8_bits.py`` does.

    (The interpreter's conversion rounds wrongly.)
    """
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 89


@functools.cache
def rounds_fp8_twice(arch: str) -> bool:
    """Whether Triton's conversion of fp32 to fp8 goes through fp16 on this chip: of 4,096 normal numbers 20 end a place
    off.
    """
    return arch == "sm_89"


CHIPS: dict[str, Chip] = {
    "sm_80": Chip(
        name="NVIDIA A100",
        matrix="mma",
        sms=108,
        warp_size=32,
        max_warps_per_sm=64,
        max_blocks_per_sm=32,
        registers_per_sm=64 * KIB,
        registers_per_thread=255,
        register_step=256,
        shared_per_block=163 * KIB,
        shared_per_sm=164 * KIB,
        shared_step=128,
        shared_reserved=KIB,
        flops={"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
        bandwidth=2.039e12,
        cache=40 * KIB * KIB,
    ),
    "sm_86": Chip(
        name="NVIDIA RTX 3090",
        matrix="mma",
        sms=82,
        warp_size=32,
        max_warps_per_sm=48,
        max_blocks_per_sm=16,
        registers_per_sm=64 * KIB,
        registers_per_thread=255,
        register_step=256,
        shared_per_block=99 * KIB,
        shared_per_sm=100 * KIB,
        shared_step=128,
        shared_reserved=KIB,
        flops={"bf16": 71e12, "fp16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12},
        bandwidth=0.936e12,
        cache=6 * KIB * KIB,
    ),
    "sm_89": Chip(
        name="NVIDIA L40S",
        matrix="mma",
        sms=142,
        warp_size=32,
        max_warps_per_sm=48,
        max_blocks_per_sm=24,
        registers_per_sm=64 * KIB,
        registers_per_thread=255,
        register_step=256,
        shared_per_block=99 * KIB,
        shared_per_sm=100 * KIB,
        shared_step=128,
        shared_reserved=KIB,
        flops={"fp8": 733e12, "bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
        bandwidth=0.864e12,
        cache=96 * KIB * KIB,
    ),
    "sm_90": Chip(
        name="NVIDIA H100",
        matrix="wgmma",
        sms=132,
        warp_size=32,
        max_warps_per_sm=64,
        max_blocks_per_sm=32,
        registers_per_sm=64 * KIB,
        registers_per_thread=255,
        register_step=256,
        shared_per_block=227 * KIB,
        shared_per_sm=228 * KIB,
        shared_step=128,
        shared_reserved=KIB,
        flops={"fp8": 1979e12, "bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "fp32": 67e12},
        bandwidth=3.35e12,
        cache=50 * KIB * KIB,
    ),
    "sm_100": Chip(
        name="NVIDIA B200",
        matrix="tcgen05",
        sms=148,
        warp_size=32,
        max_warps_per_sm=64,
        max_blocks_per_sm=32,
        registers_per_sm=64 * KIB,
        registers_per_thread=255,
        register_step=256,
        shared_per_block=227 * KIB,
        shared_per_sm=228 * KIB,
        shared_step=128,
        shared_reserved=KIB,
        flops={"fp8": 4500e12, "bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 75e12},
        bandwidth=8.0e12,
        cache=126 * KIB * KIB,
    ),
    "sm_120": Chip(
        name="NVIDIA RTX 5090",
        matrix="mma",
        sms=170,
        warp_size=32,
        max_warps_per_sm=48,
        max_blocks_per_sm=24,
        registers_per_sm=64 * KIB,
        registers_per_thread=255,
        register_step=256,
        shared_per_block=99 * KIB,
        shared_per_sm=100 * KIB,
        shared_step=128,
        shared_reserved=KIB,
        flops={"fp8": 419e12, "bf16": 209.5e12, "fp16": 209.5e12, "tf32": 104.8e12, "fp32": 104.8e12},
        bandwidth=1.792e12,
        cache=96 * KIB * KIB,
        spills_early=True,
    ),
    "gfx942": Chip(
        name="AMD MI300X",
        matrix="mfma",
        sms=304,
        warp_size=64,
        max_warps_per_sm=32,
        max_blocks_per_sm=16,
        registers_per_sm=4 * 512 * 64,
        registers_per_thread=512,
        register_step=8 * 64,
        shared_per_block=64 * KIB,
        shared_per_sm=64 * KIB,
        shared_step=512,
        shared_reserved=0,
        flops={"fp8": 2615e12, "bf16": 1307e12, "fp16": 1307e12, "tf32": 654e12, "fp32": 163e12},
        bandwidth=5.3e12,
        cache=256 * KIB * KIB,
    ),
}
