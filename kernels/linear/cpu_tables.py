"""Which measurements decide on a processor: its own table, or what the tables of its vendor's others agree on.

A processor without a table (``runtime/tuning.py``) takes the shipped ones of the same machine, vendor and library of
stock products (``runtime/processor.py``). They are of other cores, so oneDNN takes only what every one of them gives
it: of each kind of call, size of weight and number of tokens. What they disagree on stays torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..runtime import tuning

OP = "linear_cpu"
SOURCES = ("linear/onednn.py", "runtime/onednn.py")
KINDS = ("train", "packed", "packed_act", "served", "served_act")
NEVER = 1 << 62
_BITS = {"other": 128, "avx2": 256, "avx512": 512}  # of a vector
NAMED = f"a machine, a vendor, {', '.join(_BITS)} and a library: x86_64-amd-avx2-mkl"
_HOW = "`shardfuse bench calibrate --cpu` measures one in two minutes"


@dataclass(frozen=True)
class CpuConfig:
    """From how many tokens on oneDNN is faster; 0: never."""

    from_tokens: int = 0


class Measured(NamedTuple):
    """One table: whose it is, and by kind, for each number of bits of F D, the tokens from which on oneDNN wins."""

    arch: str
    on: str  # the processor that was measured
    thresholds: Mapping[str, Sequence[int]]
    sources: Mapping[str, str]  # of each kind: the measurement


class InForce(NamedTuple):
    """What decides on a processor. ``thresholds`` as in :class:`Measured`; ``tables`` are those that it follows from,
    the nearest first: its own alone, its relatives' or none.
    """

    arch: str
    thresholds: Mapping[str, Sequence[int]]
    tables: tuple[Measured, ...]

    @property
    def own(self) -> bool:
        return bool(self.tables) and self.tables[0].arch == self.arch

    def said(self) -> str:
        """Whose table it is, what it was measured on, and how to make one's own."""
        if not self.tables:
            return f"no table says where oneDNN is faster on this processor ({self.arch}); {_HOW}"
        if self.own:
            return f"the table of {self.arch}, measured on {self.tables[0].on}"
        names = ", ".join(f"{each.arch} (measured on {each.on})" for each in self.tables)
        whose = (
            f"those of its vendor's others, where they agree: {names}" if len(self.tables) > 1 else f"that of {names}"
        )
        return f"{self.arch} has no table and takes {whose}; {_HOW}"

    def why(self, kind: str, bits: int) -> str:
        """Why a product whose weight has ``bits`` bits in its size runs as it does, for a reader."""
        if self.own:
            return self.tables[0].sources[kind]
        says = ", ".join(
            f"{each.arch} (measured on {each.on}) {_from(each.thresholds[kind][bits])}" for each in self.tables
        )
        return f"{self.arch} has no table; oneDNN is faster in its vendor's others: {says}; {_HOW}"


def _from(tokens: int) -> str:
    return {NEVER: "never", 1: "always"}.get(tokens, f"from {tokens} tokens on")


def in_force(arch: str) -> InForce:
    """What decides on ``arch``: the user's table (SHARDFUSE_TUNED) over the shipped one, or what ships for relatives.

    ValueError names a table that is broken.
    """
    own = list(filter(_has_products, tuning.tables(arch).values()))
    tables = (_measured(own),) if own else tuple(_measured([each]) for each in relatives(arch))
    kinds = KINDS if tables else ()
    return InForce(
        arch, {kind: [*map(max, zip(*(each.thresholds[kind] for each in tables)))] for kind in kinds}, tables
    )


def relatives(arch: str) -> list[tuning.Table]:
    """The shipped tables of the same machine, vendor and library, the nearest width of vectors first."""
    if _same(arch) is None:
        return []
    paths = (path for path in tuning.SHIPPED.glob("*.json") if _same(path.stem) == _same(arch))
    found = [table for table in map(tuning.read, sorted(paths)) if _has_products(table) and not table.dry]
    return sorted(found, key=lambda table: abs(_width(table.arch) - _width(arch)))


def _has_products(table: tuning.Table) -> bool:
    return any(entry.op == OP for entry in table.entries)


def _same(arch: str) -> tuple[str, str, str] | None:
    """Machine, vendor and library, which relatives have in common; None for a name that has none."""
    parts = arch.split("-")
    if len(parts) < 4 or "other" in (parts[1], parts[3]):  # two of those have nothing in common
        return None
    return parts[0], parts[1], parts[3]


def check_name(arch: str) -> None:
    """ValueError for what is no processor's name: see ``processor.architecture``."""
    parts = arch.split("-")
    if len(parts) not in (4, 5) or not all(parts) or parts[2] not in _BITS:
        raise ValueError(f"processor {arch!r}: expected {NAMED}")


def _width(arch: str) -> int:
    """The bits that a core's vector units work on at a time: Zen 4 takes AVX-512's in two halves."""
    _, _, vectors, _, *core = arch.split("-")
    return _BITS.get(vectors, 0) // (2 if core else 1)


def _measured(tables: Sequence[tuning.Table]) -> Measured:
    """What tables of one processor say, a later one in place of an earlier, entry by entry."""
    entries = {entry.bucket: entry for table in tables for entry in table.entries if entry.op == OP}
    kinds = {kind: _standing_in(kind, entries) for kind in KINDS}
    sources = {bucket.partition("-")[0]: entry.source for bucket, entry in entries.items()}
    origin, arch = tables[-1].origin, tables[-1].arch
    on = str(origin.get("processor", arch))
    if any(source.endswith(f"standing for {arch}") for source in sources.values()):
        on += ", which stood in for it"
    configs = {bucket: tuning.config_of(entry, CpuConfig) for bucket, entry in entries.items() if entry.config}
    return Measured(
        arch,
        on,
        {kind: _by_bits(each, configs) for kind, each in kinds.items()},
        {kind: sources.get(each, "") for kind, each in kinds.items()},
    )


def _standing_in(kind: str, found: Iterable[str]) -> str:
    """The kind of which a table with the buckets ``found`` has measurements, for ``kind``."""
    return kind if any(each.startswith(f"{kind}-") for each in found) else kind.replace("served", "packed")


def bucket(kind: str, features: int) -> str:
    """The key of weights with ``features`` = F D elements."""
    return f"{kind}-fp32-s{features.bit_length() - 1}"


def _by_bits(kind: str, configs: Mapping[str, CpuConfig]) -> list[int]:
    sizes = sorted(size for size in range(64) if bucket(kind, 1 << size) in configs)
    thresholds = [NEVER] * 65
    for bits in range(1, 65):
        if sizes:
            size = min(max(bits - 1, sizes[0]), sizes[-1])
            measured = max((each for each in sizes if each <= size), default=sizes[0])
            thresholds[bits] = configs[bucket(kind, 1 << measured)].from_tokens or NEVER
    return thresholds
