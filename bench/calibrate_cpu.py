"""``shardfuse bench calibrate --cpu``: measures from how many tokens on oneDNN beats torch's own products here.

For each kind of call and size of weight of ``kernels/linear/cpu.py`` it times both implementations, interleaved, over
numbers of tokens, and writes the table that ``auto`` reads: SHARDFUSE_TUNED names it for a job, and copied to
``kernels/tuned/<processor>.json`` it ships. oneDNN is to win at that number of tokens by a margin, and to be no slower
at any larger one.
In inference the weights of a model take turns, so each comes from as far away as it does there. Calls outside an
engine may as well find a small model's weights in a cache: there the worse of both cases counts.

It takes two minutes. Run it on a machine that does nothing else, with as many threads as a rank will have: how
quiet the machine is, a known product tells, which is timed before and after each row. Beside other work its slowest
calls take several times as long as its fastest: the row is then measured again, and in the end no table is written.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from json import dumps
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich.progress import Progress

from ..kernels.linear import cpu_tables, linear_act
from ..kernels.runtime import onednn, processor, tuning
from ..kernels.runtime.printing import Sheet, console, figure, unbroken
from ..training.launch import Stopped, stop_signals
from .harness import provenance
from .harness.report import DRY_NOTE, write_json
from .harness.timing import keep_freed_memory

T = TypeVar("T")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
SIDES = ((128, 128), (256, 256), (512, 512), (1024, 512), (1024, 1024), (2048, 1024), (2048, 2048))  # F, D
SECONDS = 60.0  # for all points together, warming them up included
MIN_ROUNDS, MAX_ROUNDS = 5, 200
SAMPLE_S = 2e-3  # of one side, in one round: a shorter sample finds the caches full of the other's
MARGIN = 1.05
WEIGHTS, WEIGHTS_BYTES = 64, 64 << 20  # of a model: as many matrices, and no more bytes
KNOWN, KNOWN_CALLS, KNOWN_S = 512, 60, 1e-3  # the known product's sides, its samples, and how long each lasts
# By how much its slowest tenth may exceed its fastest sample: 0.04 to 0.2 on a quiet virtual machine of two cores, 3 or
# more beside one other busy process.
BUSY = 0.5
TRIES = 3  # of a row


@dataclass(frozen=True)
class Options:
    """The options of one call. ``out`` is the table; ``arch`` another processor for which this one stands; ``busy``
    writes it from a busy machine, too.
    """

    out: Path | None = None
    arch: str | None = None
    dry: bool = False
    busy: bool = False


class Busy(Exception):
    """The machine does something else. ``spread`` is that of the known product."""

    def __init__(self, spread: float) -> None:
        super().__init__(spread)
        self.spread = spread


class Ratio(NamedTuple):
    """Stock's time over oneDNN's: the median of rounds in which each is timed once, and its interval of 95 %."""

    median: float
    between: tuple[float, float]


def calibrate_cpu(options: Options, *, json: bool = False) -> int:
    """Measure, print and write; returns the exit code.

    0: done. 1: the machine is busy, and nothing was written. 2: oneDNN cannot run here, or ``out`` is another's or
    cannot be written. A signal to stop exits as it should, and leaves an earlier file as it was. ValueError for an
    ``arch`` that is no processor's name, and for a broken table in force.
    """
    people = console(stderr=True)
    arch = options.arch or processor.architecture()
    out = options.out or Path(f"shardfuse-tuned-{arch}.json")
    cpu_tables.check_name(arch)
    before = cpu_tables.in_force(arch)
    why = onednn.why_not(torch.float32) or _not_ours(out, arch) or _not_writable(out)
    if why:
        people.print(f"error: {why}", style="red", markup=False, soft_wrap=True)
        return 2
    keep_freed_memory()
    origin = provenance.describe(torch.device("cpu")) | {"processor": processor.model()}
    known = None if options.dry or options.busy else Known()
    try:
        with stop_signals(), Progress(console=people, transient=True, disable=not people.is_terminal) as progress:
            entries = list(_measured(options, arch, str(origin["commit"]), known, progress))
    except Stopped as stop:
        people.print(f"stopped; nothing was written{', and the earlier table is as it was' if out.exists() else ''}")
        sys.exit(128 + stop.signum)
    except Busy as busy:
        people.print(
            f"error: this machine is busy: the slowest tenth of {KNOWN_CALLS} equal products took "
            f"{1 + busy.spread:.1f} times as long as the fastest, and {1 + BUSY:.1f} is allowed; nothing was written. "
            "Stop what else runs here, or write the table nevertheless with --busy",
            style="red", markup=False, soft_wrap=True,
        )  # fmt: skip
        return 1
    origin |= {"spread": round(max(known.spreads), 3)} if known else {"busy": options.busy}
    table = tuning.Table(arch, options.dry, origin, {cpu_tables.OP: cpu_tables.SOURCES}, tuple(entries))
    write_json(out, table.record())
    if json:
        print(dumps({"table": str(out), **table.record()}))
    people.print(_shown(entries))
    people.print(_changes(before, entries))
    people.print(
        f"{arch}, {torch.get_num_threads()} threads{DRY_NOTE if options.dry else ''}: wrote {out}; "
        f"{tuning.VARIABLE}={out} uses it",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _measured(
    options: Options, arch: str, commit: str, known: Known | None, progress: Progress
) -> Iterator[tuning.Entry]:
    """The table's entries, one after another. Raises Busy."""
    points = [(kind, sides) for kind in cpu_tables.KINDS for sides in SIDES]
    share = 0.0 if options.dry else SECONDS / len(points) / len(TOKENS)
    hashed = tuning.source_hash(cpu_tables.SOURCES)
    source = f"bench calibrate --cpu at commit {commit[:7]} on {processor.model()}"
    if options.arch not in (None, processor.architecture()):
        source += f", standing for {arch}"
    bar = progress.add_task("products", total=len(points) * len(TOKENS))

    def row(kind: str, features: int, depth: int) -> dict[int, Ratio]:
        ratios = {}
        for tokens in TOKENS:
            ratios[tokens] = _ratio(kind, tokens, features, depth, share)
            progress.advance(bar)
        return ratios

    if known:
        known.quiet(lambda: None)
    for kind, (features, depth) in points:
        measure = partial(row, kind, features, depth)
        ratios = known.quiet(measure, lambda: progress.advance(bar, -len(TOKENS))) if known else measure()
        measured = {
            "stock over oneDNN, by tokens": {str(tokens): round(r.median, 3) for tokens, r in ratios.items()},
            "between": {str(tokens): "{:.3f} to {:.3f}".format(*r.between) for tokens, r in ratios.items()},
        }
        config = {"from_tokens": threshold({tokens: ratio.median for tokens, ratio in ratios.items()})}
        bucket = cpu_tables.bucket(kind, features * depth)
        yield tuning.Entry(cpu_tables.OP, bucket, measured, source, hashed, config=config)


