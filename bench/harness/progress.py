"""Progress of a run that may take hours: the current row, the number of rows done, the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console

from ...kernels.dev.accuracy import Verdict
from .benchmark import Measurement
from .report import Row

LAST_ERROR = 3


class Progress:
    """Prints lines on ``console`` for ``total`` rows; ``keep`` is called after every row and every checked case.

    ``failed`` collects the rows that raise. After LAST_ERROR failing rows in succession no further row starts: a GPU
    may stop responding after a failure.
    """

    def __init__(
        self, console: Console, total: int, failed: dict[tuple[str, str, str], str], keep: Callable[[], None]
    ) -> None:
        self._console = console
        self._status = console.status("")
        self._total = total
        self._failed = failed
        self._keep = keep
        self._rows = 0
        self._errors = 0  # in succession
        self._case: str | None = None
        self._started = 0.0

    def __enter__(self) -> Progress:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()

    def on_verdict(self, case: str, verdict: Verdict) -> None:
        if case != self._case:
            self._case = case
            self._status.update(f"checking {case}")
            self._keep()

    def on_start(self, planned: Measurement) -> None:
        self._started = self._started or time.monotonic()
        self._status.update("measuring")
        line = f"  {self._rows + 1:>{len(str(self._total))}} of {self._total}{self._left()}  "
        line += f"{planned.case}: {planned.metric}, against {planned.peer_name}"
        self._console.print(line, markup=False, soft_wrap=True)

    def on_row(self, row: Row) -> None:
        self._rows += 1
        self._errors = 0
        self._failed.pop(row.key, None)
        self._keep()

    def on_error(self, lost: Sequence[Measurement], error: Exception) -> None:
        """Record a row that raised, or all rows of a case whose check raised, as one error."""
        self._rows += len(lost)
        self._errors += 1
        message = str(error).strip().partition("\n")[0]
        why = f"{type(error).__name__}: {message}"
        self._failed.update((planned.key, why) for planned in lost)
        rows = f" ({len(lost)} rows)" if len(lost) > 1 else ""
        self._console.print(f"  failed{rows}: {why}", markup=False, soft_wrap=True)
        self._keep()
        if self._errors == LAST_ERROR:
            raise error

    def _left(self) -> str:
        """An estimate from the rows so far, shown if it is minutes."""
        if not self._rows:
            return ""
        minutes = (time.monotonic() - self._started) / self._rows * (self._total - self._rows) / 60
        return f", about {minutes:.0f} min left" if minutes >= 2 else ""
