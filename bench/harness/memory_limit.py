"""What the memory accesses of a row's kernels allow, by the committed counts of what their compiled code moves.

``kernels/dev/counts_report.py`` writes the counts; ``bench/gpu/predictions.py`` derives ranges from them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...kernels import dev

# Counts of sm_90's code by this Triton (``kernels/dev/counts_report.py``).
RECORD = Path(dev.__file__).parent / "compiled" / "counts-triton-3.7.1.json"
# How many times the rate of device memory each level has: an H200's 4.8 TB/s; of L1 128 bytes a clock (1.755 GHz) and
# SM (132). The columns are bytes that the level moves, over those that are necessary. What L2 moves is not counted: L1
# keeps some of what several blocks read ("by_block").
_LEVELS = {"touched": 1.0, "moved": 6.2}


class Launches(NamedTuple):
    """Kernels of a case of the record, which ran in the configurations of the row's kernels."""

    op: str
    case: str
    kernels: tuple[str, ...]


@functools.cache
def _record() -> Mapping[str, Any]:
    """LookupError without it: the predictions would lack their ground."""
    if not RECORD.is_file():
        raise LookupError(f"there is no {RECORD}, on which predictions rest: write it (make codegen) or name another")
    found: Mapping[str, Any] = json.loads(RECORD.read_text())
    return found


def counted(of: Launches, record: Mapping[str, Any]) -> list[dict[str, float]]:
    """What each of the launches moves by level; LookupError for one that is not recorded."""
    name, columns = f"sm_90 {of.op} {of.case}", ("kernel", *record["columns"])
    rows = [dict(zip(columns, row)) for row in record["cases"].get(name, [""])[1:]]
    missing = sorted(set(of.kernels) - {row["kernel"] for row in rows})
    if missing or not set(_LEVELS) <= set(columns):
        raise LookupError(
            f"{RECORD.name} has no {', '.join(missing) or 'columns'} of {name!r} with {', '.join(_LEVELS)}, from "
            "which a prediction follows: name launches that it has, or write it again (make codegen)"
        )
    return [{level: row[level] for level in _LEVELS} for row in rows if row["kernel"] in of.kernels]


def limit(of: Launches, record: Mapping[str, Any] | None = None) -> tuple[float, str]:
    """The ratio to a copy of the necessary bytes if the slowest level of memory decides, and the counts in words."""
    rows = counted(of, _record() if record is None else record)
    most = {level: max(row[level] for row in rows) for level in _LEVELS}
    moved = f"moves {most['touched']:.2f} of the necessary bytes in device memory, {most['moved']:.2f} in L1"
    return min(rate / most[level] for level, rate in _LEVELS.items()), moved
