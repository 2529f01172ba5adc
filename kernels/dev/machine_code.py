"""Reads what a compiler made of a kernel off the machine code itself, without a GPU.

PTX and Triton's IR change their spelling from version to version and say what was meant; SASS and GCN say what runs.
Registers come from the binary's own resource table, everything else from counting instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# "/*0150*/  @!P0 STS [R3], RZ ;": the offset, perhaps a predicate, then the opcode up to its first modifier.
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
# One instruction with its operands; a branch back to where a loop begins; and the waits that let a number of groups of
# asynchronous copies, or of warp-group products, stay under way: "DEPBAR.LE SB0, 0x4", "WARPGROUP.DEPBAR.LE gsb0, 0x1".
_SASS_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^;]+);", re.MULTILINE)
_SASS_BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")
_COPIES_WAIT = re.compile(r"\bDEPBAR\.LE SB0, 0x([0-9a-f]+)")
_WGMMA_WAIT = re.compile(r"\bDEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_SASS_REGISTERS = re.compile(r"\bREG:(\d+)\b")
_GCN_INSTRUCTION = re.compile(r"^[ \t]+([a-z]\w+)\b", re.MULTILINE)
_GCN_REGISTERS = re.compile(r"^\s*\.vgpr_count:\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel.

    ``registers`` are per thread (AMD: vector registers, accumulation registers included). ``spills`` counts the
    instructions that touch thread-local memory: LDL and STL in SASS, scratch_load and scratch_store in GCN. ``wgmma``
    and ``tma`` count Hopper's warp-group matrix instructions and the bulk tensor loads. ``instructions`` are all but
    those that do nothing: what an epilogue takes is their difference to the same kernel with another epilogue.

    The last two say how far loops run ahead, the worst of them: how many groups of asynchronous copies (LDGSTS), and of
    warp-group matrix instructions, the first wait of a loop leaves under way. None where no loop has any.
    """

    registers: int
    spills: int
    wgmma: int
    tma: int
    instructions: int
    copies_pending: int | None = None
    wgmma_pending: int | None = None


def read_cubin(cubin: bytes, cuobjdump: str) -> MachineCode:
    """Disassemble an NVIDIA binary with the ``cuobjdump`` at this path (Triton's wheel carries one)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [cuobjdump, "-res-usage", "-sass", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - Triton's own tool
    if done.returncode != 0:
        raise RuntimeError(f"{cuobjdump} could not read a cubin of {len(cubin)} bytes: {done.stderr.strip()}")
    return read_sass(done.stdout)


def read_sass(text: str) -> MachineCode:
    """Count in the output of ``cuobjdump -res-usage -sass``."""
    opcodes = Counter(_SASS_INSTRUCTION.findall(text))
    loops = _loops(text)
    return MachineCode(
        registers=_largest(_SASS_REGISTERS, text, opcodes),
        spills=opcodes["LDL"] + opcodes["STL"],
        wgmma=opcodes["HGMMA"] + opcodes["IGMMA"] + opcodes["QGMMA"],
        tma=opcodes["UTMALDG"],
        instructions=opcodes.total() - opcodes["NOP"],
        copies_pending=_pending(loops, "LDGSTS", _COPIES_WAIT),
        wgmma_pending=_pending(loops, "GMMA.", _WGMMA_WAIT),
    )


def _loops(text: str) -> list[str]:
    """The instructions of each loop, one a line; inner loops are parts of outer ones.

    Behind a kernel's end stand waits that it jumps out to and back from: where EXIT lies between, no loop goes round.
    """
    found = []
    for function in text.split("Function :"):
        lines = [(int(at, 16), line) for at, line in _SASS_LINE.findall(function)]
        back = [(int(branch[1], 16), at) for at, line in lines if (branch := _SASS_BRANCH.search(line))]
        for first, last in back:
            loop = [line.strip() for at, line in lines if first <= at <= last]
            if first < last and "EXIT" not in loop:
                found.append("\n".join(loop))
    return found


def _pending(loops: list[str], opcode: str, wait: re.Pattern[str]) -> int | None:
    """What the first waits of the innermost loops with ``opcode`` leave under way, at the least; 0 without a wait."""
    holders = [loop for loop in loops if opcode in loop]
    inner = [loop for loop in holders if not any(other != loop and other in loop for other in holders)]
    waits = [wait.search(loop) for loop in inner]
    return min((int(found[1], 16) if found else 0 for found in waits), default=None)


def read_amdgcn(text: str) -> MachineCode:
    """Count in AMD assembly with its metadata, as Triton keeps it under ``asm["amdgcn"]``."""
    opcodes = Counter(_GCN_INSTRUCTION.findall(text))
    return MachineCode(
        registers=_largest(_GCN_REGISTERS, text, opcodes),
        spills=sum(n for name, n in opcodes.items() if name.startswith(("scratch_load", "scratch_store"))),
        wgmma=0,
        tma=0,
        instructions=opcodes.total() - opcodes["s_nop"],
    )


def _largest(registers: re.Pattern[str], text: str, opcodes: Counter[str]) -> int:
    """The registers of the hungriest function; RuntimeError where the text is no listing (or its format changed)."""
    found = [int(value) for value in registers.findall(text)]
    if not found or not opcodes:
        raise RuntimeError(f"no {'instructions' if found else 'register count'} found in {text[:200]!r}...")
    return max(found)
