"""Measured configurations: the tables that ship in ``tuned/<chip or processor>.json``, and the user's own above them.

Nothing is tuned while a model runs. ``shardfuse bench tune`` measures on a GPU and writes a table, ``shardfuse bench
calibrate --cpu`` on a CPU; here it is read, once per process, and asked with a dict look-up.
``SHARDFUSE_TUNED=/path/file.json`` lays a table of the user's over the shipped one, entry by entry. Every rank must see
the same files (the package's, and the same SHARDFUSE_TUNED): a configuration decides the order of additions, so ranks
with different tables would differ in the last bits.

A table, in JSON::

    {"format": 2, "arch": "sm_90", "dry": false, "origin": {...}, "sources": {"gemm": ["linear/triton.py", ...]},
     "entries": [{"op": "gemm", "bucket": "nt-t4096-n4096-k4096-bf16", "config": {"block_m": 128, ...},
                  "measured": {"us": 200.0, ...}, "source": "bench tune at commit 0123456 on NVIDIA H100",
                  "source_hash": "89ab...", "stock_wins": "the stock call took 190 us where the kernel took 200 us"}]}

``sources`` are files below ``kernels/``, of each op, ``source_hash`` is theirs (see :func:`source_hash`) when the entry
was measured. ``measured`` and ``origin`` are for people. ``config`` or ``stock_wins`` may be missing.

**An entry older than its sources** keeps its configuration: it was the fastest of its neighbours a few edits ago, which
is a better guess than a rule that never saw the shape, and whether it still compiles without a spill is tested ahead of
time for what ships. Its ``stock_wins`` lapses: that the stock path beats a kernel says nothing of the kernel after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

_KERNELS = Path(__file__).resolve().parents[1]
SHIPPED = _KERNELS / "tuned"
VARIABLE = "SHARDFUSE_TUNED"
FORMAT = 2

_TABLE = {"format": int, "arch": str, "dry": bool, "origin": dict, "sources": dict, "entries": list}
_ENTRY = {
    "op": str,
    "bucket": str,
    "measured": dict,
    "source": str,
    "source_hash": str,
    "config": dict,
    "stock_wins": str,
}
_MAY_LACK = {"config", "stock_wins"}

Config = TypeVar("Config", bound=Hashable)


class Forced(Generic[Config]):
    """A configuration that overrides all rules and tables within a block, for tuning and tests. Not for threads."""

    def __init__(self) -> None:
        self.config: Config | None = None  # of the innermost block, if any

    @contextlib.contextmanager
    def __call__(self, config: Config) -> Iterator[None]:
        outer, self.config = self.config, config
        try:
            yield
        finally:
            self.config = outer


@dataclass(frozen=True)
class Entry:
    """What was measured of one op in one bucket of shapes."""

    op: str
    bucket: str
    measured: Mapping[str, Any]
    source: str  # the measurement: command, commit, device
    source_hash: str
    config: Mapping[str, int | bool] | None = None
    stock_wins: str | None = None  # what was measured, where the stock path is the faster one
    where: str = ""  # file and position, for messages
    stale: bool = False  # the sources have changed since

    def record(self) -> dict[str, Any]:
        """The entry as it is written."""
        return {name: getattr(self, name) for name in _ENTRY if getattr(self, name) is not None}


@dataclass(frozen=True)
class Table:
    """One file."""

    arch: str
    dry: bool
    origin: dict[str, Any]
    sources: Mapping[str, Sequence[str]]  # of each op
    entries: tuple[Entry, ...]

    def record(self) -> dict[str, Any]:
        """The table as it is written, entries in order of their keys."""
        entries = sorted(self.entries, key=lambda entry: (entry.op, entry.bucket))
        return {
            "format": FORMAT,
            "arch": self.arch,
            "dry": self.dry,
            "origin": dict(self.origin),
            "sources": {op: list(names) for op, names in sorted(self.sources.items())},
            "entries": [entry.record() for entry in entries],
        }


def lookup(arch: str, op: str, bucket: str | None, kind: type[Config]) -> Config | None:
    """The measured configuration, an instance of the dataclass ``kind``, or None where there is none.

    ``bucket`` None (a shape that no table may decide) has none. The first call reads the tables; ValueError names the
    file and the entry that is broken.
    """
    return None if bucket is None else _configs(arch, op, kind).get(bucket)


def entries(arch: str, op: str) -> list[Entry]:
    """What is measured of ``op`` on ``arch``, in no order."""
    return list(_of(arch, op))


def tables(arch: str) -> dict[str, Table]:
    """The tables that count for ``arch`` by path, the shipped one first. The user's is left out on another chip."""
    shipped = SHIPPED / f"{arch}.json"
    found = {str(shipped): read(shipped)} if shipped.is_file() else {}
    own = os.environ.get(VARIABLE)
    if own:
        if not Path(own).is_file():
            raise ValueError(f"{VARIABLE}={own!r}: there is no such file; `shardfuse bench tune --out` writes one")
        found[own] = read(Path(own))
    for path, table in found.items():
        if table.dry:
            raise ValueError(f"{path}: written by a dry run, which measures nothing; tune on a GPU")
    return {path: table for path, table in found.items() if table.arch == arch}


