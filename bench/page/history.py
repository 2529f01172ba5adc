"""Earlier comparisons, from a file of JSON lines: one ratio of one key on one date in each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Comparison:
    """One line. ``key`` names a row; ``ratio`` > 1 means that ours is better; ``interval`` is the ratio's."""

    date: datetime
    commit: str
    device: str
    key: str
    ratio: float
    interval: tuple[float, float] | None
    verdict: str


def read_history(path: Path) -> list[Comparison]:
    """The comparisons in a file that ``bench compare --history`` wrote, oldest first, but for refused rows.

    Raises ValueError, naming the line, if one is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"{path} cannot be read ({why}): name a file of earlier comparisons") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found += _comparison(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}, is no comparison ({error!r}): each line is an object with date, commit, "
                    "device, key, ratio > 0, between and verdict"
                ) from None
    if not found:
        raise ValueError(f"{path} holds no comparison: leave it out, or name a file that holds some")
    return sorted(found, key=lambda each: each.date.timestamp())


def _comparison(line: dict[str, Any]) -> list[Comparison]:
    if line["verdict"] == "refused":
        return []
    key: str | Sequence[str] = line["key"]
    ratio, interval = float(line["ratio"]), line["between"]
    low, high = map(float, interval) if interval else (ratio, ratio)
    if not (0 < ratio < float("inf") and 0 < low <= high < float("inf")):
        raise ValueError("its ratio and interval are not positive and finite")
    date = datetime.fromisoformat(line["date"].replace("Z", "+00:00"))  # Python 3.10 does not read Z
    name = key if isinstance(key, str) else " | ".join(map(str, key))
    between = (low, high) if interval else None
    return [Comparison(date, str(line["commit"]), str(line["device"]), name, ratio, between, str(line["verdict"]))]
