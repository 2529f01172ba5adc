"""``shardfuse plan --check``: the planner's predictions beside published runs, row by row."""

from __future__ import annotations

import json as jsonlib
from typing import Any

from rich.progress import track

from ..kernels.runtime.printing import Sheet, console, figure, prose, unbroken
from ..parallel.plan import check, published

_SHOWN = 12  # rows of a source; a source with more shows its misses and a summary


def run_check(*, json: bool = False) -> int:
    """Print every comparison; return 1 if a judged source fails, a miss has no reason or a memory is off."""
    people = console(stderr=json)
    sources, held = check.steps(), check.memory()
    for source in sources:
        people.print(_source_table(source))
        people.print()
    people.print(_memory_table(held))
    people.print()
    runs = track(published.runs(), "layouts", console=people, transient=True, disable=not people.is_terminal)
    layouts = check.layouts(runs)
    people.print(_layout_table(layouts))
    failed = [source.name for source in sources if source.passed is False]
    failed += [f"step of {step.run.name}" for step in check.unexplained(sources)]
    failed += [f"memory of {each.run.name}" for each in held if not each.passed]
    failed += [f"layout of {each.run.name}" for each in layouts if not each.passed]
    people.print("all judged predictions hold" if not failed else f"off: {'; '.join(failed)}")
    if json:
        print(jsonlib.dumps(_record(sources, held, layouts, failed)))
    return 1 if failed else 0


def _source_table(source: check.Source) -> Sheet:
    verdict = {True: "holds", False: "FAILS", None: "not judged"}[source.passed]
    rows = source.steps
    if len(rows) > _SHOWN:
        rows = tuple(step for step in rows if not step.near)
    reasons = [prose("likely reason", 30)] if any(step.reason for step in rows) else []
    hits = f"{source.hits} of {len(source.steps)} steps within {check.WITHIN:.0%}"
    table = Sheet(
        unbroken("run"), prose("layout", 30), figure("reported"), figure("predicted"), figure("error"), figure("MFU"),
        *reasons, title=f"{source.name}: {hits}, a constant MFU {source.baseline_hits}: {verdict}",
        caption="Only the misses are shown." if len(rows) < len(source.steps) else "",
    )  # fmt: skip
    for step in rows:
        table.add(
            step.run.name, step.run.layout.described(), f"{step.reported:.3g} s", f"{step.predicted:.3g} s",
            f"{step.error:+.0%}", f"{step.baseline_error:+.0%}", *([step.reason] if reasons else []),
        )  # fmt: skip
    return table


def _memory_table(held: list[check.Held]) -> Sheet:
    table = Sheet(
        unbroken("run"), prose("layout", 30), unbroken("what"), figure("reported"), figure("predicted"),
        figure("error"), title="Memory, GiB",
    )  # fmt: skip
    for each in held:
        table.add(
            each.run.name, each.run.layout.described(), each.what, f"{each.reported:.2f}", f"{each.predicted:.2f}",
            f"{each.error:+.1%}",
        )  # fmt: skip
    return table


def _layout_table(layouts: list[check.Chosen]) -> Sheet:
    table = Sheet(
        unbroken("run"), prose("published", 24), figure("longer by"), prose("best found", 24), prose("free search", 24),
        prose("why", 24),
        title=f"Published layouts beside the best that the planner finds for the same choices; allowed: "
        f"{check.LAYOUT_WITHIN:.0%} longer",
    )  # fmt: skip
    for each in layouts:
        table.add(
            each.run.name, each.run.layout.described(), f"{each.over:+.1%}", each.best.described(),
            each.free.described() if each.free else "", each.reason,
        )  # fmt: skip
    return table


def _record(
    sources: list[check.Source], held: list[check.Held], layouts: list[check.Chosen], failed: list[str]
) -> dict[str, Any]:
    return {
        "steps": [
            {
                "source": source.name,
                "passed": source.passed,
                "runs": [
                    {"run": step.run.name, "reported": step.reported, "predicted": step.predicted, "error": step.error}
                    for step in source.steps
                ],
            }
            for source in sources
        ],
        "memory": [{"run": each.run.name, "what": each.what, "error": each.error} for each in held],
        "layouts": [{"run": each.run.name, "over": each.over, "passed": each.passed} for each in layouts],
        "failed": failed,
    }
