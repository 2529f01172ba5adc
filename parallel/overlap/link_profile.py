"""Profiles: the figures of the links between ranks and of the products beside them, one JSON file per kind of machine.

``shardfuse bench calibrate`` measures a node and writes a profile; ``SHARDFUSE_LINKS`` names the file. Without it a
shipped profile applies (``profiles/<chip>.json``): the one for CPUs overlaps nothing; those for GPUs hold published
figures, and every reason based on them says so. A profile in JSON (seconds, bytes, FLOP/s)::

    {"format": 2, "device": "NVIDIA H100 80GB HBM3", "arch": "sm_90", "measured": true, "dry": false,
     "origin": {"date": ..., "torch": ..., "triton": ..., "ranks": 8, "cpus": 104, ...},
     "sources": ["measured by shardfuse bench calibrate"],
     "links": {"node": {"all_gather": {"start_s": 8e-6, "alpha_s": 3e-6, "bytes_per_s": 4e11}, ...}},
     "gemm_flops": {"bf16": 7e14}, "copy_bytes_per_s": 4.2e11, "memory_bytes_per_s": 3e12,
     "hides": 0.8, "piece_s": 4e-5,
     "rows": [{"op": "all_gather_linear", "dtype": "bf16", "ranks": 8, "link": "node", "bucket": "t4096-k8192-n3584",
               "clock": "device", "plain_s": 4e-4, "chunked_s": {"1": 3.7e-4, "2": 3.9e-4}, "kernel_s": 3.3e-4,
               "noise": 0.01}]}

``links`` has "node" for ranks of one machine and "network" for ranks of several; :mod:`link_model` defines the figures.
``rows`` are measurements of whole operations, each for a bucket of shapes; ``kernel_s`` may be missing. A bucket has
two rows. With the clock "device" several calls are queued, and a call's time is the device's, as in training, which
hides the host's work. With "with_host" each call ends before the next one begins, as in decoding. :mod:`plan` knows
which clock fits a call. Format 1 had one row, measured like "with_host".
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.runtime import device as chips

SHIPPED = Path(__file__).parent / "profiles"
VARIABLE = "SHARDFUSE_LINKS"
FORMAT = 2
CLOCKS = DEVICE, WITH_HOST = "device", "with_host"
OPS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "all_reduce_rmsnorm")
COLLECTIVES = dict(zip(OPS, ("all_gather", "reduce_scatter", "all_reduce", "all_reduce")))
LINKS = ("node", "network")
AGAIN = "write one with `shardfuse bench calibrate`, or unset SHARDFUSE_LINKS"

RowKey = tuple[str, str, int, str, str, str]
_OTHER_LINKS = re.compile("PCIE|NVL", re.IGNORECASE)  # cards whose links differ from those of the chip's usual module


@dataclass(frozen=True)
class Link:
    """A collective's cost: seconds per call, seconds per step of it, and bytes/s that a rank sends."""

    start_s: float
    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Row:
    """One operation measured on shapes that stand for their bucket: seconds of each path.

    ``plain_s`` is plain's time on the first shape. The time of another path is ``plain_s`` times its share of plain's
    time on the same shape; of several shapes the worst share counts.
    """

    op: str
    dtype: str
    ranks: int
    link: str
    bucket: str
    plain_s: float
    chunked_s: Mapping[int, float]  # by the number of pieces of each rank's shard
    kernel_s: float | None = None
    noise: float = 0.0  # the relative difference between two timings of the same path
    clock: str = DEVICE  # one of CLOCKS

    @property
    def key(self) -> RowKey:
        return self.op, self.dtype, self.ranks, self.link, self.bucket, self.clock

    def record(self) -> dict[str, Any]:
        """The row as it is written to the file."""
        plain = {name: getattr(self, name) for name in _ROW if getattr(self, name) is not None}
        return plain | {"chunked_s": {str(pieces): seconds for pieces, seconds in sorted(self.chunked_s.items())}}


