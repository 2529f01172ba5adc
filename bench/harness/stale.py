"""Reports which results are missing, lack rows, or are older than the code they measured.

Results are in bench/results/<gpu>/<benchmark>.json with a hash of every source they depend on, a CPU's in
bench/results/cpu/<kind>/ (``places.py``). A CPU has no stale results: only ratios count there, and every run measures
its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.dev import registry
from ...kernels.runtime.printing import Sheet, console, prose, unbroken
from . import places, provenance
from .benchmark import Benchmark
from .report import write_json
from .runner import benchmarks

RESULTS = Path(__file__).resolve().parents[1] / "results"
ANY_GPU = "any GPU"
_HOW = "make gpu OUT=dir measures their short plans, shardfuse bench run NAME --out FILE a whole one"
_ORDER = {"unmeasured": 0, "missing": 1, "stale": 2, "incomplete": 3, "short": 4, "fresh": 5}
# Variables that make "ours" differ from what users get.
_NOT_WHAT_USERS_GET = ("SHARDFUSE_IMPL", "SHARDFUSE_POISON", "SHARDFUSE_ROW_INVARIANT", "SHARDFUSE_TUNED")
_DEFAULTS = (None, "", "0", "auto")


@dataclass(frozen=True)
class Stale:
    """One benchmark (or an op without one) on one GPU.

    ``state`` is "unmeasured" (an op that no benchmark measures), "missing", "stale", "incomplete" (planned rows were
    not measured), "short" (only the short plan was measured) or "fresh".
    """

    gpu: str
    name: str
    state: str
    date: str  # of the result, ISO 8601; empty if there is none
    why: str

    @property
    def order(self) -> tuple[int, str, str, str]:
        """Stalest first: missing results, then the oldest of those with changed sources, then those that lack rows."""
        return _ORDER[self.state], self.date, self.gpu, self.name


def survey(results: Path = RESULTS, candidates: Iterable[Benchmark] | None = None) -> list[Stale]:
    """Every benchmark that runs on a GPU, on every GPU with a folder of results, stalest first."""
    measurable = [b for b in (benchmarks().values() if candidates is None else candidates) if "cuda" in b.devices]
    folders = [folder.name for folder in results.iterdir() if folder.is_dir()] if results.is_dir() else []
    gpus = sorted(name for name in folders if name != places.CPU)
    found = [_judge(results, gpu, benchmark) for gpu in gpus or [ANY_GPU] for benchmark in measurable]
    return sorted([*found, *_without_benchmark(measurable)], key=lambda item: item.order)


def stalest_first(chosen: Iterable[Benchmark], gpu: str, results: Path = RESULTS) -> list[Benchmark]:
    """``chosen`` in the order in which a run on ``gpu`` (a folder's name) should measure them."""
    return sorted(chosen, key=lambda benchmark: _judge(results, gpu, benchmark).order)


def show(*, json: bool = False, results: Path = RESULTS) -> int:
    """Print what is stale, stalest first; returns 0. With ``json`` the last line is a list of objects."""
    due = [item for item in survey(results) if item.state != "fresh"]
    if json:
        print(_dumps(due), flush=True)
        return 0
    if not due:
        console().print("nothing is stale: every result is as new as its sources")
        return 0
    columns = (prose("GPU"), unbroken("benchmark or op"), unbroken("state"), prose("why"))
    table = Sheet(*columns, title="stale results, stalest first", caption=_HOW)
    for item in due:
        table.add(item.gpu, item.name, item.state, item.why)
    console().print(table)
    return 0


def accept(record: dict[str, Any], results: Path = RESULTS) -> Path:
    """File a benchmark's record under its GPU or its kind of CPU; returns the path.

    A record that lacks planned rows, such as those of a red case, is filed, and stays stale. Raises ValueError for
    records that must not be filed: a dry run, one whose cases are all red, a CPU of unknown kind, no rows, a tree
    without a commit, an environment that changes what "ours" is, a short run in place of a whole plan's result, or
    fewer rows than the filed result has of the same sources.
    """
    name, device, origin = record["bench"], record["device"], record["origin"]
    commit_known = origin["commit"] not in ("", "unknown")
    folder = places.folder(record)
    path = results / (folder or places.CPU) / f"{name}.json"
    filed = json.loads(path.read_text()) if path.is_file() else None
    environment = origin["environment"]
    changed = [f"{each}={environment[each]}" for each in _NOT_WHAT_USERS_GET if environment.get(each) not in _DEFAULTS]
    refusals = {
        "it was a dry run": record["dry"],
        "its gate is red": record["gate"] != "green" and not record["rows"],
        "it ran on a CPU whose vendor, family and model the record does not tell": folder is None,
        "it has no rows": not record["rows"],
        "its commit is unknown; measure again from a checkout, or name the tree's commit with "
        "make gpu COMMIT=<hash> DIRTY=0": not commit_known,
        f"its tree was dirty, {origin['commit']} with changes; commit them and measure again": origin["dirty"],
        f"it is unknown whether its tree had changes to {origin['commit']}; measure again with "
        "make gpu COMMIT=<hash> DIRTY=0": commit_known and origin["dirty"] is None,
        f"it ran under {', '.join(changed)}; unset and measure again": bool(changed),
        f"it is of the short plan, and {path} is of the whole one; file a whole run (shardfuse bench run {name} --out "
        "FILE), or remove the old result": record["short"] and filed is not None and not filed["short"],
        f"{path} holds more rows of the same sources; measure the others, or remove the old result": filed is not None
        and record["gate"] == "green"
        and filed["sources"] == record["sources"]
        and len(filed["rows"]) > len(record["rows"]),
    }
    for reason, refused in refusals.items():
        if refused:
            raise ValueError(f"the result of {name} on {device} is not filed: {reason}")
    write_json(path, record)
    return path


def _of_a_processor(name: str) -> bool:
    """Whether a source is a table of a CPU's products, which no GPU reads."""
    path = Path(name)
    return path.parent.name == "tuned" and path.suffix == ".json" and path.stem not in registry.TARGETS


def _judge(results: Path, gpu: str, benchmark: Benchmark) -> Stale:
    path = results / gpu / f"{benchmark.name}.json"
    if not path.is_file():
        return Stale(gpu, benchmark.name, "missing", "", "never measured")
    record = json.loads(path.read_text())
    date = record["origin"]["date"]
    then, now = record["sources"], provenance.source_hashes(benchmark)
    names = (name for name in then.keys() | now.keys() if not _of_a_processor(name))
    changed = sorted(name for name in names if then.get(name) != now.get(name))
    if changed:
        return Stale(gpu, benchmark.name, "stale", date, f"changed since {date[:10]}: {', '.join(changed)}")
    if record["missing"]:
        rows = "; ".join(" | ".join(key) for key in record["missing"])
        return Stale(gpu, benchmark.name, "incomplete", date, f"rows not measured: {rows}")
    if record["short"]:
        return Stale(gpu, benchmark.name, "short", date, "only the short plan was measured")
    return Stale(gpu, benchmark.name, "fresh", date, f"measured {date[:10]}")


def _without_benchmark(measurable: Iterable[Benchmark]) -> Iterator[Stale]:
    measured = {op for benchmark in measurable for op in benchmark.ops}
    for name in sorted(registry.ops().keys() - measured):
        yield Stale(ANY_GPU, name, "unmeasured", "", "no benchmark measures this op")


def _dumps(due: Iterable[Stale]) -> str:
    return json.dumps([vars(item) for item in due])
