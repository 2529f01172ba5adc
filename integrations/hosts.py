"""The tested versions of each host, and the check of others, made when a plug-in registers.

A host changes its plug-in interface every one or two minor versions. With a tested version the plug-in registers. With
another version it registers with a warning if the sources still have everything that it relies on (``contract.py``).
Otherwise :class:`UnsupportedHost` names the difference and the tested versions.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .contract import Expectation, differences, read


class UnsupportedHost(RuntimeError):
    """A host is missing, or its version lacks something that the plug-in relies on."""


@dataclass(frozen=True)
class Host:
    """A server or library that calls our kernel."""

    name: str
    package: str  # the name to import
    distributions: tuple[str, ...]  # pip's names, any of which provides it
    ran: tuple[str, ...]  # versions tested end to end
    compared: tuple[str, ...] = ()  # versions whose sources satisfy the contract, not run

    @property
    def tested(self) -> str:
        """The versions, for messages."""
        parts = [f"{', '.join(self.ran)} (run)" if self.ran else ""]
        parts += [f"{', '.join(self.compared)} (contract compared, not run)" if self.compared else ""]
        return "; ".join(filter(None, parts))

    def version(self) -> str:
        """The installed version, without its local part. UnsupportedHost if the host is not installed."""
        for distribution in self.distributions:
            try:
                return metadata.version(distribution).partition("+")[0]
            except metadata.PackageNotFoundError:
                continue
        raise UnsupportedHost(
            f"{self.name} is not installed: pip install {self.distributions[0]}=={(*self.ran, *self.compared)[0]} "
            f"(versions tested: {self.tested})"
        )

    def folder(self) -> Path:
        """The folder of the installed package's sources, found without importing it."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise UnsupportedHost(f"{self.name} {self.version()} has no package {self.package!r} here; install it anew")
        return Path(spec.origin).parent

    def check(self, contract: Sequence[Expectation]) -> str:
        """The installed version if the plug-in can work with it; warns for an untested one.

        Raises UnsupportedHost otherwise.
        """
        version = self.version()
        if version in (*self.ran, *self.compared):
            return version
        try:
            wrong = differences(read(self.folder().parent, contract), contract)
        except (OSError, SyntaxError, ValueError) as error:
            wrong = [f"its sources cannot be read ({error})"]
        if wrong:
            raise UnsupportedHost(
                f"{self.name} {version} is not what this plug-in was written for: {'; '.join(wrong)}. Versions tested: "
                f"{self.tested}; install one of them, or a newer shardfuse"
            )
        warnings.warn(
            f"{self.name} {version} was not tested with shardfuse, but has what the plug-in rests on. Versions tested: "
            f"{self.tested}",
            stacklevel=2,
        )
        return version
