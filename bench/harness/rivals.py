"""Rivals: other implementations of an op, each found if its package is installed, and skipped with a reason if not.

They come from the modules of ``bench/rivals``, from the entry points ``shardfuse.rivals`` of installed packages, and
from files (``--rival PATH:NAME``). The gate judges a rival like any other implementation before it is timed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from ...kernels.dev.registry import Case
from ...kernels.runtime.names import expected
from . import vendored  # noqa: F401 - makes the wheels in .whl importable
from .loading import from_entry_points, from_file

GROUP = "shardfuse.rivals"

Outputs = Mapping[str, torch.Tensor]
Run = Callable[[dict[str, Any], Case], Outputs]


class Prepared(NamedTuple):
    """A call over operands in the rival's own layout. ``call`` alone is timed; ``outputs`` names its results."""

    call: Callable[[], Any]
    outputs: Callable[[Any], Outputs]


@dataclass(frozen=True)
class Rival:
    """One implementation of one op by other code.

    ``run(inputs, case)`` returns outputs and gradients by name, as ``OpSpec.run`` does. ``prepare(inputs, case)`` takes
    its place where operands need another layout, which is made before the timing.

    It is found if the module ``package`` can be imported, ``distribution`` (by default of the same name) has at least
    the version ``least``, the device is one of ``devices``, and ``lacks(device)`` gives no reason why not.
    ``refuses(case)`` is the reason why it has no answer to a case; an empty string means that it has one.
    """

    name: str
    op: str
    run: Run | None = None
    prepare: Callable[[dict[str, Any], Case], Prepared] | None = None
    package: str = "torch"
    distribution: str = ""
    least: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    lacks: Callable[[torch.device], str] = lambda device: ""
    refuses: Callable[[Case], str] = lambda case: ""

    def __post_init__(self) -> None:
        if (self.run is None) == (self.prepare is None):
            raise ValueError(f"rival {self.name} of {self.op}: expected one of run and prepare")

    @property
    def version(self) -> str | None:
        """The installed version; None for a package without one, such as a file beside the program."""
        try:
            return metadata.version(self.distribution or self.package)
        except metadata.PackageNotFoundError:
            return None

    def missing(self, device: torch.device) -> str:
        """The reason why it cannot run on ``device``; an empty string if it can."""
        name, version = self.distribution or self.package, self.version
        if importlib.util.find_spec(self.package) is None:
            return f"{name} is not installed"
        if self.least and version is not None and TorchVersion(version) < self.least:
            return f"{name} is {version}, expected {self.least} or newer"
        if device.type not in self.devices:
            return f"needs the device {' or '.join(self.devices)}, not {device.type}"
        return self.lacks(device)


@dataclass(frozen=True)
class Listed:
    """A rival with its origin. ``broken``: why it cannot be used at all."""

    source: str
    rival: Rival | None
    broken: str = ""


@functools.cache
def built_in() -> tuple[Rival, ...]:
    """The rivals that the modules of ``bench/rivals`` define in ``RIVALS``."""
    from .. import rivals

    names = [entry.name for entry in pkgutil.iter_modules(rivals.__path__)]
    modules = [importlib.import_module(f"{rivals.__name__}.{name}") for name in names]
    return tuple(rival for module in modules for rival in getattr(module, "RIVALS", ()))


def listed(files: Sequence[str] = ()) -> list[Listed]:
    """Every rival: built-in ones, entry points' and those of ``files``, each of which is a "PATH:NAME".

    The first of two with the same name and op counts. Raises ValueError or RuntimeError for a file without a rival.
    """
    found: list[Listed] = []
    taken: dict[tuple[str, str], str] = {}
    for source, each in _objects(files):
        if not isinstance(each, Rival):
            why = str(each) if isinstance(each, Exception) else f"is a {type(each).__name__}, expected a Rival"
            found.append(Listed(source, None, why))
            continue
        key = each.op, each.name
        before = taken.setdefault(key, source)
        found.append(Listed(source, each, "" if before == source else f"{before} has a rival of this name, too"))
    return found


def find_rival(op: str, name: str, device: torch.device, files: Sequence[str] = ()) -> Rival:
    """The rival called ``name`` of ``op``; ValueError if there is none, RuntimeError if it cannot run on ``device``."""
    known = {
        each.rival.name: each.rival for each in listed(files) if each.rival and each.rival.op == op and not each.broken
    }
    if name not in known:
        raise ValueError(f"rival:{name}: {op} has no such rival; {expected(name, known, 'it has')}")
    missing = known[name].missing(device)
    if missing:
        raise RuntimeError(f"rival:{name}: {missing}; `shardfuse bench rivals {op}` lists those that are here")
    return known[name]


def _objects(files: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for rival in built_in():
        yield "built in", rival
    yield from from_entry_points(GROUP)
    for text in files:
        found = from_file(text, "--rival", "PATH:NAME, a Rival or a tuple of them in a Python file")
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if not isinstance(each, Rival):
                raise ValueError(f"--rival {text}: is a {type(each).__name__}, expected a Rival or a tuple of them")
            yield text, each
