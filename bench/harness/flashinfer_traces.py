"""``shardfuse bench report FILE... --trace OUT``: results as a dataset in FlashInfer-Bench's Trace format.

The format is that of flashinfer-bench 0.1.2 (https://pypi.org/project/flashinfer-bench/0.1.2/, its package ``data``),
whose ``TraceSet.from_path`` reads the folder::

    OUT/
        definitions/BENCH/DEFINITION.json       a metric of a benchmark, against one peer
        workloads/BENCH/DEFINITION.jsonl        its cases
        solutions/BENCH/DEFINITION/NAME.json    shardfuse at one commit
        traces/BENCH/DEFINITION.jsonl           the rows that were measured in time

The format requires tensors and code. Our results have neither: they only name their cases and peers. The export invents
nothing instead. A definition has no axes, inputs or outputs, its reference and the solutions' code raise an error that
says so, and the format's two elementwise errors are NaN. ``docs/benchmarks.md`` has the whole mapping.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...parallel.checkpoint import storage
from . import provenance, stale
from .records import read_records, writing
from .report import Row

AUTHOR = "shardfuse"
UNKNOWN = "NaN"  # how the format writes an unknown float
_TIME = re.compile(r", us\b")  # "forward, us", "a step of 32 running, us of the host"
_LIBRARIES = {"torch": "torch", "triton": "triton", "cuda": "cuda", "shardfuse": "shardfuse", "liger": "liger-kernel"}
_STAND_IN = "def run(*args, **kwargs):\n    raise NotImplementedError({!r})\n"
Key = tuple[str, str, str]  # case, metric, peer, as a record has them


def export(paths: Sequence[Path], out: Path, *, results: Path = stale.RESULTS) -> Path:
    """Write the dataset of the records in ``paths`` (by default the committed ones) into the new folder ``out``.

    Raises ValueError for other files, dry runs, results without a row in time, and an ``out`` that is not empty.
    """
    dataset = _Dataset()
    for path in paths or sorted(results.rglob("*.json")):
        for record in read_records(path):
            try:
                if record["dry"]:
                    raise ValueError(
                        f"{path} holds a dry run of {record['bench']}, which measures nothing: leave it out"
                    )
                dataset.add(record)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} holds a record that is not of this version: {error!r}") from None
    if not dataset.files:
        raise ValueError("no row of these results is measured in time, which a trace needs: name other results")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"--trace {out}: holds files already; name a new folder, since a trace set is read as a whole")
    with writing(out, "--trace"):
        folder, lock = storage.beside(out.absolute())
        try:
            for name, lines in dataset.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
                (folder / name).write_text(text, encoding="utf-8")
            folder.rename(out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    return out


class _Dataset:
    """``files``: the content of every file by its path in the dataset, one object a line."""

    def __init__(self) -> None:
        self.files: dict[str, list[dict[str, Any]]] = {}
        self._names: dict[tuple[str, ...], str] = {}  # of the definitions, by benchmark, metric and peer

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the rows of a record that are times; rows that were only planned become workloads without a trace."""
        bench = record["bench"]
        folder = provenance.slug(bench)
        for (case, metric, peer), row in _planned(record):
            name = self._name(bench, metric, peer)
            workload = {"axes": {}, "inputs": {}, "uuid": case}
            self._write(f"definitions/{folder}/{name}.json", _definition(name, bench, metric, peer))
            self._write(f"workloads/{folder}/{name}.jsonl", {"definition": name, "workload": workload})
            evaluation = _evaluation(record, case, row)
            if evaluation is not None:
                solution = _solution(name, record)
                self._write(f"solutions/{folder}/{name}/{solution['name']}.json", solution)
                trace = {"definition": name, "workload": workload, "solution": solution["name"]}
                self._write(f"traces/{folder}/{name}.jsonl", trace | {"evaluation": evaluation})

    def _write(self, path: str, line: dict[str, Any]) -> None:
        lines = self.files.setdefault(path, [])
        if line not in lines:
            lines.append(line)

    def _name(self, *parts: str) -> str:
        """The definition's name, which also names its files; it ends in a number if another definition has the name."""
        if parts not in self._names:
            name = plain = provenance.slug(" ".join(parts))
            count = 1
            while name in self._names.values():
                count += 1
                name = f"{plain}-{count}"
            self._names[parts] = name
        return self._names[parts]


