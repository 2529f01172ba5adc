"""What ``counters.py`` counted, summed up: per element of output, by loop, by line, and what bounds follow from it.

Instructions are those of PTX. ptxas merges and splits some: of MUFU, accesses, products and barriers there stay nearly
as many, of integers, conversions and moves not. Cycle bounds are of one block alone on a multiprocessor, at public
rates (CUDA C++ Programming Guide, "Arithmetic Instructions"; data sheets): a kernel takes at least as long, and none is
a prediction.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...runtime.chips import described
from .counters import FIELDS, LINE, SECTOR, Counters
from .parse import BITS, Instruction, Kernel, Vector
from .units import is_barrier

MUFU = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"}
_INTEGER = {"add", "sub", "mul", "mad", "and", "or", "xor", "not", "shl", "shr", "shf", "bfe", "bfi", "prmt", "lop3"}
_INTEGER |= {"min", "max", "neg", "abs", "popc", "clz", "dp4a"}
_HALVES = ("f16x2", "bf16x2", "f16", "bf16")
# Integer division by its bits: what it expands to, roughly.
_DIVISION = {32: {"mufu": 1, "convert": 2, "integer": 12}, 64: {"mufu": 1, "convert": 2, "integer": 60}}
STORAGE = "a tensor"  # so begins the name of what a launch reaches through a table (``driver``)
LOADS, STORES = ("load", "cp.async", "TMA load"), ("store", "TMA store", "atomic")
SHARED = ("ld.shared", "st.shared", "ldmatrix", "stmatrix")
_MAIN = 0.05  # of a launch's sectors: what moves more is a main access
_BY_LANES = {"load": 1, "store": 1, "cp.async": 1, "atomic": 1}


class Rates(NamedTuple):
    """Of one multiprocessor in a cycle."""

    fp32: int  # lanes
    products: int  # multiply-adds of bf16 by tensor cores
    clock: float  # Hz, at which the data sheet counts
    mufu: int = 16
    half: int = 128  # instructions on pairs
    integer: int = 64
    compare: int = 64
    convert: int = 64
    shuffle: int = 32
    issue: int = 4  # warp instructions
    shared: int = 128  # bytes
    l2: int = 32  # bytes


RATES = {
    "sm_80": Rates(64, 1024, 1.41e9),
    "sm_86": Rates(128, 256, 1.695e9, half=64),
    "sm_89": Rates(128, 512, 2.52e9, half=64),
    "sm_90": Rates(128, 2048, 1.755e9),
}
_FACTOR = {"tf32": 0.5, "e4m3": 2.0, "e5m2": 2.0}  # of products against bf16's


def units(i: Instruction) -> dict[str, int]:
    """How often one thread uses which unit for an instruction; an estimate for division, and for roots that round."""
    base, parts, kind = i.parts[0], i.parts, i.parts[-1]
    if base in ("setp", "selp", "slct", "set"):
        return {"compare": 1}
    if kind == "pred" or base in ("mov", "cvta"):
        return {"move": 1}
    if base == "cvt":
        return {"convert": 1} if any(part[0] in "fbet" for part in parts[-2:]) else {"integer": 1}
    if base in MUFU:
        return {"mufu": 1, "fp32": 8} if "rn" in parts else {"mufu": 2 if kind.endswith("x2") else 1}
    if kind == "f64":
        return {"fp64": 1}
    if base in ("div", "rem"):
        if kind == "f32":
            return {"mufu": 1, "fp32": 9 if "rn" in parts else 2}
        found = _DIVISION[64 if BITS.get(kind, 32) == 64 else 32]
        return found | {"integer": found["integer"] + 2 * (base == "rem")}
    if base in ("add", "sub", "mul", "fma", "min", "max") and (kind == "f32" or kind in _HALVES):
        return {"fp32": 1} if kind == "f32" else {"half": 1}
    if base in ("neg", "abs") and (kind == "f32" or kind in _HALVES):
        return {"move": 1}  # a modifier of an operand in machine code
    if base in _INTEGER:
        return {"integer": 1}
    return {"shuffle": 1} if base in ("shfl", "redux") else {}


def memory(i: Instruction) -> str:
    """What an access to memory is called; "" for other instructions."""
    base, op = i.parts[0], i.opcode
    if base in ("ld", "st"):
        shared = any(part.startswith("shared") for part in i.parts)
        name = {"ld": "ld.shared", "st": "st.shared"} if shared else {"ld": "load", "st": "store"}
        return name[base] if shared or "global" in i.parts else ""
    if base in ("ldmatrix", "stmatrix"):
        return base
    if base in ("atom", "red"):
        return "atomic"
    if op.startswith("cp.async.bulk.tensor"):
        return "TMA load" if op.find(".shared::") < op.find(".global") else "TMA store"
    return "cp.async" if op.startswith(("cp.async.ca", "cp.async.cg")) else ""


def product(i: Instruction) -> tuple[int, float, int] | None:
    """(multiply-adds of a warp, those of bf16 that take as long, bytes of shared memory that a warp's share reads)."""
    if i.opcode.startswith("wgmma.mma_async") and (shape := re.fullmatch(r"m64n(\d+)k(\d+)", i.parts[4])):
        n, k, kind = int(shape[1]), int(shape[2]), i.parts[6]
        size = 4 if kind == "tf32" else BITS.get(kind, 8) // 8
        rows = n + (0 if isinstance(i.args[1], Vector) else 64)
        return 16 * n * k, 16 * n * k / _FACTOR.get(kind, 1.0), rows * k * size // 4
    if i.opcode.startswith("mma.sync") and (shape := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", i.parts[3])):
        count = int(shape[1]) * int(shape[2]) * int(shape[3])
        return count, count / _FACTOR.get(i.parts[7], 1.0), 0
    return None


def sources(text: str) -> dict[int, str]:
    """Line of PTX -> "file.py:28 @ file.py:134": the innermost line that is not Triton's own, and the kernel's."""
    found, here = {}, ""
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(".loc"):
            chain = re.findall(r"([\w.]+\.py:\d+)", line.partition("//")[2])
            own = [each for each in chain if not each.startswith(("standard.py", "math.py", "core.py"))] or chain
            here = " @ ".join(dict.fromkeys((own[0], own[-1]))) if own else ""
        found[number] = here
    return found


def looped(kernel: Kernel) -> np.ndarray[Any, Any]:
    """Which instructions lie in a loop: between a label and a branch back to it."""
    found = np.zeros(len(kernel.code), bool)
    for n, i in enumerate(kernel.code):
        if i.parts[0] == "bra" and kernel.labels[i.args[-1].name] <= n:  # type: ignore[union-attr]
            found[kernel.labels[i.args[-1].name] : n + 1] = True  # type: ignore[union-attr]
    return found


@dataclass
class Summary:
    """Of one launch. Numbers are exact but for the estimates of ``units`` and the ``bounds``; bytes and elements."""

    kernel: str
    arch: str
    grid: tuple[int, ...]
    threads: int  # of a block
    blocks: int
    issued: int  # instructions of warps
    active: float  # threads in each, on average
    barriers: float  # of the block that a warp waits at
    parted: int  # branches at which the threads of a warp part
    elements: int  # of what ``per`` names
    computed: int  # elements that threads compute of it, those beyond its ends and repeated ones too
    per: str  # "output: argument 3 (128, 512)"
    units: dict[str, float]  # instructions of threads, by element
    asked: int  # bytes that threads load and store
    moved: int  # of sectors, by request
    by_block: int  # the same, where a block loads each sector once
    touched: int  # the same, where the launch loads each sector once, and stores it once: device memory's part
    needed: int  # distinct bytes loaded, and distinct bytes stored
    loads: float | None  # the share of the sectors' bytes that is used, in the worst main load; None without one
    stores: float | None
    conflicts: float | None  # wavefronts in loops over those needed; None without any
    loops: list[dict[str, float]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    control: list[dict[str, Any]] = field(default_factory=list)  # barriers, and branches at which warps part
    by_source: list[dict[str, Any]] = field(default_factory=list)  # instructions of each line of source
    bounds: dict[str, float] = field(default_factory=dict)  # cycles of a block

    @property
    def ratios(self) -> dict[str, float | None]:
        """What is gated and recorded."""
        needed = max(1, self.needed)
        computed = round(self.units.get("mufu", 0.0) * self.elements / max(1, self.computed), 4)
        # Through a table of addresses a kernel reaches tensors of all ranks: which has most elements may be a tie.
        alone = f": {STORAGE}" not in self.per
        return {
            "loads": self.loads,
            "stores": self.stores,
            "conflicts": self.conflicts,
            "mufu": round(self.units.get("mufu", 0.0), 4),
            "mufu_computed": computed if alone else None,
            "moved": round(self.moved / needed, 4),
            "by_block": round(self.by_block / needed, 4),
            "touched": round(self.touched / needed, 4),
        }


def summary(counters: Counters, arch: str = "") -> Summary:
    """``arch`` names the rates of the bounds; default: that of the kernel."""
    return _Sums(counters, arch or counters.program.kernel.target.rstrip("af")).summary()


class _Sums:
    def __init__(self, counters: Counters, arch: str) -> None:
        self.c, self.arch, self.kernel = counters, arch, counters.program.kernel
        self.code, self.found = self.kernel.code, counters.found
        self.where = sources(self.kernel.text)
        self.in_loop = looped(self.kernel)
        self.kinds = [memory(i) for i in self.code]
        self.issues, self.active = self._by_line()
        self.lines = self._lines()

    def _by_line(self) -> tuple[Any, Any]:
        """(warps, threads) that ran each instruction, but for loops that try an mbarrier: a matter of time."""
        issues, active = np.zeros(len(self.code), np.int64), np.zeros(len(self.code), np.int64)
        for number, (start, end) in enumerate(self.c.program.ranges):
            if not any("try_wait" in i.parts for i in self.code[start:end]):
                issues[start:end], active[start:end] = self.c.issues[number], self.c.active[number]
        return issues, active

    def total(self, name: str, kinds: Iterable[str]) -> int:
        kinds = set(kinds)
        return sum(int(self.found[name][n]) for n, kind in enumerate(self.kinds) if kind in kinds)

    def used(self) -> dict[str, int]:
        """Instructions of threads by unit."""
        found: Counter[str] = Counter()
        for n, i in enumerate(self.code):
            for unit, times in units(i).items():
                found[unit] += int(self.active[n]) * times
            if (made := product(i)) is not None:
                found["multiply-adds"] += int(self.issues[n]) * made[0]
        return dict(found)

    def summary(self) -> Summary:
        places, issued = self.c.places, int(self.issues.sum())
        per, elements, computed = self._elements()
        stored = SECTOR * self.total("sectors", STORES)
        barriers = sum(int(self.issues[n]) for n, i in enumerate(self.code) if is_barrier(i))
        return Summary(
            kernel=self.kernel.name,
            arch=self.arch,
            grid=tuple(self.c.grid),
            threads=self.kernel.threads,
            blocks=self.c.blocks,
            issued=issued,
            active=round(int(self.active.sum()) / max(1, issued), 2),
            barriers=round(barriers / max(1, self.c.warps), 2),
            parted=int(self.c.parted.sum()),
            elements=elements,
            computed=computed,
            per=per,
            units={name: count / max(1, elements) for name, count in sorted(self.used().items())},
            asked=self.total("asked", LOADS + STORES),
            moved=SECTOR * self.total("sectors", LOADS) + stored,
            by_block=SECTOR * self.c.by_block + stored,
            touched=SECTOR * self._touched(),
            needed=places.bytes("load") + places.bytes("store"),
            loads=self._share(LOADS),
            stores=self._share(STORES),
            conflicts=self._conflicts(),
            loops=self._loops(),
            lines=self.lines,
            control=self._control(),
            by_source=self._by_source(max(1, elements)),
            bounds=self._bounds(),
        )

    def _touched(self) -> int:
        return self.c.places.sectors("load") + self.c.places.sectors("store")

    def _elements(self) -> tuple[str, int, int]:
        """The argument to which most elements are written, how many, and how many are computed; where a block writes
        fewer than it has threads, and multiplies no matrices, the kernel sums up: then the argument of which most are
        read.
        """
        written, read = self._most("store"), self._most("load")
        multiplies = any(product(i) is not None for i in self.code)
        if multiplies or written[0] >= self.c.threads or read[0] <= written[0]:
            return f"output: {written[1]}", written[0], self._computed(STORES, written[2])
        return f"input: {read[1]}", read[0], self._computed(LOADS, read[2])

    def _computed(self, kinds: tuple[str, ...], index: int) -> int:
        """Elements of an allocation for which threads run loads or stores, whatever predicates say."""
        total = 0
        for n, i in enumerate(self.code):
            if self.kinds[n] in kinds and index in self.c.on[n]:
                size = i.args[2].value if self.kinds[n] == "cp.async" else BITS.get(i.parts[-1], 0) // 8 * i.count  # type: ignore[union-attr]
                copied = LINE * int(self.found["needed"][n]) if self.kinds[n].startswith("TMA") else 0
                total += copied or int(self.active[n]) * size
        return total // max(1, self.c.places.allocations[index].itemsize if index >= 0 else 1)

    def _most(self, way: str) -> tuple[int, str, int]:
        """(elements, the name, the number) of an allocation."""
        places = self.c.places
        reached = {
            index
            for n, kind in enumerate(self.kinds)
            if kind in (LOADS if way == "load" else STORES)
            for index in self.c.on[n]
        }
        found = [
            (places.bytes(way, index) // max(1, (of := places.allocations[index]).itemsize), of.name, index)
            for index in sorted(reached)
        ]
        return max(found, key=lambda each: each[0], default=(0, "nothing", -1))

    def _share(self, kinds: tuple[str, ...]) -> float | None:
        """Of what the main accesses touch; requests of one sector each cannot touch fewer."""
        least = _MAIN * sum(row["sectors"] for row in self.lines)
        main = [
            row["used"] / (SECTOR * row["sectors"])
            for row in self.lines
            if row["unit"] in kinds and row["sectors"] > max(row["requests"], least)
        ]
        return round(min(main), 4) if main else None

    def _conflicts(self) -> float | None:
        chosen = [n for n, kind in enumerate(self.kinds) if kind in (*SHARED, "cp.async") and self.in_loop[n]]
        needed = sum(int(self.found["needed"][n]) for n in chosen)
        return round(sum(int(self.found["wavefronts"][n]) for n in chosen) / needed, 4) if needed else None

    def _lines(self) -> list[dict[str, Any]]:
        """Accesses to memory; those of one place in the source, opcode and argument together."""
        names, found = [each.name for each in self.c.places.allocations], dict[Any, dict[str, Any]]()
        for n, i in enumerate(self.code):
            if not self.kinds[n] or not self.found["requests"][n]:
                continue
            on = " + ".join(dict.fromkeys(names[index] for index in sorted(self.c.on[n])))
            times = round(int(self.issues[n]) / max(1, self.c.warps), 2)
            key = (self.kinds[n], i.opcode, self._source(n), on, times)
            head = dict(zip(("unit", "opcode", "source", "on", "times"), key))
            row = found.setdefault(key, {"ptx": i.line, "count": 0, **head, **dict.fromkeys(FIELDS, 0)})
            row["count"] += 1
            for name in FIELDS:
                row[name] += int(self.found[name][n])
        return list(found.values())

    def _loops(self) -> list[dict[str, float]]:
        """Code by how often a warp ran it: what runs once, and the steady state of each loop. Per block and round."""
        found: dict[float, dict[str, float]] = {}
        for n in np.flatnonzero(self.issues):
            i, times = self.code[n], round(int(self.issues[n]) / self.c.warps, 2)
            row, scale = found.setdefault(times, defaultdict(float)), 1 / (self.c.blocks * max(times, 0.01))
            row["issued"] += int(self.issues[n]) * scale
            for unit, uses in units(i).items():
                row[unit] += int(self.active[n]) * uses * scale
            if (made := product(i)) is not None:
                row["multiply-adds"] += int(self.issues[n]) * made[0] * scale
            row["barriers"] += int(self.issues[n]) * scale * is_barrier(i)
            for name in ("wavefronts", "needed") if self.kinds[n] else ():
                row[name] += int(self.found[name][n]) * scale
            if self.kinds[n] in LOADS + STORES:
                way = "loaded" if self.kinds[n] in LOADS else "stored"
                row[f"{way} sectors"] += int(self.found["sectors"][n]) * scale
        shown = {times: {name: round(each, 2) for name, each in row.items() if each} for times, row in found.items()}
        return [{"times": times, **shown[times]} for times in sorted(shown)]

    def _source(self, n: int) -> str:
        i = self.code[n]
        return self.where.get(i.line) or i.source or f"PTX line {i.line}"

    def _control(self) -> list[dict[str, Any]]:
        parted = {end - 1: int(self.c.parted[k]) for k, (_, end) in enumerate(self.c.program.ranges)}
        return [
            {
                "what": "barrier" if is_barrier(i) else "branch",
                "ptx": i.line,
                "source": self._source(n),
                "warps": int(self.issues[n]),
                "parted": parted.get(n, 0),
            }
            for n, i in enumerate(self.code)
            if (is_barrier(i) and self.issues[n]) or parted.get(n)
        ]

    def _by_source(self, elements: int) -> list[dict[str, Any]]:
        """Those that warps issue most for come first; units are of threads by element."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for n in np.flatnonzero(self.issues):
            row = found[self._source(n)]
            row["issued"] += int(self.issues[n])
            row.update({unit: int(self.active[n]) * times for unit, times in units(self.code[n]).items()})
        order = sorted(found, key=lambda source: -found[source]["issued"])
        return [
            {
                "source": source,
                **{unit: each if unit == "issued" else each / elements for unit, each in found[source].items()},
            }
            for source in order
        ]

    def _bounds(self) -> dict[str, float]:
        """Cycles that one block takes at least, by what is used; nothing for a chip that RATES lacks."""
        if self.arch not in RATES:
            return {}
        chip, rates = described(self.arch), RATES[self.arch]
        used, read = self.used(), 0.0
        found = {unit: used.get(unit, 0) / lanes for unit, lanes in rates._asdict().items() if unit in used}
        for n, i in enumerate(self.code):
            if (made := product(i)) is not None:
                found["products"] = found.get("products", 0.0) + int(self.issues[n]) * made[1] / rates.products
                read += int(self.issues[n]) * made[2]
        found["issue"] = int(self.issues.sum()) / rates.issue
        asynchronous = (*SHARED, "cp.async", "TMA load", "TMA store")
        found["shared memory"] = self.total("wavefronts", asynchronous) + read / rates.shared
        found["L1"] = float(self.total("lines", _BY_LANES))  # one line of 128 bytes
        found["L2"] = (SECTOR * (self.c.by_block + self.total("sectors", STORES))) / rates.l2
        found["device memory"] = SECTOR * self._touched() * chip.sms * rates.clock / chip.bandwidth
        return {name: round(each / max(1, self.c.blocks)) for name, each in found.items() if each}
