"""What ``paged_attention`` can do, as axes with values, and the cases in which any two of them (or three) meet.

``pairwise`` is a covering array: a small set of cases in which every two values that are not refused together appear
in one case. ``full`` is the same for every three. Which are refused is asked of ``options.AttentionOptions``. The page
``docs/paged_attention.md`` shows the pairs; ``python -m shardfuse.kernels.dev.cases.paged_features --write`` writes it.
"""

from __future__ import annotations

import argparse
import functools
import random
import re
import sys
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import torch

from ...paged_attention.options import REFUSED, AttentionOptions
from ...runtime.dtypes import BF16, E4M3, FP16, FP32, INT8
from .. import checkout
from ..registry import Case

# Kinds of step: page size -> (context, queries) of each sequence. Lengths end on, one before and one behind a page, and
# cross the borders of the interpreter's tiles (16 keys) and quanta (32 keys).
STEPS = {
    "decode": lambda page: ((page - 1, page, 31, 47), (1, 1, 1, 1)),
    "long outlier": lambda page: ((331, 2, 15), (1, 1, 1)),
    "prefill": lambda page: ((0, 0), (33, 5)),
    "chunk": lambda page: ((page, 29), (17, 2)),
    "mixed": lambda page: ((page - 1, 0, 16, 2), (1, 21, 1, 5)),
    "speculative": lambda page: ((max(page - 2, 0), 30, 0), (4, 3, 2)),
    "idle sequences": lambda page: ((9, 40, 0, page, 3), (0, 1, 0, 3, 0)),
}

# Axis -> its values by name. The first value is what a call does that does not ask.
AXES: dict[str, dict[str, Any]] = {
    "step": STEPS,
    "page size": {str(size): size for size in (16, 1, 4, 32, 100, 256)},
    "head size": {str(size): size for size in (128, 32, 64, 80, 96, 112, 160, 256)},
    "value size": {"H": False, "Hv != H": True},
    "heads per KV head": {str(size): size for size in (1, 2, 3, 4, 7, 8, 12)},
    "causal": {"causal": True, "non-causal": False},
    "window": {"no window": None, "window": 19},
    "prefix": {"no prefix": False, "prefix-LM": True},
    "tree": {"no tree": False, "tree": True},
    "softcap": {"no soft-cap": None, "soft-cap": 1.5},
    "sinks": {"no sinks": False, "sinks": True},
    "ALiBi": {"no ALiBi": False, "ALiBi": True},
    "q": {"q fp16": FP16, "q bf16": BF16, "q fp32": FP32},
    "cache": {"cache as q": "q", "cache other 16-bit": "other", "cache fp8": "fp8", "cache int8": "int8"},
    "scales": {"unscaled": None, "scale per tensor": "tensor", "scale per token, head": "token"},
    "lse": {"no lse": False, "lse": True},
    "mode": {"fast": False, "invariant": True},
    "layout": {"one tensor": "one", "a pair": "pair", "slots before heads": "nhd", "pair of views": "views"},
    "host": {"no bounds": "nothing", "bounds": "bounds", "plan": "plan"},
}

_VALUE_SIZES = {32: 33, 64: 32, 80: 128, 96: 64, 112: 96, 128: 80, 160: 128, 256: 192}  # where they differ from H
_OTHER_HALF = {FP16: BF16, BF16: FP16, FP32: BF16}

Choice = dict[str, str]  # axis -> value's name
Meeting = frozenset[tuple[str, str]]  # (axis, value) of each


def refused(chosen: Iterable[tuple[str, str]]) -> str | None:
    """The name in ``REFUSED`` of what these (axis, value) may not do together, or None.

    Of cache and scales the one that is not chosen is taken to be what the other wants.
    """
    asked = {axis: AXES[axis][value] for axis, value in chosen}
    some = torch.empty(0)
    scaled = asked["scales"] is not None if "scales" in asked else asked.get("cache") == "int8"
    cache = asked.get("cache", "int8" if scaled else "q")
    options = AttentionOptions(
        1.0,
        causal=asked.get("causal", True),
        window=asked.get("window"),
        prefix_lens=some if asked.get("prefix") else None,
        tree_mask=some if asked.get("tree") else None,
        alibi_slopes=some if asked.get("ALiBi") else None,
        k_scale=some if scaled else None,
        v_scale=some if scaled else None,
    )
    return options.refused(_cache_dtype(asked.get("q", FP16), cache))


