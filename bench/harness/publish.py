"""The folder of ``shardfuse bench report``: records as a table in Markdown and, for each GPU, a roofline plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import places, provenance, roofline, stale
from .records import read_records, writing
from .report import RATES, TOO_NOISY, Row

TABLE = "report.md"
_SIDES = ("---",) * 3
_RIGHT = "---:"


@dataclass(frozen=True)
class Result:
    """One benchmark's record, read from a file."""

    path: Path
    bench: str
    device: str
    origin: Mapping[str, Any]
    rows: Sequence[Row]
    missing: int
    complaint: str  # why its numbers must not be shown, or empty

    @property
    def where(self) -> str:
        """The device, of a CPU with its kind: "cpu (amd-zen4)"."""
        kind = None if self.absolute else places.cpu_kind(self.origin.get("cpu") or "")
        return self.device if kind is None else f"{self.device} ({kind})"

    @property
    def absolute(self) -> bool:
        """Whether absolute times count: on a CPU only ratios do."""
        return self.device != places.CPU


def publish(paths: Sequence[Path], out: Path, *, results: Path = stale.RESULTS) -> list[Path]:
    """Write the table and the plots of the records in ``paths`` (by default the committed ones); returns the files.

    ``paths`` hold one record (``bench run --out``, ``bench/results/``) or several by name (``make gpu``'s
    results.json). Raises ValueError for other files and an ``out`` that cannot be written to, RuntimeError if a plot is
    needed and Matplotlib is missing.
    """
    found = read_all(paths, results=results)
    drawn = {}
    for device in dict.fromkeys(result.device for result in found if result.absolute):
        good = [result for result in found if result.device == device and not result.complaint]
        figure = roofline.draw(device, {result.bench: result.rows for result in good})
        if figure is not None:
            drawn[f"roofline-{provenance.slug(device)}.png"] = figure
    with writing(out / TABLE):
        for name, figure in drawn.items():
            figure.savefig(out / name)
        (out / TABLE).write_text("\n".join(markdown(found, list(drawn))) + "\n")
    return [out / TABLE, *(out / name for name in drawn)]


def read_all(paths: Sequence[Path], *, results: Path = stale.RESULTS) -> list[Result]:
    """The records in ``paths``, by default the committed ones; ValueError for other files, and if there is none."""
    found = [result for path in paths or sorted(results.rglob("*.json")) for result in read(path)]
    if not found:
        where = ", ".join(map(str, paths)) or results
        raise ValueError(
            f"there is no result in {where}: name files that hold some, such as shardfuse bench run NAME --out FILE "
            "writes; only a checkout has the committed ones"
        )
    return found


def write_markdown(found: Sequence[Result], out: Path) -> None:
    """Write the report's tables to the file ``out``; ValueError if it cannot be written."""
    with writing(out, "--markdown"):
        out.write_text("\n".join(markdown(found, ())) + "\n", encoding="utf-8")


def read(path: Path) -> list[Result]:
    """The records in a file; ValueError if it holds anything else."""
    records = read_records(path)
    try:
        return [_result(path, record) for record in records]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds a record that is not of this version: {error!r}") from None


def _result(path: Path, record: Mapping[str, Any]) -> Result:
    red = record["gate"] != "green" and not record["rows"]
    complaints = {"a dry run: it measured nothing": record["dry"], "its gate is red": red}
    return Result(
        path,
        record["bench"],
        record["device"],
        record["origin"],
        [Row.from_record(row) for row in record["rows"]],
        len(record["missing"]),
        "; ".join(complaint for complaint, applies in complaints.items() if applies),
    )


# --- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(results: Sequence[Result], pictures: Sequence[str]) -> Iterator[str]:
    """The report, line by line."""
    yield "# Benchmarks"
    yield ""
    yield "Ours against one peer per row, measured in the same run; a ratio above 1 means that ours is better."
    yield f"{TOO_NOISY.capitalize()}."
    if any(result.absolute for result in results):
        yield "TFLOP/s and GB/s are ours, with their shares of the cuBLAS GEMM and of the copy that the run measured."
        yield "The bound is all that taking the peer's extra passes over memory out can gain, with what was won of it."
    for picture in pictures:
        yield ""
        yield f"![{picture.removesuffix('.png')}]({picture})"
    for result in results:
        yield ""
        yield f"## {result.bench} on {result.where}"
        yield ""
        yield from origin_lines(result)
        yield ""
        yield from [f"Not shown: {result.complaint}."] if result.complaint else _table(result)


def origin_lines(result: Result) -> Iterator[str]:
    """Where and with what a result was measured, its ceilings and how many targets it meets."""
    origin = result.origin
    dirty = {True: " with changes", False: "", None: " (perhaps with changes)"}[origin["dirty"]]
    gpu = origin.get("gpu") or {}
    driver = f", driver {gpu['driver_version']}" if "driver_version" in gpu else ""
    versions = f"torch {origin['torch']}, Triton {origin['triton']}{driver}"
    yield f"{origin['date']}, commit {origin['commit']}{dirty}, {versions}."
    if result.complaint:
        return
    ceilings = next((row.ceilings for row in result.rows if row.ceilings), None)
    if ceilings:
        peak, copy = ceilings.flops / 1e12, ceilings.bandwidth / 1e9
        yield f"Ceilings: cuBLAS 8192^3 bf16 {peak:,.0f} TFLOP/s, copy {copy:,.0f} GB/s."
    judged = [row for row in result.rows if row.met is not None]
    yield f"Targets met: {sum(bool(row.met) for row in judged)} of {len(judged)}. Rows not measured: {result.missing}."


def _table(result: Result) -> Iterator[str]:
    absolute = result.absolute
    rates = RATES if absolute and any(row.work for row in result.rows) else {}
    numbers = (*(("ours", "peer's", "host us, ours / peer's") if absolute else ()), "ratio", "target", "met", *rates)
    yield _line(("case", "metric", "peer", *numbers))
    yield _line((*_SIDES, *(_RIGHT for _ in numbers)))
    for row in result.rows:
        times = (f"{row.ours:,.4g}", f"{row.peer:,.4g}", _host(row)) if absolute else ()
        target = "" if row.target is None else f"{row.target:.3f}"
        found = row.rates()
        shown = (show(found) for show in rates.values())
        met = {None: "", True: "yes", False: "**no**"}[row.met]
        yield _line((row.case, row.metric, row.peer_name, *times, f"{row.ratio:.3f}", target, met, *shown))


def _host(row: Row) -> str:
    if row.ours_host_us is None or row.peer_host_us is None:
        return ""
    return f"{row.ours_host_us:.0f} / {row.peer_host_us:.0f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
