"""Instructions of a launch by unit as ptxas makes them, where PTX is only what was meant: integers and moves above all.

Every PTX instruction gets a ``.loc`` with its own line, ptxas keeps these, nvdisasm lists them: each instruction of the
machine code then counts as often as threads ran the line of PTX that it comes from. Code that ptxas moved keeps its
line. The slow paths that it adds, of division and roots, count as if taken: they are few instructions more than run.
Both tools lie in Triton's wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from .. import listings
from .counters import Counters
from .parse import Kernel

# Of opcodes in machine code (SASS): CUDA Binary Utilities, "Instruction Set Reference".
_UNITS = tuple(
    (unit, re.compile(pattern))
    for unit, pattern in (
        ("mufu", r"MUFU"),
        ("fp32", r"F(ADD|MUL|FMA|MNMX|SEL|CHK)\b|FSWZADD"),
        ("half", r"H(ADD|MUL|FMA|MNMX)2"),
        ("convert", r"F2F|F2FP|F2I|I2F|I2FP|FRND|I2I|F2IP"),
        ("compare", r"([IFU]|UI)SETP|FSET\b|SEL\b|PLOP3|VOTE|HSETP2"),
        ("shuffle", r"SHFL|REDUX"),
        ("product", r"HGMMA|HMMA|QGMMA|IMMA"),
        ("integer", r"U?(IADD3?|IMAD|LOP3?|SHF|LEA|PRMT|IABS|BREV|POPC|FLO|IMNMX|VIADD|VIMNMX|BMSK|SGXT)"),
        ("move", r"U?MOV|CS2R|S2R|S2UR|R2UR|U?LDC|R2P|P2R|UP2UR|CS2UR"),
        ("global memory", r"LDG\b|STG\b|LDGSTS|UTMALDG|UTMASTG|ATOMG?\b|REDG?\b"),
        ("shared memory", r"LDS\b|STS\b|LDSM|STSM|ATOMS"),
        ("barrier", r"BAR\b|SYNCS|WARPSYNC|WARPGROUP|DEPBAR|LDGDEPBAR"),
        ("local memory", r"LDL|STL"),
    )
)


def by_unit(counters: Counters, listed: list[tuple[int, str]]) -> dict[str, int]:
    """Instructions of threads by unit, and "issued": those of warps. ``listed``: the kernel's ``listing``."""
    program, kernel = counters.program, counters.program.kernel
    times: dict[int, tuple[int, int]] = {}  # (warps, threads) that ran a line of PTX
    for number, (start, end) in enumerate(program.ranges):
        waits = any("try_wait" in i.parts for i in kernel.code[start:end])  # a matter of time
        for i in kernel.code[start:end]:
            ran = (0, 0) if waits else (int(counters.issues[number]), int(counters.active[number]))
            times[i.line] = max(times.get(i.line, (0, 0)), ran)
    found: Counter[str] = Counter()
    last = min(times)
    for line, opcode in listed:
        last = line if line in times else last
        warps, threads = times[last]
        if opcode != "NOP":
            found["issued"] += warps
            found[unit_of(opcode)] += threads
    return dict(found)


def unit_of(opcode: str) -> str:
    """Of an instruction of the machine code; "control" of branches and what is not listed."""
    return next((unit for unit, pattern in _UNITS if pattern.match(opcode)), "control")


def listing(kernel: Kernel) -> list[tuple[int, str]]:
    """(line of PTX, opcode) of each instruction that ptxas makes. Raises RuntimeError where it fails."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(located(kernel))
        _run([knobs.nvidia.ptxas.path, "-lineinfo", f"-arch={kernel.target}", str(source), "-o", str(binary)])
        text = _run([knobs.nvidia.nvdisasm.path, "-g", "-c", str(binary)])
    return read(text)


def read(text: str) -> list[tuple[int, str]]:
    """The same of the output of nvdisasm -g."""
    return [(int(each.source.rpartition(":")[2] or 0), each.opcode) for each in listings.sass(text).instructions]


def located(kernel: Kernel) -> str:
    """The kernel's PTX, in which each instruction has its own line as its source."""
    starts = {i.line for i in kernel.code}
    lines = []
    for number, line in enumerate(kernel.text.rstrip("\0").split("\n"), 1):
        kept = "" if re.match(r"\s*\.(loc|file)\b", line) else line
        lines.append(f"\t.loc 1 {number} 0\n{kept}" if number in starts else kept)
    text = re.sub(r"\.section\s+\.debug_\w+\s*\{.*?\n\s*\}", "", "\n".join(lines), flags=re.S)
    return re.sub(r"(\.address_size 64)", r'\1\n.file 1 "ptx"', text, count=1)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - Triton's own tools
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[:400]}")
    return done.stdout