def _cache_dtype(q: torch.dtype, cache: str) -> torch.dtype:
    return {"q": q, "other": _OTHER_HALF[q], "fp8": E4M3, "int8": INT8}[cache]


# ------------------------------------------------------------------------------------------------- covering arrays


def meetings(strength: int) -> list[Meeting]:
    """Every ``strength`` values of different axes that are not refused together."""
    return [
        frozenset(zip(axes, values))
        for axes in combinations(AXES, strength)
        for values in product(*(AXES[axis] for axis in axes))
        if not _refused_in(zip(axes, values))
    ]


def _refused_in(chosen: Iterable[tuple[str, str]]) -> bool:
    return any(pair in refused_pairs() for pair in map(frozenset, combinations(chosen, 2)))


@functools.cache
def refused_pairs() -> dict[Meeting, str]:
    """Every combination in REFUSED is one of two features, so pairs say all."""
    found = {}
    for one, other in combinations(AXES, 2):
        for values in product(AXES[one], AXES[other]):
            pair = tuple(zip((one, other), values))
            name = refused(pair)
            if name is not None:
                found[frozenset(pair)] = name
    return found


@functools.cache
def pairwise(seed: int = 0) -> tuple[Case, ...]:
    """A few dozen cases in which all ``meetings(2)`` happen."""
    return _covering(2, seed, tries=8)


@functools.cache
def full(seed: int = 0) -> tuple[Case, ...]:
    """A few hundred cases in which all ``meetings(3)`` happen."""
    return _covering(3, seed, tries=1)


def _covering(strength: int, seed: int, tries: int) -> tuple[Case, ...]:
    """Greedily: each case starts from a meeting that has not happened and takes the value that brings most others.

    (After Cohen, Dalal, Fredman, Patton, "The AETG system", IEEE TSE 1997: of ``tries`` candidates the best is kept.)
    """
    draw = random.Random(seed)  # noqa: S311 - it draws test cases
    open_meetings = dict.fromkeys(meetings(strength))  # ordered, unlike a set
    cases: list[Case] = []
    while open_meetings:
        first = next(iter(open_meetings))
        candidates = [_complete(dict(first), strength, open_meetings, draw) for _ in range(tries)]
        chosen, gains = max(candidates, key=lambda candidate: len(candidate[1]))
        for meeting in gains:
            open_meetings.pop(meeting, None)
        cases.append(case_of(chosen, f"{len(cases):03d}"))
    return tuple(cases)


def _complete(
    chosen: Choice, strength: int, open_meetings: dict[Meeting, None], draw: random.Random
) -> tuple[Choice, set[Meeting]]:
    """The choice with every axis filled, and which open meetings it brings about."""
    gained: set[Meeting] = {frozenset(chosen.items())}
    missing = [axis for axis in AXES if axis not in chosen]
    draw.shuffle(missing)
    for axis in missing:
        others = [tuple(rest) for rest in combinations(chosen.items(), strength - 1)]
        best: tuple[int, float, str, list[Meeting]] | None = None
        for value in AXES[axis]:
            if any(frozenset(((axis, value), other)) in refused_pairs() for other in chosen.items()):
                continue
            brings = [m for rest in others if (m := frozenset(((axis, value), *rest))) in open_meetings]
            rank = (len(brings), draw.random(), value, brings)
            if best is None or rank[:2] > best[:2]:
                best = rank
        assert best is not None, f"nothing fits {chosen} on {axis}"
        chosen[axis] = best[2]
        gained.update(best[3])
    return chosen, gained


