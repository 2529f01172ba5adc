"""Which measurements decide on a processor: its own table, or what the tables of its vendor's others agree on.

A processor without a table (``runtime/tuning.py``) takes those of the same machine, vendor and library of stock
products (``runtime/processor.py``). They are of other cores, so oneDNN takes only what every one of them gives it: with
each kind of call, size of weight and number of tokens. What they disagree on stays torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..runtime import tuning

OP = "linear_cpu"
SOURCES = ("linear/onednn.py", "runtime/onednn.py")
KINDS = ("train", "packed", "packed_act", "served", "served_act")
NEVER = 1 << 62
_BITS = {"other": 128, "avx2": 256, "avx512": 512}  # of a vector
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
        return f"{self.arch} has no table: oneDNN takes what its vendor's all give it, {names}; {_HOW}"

    def why(self, kind: str, bits: int) -> str:
        """Why a product whose weight has ``bits`` bits in its size runs as it does, for a reader."""
        if self.own:
            return self.tables[0].sources[kind]
        says = ", ".join(
            f"{each.arch} (measured on {each.on}) {_from(each.thresholds[kind][bits])}" for each in self.tables
        )
        return f"{self.arch} has no table, and oneDNN takes what its vendor's all give it: {says}; {_HOW}"


def _from(tokens: int) -> str:
    return {NEVER: "never", 1: "always"}.get(tokens, f"from {tokens} tokens on")


def in_force(arch: str) -> InForce:
    """What decides on ``arch``: the user's table (SHARDFUSE_TUNED) over the shipped one, or its relatives'."""
    names = [arch] if tuning.entries(arch, OP) else relatives(arch)
    tables = tuple(map(_measured, names))
    kinds = KINDS if tables else ()
    return InForce(
        arch, {kind: [*map(max, zip(*(each.thresholds[kind] for each in tables)))] for kind in kinds}, tables
    )


def relatives(arch: str) -> list[str]:
    """The processors with a table of the same machine, vendor and library, the nearest width of vectors first."""
    machine, vendor, _, library, *_ = arch.split("-")
    if "other" in (vendor, library):  # two of those have nothing in common
        return []
    stems = (path.stem for path in tuning.SHIPPED.glob(f"{machine}-{vendor}-*.json"))
    others = [stem for stem in stems if stem.split("-")[3:4] == [library] and tuning.entries(stem, OP)]
    return sorted(others, key=lambda other: (abs(_width(other) - _width(arch)), other))


def _width(arch: str) -> int:
    """The bits that a core's vector units work on at a time: Zen 4 takes AVX-512's in two halves."""
    _, _, vectors, _, *core = arch.split("-")
    return _BITS[vectors] // (2 if core else 1)


def _measured(arch: str) -> Measured:
    entries = tuning.entries(arch, OP)
    tables = tuning.tables(arch).values()
    found = {entry.bucket for entry in entries}
    kinds = {kind: _standing_in(kind, found) for kind in KINDS}
    sources = {entry.bucket.partition("-")[0]: entry.source for entry in entries}
    on = next((str(table.origin["processor"]) for table in reversed(tables) if "processor" in table.origin), arch)
    return Measured(
        arch,
        on,
        {kind: _by_bits(arch, each, found) for kind, each in kinds.items()},
        {kind: sources.get(each, "") for kind, each in kinds.items()},
    )


def _standing_in(kind: str, found: set[str]) -> str:
    """The kind of which a table with the buckets ``found`` has measurements, for ``kind``."""
    return kind if any(each.startswith(f"{kind}-") for each in found) else kind.replace("served", "packed")


def bucket(kind: str, features: int) -> str:
    """The key of weights with ``features`` = F D elements."""
    return f"{kind}-fp32-s{features.bit_length() - 1}"


def _by_bits(arch: str, kind: str, found: set[str]) -> list[int]:
    sizes = sorted(size for size in range(64) if bucket(kind, 1 << size) in found)
    thresholds = [NEVER] * 65
    for bits in range(1, 65):
        if sizes:
            size = min(max(bits - 1, sizes[0]), sizes[-1])
            measured = max((each for each in sizes if each <= size), default=sizes[0])
            config = tuning.lookup(arch, OP, bucket(kind, 1 << measured), CpuConfig)
            if config is not None and config.from_tokens:
                thresholds[bits] = config.from_tokens
    return thresholds
