"""Disassembled kernels as instructions with their loops and lines of source: NVIDIA's SASS and AMD's assembly.

What differs between the two is here, in one parser and one table of opcodes each; ``machine_code.py`` counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import NamedTuple


class Access(NamedTuple):
    space: str  # "global", "shared" or "local", which is a thread's own
    kind: str  # "load", "store", "copy" (from global to shared memory, past the registers), "atomic"
    bits: int  # of a thread


class Instruction(NamedTuple):
    opcode: str  # with its modifiers: "LDG.E.128", "buffer_load_dwordx4"
    operands: str
    source: str  # "triton.py:29": where it was written, "" where the compiler does not say
    guarded: bool = False  # threads whose predicate does not hold pass over it


class Listing(NamedTuple):
    instructions: list[Instruction]
    loops: list[tuple[int, int]]  # the first and the last instruction of each, outer ones too
    jumps: dict[int, int]  # where branches go


class Dialect(NamedTuple):
    """How a vendor's instructions are read."""

    access: Callable[[Instruction], Access | None]
    registers: Callable[[str], set[int]]  # of a thread, that operands name
    unit: Callable[[str], str]  # "wgmma", "mma", "tcgen05", "mfma" multiply matrices, "TMA load" and "TMA store"; or ""
    mufu: Callable[[str], bool]  # transcendental functions and reciprocals
    fp32: Callable[[str], int]  # operations in fp32 of a thread: 2 where they are packed
    barrier: Callable[[str], bool]


# ---------------------------------------------------------------------------------------------------------- NVIDIA's

# '	//## File "/a/triton.py", line 29', ".L_x_3:", "/*0150*/  @!P0 STS [R3], RZ ;"
_SASS_SOURCE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_SASS_LABEL = re.compile(r"^(\.L_\w+):")
# What never runs ("@!PT LDS RZ, [RZ] ;") only fills time, as NOP does.
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P(?!T)\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_SASS_TARGET = re.compile(r"`\((\.L_\w+)\)")
_SASS_KINDS = {
    **dict.fromkeys(("LDG", "LD"), ("global", "load")),
    **dict.fromkeys(("STG", "ST"), ("global", "store")),
    "LDGSTS": ("global", "copy"),
    **dict.fromkeys(("ATOMG", "ATOM", "REDG", "RED"), ("global", "atomic")),
    **dict.fromkeys(("LDS", "LDSM"), ("shared", "load")),
    **dict.fromkeys(("STS", "STSM"), ("shared", "store")),
    "ATOMS": ("shared", "atomic"),
    "LDL": ("local", "load"),
    "STL": ("local", "store"),
}
_SASS_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "96": 96, "128": 128, "256": 256}
_SASS_REGISTER = re.compile(r"\bR(\d+)\b")
_SASS_FP32 = ("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSET", "FSETP")
_SASS_UNITS = {
    **dict.fromkeys(("HGMMA", "IGMMA", "QGMMA"), "wgmma"),
    **dict.fromkeys(("HMMA", "IMMA", "DMMA", "QMMA", "OMMA"), "mma"),
    **dict.fromkeys(("UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"), "tcgen05"),
    "UTMALDG": "TMA load",
    **dict.fromkeys(("UTMASTG", "UTMAREDG"), "TMA store"),
}


def sass(text: str) -> Listing:
    """What ``nvdisasm -g -c`` prints."""
    lines = []
    for line in text.splitlines():
        if found := _SASS_SOURCE.match(line):
            lines.append(("source", f"{PurePath(found[1]).name}:{found[2]}", ""))
        elif found := _SASS_LABEL.match(line):
            lines.append(("label", found[1], ""))
        elif found := _SASS_INSTRUCTION.match(line):
            lines.append(("guarded" if found[1] else "instruction", found[2], found[3]))
    return _listing(lines, lambda each: _SASS_TARGET.findall(each.operands) if each.opcode[:3] == "BRA" else [], "EXIT")


def _sass_access(each: Instruction) -> Access | None:
    name, *modifiers = each.opcode.split(".")
    if name not in _SASS_KINDS:
        return None
    bits = next((_SASS_WIDTHS[each] for each in modifiers if each in _SASS_WIDTHS), 32)
    if name in ("LDSM", "STSM"):  # "LDSM.16.M88.4": so many matrices, of each of which a thread has 32 bits
        bits = 32 * int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 32
    return Access(*_SASS_KINDS[name], bits)


def _stem(opcode: str) -> str:
    return opcode.partition(".")[0]


SASS = Dialect(
    _sass_access,
    registers=lambda operands: {int(each) for each in _SASS_REGISTER.findall(operands)},
    unit=lambda opcode: _SASS_UNITS.get(_stem(opcode), ""),
    mufu=lambda opcode: _stem(opcode) == "MUFU",
    fp32=lambda opcode: 1 + _stem(opcode).endswith("2") if _stem(opcode).rstrip("2") in _SASS_FP32 else 0,
    barrier=lambda opcode: _stem(opcode) == "BAR",
)