def case_of(chosen: Choice, label: str) -> Case:
    """The case that does what ``chosen`` says; axes that it leaves out take their first value."""
    value = {axis: values[chosen.get(axis, next(iter(values)))] for axis, values in AXES.items()}
    page, h, group, q = value["page size"], value["head size"], value["heads per KV head"], value["q"]
    kv_heads = 2 if group <= 3 else 1
    context, queries = value["step"](page)
    options = {
        "context": context,
        "queries": queries,
        "cache": _cache_dtype(q, value["cache"]),
        "causal": value["causal"],
        "window": value["window"],
        "prefix": value["prefix"],
        "tree": value["tree"],
        "softcap": value["softcap"],
        "sinks": value["sinks"],
        "alibi": value["ALiBi"],
        "scales": value["scales"],
        "lse": value["lse"],
        "invariant": value["mode"],
        "layout": value["layout"],
        "host": value["host"],
        "features": tuple((axis, chosen.get(axis, next(iter(values)))) for axis, values in AXES.items()),
    }
    asked = [name for axis, name in chosen.items() if name != next(iter(AXES[axis])) and not name.isdigit()]
    sizes = {
        "N": group * kv_heads,
        "K": kv_heads,
        "H": h,
        "Hv": _VALUE_SIZES[h] if value["value size"] else h,
        "block_size": page,
    }
    name = re.sub(r"[^\w.-]+", "_", "-".join([label, f"g{group}", f"h{h}", f"p{page}", *asked]))
    return Case(name, q, sizes, options)


def met(case: Case, strength: int = 2) -> set[Meeting]:
    """Every ``strength`` values that meet in a case of ``pairwise`` or ``full``."""
    return {frozenset(chosen) for chosen in combinations(case.options["features"], strength)}


# ------------------------------------------------------------------------------------------------------ the page

PAGE = checkout.ROOT / "docs" / "paged_attention.md"
_BEGIN, _END = "<!-- generated: begin -->", "<!-- generated: end -->"
_SIZES = ("page size", "head size", "heads per KV head")  # one line each; every size is run nevertheless
_UNSHOWN = ("H", "causal")  # like "no window": what every other line does as well


def _lines() -> list[tuple[str, list[tuple[str, str]]]]:
    """The features that the table shows: label, and the (axis, value) that stand behind it."""
    lines: list[tuple[str, list[tuple[str, str]]]] = []
    for axis, values in AXES.items():
        if axis in _SIZES:
            lines.append((f"every {axis}", [(axis, value) for value in values]))
        else:
            shown = [value for value in values if not value.startswith("no ") and value not in _UNSHOWN]
            lines += [(value, [(axis, value)]) for value in shown]
    return lines


def table() -> str:
    """The matrix as text: each feature is a line and a column."""
    letters = {name: chr(ord("a") + i) for i, name in enumerate(REFUSED)}
    lines = _lines()
    width = max(len(label) for label, _ in lines)
    rows = [" " * (width + 5) + " ".join(f"{i:>2}" for i in range(1, len(lines) + 1))]
    for i, (label, mine) in enumerate(lines, start=1):
        cells = [_cell(mine, theirs, letters) for _, theirs in lines[:i]]
        rows.append(f"{i:>2}  {label:<{width}} " + " ".join(f"{cell:>2}" for cell in cells))
    return "\n".join(
        [
            f"`+` works: {len(meetings(2))} pairs of values meet in {len(pairwise())} cases, which are run and judged",
            "against fp64. A letter: refused. `.`: two values of one thing.",
            "",
            "```text",
            *rows,
            "```",
            "",
            *(f"- `{letters[name]}` {name}: {why}" for name, why in REFUSED.items()),
            "",
            *(f"- {axis}: {', '.join(sorted(AXES[axis], key=int))}" for axis in _SIZES),
        ]
    )


def _cell(mine: list[tuple[str, str]], theirs: list[tuple[str, str]], letters: dict[str, str]) -> str:
    if mine[0][0] == theirs[0][0]:
        return "."
    names = {refused_pairs().get(frozenset(pair)) for pair in product(mine, theirs)}
    assert len(names) == 1, f"values that differ in what refuses them share a line: {mine}, {theirs}"
    return letters.get(names.pop() or "", "+")


def written(page: str) -> str:
    """The page with its generated part as it should be. ValueError where the page has no place for it."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected the lines {_BEGIN} and {_END}, between which the table goes")
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; ``--write`` puts it into the page."""
    parser = argparse.ArgumentParser(description="the matrix of paged attention's features")
    parser.add_argument("--write", action="store_true", help=f"write it into {PAGE.name}")
    if parser.parse_args(argv).write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
