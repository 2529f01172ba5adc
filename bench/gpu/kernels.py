"""The compiled kernels of a GPU run: those that came along in ``kernels.zip``, and those that it compiles itself.

Each call unpacks the file into an empty cache of Triton's and adds to it at its end what the call had to compile. So
nothing is compiled twice, on whichever machines the calls run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...kernels.dev import carried
from ..harness import provenance
from ..harness.benchmark import Benchmark
from ..harness.runner import find

ARCHIVE = "kernels.zip"
_CASES = "benchmarks"  # in the archive's notes: the benchmarks' cases whose kernels are all there


class Kernels:
    """A run's cache, ``folder``, filled from the archive in ``out`` if there is one."""

    def __init__(self, out: Path) -> None:
        self._archive = out / ARCHIVE
        self._temporary = tempfile.TemporaryDirectory(prefix="shardfuse-kernels-")
        self.folder = Path(self._temporary.name)
        self.given = carried.unpack(self._archive, self.folder) if self._archive.is_file() else carried.Carried()
        self._before = carried.kernels_in(self.folder)

    def compiled(self) -> int:
        """The number of kernels that were compiled since the archive was unpacked."""
        return len(carried.kernels_in(self.folder) - self._before)

    def has(self, benchmark: Benchmark, case: str) -> bool:
        """Whether the archive brought the kernels of a case, compiled from today's sources."""
        return case in self.given.notes.get(_CASES, {}).get(_name(benchmark), ())

    def close(self) -> None:
        """Keep in the archive what was compiled, and remove the cache."""
        if carried.kernels_in(self.folder) - self._before:
            carried.pack(self.folder, self._archive)
        self._temporary.cleanup()


def noted(cases: Iterable[tuple[str, str]], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Notes for the archive that (benchmark, case) are compiled, beside what its ``earlier`` notes say."""
    found = {name: set(each) for name, each in earlier.get(_CASES, {}).items()}
    for benchmark, case in cases:
        found.setdefault(_name(find(benchmark)), set()).add(case)
    return {_CASES: {name: sorted(each) for name, each in found.items()}}


def _name(benchmark: Benchmark) -> str:
    return f"{benchmark.name} {provenance.source_hash(benchmark)}"