# ------------------------------------------------------------------------------------------------------------- AMD's

# '	.file	1 "/a" "triton.py"', "	.loc	1 29 19", ".LBB0_3:", "	buffer_load_dwordx4 v[8:11], v18, s[20:23], 0 offen"
_GCN_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_GCN_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_GCN_LABEL = re.compile(r"^(\.LBB\w+):")
_GCN_INSTRUCTION = re.compile(r"^[ \t]+([a-z]\w+)\b[ \t]*([^;]*)")
_GCN_TARGET = re.compile(r"\.LBB\w+")
_GCN_ACCESS = re.compile(r"^(global|buffer|flat|ds|scratch)_(load|store|read|write|atomic|add|max|min)(?:_lds)?(.*)$")
_GCN_WIDTHS = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32}
_GCN_BITS = re.compile(r"_[bui](\d+)(?:_|$)")
_GCN_REGISTERS = re.compile(r"\bv(?:(\d+)\b|\[(\d+):(\d+)\])")
_GCN_MUFU = re.compile(r"^v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(f16|f32)")
_GCN_FP32 = re.compile(r"^v_(pk_)?(add|sub|subrev|mul|fma|fmac|fmamk|fmaak|mac|max|min|max3|min3|med3|cmp\w*)_f32")


def gcn(text: str) -> Listing:
    """AMD assembly, as Triton keeps it under ``asm["amdgcn"]``."""
    lines, files = [], dict[str, str]()
    for line in text.splitlines():
        if found := _GCN_FILE.match(line):
            files[found[1]] = found[2]
        elif found := _GCN_LOC.match(line):
            lines.append(("source", f"{files.get(found[1], '')}:{found[2]}", ""))
        elif found := _GCN_LABEL.match(line):
            lines.append(("label", found[1], ""))
        elif found := _GCN_INSTRUCTION.match(line):
            lines.append(("instruction", found[1], found[2].strip()))
    branches = ("s_cbranch", "s_branch")
    return _listing(
        lines, lambda each: _GCN_TARGET.findall(each.operands) if each.opcode.startswith(branches) else [], "s_endpgm"
    )


def _gcn_access(each: Instruction) -> Access | None:
    found = _GCN_ACCESS.match(each.opcode)
    if found is None:
        return None
    space = {"ds": "shared", "scratch": "local"}.get(found[1], "global")
    kind = {"read": "load", "write": "store"}.get(found[2], found[2])
    kind = kind if kind in ("load", "store") else "atomic"
    if space == "global" and kind == "load" and ("_lds" in each.opcode or re.search(r"\blds\b", each.operands)):
        kind = "copy"
    return Access(space, kind, _gcn_bits(found[3]))


def _gcn_bits(suffix: str) -> int:
    """ "_dwordx4" 128, "_ubyte" 8, "2st64_b64" 128, "_b16" 16."""
    if found := _GCN_BITS.search(suffix):
        return int(found[1]) * (2 if suffix.startswith("2") else 1)
    if found := re.search(r"dwordx(\d)", suffix):
        return 32 * int(found[1])
    return next((bits for name, bits in _GCN_WIDTHS.items() if name in suffix), 32)


def _gcn_registers(operands: str) -> set[int]:
    found = set()
    for one, first, last in _GCN_REGISTERS.findall(operands):
        found |= {int(one)} if one else set(range(int(first), int(last) + 1))
    return found


GCN = Dialect(
    _gcn_access,
    registers=_gcn_registers,
    unit=lambda opcode: "mfma" if opcode.startswith(("v_mfma", "v_smfmac", "v_wmma")) else "",
    mufu=lambda opcode: _GCN_MUFU.match(opcode) is not None,
    fp32=lambda opcode: 0 if (found := _GCN_FP32.match(opcode)) is None else 2 if found[1] else 1,
    barrier=lambda opcode: opcode == "s_barrier",
)

# -------------------------------------------------------------------------------------------------------------- both


def _listing(lines: Iterable[tuple[str, str, str]], targets: Callable[[Instruction], list[str]], end: str) -> Listing:
    """Instructions and loops of lines that are each ("source", place, ""), ("label", name, "") or an instruction,
    ("guarded", opcode, operands) where it has a predicate.

    Behind a kernel's end stand waits that it jumps out to and back from: where an ``end`` that no thread passes over
    lies between, no loop goes round. A loop that is gone back to from several places is one.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for what, name, operands in lines:
        if what == "source":
            source = name
        elif what == "label":
            labels[name] = len(instructions)
        else:
            instructions.append(Instruction(name, operands, source, what == "guarded"))
    ends = [at for at, each in enumerate(instructions) if each.opcode == end and not each.guarded]
    named = {at: names[0] for at, each in enumerate(instructions) if (names := targets(each))}
    jumps = {at: labels[name] for at, name in named.items() if name in labels}
    loops: dict[int, int] = {}
    for last, first in jumps.items():
        if first < last and not any(first <= at <= last for at in ends):
            loops[first] = max(last, loops.get(first, last))
    return Listing(instructions, list(loops.items()), jumps)
