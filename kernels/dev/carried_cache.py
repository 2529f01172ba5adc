"""A Triton cache for one run: filled from an archive of compiled kernels, which gets what the run compiles itself.

Where the archive was not made of today's sources, a run adds what it had to compile, up to LIMIT. The archive belongs
to all cards of one compute capability; another's get none of it.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from . import carried

ARCHIVE = "kernels.zip"
LIMIT = 15 << 20  # bytes: what is larger may not come back from a machine
ARCH, SOURCES = "arch", "sources"  # in the archive's notes: for what it was compiled; by phase, a hash of the sources
NEEDED = {"smoke", "benchmarks"}  # phases whose kernels make an archive worth no addition


class Kernels:
    """A run's cache, ``folder``, filled from the archive in ``out`` if there is one for ``arch``.

    ``fresh`` are the phases whose kernels were compiled of ``sources``, a hash, so that hardly any is left to compile.
    """

    def __init__(self, out: Path, arch: str, sources: str) -> None:
        self._archive, self._arch = out / ARCHIVE, arch
        self._temporary = tempfile.TemporaryDirectory(prefix="shardfuse-kernels-")
        self.folder = Path(self._temporary.name)
        self.given, self._ours = carried.Carried(), not self._archive.is_file()
        try:
            if not self._ours:
                theirs = carried.notes_of(self._archive).get(ARCH, arch)
                self._ours = theirs == arch
                other = carried.Carried(refused=f"they are for {theirs}, and this is {arch}")
                self.given = carried.unpack(self._archive, self.folder) if self._ours else other
        except Exception as error:  # a damaged archive raises whatever its packer does
            self._ours, why = False, f"{type(error).__name__}: {error}"
            self.given = carried.Carried(refused=f"{self._archive} cannot be read ({why}): delete it")
        noted = self.given.notes.get(SOURCES)
        self.fresh = {phase for phase, made in noted.items() if made == sources} if isinstance(noted, dict) else set()
        self._before = carried.kernels_in(self.folder)

    @property
    def adds(self) -> bool:
        """Whether :meth:`close` may have to pack, which takes seconds."""
        return self._ours and not self.fresh >= NEEDED

    def compiled(self) -> int:
        """The number of kernels that were compiled since the archive was unpacked."""
        return len(carried.kernels_in(self.folder) - self._before)

    def close(self) -> None:
        """Keep in the archive what was compiled, unless that was made of today's sources, and remove the cache."""
        try:
            if self.adds and self.compiled():
                carried.pack(self.folder, self._archive, {ARCH: self._arch}, compression=zipfile.ZIP_LZMA, limit=LIMIT)
        finally:
            self._temporary.cleanup()
