"""The tables of docs/plan.md that the planner's check fills: ``python tests/support/plan_page.py --write``."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import shardfuse as sf
from shardfuse.parallel.plan import check, published

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plan.md"


# Model, kind and number of GPUs, sequences of a step, tokens of a sequence.
EXAMPLES = (
    ("gpt3-175b", "a100", 64, 1536, 2048),
    ("gpt3-175b", "a100", 384, 1536, 2048),
    ("gpt3-175b", "a100", 1536, 1536, 2048),
    ("gpt3-175b", "h100", 1024, 2048, 2048),
    ("llama3-405b", "h100", 8192, 2048, 8192),
    ("llama3-405b", "h100", 16384, 2048, 8192),
)


@functools.cache
def sources() -> list[check.Source]:
    """Every source's steps, computed once: it takes seconds."""
    return check.steps()


def examples_table() -> str:
    """A row for each example: the best layout."""
    lines = ["| model | on | batch | best layout | step | MFU | GiB |", "|---|---|---|---|---|---|---|"]
    for model, gpu, gpus, batch, seq in EXAMPLES:
        made = sf.plan(model, gpus=gpus, gpu=gpu, batch=batch, seq=seq, count=1)
        best = made.best
        lines.append(
            f"| {model} | {gpus:,} {gpu} | {batch:,} x {seq:,} | {best.layout.described()} | {best.time.total:.3g} s | "
            f"{made.utilization(best):.0%} | {best.memory.total / 2**30:.1f} |"
        )
    return "\n".join(lines)


def steps_table() -> str:
    """A row for each source."""
    lines = ["| source | steps within 15 % | a constant MFU's | largest error | verdict |", "|---|---|---|---|---|"]
    for source in sources():
        verdict = {True: "holds", False: "**fails**", None: "not judged"}[source.passed]
        worst = max((step.error for step in source.steps), key=abs)
        hits = f"{source.hits} of {len(source.steps)}"
        lines.append(f"| {source.name} | {hits} | {source.baseline_hits} | {worst:+.0%} | {verdict} |")
    return "\n".join(lines)


def misses_table() -> str:
    """A row for each model of a source whose steps are off by more than the limit."""
    errors: dict[tuple[str, str, str], list[float]] = {}
    for source in sources():
        for step in source.steps:
            if not (step.near or step.run.informative):
                key = (source.name, step.run.shape.name, step.run.cluster.gpu.name)
                errors.setdefault(key, []).append(step.error)
    lines = ["| source | model | GPU | steps off | errors | likely reason |", "|---|---|---|---|---|---|"]
    for (name, model, gpu), mine in errors.items():
        span = " to ".join(dict.fromkeys(f"{each:+.0%}" for each in (min(mine), max(mine))))
        lines.append(f"| {name} | {model} | {gpu} | {len(mine)} | {span} | {check.MISSED[name, model, gpu]} |")
    return "\n".join(lines)


def layouts_table() -> str:
    """A row for each published layout that is further from the best than the limit."""
    runs = [run for run in published.runs() if (run.source, run.shape.name) in check.FAR]
    reasons = list(dict.fromkeys(check.FAR.values()))
    lines = ["| run | published | longer by | best found | why |", "|---|---|---|---|---|"]
    for each in check.layouts(runs, free=False):
        if not each.near:
            run, number = each.run, reasons.index(each.reason) + 1
            lines.append(
                f"| {run.source}: {run.name} | {run.layout.described()} | {each.over:.0%} | {each.best.described()} | "
                f"{number} |"
            )
    return "\n".join(lines)


def reasons_list() -> str:
    """The reasons, in the order of the table's numbers."""
    return "\n".join(f"{number}. {why}" for number, why in enumerate(dict.fromkeys(check.FAR.values()), 1))


TABLES = {
    "examples": examples_table,
    "steps": steps_table,
    "misses": misses_table,
    "layouts": layouts_table,
    "reasons": reasons_list,
}


def shown(name: str) -> str:
    """The table as the page has it."""
    found = re.search(rf"<!-- {name} -->\n\n(.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"docs/plan.md has no table of {name}"
    return found[1]


def write() -> None:
    """Replace the page's tables."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n\n")
        text = before + mark + table() + "\n\n" + re.sub(r"\A(?:[|\d].*\n)*\n?", "", rest)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write() if sys.argv[1:] == ["--write"] else __doc__)
