"""Reads what a compiler made of a kernel off the machine code itself, without a GPU.

PTX and Triton's IR change their spelling from version to version and say what was meant; SASS and GCN say what runs.
Registers come from the binary's own resource table, everything else from its instructions (``listings.py``).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import listings
from .listings import GCN, SASS, Access, Dialect, Instruction, Listing

_SASS_REGISTERS = re.compile(r"\bREG:(\d+)\b")
_GCN_REGISTERS = re.compile(r"^\s*\.vgpr_count:\s+(\d+)", re.MULTILINE)
# The waits that let a number of groups of asynchronous copies, or of warp-group products, stay under way.
_COPIES_WAIT = re.compile(r"SB0, 0x([0-9a-f]+)")
_WGMMA_WAIT = re.compile(r"gsb0, 0x([0-9a-f]+)")


@dataclass(frozen=True)
class Region:
    """What a loop holds beside the loops within it, or a kernel outside of all of them: instructions of one thread.

    ``accesses`` counts them by space, kind and bits: "global load 128". ``in_flight`` are bytes that a thread has asked
    of device memory before it needs the first of them, at the most; what is copied past the registers counts by what
    the loop's wait leaves under way. ``pending`` are warp-group products that the loop goes round with.
    """

    depth: int  # 0 outside of loops
    accesses: dict[str, int]
    units: dict[str, int]  # instructions by the unit's name: "wgmma", "mma", "tcgen05", "mfma", "TMA load", "TMA store"
    pending: int | None
    copies_pending: int | None
    in_flight: int
    mufu: int
    fp32: int
    barriers: int
    stores: list[str]  # lines of source that store to device memory: "triton.py:29"

    @property
    def busy(self) -> bool:
        return bool(self.accesses or self.units)


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel.

    ``registers`` are per thread (AMD: vector registers, accumulation registers included). ``spills`` counts the
    instructions that touch thread-local memory: LDL and STL in SASS, scratch_load and scratch_store in GCN. ``wgmma``
    and ``tma`` count Hopper's warp-group matrix instructions and the bulk tensor loads. ``instructions`` are all but
    those that do nothing: what an epilogue takes is their difference to the same kernel with another epilogue.

    ``places`` counts the accesses to device memory by line of source, kind and bits: "triton.py:29 load 128".

    The last two say how far loops run ahead, the worst of them: how many groups of asynchronous copies (LDGSTS) the
    first wait of a loop leaves under way, and with how many warp-group products it goes round. None where no loop has
    any.
    """

    registers: int
    spills: int
    wgmma: int
    tma: int
    instructions: int
    regions: list[Region]
    places: dict[str, int]
    copies_pending: int | None = None
    wgmma_pending: int | None = None

    @property
    def accesses(self) -> dict[str, int]:
        """Instructions that access device memory, by kind and bits: "load 128"."""
        found = Counter[str]()
        for place, count in self.places.items():
            found[place.partition(" ")[2]] += count
        return dict(found)

    @classmethod
    def of(cls, kept: dict[str, Any]) -> MachineCode:
        """From ``dataclasses.asdict``."""
        return cls(**{**kept, "regions": [Region(**region) for region in kept["regions"]]})