class Known:
    """The known product, and what it told so far: see the module."""

    def __init__(self) -> None:
        self._a, self._b = torch.ones(KNOWN, KNOWN), torch.ones(KNOWN, KNOWN)
        self._best = math.inf
        self.spreads: list[float] = []  # of what counted

    def quiet(self, measure: Callable[[], T], again: Callable[[], object] = lambda: None) -> T:
        """What ``measure`` returns on a quiet machine; ``again`` is called before it is tried again. Raises Busy."""
        for _ in range(TRIES):
            found, spread = measure(), self.spread()
            if spread <= BUSY:
                self.spreads.append(spread)
                return found
            again()
        raise Busy(spread)

    def spread(self) -> float:
        """By how much the slowest tenth of equal products exceeds the fastest so far: 0.1 is a tenth of the time."""
        calls = max(1, round(KNOWN_S / min(_timed(self._product) for _ in range(5))))
        times = sorted(_timed(self._product, calls) for _ in range(KNOWN_CALLS))
        self._best = min(self._best, times[0])
        return times[-1 - KNOWN_CALLS // 10] / self._best - 1

    def _product(self) -> object:
        return self._a @ self._b


def threshold(ratios: dict[int, float]) -> int:
    """From how many tokens on oneDNN is taken: it wins there by MARGIN, and at no larger number of them is it slower.

    0: never.
    """
    found = 0
    for tokens, ratio in sorted(ratios.items(), reverse=True):
        if ratio < 1:
            break
        found = tokens if ratio >= MARGIN else found
    return found


def _not_ours(out: Path, arch: str) -> str | None:
    """Why ``out`` must not be overwritten, or None."""
    if not out.exists():
        return None
    if out.is_dir():
        return f"{out} is a folder; name a file in it with --out"
    try:
        table = tuning.read(out)
    except ValueError as error:
        return f"{out} exists and is no table of measurements ({error}); name another file with --out"
    if table.arch != arch or set(table.sources) - {cpu_tables.OP}:
        return f"{out} holds a table of {table.arch} for {', '.join(table.sources)}; name another file with --out"
    return None


def _not_writable(out: Path) -> str | None:
    """Why ``out`` cannot be written, asked before two minutes of measuring; or None."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            return None
    except OSError as error:
        return f"{out} cannot be written ({error.strerror}); name another file with --out"


def _ratio(kind: str, tokens: int, features: int, depth: int, seconds: float) -> Ratio:
    with onednn.serving(compare=False) if kind.startswith("served") else contextlib.nullcontext():
        return min(
            _ratio_of([_call(kind, impl, tokens, features, depth, count) for impl in ("onednn", "reference")], seconds)
            for count in _models(kind, 4 * features * depth)
        )


def _models(kind: str, size: int) -> tuple[int, ...]:
    """The numbers of matrices of ``size`` bytes that take turns."""
    many = max(1, min(WEIGHTS, WEIGHTS_BYTES // size))
    return {"train": (1,), "packed": (1, many), "packed_act": (1, many)}.get(kind, (many,))


def _ratio_of(sides: list[Callable[[], object]], seconds: float) -> Ratio:
    began = time.perf_counter()
    for side in sides:
        side()
    each = min(map(_timed, sides))
    calls = max(1, round(SAMPLE_S / each))
    ratios: list[float] = []
    while len(ratios) < (MIN_ROUNDS if seconds else 1) or (
        len(ratios) < MAX_ROUNDS and time.perf_counter() - began < seconds
    ):
        order = (0, 1) if len(ratios) % 2 == 0 else (1, 0)
        times = {side: _timed(sides[side], calls) for side in order}
        ratios.append(times[1] / times[0])
    ratios.sort()
    aside = max(0, int(len(ratios) / 2 - math.sqrt(len(ratios))))  # as in harness/timing.py
    return Ratio(statistics.median(ratios), (ratios[aside], ratios[-1 - aside]))


def _timed(call: Callable[[], object], calls: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def _call(kind: str, impl: str, tokens: int, features: int, depth: int, count: int) -> Callable[[], object]:
    drawn = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(rows, depth, generator=drawn) for rows in (tokens, features))
    bias, dy = torch.randn(features, generator=drawn), torch.randn(tokens, features, generator=drawn)
    if kind == "train":
        leaves = [t.requires_grad_() for t in (x, weight, bias)]

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            linear_act(x, weight, bias, impl=impl).backward(dy)

        return step
    activation = "gelu_tanh" if kind.endswith("_act") else "identity"
    weights = itertools.cycle([weight.clone() for _ in range(count)])
    act = torch.no_grad()(partial(linear_act, x, bias=bias, activation=activation, pack_weight=True, impl=impl))
    for _ in range(2 * count):  # they are packed at the second call
        act(weight=next(weights))
    return lambda: act(weight=next(weights))


def _shown(entries: list[tuning.Entry]) -> Sheet:
    headings = ("weight", *(f"{tokens} tokens" for tokens in TOKENS), "oneDNN")
    caption = "stock's time over oneDNN's: > 1 means oneDNN is faster"
    shown = Sheet(unbroken("kind"), *map(figure, headings), caption=caption)
    for entry, kind, sides, tokens in _rows(entries):
        ratios = entry.measured["stock over oneDNN, by tokens"].values()
        shown.add(kind, f"{sides[0]} x {sides[1]}", *(f"{ratio:.2f}" for ratio in ratios), _when(tokens))
    return shown


def _rows(entries: list[tuning.Entry]) -> Iterator[tuple[tuning.Entry, str, tuple[int, int], int]]:
    """Each entry with its kind, its weight's sides and its threshold."""
    sizes = {cpu_tables.bucket(kind, F * D): (kind, (F, D)) for kind in cpu_tables.KINDS for F, D in SIDES}
    for entry in entries:
        yield entry, *sizes[entry.bucket], int((entry.config or {})["from_tokens"])


def _changes(before: cpu_tables.InForce, entries: list[tuning.Entry]) -> Sheet | str:
    """What the new table says otherwise than what decides now."""
    changed = []
    for _, kind, (features, depth), tokens in _rows(entries):
        thresholds = before.thresholds.get(kind)
        decided = thresholds[(features * depth).bit_length()] if thresholds else cpu_tables.NEVER
        if decided != (tokens or cpu_tables.NEVER):
            changed.append((kind, f"{features} x {depth}", _when(decided), _when(tokens)))
    if not changed:
        return f"It says what {before.tables[0].arch if before.tables else 'no table'} says already."
    whose = ", ".join(each.arch for each in before.tables) or "no table: torch's own products"
    shown = Sheet(
        unbroken("kind"), *map(figure, ("weight", "oneDNN now", "oneDNN then")),
        caption=f"{len(changed)} of {len(entries)} rows differ from what decides now ({whose})",
    )  # fmt: skip
    for row in changed:
        shown.add(*row)
    return shown


def _when(tokens: int) -> str:
    return f"from {tokens} tokens" if 0 < tokens < cpu_tables.NEVER else "never"