def _planned(record: Mapping[str, Any]) -> Iterator[tuple[Key, Row | None]]:
    """The rows that are times, measured or only planned; a row that the machine cannot measure counts as planned."""
    measured = {row.key: row for row in map(Row.from_record, record["rows"])}
    planned = [tuple(each[:3]) for each in (*record["missing"], *record.get("skipped", ()))]
    for case, metric, peer in dict.fromkeys((*measured, *planned)):
        if _TIME.search(metric):
            yield (case, metric, peer), measured.get((case, metric, peer))


def _definition(name: str, bench: str, metric: str, peer: str) -> dict[str, Any]:
    return {
        "name": name,
        "op_type": bench,
        "axes": {},
        "inputs": {},
        "outputs": {},
        "reference": _STAND_IN.format(
            f"results hold no code: bench/suites/{bench}.py of shardfuse calls the peer {peer}"
        ),
        "tags": [AUTHOR],
        "description": f"{bench}, {metric}. The reference latency is that of the peer: {peer}. The results hold no "
        "tensors, so axes, inputs and outputs are left out; a workload is a case by its name.",
    }


def _solution(definition: str, record: Mapping[str, Any]) -> dict[str, Any]:
    origin = record["origin"]
    changes = {True: " with changes", False: "", None: " (perhaps with changes)"}[origin["dirty"]]
    tree = f"shardfuse {origin.get('shardfuse') or 'of unknown version'}, commit {origin['commit']}{changes}"
    content = {
        "definition": definition,
        "author": AUTHOR,
        "spec": {
            "language": "python",
            "target_hardware": ["cpu" if record["device"] == "cpu" else "cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["shardfuse"],
            "destination_passing_style": False,
        },
        "sources": [
            {
                "path": "main.py",
                "content": _STAND_IN.format(
                    f"results hold no code: check out commit {origin['commit']} of shardfuse and call "
                    f"shardfuse bench run {record['bench']}"
                ),
            },
            {"path": "sources.json", "content": json.dumps(record["sources"])},
        ],
        "description": f"{tree}. sources.json has the first 16 digits of the SHA-256 of every file that was measured.",
    }
    # A trace set holds each name once, so solutions that differ in anything need different names.
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    return {"name": f"{definition}-{origin['commit'][:12]}-{digest}", **content}


def _evaluation(record: Mapping[str, Any], case: str, row: Row | None) -> dict[str, Any] | None:
    """The evaluation of a row; None if no verdict covers its case.

    If the case is right, it is also None for a row that was not measured or that claims more than the device's peak.
    """
    verdicts = [each for each in record["verdicts"] if each["case"] == case]
    wrong = any(not each["ok"] for each in verdicts)
    if not verdicts or (not wrong and (row is None or row.beats_peak)):
        return None
    origin = record["origin"]
    errors = {each["name"]: {field: _number(each[field]) for field in ("error", "budget")} for each in verdicts}
    rest = {"gate": record["gate"], "origin": origin, "row": None if row is None else row.record()}
    found: dict[str, Any] = {
        "status": "INCORRECT_NUMERICAL" if wrong else "PASSED",
        "environment": {"hardware": _hardware(record), "libs": _libraries(origin)},
        "timestamp": origin["date"],
        "log": json.dumps(rest),
        "correctness": {
            "max_relative_error": UNKNOWN,
            "max_absolute_error": UNKNOWN,
            "extra": {"relative_frobenius_error_against_fp64": errors},
        },
    }
    if row is not None and not wrong:
        found["performance"] = {
            "latency_ms": row.ours / 1e3,
            "reference_latency_ms": row.peer / 1e3,
            "speedup_factor": row.ratio,
        }
    return found


def _number(value: float) -> float | str:
    """JSON has no infinity: the format writes it as text."""
    return value if math.isfinite(value) else UNKNOWN if math.isnan(value) else "Infinity"


def _hardware(record: Mapping[str, Any]) -> str:
    return str(record["origin"].get("cpu") or "cpu") if record["device"] == "cpu" else str(record["device"])


def _libraries(origin: Mapping[str, Any]) -> dict[str, str]:
    found = {name: origin.get(field) for field, name in _LIBRARIES.items()}
    found["driver"] = (origin.get("gpu") or {}).get("driver_version")
    return {name: str(value) for name, value in found.items() if value is not None}
