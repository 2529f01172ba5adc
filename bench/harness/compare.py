"""``shardfuse bench compare``: of two result files, implementations of an op, or versions, which is faster."""

from __future__ import annotations

import json as jsonlib
import math
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from ...kernels.runtime.printing import Sheet, console, figure, prose, unbroken
from . import provenance, timing
from .drawn import check_drawn, tensors
from .gate import copy_inputs
from .implementation import PREFIX, load
from .least import impossible, work_of
from .ops import find_op
from .records import read_records
from .report import Row
from .shift import ROUNDS, Shift, balanced_order, compare_times
from .verify import choose, find_device, split, verify_case
from .versions import EXPECTED, PREFIXES, compare_versions

Key = tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """``op`` and ``rivals`` (files, each a PATH:NAME) belong to a comparison of implementations, ``bench`` to one of
    versions, ``cases``, ``device`` and ``seed`` to both.
    """

    op: str | None = None
    bench: str | None = None
    cases: tuple[str, ...] = ()
    device: str | None = None
    seed: int | None = None
    fail_on_regression: bool = False
    history: Path | None = None
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """One row; ``shift`` is None if the row is refused, and ``why`` says for what reason."""

    key: Key
    shift: Shift | None
    why: str = ""

    @property
    def verdict(self) -> str:
        return "refused" if self.shift is None else self.shift.verdict

    def record(self) -> dict[str, Any]:
        shift = {"ratio": None, "between": None, "p": None} if self.shift is None else asdict(self.shift)
        return {"key": self.key, **shift, "verdict": self.verdict, "why": self.why}


@dataclass(frozen=True)
class Comparison:
    """All rows; ``versions`` is what the two versions stand for, a release's number or a commit's hash."""

    device: str
    rows: list[Compared]
    versions: tuple[str, str] | None = None


def compare(a: str, b: str, options: Options, *, json: bool = False) -> int:
    """Print a verdict on every row that both sides have.

    Returns 0; 1 if a row was refused or, with ``fail_on_regression``, is slower; 2 if nothing could be compared.
    """
    try:
        if options.history is not None and not options.history.parent.is_dir():
            raise ValueError(f"--history {options.history}: there is no folder {options.history.parent}; make it first")
        if a.endswith(".json") and b.endswith(".json"):
            found = _of_files(Path(a), Path(b))
        elif a.startswith(PREFIXES) and b.startswith(PREFIXES):
            found = _of_versions(a, b, options)
        else:
            found = _of_implementations(a, b, options)
        if options.history is not None:
            _append(options.history, a, b, found)
    except (ValueError, RuntimeError, OSError) as error:
        errors = console(stderr=True)
        errors.print("[red]error:[/]", end=" ")
        errors.print(str(error), markup=False)
        return 2
    rows = found.rows
    if json:
        records = [row.record() for row in rows]
        result = {"a": a, "b": b, "versions": found.versions, "device": found.device, "rows": records}
        print(jsonlib.dumps(result), flush=True)
    else:
        of_a, of_b = (f" ({each})" for each in found.versions) if found.versions else ("", "")
        _show(f"{b}{of_b} against {a}{of_a} on {found.device}", rows)
    verdicts = {row.verdict for row in rows}
    return int("refused" in verdicts or (options.fail_on_regression and "slower" in verdicts))


def compare_rows(a: Row, b: Row, *, absolute: bool) -> Compared:
    """Two measurements of one row: ``absolute`` by their own times, else by their ratios to the same peer.

    A record keeps no samples, so the interval follows from both rows' own: that of the ratio, or the noise.
    """
    for side, row in (("A", a), ("B", b)):
        if row.beats_peak:
            share = row.rates()["of_peak"]
            return Compared(row.key, None, f"{side} claims {share:.0%} of the peak that was measured beside it")
    better_if_larger = not math.isclose(a.ratio, a.peer / a.ours, rel_tol=1e-6)
    if not absolute:
        ratio = b.ratio / a.ratio
    else:
        ratio = b.ours / a.ours if better_if_larger else a.ours / b.ours
    half = math.hypot(_half_width(a), _half_width(b))
    return Compared(a.key, Shift(ratio, (ratio * math.exp(-half), ratio * math.exp(half)), None))