@dataclass(frozen=True)
class Profile:
    """One file. Where ``measured`` is False the figures are published or assumed; ``sources`` names their origin."""

    device: str  # the GPU's name, or "cpu"; in a shipped profile the chip's name
    arch: str  # "sm_90", or "cpu"
    measured: bool
    dry: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    links: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)
    gemm_flops: Mapping[str, float] = field(default_factory=dict)  # by dtype
    copy_bytes_per_s: float | None = None  # the rate of a copy engine to a peer
    memory_bytes_per_s: float | None = None
    hides: float = 0.0  # a product's speed during a collective, as a share of its speed alone
    piece_s: float = 0.0  # host time for one piece of a chunked operation
    rows: tuple[Row, ...] = ()

    @functools.cached_property
    def table(self) -> dict[RowKey, Row]:
        """The rows by their keys."""
        return {row.key: row for row in self.rows}

    def record(self) -> dict[str, Any]:
        """The profile as it is written to the file, rows in order of their keys."""
        rows = sorted(self.rows, key=lambda row: row.key)
        links = {
            name: {collective: vars(link) for collective, link in of.items()} for name, of in sorted(self.links.items())
        }
        plain = {name: getattr(self, name) for name in _PROFILE if name not in ("format", "links", "rows")}
        plain = {name: value for name, value in plain.items() if value is not None}
        return {
            "format": FORMAT,
            **plain,
            "sources": list(self.sources),
            "links": links,
            "rows": [row.record() for row in rows],
        }


def bucket(tokens: int, features_in: int, features_out: int) -> str:
    """The bucket of a shape: each size rounded to the nearest power of two on a logarithmic scale."""
    return "-".join(
        f"{letter}{_nearest(size)}" for letter, size in (("t", tokens), ("k", features_in), ("n", features_out))
    )


def _nearest(size: int) -> int:
    return 0 if size < 1 else 1 << round(math.log2(size))


class Ends(NamedTuple):
    """The sizes of a bucket: from ``low`` to ``high``, named after ``middle``."""

    low: int
    middle: int
    high: int


def bucket_ends(size: int) -> Ends:
    """The bucket of one ``size`` of at least 1."""
    middle = _nearest(size)
    return Ends(math.ceil(middle * 0.5**0.5), middle, math.floor(middle * 2**0.5))


def device_names(device: torch.device) -> tuple[str, str]:
    """(the device's name, its chip): ("NVIDIA H100 80GB HBM3", "sm_90"), ("cpu", "cpu"); ("cuda", "unknown") for a GPU
    that this machine lacks.
    """
    if device.type != "cuda":
        return device.type, device.type
    if not torch.cuda.is_available():
        return "cuda", "unknown"
    return torch.cuda.get_device_name(device), chips.architecture(device)


def load(device: torch.device) -> Profile | None:
    """The profile for ``device``: the file that SHARDFUSE_LINKS names, else the shipped one, or None if there is none.

    Raises ValueError, naming the file, if it is missing, broken, or for another kind of device.
    """
    name, arch = device_names(device)
    path = os.environ.get(VARIABLE)
    if not path:
        return None if _OTHER_LINKS.search(name) else shipped(arch)
    profile = read(Path(path))
    if (profile.device, profile.arch) != (name, arch):
        raise ValueError(
            f"{VARIABLE}: {path} was measured on {profile.device} ({profile.arch}), and this is {name} ({arch}): "
            f"figures of one device do not apply to another; {AGAIN}"
        )
    return profile


@functools.cache
def shipped(arch: str) -> Profile | None:
    """The profile that ships with the package for a chip ("sm_90", "cpu"), or None."""
    path = SHIPPED / f"{arch}.json"
    return read(path) if path.is_file() else None