def read(path: Path) -> Table:
    """The table in a file, checked. ValueError names the file and the line or entry at fault."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg}); tune again or restore it") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file; tune again or restore it") from None
    _check(str(path), content, _TABLE, set())
    if content["format"] != FORMAT:
        raise ValueError(f"{path}: format {content['format']}, and this version reads format {FORMAT}; tune again")
    for op, names in content["sources"].items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path}: sources of {op} must be file names")
    now = {op: source_hash(names) for op, names in content["sources"].items()}
    entries: dict[tuple[str, str], Entry] = {}
    for index, item in enumerate(content["entries"]):
        where = f"{path}, entry {index}"
        _check(where, item, _ENTRY, _MAY_LACK)
        entry = Entry(**item, where=f"{where} ({item['bucket']})", stale=item["source_hash"] != now.get(item["op"]))
        if entries.setdefault((entry.op, entry.bucket), entry) is not entry:
            raise ValueError(f"{where}: a second entry for {entry.op} {entry.bucket}")
    return Table(content["arch"], content["dry"], content["origin"], content["sources"], tuple(entries.values()))


def source_hash(names: Sequence[str]) -> str:
    """16 digits of a SHA-256 over the named files below ``kernels/``; a file that is gone counts as empty."""
    digest = hashlib.sha256()
    for name in sorted(names):
        path = _KERNELS / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
    return digest.hexdigest()[:16]


def forget() -> None:
    """Read the tables anew at the next question: after one was written, and in tests."""
    for cached in (_entries, _configs, claims):
        cached.cache_clear()
    for clear in also_forget:
        clear()


also_forget: list[Callable[[], None]] = []  # caches elsewhere that hold what was looked up here


@functools.cache
def _entries(arch: str) -> dict[tuple[str, str], Entry]:
    return {(entry.op, entry.bucket): entry for table in tables(arch).values() for entry in table.entries}


@functools.cache
def _configs(arch: str, op: str, kind: type[Any]) -> dict[str, Any]:
    """Every configuration of one op by bucket."""
    return {entry.bucket: config_of(entry, kind) for entry in _of(arch, op) if entry.config is not None}


@functools.cache
def claims(arch: str, op: str) -> dict[str, str]:
    """The measurements by which the stock path is faster than ``op``, by bucket, but for those that have lapsed."""
    return {
        entry.bucket: f"{entry.stock_wins} ({entry.source})"
        for entry in _of(arch, op)
        if entry.stock_wins is not None and not entry.stale
    }


def _of(arch: str, op: str) -> Iterable[Entry]:
    return (entry for entry in _entries(arch).values() if entry.op == op)


def config_of(entry: Entry, kind: type[Any]) -> Any:
    """The configuration of an entry that has one. ValueError names the entry and the field that is wrong."""
    assert entry.config is not None
    types = typing.get_type_hints(kind)
    defaults = {each.name: each.default for each in dataclasses.fields(kind) if each.default is not dataclasses.MISSING}
    _check(f"{entry.where}, config", dict(entry.config), types, defaults)
    for name, value in entry.config.items():
        if type(value) is int and value < 1 and value != defaults.get(name):
            raise ValueError(f"{entry.where}, config: {name} is {value}, expected at least 1")
    return kind(**entry.config)


def _check(where: str, content: Any, fields: Mapping[str, type], may_lack: Iterable[str]) -> None:
    """ValueError unless ``content`` is an object with these fields in these types."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(fields)}")
    unknown, missing = content.keys() - fields.keys(), fields.keys() - content.keys() - set(may_lack)
    if unknown or missing:
        faults = [f"unknown field {name!r}" for name in sorted(unknown)]
        faults += [f"field {name!r} is missing" for name in sorted(missing)]
        raise ValueError(f"{where}: {'; '.join(faults)}; fields are {', '.join(fields)}")
    for name, value in content.items():
        if type(value) is not fields[name]:
            raise ValueError(f"{where}: {name} is {value!r}, expected {fields[name].__name__}")