def compare_implementations(
    op: str,
    a: str,
    b: str,
    cases: Sequence[str],
    device: torch.device,
    seed: int,
    *,
    rivals: Sequence[str] = (),
    rounds: int = ROUNDS,
) -> Iterator[Compared]:
    """Verify both on each case, then time them in ``rounds`` rounds; a side that is wrong is refused, not timed.

    On a GPU the calls rotate over input sets larger than its L2 cache together. A side that is faster than the device's
    measured ceilings allow is refused, too.

    Raises ValueError before anything is timed if a side has no answer to a case, and for inputs that prove nothing.
    """
    spec = find_op(op)
    sides = load(spec, a, device, rivals), load(spec, b, device, rivals)
    chosen = choose(spec, cases)
    for implementation in sides:
        split(chosen, implementation, named=True)
    for case in chosen:
        check_drawn(spec, case, device, seed)
        key = (spec.name, case.name)
        wrong = [
            f"{side.name}: {each.name} is wrong {each.why}".rstrip()
            for side in sides
            for each in verify_case(spec, case, side, device, seed)
            if not each.ok
        ]
        if wrong:
            yield Compared(key, None, "; ".join(dict.fromkeys(wrong)))
            continue
        inputs = spec.make_inputs(case, device, seed)
        work = work_of(spec, case, inputs, spec.run(copy_inputs(inputs), case, "reference"))
        count = timing.input_sets(sum(x.numel() * x.element_size() for x in tensors(inputs)), device)
        drawn = [inputs, *(spec.make_inputs(case, device, seed + number) for number in range(1, count))]
        a_calls, b_calls = ([side.call(copy_inputs(each), case) for each in drawn] for side in sides)
        sample = timing.sampler((a_calls, b_calls), device)
        samples: tuple[list[float], list[float]] = ([], [])
        for order in balanced_order(rounds, random.Random(seed)):  # noqa: S311 - an order, not a secret
            for side in order:
                samples[side].append(sample(side))
        ceilings = timing.ceilings(device)
        claims = [impossible(each.name, times, work, ceilings, device) for each, times in zip(sides, samples)]
        shift = None if any(claims) else compare_times(*samples)
        yield Compared(key, shift, "; ".join(filter(None, claims)))


def _of_implementations(a: str, b: str, options: Options) -> Comparison:
    for text in (a, b):
        if text.startswith(PREFIXES) or not (text.startswith(PREFIX) or ":" in text):
            raise ValueError(
                f"{text}: expected two result files (FILE.json), two implementations (impl:NAME, rival:NAME or "
                f"PATH:NAME), or two versions ({EXPECTED})"
            )
    if options.op is None or not options.cases:
        raise ValueError("two implementations are compared on an op's cases: pass --op OP --case NAME")
    device = find_device(options.device)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    rows = list(compare_implementations(options.op, a, b, options.cases, device, seed, rivals=options.rivals))
    return Comparison(provenance.device_name(device), rows)


def _of_versions(a: str, b: str, options: Options) -> Comparison:
    if options.bench is None:
        raise ValueError("two versions are compared on a benchmark: pass --bench NAME")
    found = compare_versions(
        provenance.package_folder("bench").parent,
        (a, b),
        options.bench,
        cases=options.cases,
        device=options.device,
        seed=secrets.randbelow(2**31) if options.seed is None else options.seed,
    )
    rows = [Compared((options.bench, *key), shift, why) for key, shift, why in found.rows]
    return Comparison(found.device, rows, found.numbers)


def _of_files(a: Path, b: Path) -> Comparison:
    sides = [{record["bench"]: record for record in read_records(path)} for path in (a, b)]
    shared = [name for name in sides[0] if name in sides[1]]
    rows: list[Compared] = []
    devices = {record["device"] for side in sides for record in side.values()}
    if len(devices) != 1:
        raise ValueError(f"{a} and {b} are of several devices, {', '.join(sorted(devices))}: expected one")
    for name in shared:
        first, second = (side[name] for side in sides)
        if first["dry"] or second["dry"]:
            raise ValueError(f"{name} is of a dry run, whose numbers mean nothing: measure it")
        theirs = {row.key: row for row in map(Row.from_record, second["rows"])}
        for row in map(Row.from_record, first["rows"]):
            if row.key in theirs:
                found = compare_rows(row, theirs[row.key], absolute=first["device"] != "cpu")
                rows.append(Compared((name, *found.key), found.shift, found.why))
    if not rows:
        raise ValueError(f"{a} and {b} have no row in common")
    return Comparison(devices.pop(), rows)


def _half_width(row: Row) -> float:
    """Half the width of the row's interval of 95 %, in logarithms; its noise where the timing gave no interval."""
    if row.between is not None:
        return math.log(row.between[1] / row.between[0]) / 2
    if row.noise is None:
        raise ValueError(f"{' | '.join(row.key)} has neither an interval nor a noise: measure it again")
    return math.log1p(row.noise)


def _append(path: Path, a: str, b: str, found: Comparison) -> None:
    commit, dirty = provenance.revision()
    head = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "device": found.device,
        "processor": provenance.processor.description(),
        "a": a,
        "b": b,
        "versions": found.versions,
    }
    with path.open("a") as file:
        file.writelines(jsonlib.dumps(head | row.record()) + "\n" for row in found.rows)


def _show(title: str, rows: Sequence[Compared]) -> None:
    figures_of = (figure("ratio"), figure("95 %"), figure("p"))
    columns = (prose("row"), *figures_of, unbroken("verdict"), prose("why"))
    table = Sheet(*columns, title=title, caption="ratio > 1: B is faster")
    colours = {"faster": "green", "slower": "red", "refused": "red"}
    for row in rows:
        figures = ["", "", ""]
        if row.shift is not None:
            low, high = row.shift.between
            p = "" if row.shift.p is None else f"{row.shift.p:.1g}"
            figures = [f"{row.shift.ratio:.3f}", f"{low:.3f} to {high:.3f}", p]
        table.add(" | ".join(row.key), *figures, Text(row.verdict, colours.get(row.verdict, "")), row.why)
    console().print(table)
