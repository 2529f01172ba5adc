"""Rows, and the three forms they take: the line for scripts, the table for people, the record for the repository."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ..kernels.accuracy import Verdict
from .benchmark import Measurement
from .timing import Timing

# Where the same version timed twice differs by more than this, the machine was too busy to tell.
NOISE_LIMIT = 0.25

CONTRACT = ("case", "metric", "ours", "peer", "peer_name", "ratio", "target", "met")


@dataclass(frozen=True)
class Row:
    """One measured comparison. ``ratio`` > 1 means that ours is better; ``met`` is None where no target is set.

    A row noisier than NOISE_LIMIT has shown nothing, so it meets no target.
    """

    case: str
    metric: str
    ours: float
    peer: float
    peer_name: str
    ratio: float
    target: float | None
    met: bool | None
    noise: float | None = None  # the larger of the two sides' own spread
    ours_host_us: float | None = None
    peer_host_us: float | None = None

    @classmethod
    def of(cls, planned: Measurement, ours: Timing, peer: Timing) -> Row:
        ratio = ours.value / peer.value if planned.higher_is_better else peer.value / ours.value
        noise = max((side.noise for side in (ours, peer) if side.noise is not None), default=None)
        quiet = noise is None or noise <= NOISE_LIMIT
        return cls(
            planned.case,
            planned.metric,
            ours.value,
            peer.value,
            planned.peer_name,
            ratio,
            planned.target,
            None if planned.target is None else quiet and ratio >= planned.target,
            noise,
            ours.host,
            peer.host,
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Row:
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.metric, self.peer_name

    def contract(self) -> dict[str, Any]:
        """The eight fields that scripts may rely on."""
        return {name: getattr(self, name) for name in CONTRACT}

    def record(self) -> dict[str, Any]:
        return asdict(self)


LOG_WIDTH = 150


def console(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """A terminal as wide as it is; a file or a pipe, which has no width of its own, wide enough for every table."""
    found = Console(stderr=stderr, file=file, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, file=file, highlight=False, width=LOG_WIDTH)


def last_line(bench: str, green: bool, device: str, rows: Sequence[Row]) -> str:
    """What ``--json`` prints last; a red gate shows no row."""
    shown = [row.contract() for row in rows] if green else []
    return json.dumps({"bench": bench, "gate": "green" if green else "red", "device": device, "rows": shown})


def show_rows(console: Console, title: str, rows: Sequence[Row], *, absolute: bool) -> None:
    """A table of rows. Without ``absolute`` (any CPU) it shows ratios only: the times mean nothing by themselves."""
    table = Table(
        title=title, title_justify="left", caption=None if absolute else "ratios only: > 1 means ours is better"
    )
    for column in ("case", "metric", "peer"):
        table.add_column(column, overflow="fold", no_wrap=column != "peer")
    for column in (("ours", "peer's") if absolute else ()) + ("ratio", "target", "noise", "met"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = (f"{row.ours:,.4g}", f"{row.peer:,.4g}") if absolute else ()
        table.add_row(
            row.case,
            row.metric,
            row.peer_name,
            *times,
            f"{row.ratio:.3f}",
            "" if row.target is None else f"{row.target:.3f}",
            "" if row.noise is None else f"{row.noise:.1%}",
            {None: "", True: "[green]yes", False: "[red]no"}[row.met],
        )
    console.print(table)


def show_red(console: Console, bench: str, verdicts: Sequence[tuple[str, Verdict]]) -> None:
    """Why a gate is red: the failing comparisons, and nothing that could pass for a result."""
    console.print(f"[red]{bench}: the correctness gate is red, nothing was timed")
    for case, verdict in verdicts:
        if not verdict.ok:
            console.print(f"  {case}: {verdict}", markup=False, highlight=False)


def write_json(path: Path, content: Any) -> None:
    """Write beside, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)
