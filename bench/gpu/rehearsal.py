"""What a dry run rehearses besides its own path.

Tests that fail, crash and hang, and going on after them; a red case; kernels that come along.

Each step adds an event "rehearsed" to the journal; one that is not ok makes the run fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...kernels.dev.accuracy import Verdict
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.records import record
from ..harness.runner import run
from ..harness.timing import Timing
from .ahead import Options, compile_ahead
from .journal import Journal
from .kernels import Kernels
from .suite import Suite

FAULTY = Path(__file__).with_name("faulty_tests.py")
LANE = "rehearsal"
QUIET_S = 8.0  # of a test that hangs
FIRST = ["passed", "failed", "crashed", "hung", "passed"]


def rehearse(journal: Journal, suite: Callable[[Journal], Suite], settings: Settings, until: float) -> None:
    """Run the faulty tests twice, as two calls would, carry some kernels along, and run a benchmark with a red case."""
    with tempfile.TemporaryDirectory(prefix="shardfuse-gpu-") as folder:
        for expected in (FIRST, ["failed"]):  # the second call runs again what failed, and nothing else
            calls = Journal(Path(folder) / "events.jsonl", dry=True)
            suite(calls).run(LANE, "", FAULTY, until, quiet_s=QUIET_S)
            outcomes = [event["outcome"] for event in calls.of("test", lane=LANE)]
            journal.add("rehearsed", what="tests", ok=outcomes == expected, outcomes=outcomes)
            calls.close()
    with tempfile.TemporaryDirectory(prefix="shardfuse-gpu-") as folder:
        options = Options(Path(folder), ("smoke",), ("dropout",), jobs=1, limit=2)
        first = compile_ahead(options, lambda line: None)
        given = Kernels(Path(folder)).given.kernels
        again = compile_ahead(options, lambda line: None)  # in another cache, from the archive
        ok = first.compiled == given == again.found > again.compiled == 0
        journal.add("rehearsed", what="kernels that come along", ok=ok, given=given, compiled=again.compiled)
    outcome = run(BENCHMARK, settings)
    kept = record(BENCHMARK, settings, outcome)
    cases = [row["case"] for row in kept["rows"]]
    ok = (kept["gate"], cases, kept["missing"]) == ("red", ["right"], [("wrong", "us", "itself")])
    journal.add("rehearsed", what="a red case", ok=ok, cases=cases)


def _plan(settings: Settings) -> list[Measurement]:
    took = Timing(1.0), Timing(1.0)
    return [Measurement(case, "us", "itself", None, lambda: took) for case in ("wrong", "right")]


def _check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for name in names:
        yield name, Verdict("y", error=1.0 if name == "wrong" else 0.0, budget=0.5)


BENCHMARK = Benchmark(
    name="dropout",  # whose sources it claims; it is never filed
    summary="a right and a wrong case",
    targets={},
    plan=_plan,
    check=_check,
)
