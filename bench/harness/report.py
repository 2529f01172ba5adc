"""Rows and their three forms: the line for scripts, the table for people, the record for the repository."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime.printing import Sheet, figure, prose, unbroken
from .benchmark import Measurement, Work
from .timing import Ceilings, Timing

# If two timings of the same version differ by more than this, the machine was too busy for a result.
NOISE_LIMIT = 0.25
TOO_NOISY = f"a row with more than {NOISE_LIMIT:.0%} noise meets no target"
PEAK_MARGIN = 1.1  # a product may beat the one that measured the peak by a little; by more, the timing is wrong

CONTRACT = ("case", "metric", "ours", "peer", "peer_name", "ratio", "target", "met")


@dataclass(frozen=True)
class Row:
    """One measured comparison. ``ratio`` > 1 means that ours is better; ``met`` is None without a target.

    A row noisier than NOISE_LIMIT is inconclusive, so it meets no target, and nor does one above the device's peak.
    ``ceilings`` were measured in the same run, in the row's precision, if there is ``work`` to compare with them.
    ``ran`` names the ops and implementations that the timed calls of both sides used ("linear_act=triton"): a table of
    measurements may have selected the stock path for ours. ``between`` is an interval of the ratio and ``low`` its
    first decile, if the timing gave them; where the target is a gain, the decile must be one, too.
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
    work: Work | None = None
    ceilings: Ceilings | None = None
    ran: str = ""
    between: tuple[float, float] | None = None
    low: float | None = None

    @classmethod
    def of(
        cls, planned: Measurement, ours: Timing, peer: Timing, ceilings: Ceilings | None = None, *, ran: str = ""
    ) -> Row:
        ratio = ours.value / peer.value if planned.higher_is_better else peer.value / ours.value
        noise = max((side.noise for side in (ours, peer) if side.noise is not None), default=None)
        quiet = noise is None or noise <= NOISE_LIMIT
        steady = ours.ratio_low is None or planned.target is None or planned.target <= 1 or ours.ratio_low > 1
        found = cls(
            planned.case,
            planned.metric,
            ours.value,
            peer.value,
            planned.peer_name,
            ratio,
            planned.target,
            None if planned.target is None else quiet and steady and ratio >= planned.target,
            noise,
            ours.host,
            peer.host,
            planned.work,
            ceilings if planned.work is not None and planned.bf16 else None,
            ran,
            ours.ratio_between,
            ours.ratio_low,
        )
        return replace(found, met=False) if found.met and found.beats_peak else found

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Row:
        plain = {name: record[name] for name in cls.__dataclass_fields__}
        work, ceilings, between = (plain.pop(name) for name in ("work", "ceilings", "between"))
        return cls(
            **plain,
            work=work and Work(**work),
            ceilings=ceilings and Ceilings(**ceilings),
            between=between and tuple(between),
        )

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.metric, self.peer_name

    @property
    def beats_peak(self) -> bool:
        """Whether our time stands for more operations per second than the device can do, by PEAK_MARGIN."""
        return self.rates().get("of_peak", 0.0) > PEAK_MARGIN

    def contract(self) -> dict[str, Any]:
        """The eight fields that scripts may rely on."""
        return {name: getattr(self, name) for name in CONTRACT}

    def record(self) -> dict[str, Any]:
        """Every field and the derived figures: see :meth:`rates`."""
        return asdict(self) | self.rates()

    def rates(self) -> dict[str, float]:
        """Figures derived from our time: TFLOP/s, GB/s, their shares of the ceilings, the gain over this peer that the
        pass count allows, and the share of it that was reached. Empty without work; no shares without ceilings.
        """
        if self.work is None:
            return {}
        seconds = self.ours * 1e-6
        flops, bandwidth = self.work.flops / seconds, self.work.bytes / seconds
        found = {"tflops": flops / 1e12, "gb_s": bandwidth / 1e9}
        if self.ceilings is not None:
            found |= {"of_peak": flops / self.ceilings.flops, "of_copy": bandwidth / self.ceilings.bandwidth}
            bound = self.work.bound(self.ceilings)
            if bound > 0:
                found |= {"bound": bound, "won": (self.ratio - 1) / bound}
        return found


DRY_NOTE = " (dry run: the path was proved, the numbers mean nothing)"


def last_line(bench: str, green: bool, device: str, rows: Sequence[Row]) -> str:
    """The last line of ``--json``; ``rows`` are those of green cases."""
    shown = [row.contract() for row in rows]
    return json.dumps({"bench": bench, "gate": "green" if green else "red", "device": device, "rows": shown})


# Columns for people, each from one or two entries of Row.rates().
RATES = {
    "TFLOP/s (of peak)": lambda rates: _with_share(rates, "tflops", "of_peak"),
    "GB/s (of copy)": lambda rates: _with_share(rates, "gb_s", "of_copy"),
    "bound (won)": lambda rates: f"{rates['bound']:.1%} ({rates['won']:.0%})" if "bound" in rates else "",
}


def _with_share(rates: Mapping[str, float], name: str, share: str) -> str:
    if name not in rates:
        return ""
    return f"{rates[name]:,.4g}" + (f" ({rates[share]:.0%})" if share in rates else "")


def show_rows(console: Console, title: str, rows: Sequence[Row], *, absolute: bool) -> None:
    """A table of rows. Without ``absolute`` (any CPU) it shows ratios only: the times mean nothing by themselves."""
    rates = RATES if absolute and any(row.work for row in rows) else {}
    headings = (*(("ours", "peer's") if absolute else ()), "ratio", "target", "noise", "met", *rates)
    table = Sheet(
        unbroken("case"),
        prose("metric"),
        prose("peer"),
        *map(figure, headings),
        title=title,
        caption=("" if absolute else "ratios only: > 1 means ours is better; ") + TOO_NOISY,
    )
    for row in rows:
        times = (f"{row.ours:,.4g}", f"{row.peer:,.4g}") if absolute else ()
        found = row.rates()
        table.add(
            row.case,
            row.metric,
            row.peer_name,
            *times,
            f"{row.ratio:.3f}" + (" ({:.3f} to {:.3f})".format(*row.between) if row.between else ""),
            "" if row.target is None else f"{row.target:.3f}",
            "" if row.noise is None else f"{row.noise:.1%}",
            {None: Text(), True: Text("yes", "green"), False: Text("no", "red")}[row.met],
            *(show(found) for show in rates.values()),
        )
    console.print(table)


def show_red(console: Console, bench: str, verdicts: Sequence[tuple[str, Verdict]]) -> None:
    """Print why a gate is red: the failing comparisons, whose cases are not timed."""
    cases = dict.fromkeys(case for case, verdict in verdicts if not verdict.ok)
    console.print(f"[red]{bench}: the correctness gate is red, so nothing was timed of {', '.join(cases)}")
    for case, verdict in verdicts:
        if not verdict.ok:
            console.print(f"  {case}: {verdict}", markup=False, highlight=False)


def write_json(path: Path, content: Any) -> None:
    """Write a temporary file beside ``path``, then rename it: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