def read(path: Path) -> Profile:
    """The profile in ``path``; ValueError, naming the file, if it is missing, truncated or something else."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{path} is cut short, or not JSON ({error}); {AGAIN}") from None
    return parse(content, str(path))


def parse(content: Any, where: str) -> Profile:
    """The profile that :meth:`Profile.record` wrote as ``content``; messages name ``where`` it comes from."""
    _check(where, content, _PROFILE, _MAY_LACK)
    if content["format"] != FORMAT:
        raise ValueError(f"{where}: format {content['format']}, and this version reads {FORMAT}; {AGAIN}")
    values = dict(content)
    del values["format"]
    if not 0 <= values.get("hides", 0.0) <= 1:
        raise ValueError(f"{where}: hides is {values['hides']!r}, expected a share from 0 to 1; {AGAIN}")
    values["sources"] = tuple(values.get("sources", ()))
    values["links"] = {name: _links(f"{where}, links.{name}", of, name) for name, of in values.get("links", {}).items()}
    values["rows"] = tuple(_row(f"{where}, row {index}", row) for index, row in enumerate(values.get("rows", ())))
    for name, rate in values.get("gemm_flops", {}).items():
        _positive(f"{where}, gemm_flops.{name}", rate)
    profile = Profile(**values)
    if len(profile.table) < len(profile.rows):
        raise ValueError(f"{where}: two rows of one op, dtype, group, bucket and clock; {AGAIN}")
    return profile


def _links(where: str, content: Any, name: str) -> dict[str, Link]:
    if name not in LINKS:
        raise ValueError(f"{where}: expected one of {', '.join(LINKS)}; {AGAIN}")
    _check(where, content, dict.fromkeys(COLLECTIVES.values(), dict), set(COLLECTIVES.values()))
    for collective, link in content.items():
        _check(f"{where}.{collective}", link, _LINK, ())
        _positive(f"{where}.{collective}.bytes_per_s", link["bytes_per_s"])
    return {collective: Link(**link) for collective, link in content.items()}


def _row(where: str, content: Any) -> Row:
    _check(where, content, _ROW, {"kernel_s", "noise"})
    if content["op"] not in OPS:
        raise ValueError(f"{where}: op is {content['op']!r}, expected one of {', '.join(OPS)}; {AGAIN}")
    if content["clock"] not in CLOCKS:
        raise ValueError(f"{where}: clock is {content['clock']!r}, expected one of {', '.join(CLOCKS)}; {AGAIN}")
    for pieces, seconds in content["chunked_s"].items():
        if not (pieces.isdigit() and int(pieces) > 0):
            raise ValueError(f"{where}: chunked_s has {pieces!r}, expected numbers of pieces; {AGAIN}")
        _positive(f"{where}, chunked_s.{pieces}", seconds)
    for name in ("plain_s", "kernel_s"):
        if name in content:
            _positive(f"{where}, {name}", content[name])
    return Row(**content | {"chunked_s": {int(pieces): seconds for pieces, seconds in content["chunked_s"].items()}})


_NUMBER = float  # also accepts JSON's whole numbers
_PROFILE = {
    "format": int,
    "device": str,
    "arch": str,
    "measured": bool,
    "dry": bool,
    "origin": dict,
    "sources": list,
    "links": dict,
    "gemm_flops": dict,
    "copy_bytes_per_s": _NUMBER,
    "memory_bytes_per_s": _NUMBER,
    "hides": _NUMBER,
    "piece_s": _NUMBER,
    "rows": list,
}
_MAY_LACK = _PROFILE.keys() - {"format", "device", "arch", "measured"}
_LINK = {"start_s": _NUMBER, "alpha_s": _NUMBER, "bytes_per_s": _NUMBER}
_ROW = {
    "op": str,
    "dtype": str,
    "ranks": int,
    "link": str,
    "bucket": str,
    "clock": str,
    "plain_s": _NUMBER,
    "chunked_s": dict,
    "kernel_s": _NUMBER,
    "noise": _NUMBER,
}


def _check(where: str, content: Any, fields: Mapping[str, type], may_lack: Any) -> None:
    """ValueError unless ``content`` is an object with these fields and types, its numbers finite and at least 0."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(fields)}; {AGAIN}")
    unknown, missing = content.keys() - fields.keys(), fields.keys() - content.keys() - set(may_lack)
    if unknown or missing:
        faults = [f"unknown field {name!r}" for name in sorted(unknown)]
        faults += [f"field {name!r} is missing" for name in sorted(missing)]
        raise ValueError(f"{where}: {'; '.join(faults)}; {AGAIN}")
    for name, value in content.items():
        kind = fields[name]
        if kind is _NUMBER:
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{where}: {name} is {value!r}, expected a number from 0 on; {AGAIN}")
        elif type(value) is not kind:
            raise ValueError(f"{where}: {name} is {value!r}, expected {kind.__name__}; {AGAIN}")


def _positive(where: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{where} is {value!r}, expected a number above 0; {AGAIN}")