def read_cubin(cubin: bytes, cuobjdump: str, nvdisasm: str) -> MachineCode:
    """Disassemble an NVIDIA binary with the tools at these paths (Triton's wheel carries them)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = "".join(_said(command, cubin, path) for command in ([cuobjdump, "-res-usage"], [nvdisasm, "-g", "-c"]))
    return read_sass(text)


def _said(command: Sequence[str], cubin: bytes, path: Path) -> str:
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)  # noqa: S603 - Triton's own tools
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} could not read a cubin of {len(cubin)} bytes: {done.stderr.strip()}")
    return done.stdout


def read_sass(text: str) -> MachineCode:
    """What ``cuobjdump -res-usage`` and ``nvdisasm -g -c`` print, one after the other."""
    return _read(text, listings.sass(text), SASS, _SASS_REGISTERS)


def read_amdgcn(text: str) -> MachineCode:
    """AMD assembly with its metadata, as Triton keeps it under ``asm["amdgcn"]``."""
    return _read(text, listings.gcn(text), GCN, _GCN_REGISTERS)


def _read(text: str, listing: Listing, dialect: Dialect, registers: re.Pattern[str]) -> MachineCode:
    """RuntimeError where the text is no listing (or its format changed)."""
    found = [int(value) for value in registers.findall(text)]
    if not found or not listing.instructions:
        raise RuntimeError(f"no {'instructions' if found else 'register count'} found in {text[:200]!r}...")
    opcodes = Counter(each.opcode.partition(".")[0] for each in listing.instructions)
    accesses = [(each, access) for each in listing.instructions if (access := dialect.access(each))]
    units = Counter(dialect.unit(each.opcode) for each in listing.instructions)
    regions = list(_regions(listing, dialect))
    inner = [region for region in regions if region.depth]
    return MachineCode(
        registers=max(found),
        spills=sum(access.space == "local" for _, access in accesses),
        wgmma=units["wgmma"],
        tma=units["TMA load"],
        instructions=opcodes.total() - opcodes["NOP"] - opcodes["s_nop"],
        regions=regions,
        places=dict(Counter(f"{each.source} {a.kind} {a.bits}" for each, a in accesses if a.space == "global")),
        copies_pending=_least(region.copies_pending for region in inner),
        wgmma_pending=_least(region.pending for region in inner),
    )


def _least(found: Iterator[int | None]) -> int | None:
    return min((each for each in found if each is not None), default=None)


def _regions(listing: Listing, dialect: Dialect) -> Iterator[Region]:
    """What stands outside of loops, then each loop, an outer one before those within."""
    owners: list[tuple[int, int] | None] = [None] * len(listing.instructions)
    for loop in sorted(listing.loops, key=lambda each: each[0] - each[1]):  # the longest first: shorter ones lie within
        owners[loop[0] : loop[1] + 1] = [loop] * (loop[1] + 1 - loop[0])
    for owner in [None, *sorted(listing.loops, key=lambda each: (each[0], -each[1]))]:
        own = [at for at, of in enumerate(owners) if of == owner]
        depth = sum(first <= owner[0] and owner[1] <= last for first, last in listing.loops) if owner else 0
        yield _region(listing, own, dialect, depth)


def _region(listing: Listing, indices: list[int], dialect: Dialect, depth: int) -> Region:
    own = [listing.instructions[at] for at in indices]
    accesses = [(each, access) for each in own if (access := dialect.access(each))]
    copies = sum(access.bits // 8 for _, access in accesses if access.kind == "copy")
    groups = sum(each.opcode == "LDGDEPBAR" for each in own)
    waits = [wait for each in own if (wait := _wait(each, "DEPBAR.LE", _COPIES_WAIT)) is not None]
    copies_pending = (waits[0] if waits else 0) if copies and groups and depth else None
    return Region(
        depth=depth,
        accesses=dict(sorted(Counter(" ".join(map(str, access)) for _, access in accesses).items())),
        units=dict(Counter(name for each in own if (name := dialect.unit(each.opcode)))),
        pending=_products_pending(listing, indices) if depth else None,
        copies_pending=copies_pending,
        in_flight=_in_flight(own, dialect) + (copies_pending or 0) * copies // max(1, groups),
        mufu=sum(dialect.mufu(each.opcode) for each in own),
        fp32=sum(dialect.fp32(each.opcode) for each in own),
        barriers=sum(dialect.barrier(each.opcode) for each in own),
        stores=sorted({each.source for each in own if _stores(each, dialect)}),
    )


def _stores(each: Instruction, dialect: Dialect) -> bool:
    access = dialect.access(each)
    return dialect.unit(each.opcode) == "TMA store" or (access is not None and access[:2] == ("global", "store"))


def _wait(each: Instruction, opcode: str, of: re.Pattern[str]) -> int | None:
    found = of.match(each.operands) if each.opcode == opcode else None
    return int(found[1], 16) if found else None


def _products_pending(listing: Listing, indices: list[int]) -> int | None:
    """Groups of warp-group products that a loop goes round with; None where it has none.

    A group ends with the product that signals ("gsb0"); a wait leaves so many of the latest under way. An epilogue
    within the loop, which all steps but a tile's last jump over, may wait for all: the better of both ways counts. A
    wait that only a loop's last step jumps over is thereby not seen.
    """
    found = [_carried(listing, indices, jumping) for jumping in (False, True)]
    return max((each for each in found if each is not None), default=None)


def _carried(listing: Listing, indices: list[int], jumping: bool) -> int | None:
    """``jumping``: every forward branch within the loop is taken."""
    groups, found, last = 0, False, max(indices, default=0)
    for _ in range(2):  # the second time with what the first one left
        skipped = 0  # up to this instruction
        for at in indices:
            each = listing.instructions[at]
            if at < skipped:
                continue
            if jumping and at < listing.jumps.get(at, at) <= last:
                skipped = listing.jumps[at]
            elif "GMMA." in each.opcode and "gsb0" in each.operands:
                groups, found = groups + 1, True
            elif (wait := _wait(each, "WARPGROUP.DEPBAR.LE", _WGMMA_WAIT)) is not None:
                groups = min(groups, wait)
    return groups if found else None


def _in_flight(own: Sequence[Instruction], dialect: Dialect) -> int:
    """Bytes of loads that wait for their first use at once, at the most."""
    waiting: dict[int, tuple[set[int], int]] = {}  # the first register of a load: all of them, its bytes
    most = 0
    for each in own:
        named = dialect.registers(each.operands)
        access = dialect.access(each)
        waiting = {first: (rest, size) for first, (rest, size) in waiting.items() if not named & rest}
        if access == Access("global", "load", access.bits if access else 0) and named:
            first = min(dialect.registers(each.operands.partition(",")[0]), default=None)
            if first is not None:
                waiting[first] = set(range(first, first + max(1, access.bits // 32))), access.bits // 8
                most = max(most, sum(size for _, size in waiting.values()))
    return most


# ------------------------------------------------------------------------------------------------------------ as text


def described(region: Region, outputs: int = 0) -> str:
    """One line of the record. ``outputs``: numbers that a thread stores in the region, for MUFU and FP32 by each."""
    said = [f"loop {region.depth}:" if region.depth else "outside:"]
    for space in ("global", "shared", "local"):
        kinds = [name.split(" ") for name in region.accesses if name.startswith(space)]
        widths = [f"{kind} {region.accesses[f'{of} {kind} {bits}']}x{bits}" for of, kind, bits in kinds]
        said += [f"{space} {', '.join(widths)};"] if widths else []
    said += [f"{count} {name};" for name, count in region.units.items()]
    if region.pending is not None:
        said.append(f"{region.pending} pending;")
    if region.in_flight:
        said.append(f"{region.in_flight} B in flight;")
    for name, count in (("MUFU", region.mufu), ("FP32", region.fp32)):
        if count:
            said.append(f"{name} {count / outputs:.2g} an output;" if outputs else f"{name} {count};")
    if region.barriers:
        said.append(f"{region.barriers} barrier{'s' * (region.barriers > 1)};")
    return " ".join(said).rstrip(";")
