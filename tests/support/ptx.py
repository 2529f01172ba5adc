"""A block of PTX without branches, run on the CPU for many inputs at once: what inline assembly does, without a GPU."""

from __future__ import annotations

import re

import torch

_FORMATS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def run(text: str, operands: dict[str, torch.Tensor], results: list[str]) -> list[torch.Tensor]:
    """The values [n] int64 of ``results`` after ``text``, from those of ``operands``. Knows a dozen instructions."""
    registers = dict(operands)

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in (part.strip(" \n{") for part in re.sub(r"\{([^{}]*)\},", r"\1;,", text).split(";\n")):
        if not line or line.startswith((".reg", "}")):
            continue
        opcode, rest = line.split(None, 1)
        into, sources = rest.split(",", 1) if ";," not in rest else rest.split(";,", 1)
        given = [value(name.strip()) for name in sources.split(",")]
        if ";," in rest:  # mov.b32 {low, high}, x
            low, high = (name.strip() for name in into.split(","))
            registers |= {low: given[0] & 0xFFFF, high: given[0] >> 16}
        else:
            registers[into.strip()] = _result(opcode, given)
    return [registers[name] for name in results]


def _result(opcode: str, given: list[torch.Tensor]) -> torch.Tensor:
    name, *suffixes = opcode.split(".")
    if opcode == "mov.b32":
        return given[0]
    if opcode == "shr.b32":
        return given[0] >> given[1]
    if opcode == "lop3.b32" and int(given[3]) == 0xEA:  # its table of (a & b) | c
        return (given[0] & given[1]) | given[2]
    if opcode == "prmt.b32":
        both, selector = given[0] | (given[1] << 32), int(given[2])
        chosen = [(both >> 8 * (selector >> 4 * i & 7)) & 0xFF for i in range(4)]
        return sum((byte << 8 * i for i, byte in enumerate(chosen)), torch.tensor(0))
    if opcode == "cvt.rn.f16x2.e4m3x2":
        return _packed(*(_halves(given[0], 8, torch.uint8, torch.float8_e4m3fn)), torch.float16)
    if opcode == "cvt.f32.f16":
        return given[0].to(torch.int16).view(torch.float16).float()
    if opcode == "cvt.rn.bf16x2.f32":  # the upper half first
        return _packed(given[1], given[0], torch.bfloat16)
    if name == "fma" and suffixes[0] == "rn":
        dtype = _FORMATS[suffixes[1]]
        a, b, c = (_halves(x, 16, torch.int16, dtype) for x in given)
        return _packed(*(x.double() * y.double() + z.double() for x, y, z in zip(a, b, c)), dtype)
    raise NotImplementedError(opcode)


def _halves(x: torch.Tensor, bits: int, integer: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of ``dtype`` in each integer, the lower first."""
    low, high = ((x >> shift) & (2**bits - 1) for shift in (0, bits))
    return low.to(integer).view(dtype).float(), high.to(integer).view(dtype).float()


def _packed(low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two numbers in the halves of each integer."""
    bits = [x.to(dtype).view(torch.int16).long() & 0xFFFF for x in (low, high)]
    return bits[0] | (bits[1] << 16)
