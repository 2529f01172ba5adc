"""The rows of a page: each has a number, by which tables, plots and filters name it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..harness.publish import Result
from ..harness.report import Row
from .history import Comparison

_TOKENS = re.compile(r"(?<![a-z0-9])t(\d+)(?![a-z0-9])")
GPU, PROCESSOR = "GPU", "processor"


@dataclass(frozen=True)
class Entry:
    """A row of a result, with its number on the page."""

    number: int
    result: Result
    row: Row

    @property
    def label(self) -> str:
        return f"{self.row.case}, {self.row.metric}"

    @property
    def span(self) -> tuple[float, float]:
        """The ratio's interval, or the ratio twice where the timing gave none."""
        return self.row.between or (self.row.ratio, self.row.ratio)

    @property
    def told(self) -> str:
        """One line for a plot's dot."""
        row = self.row
        target = "" if row.target is None else f", target {row.target:.3f}"
        return f"{self.label}, against {row.peer_name}: {ratio(row.ratio, row.between)}{target}"

    @property
    def tokens(self) -> int | None:
        """The number of tokens that the case's name gives ("t512"), or None."""
        found = _TOKENS.findall(self.row.case)
        return int(found[0]) if len(found) == 1 and int(found[0]) > 0 else None

    @property
    def family(self) -> tuple[int, str, str]:
        """Equal for rows that differ in tokens and peer alone: result, case with T for the number, metric."""
        return id(self.result), _TOKENS.sub("T", self.row.case), self.row.metric

    @property
    def filters(self) -> dict[str, str]:
        """The texts that the page's filters look through, as attributes."""
        return _filters(f"{self.result.bench} {self.row.ran} {self.row.case}", self.label, self.result.device)


@dataclass(frozen=True)
class Past:
    """An earlier comparison, with its number on the page."""

    number: int
    comparison: Comparison

    @property
    def filters(self) -> dict[str, str]:
        return _filters(self.comparison.key, self.comparison.key, self.comparison.device)


def entries(results: Iterable[Result]) -> list[Entry]:
    """The rows that may be shown, numbered from 0."""
    rows = [(result, row) for result in results if not result.complaint for row in result.rows]
    return [Entry(number, result, row) for number, (result, row) in enumerate(rows)]


def pasts(history: Sequence[Comparison], first: int) -> list[Past]:
    """Earlier comparisons, numbered from ``first``."""
    return [Past(number, each) for number, each in enumerate(history, first)]


def ratio(value: float, interval: tuple[float, float] | None) -> str:
    """A ratio and its interval, for people."""
    return f"{value:.3f}" + (" ({:.3f} to {:.3f})".format(*interval) if interval else "")


def kind(device: str) -> str:
    """What the device filter calls a device."""
    return PROCESSOR if device == "cpu" else GPU


def _filters(name: str, shape: str, device: str) -> dict[str, str]:
    return {"data_name": name.lower(), "data_shape": shape.lower(), "data_device": kind(device)}
