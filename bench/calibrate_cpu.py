"""``shardfuse bench calibrate --cpu``: measures from how many tokens on oneDNN beats torch's own products here.

For each kind of call and size of weight of ``kernels/linear/cpu.py`` it times both implementations, interleaved, over
numbers of tokens, and writes the table that ``auto`` reads: SHARDFUSE_TUNED names it for a job, and copied to
``kernels/tuned/<processor>.json`` it ships. oneDNN is to win at that number of tokens and all larger ones, by a margin.
In inference the weights of a model take turns, so each comes from as far away as it does there. Calls outside an
engine may as well find a small model's weights in a cache: there the worse of both cases counts.
It takes a minute and a half. Run it on a machine that does nothing else, with as many threads as a rank will have.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from json import dumps
from pathlib import Path

import torch
from rich.progress import Progress

from ..kernels.linear import cpu, linear_act
from ..kernels.runtime import onednn, processor, tuning
from ..kernels.runtime.printing import Sheet, console, figure, unbroken
from .harness import provenance
from .harness.report import DRY_NOTE, write_json
from .harness.timing import keep_freed_memory

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
SIDES = ((128, 128), (256, 256), (512, 512), (1024, 512), (1024, 1024), (2048, 1024), (2048, 2048))  # F, D
SECONDS = 60.0  # for all points together, warming them up included
MIN_ROUNDS, MAX_ROUNDS = 5, 200
SAMPLE_S = 2e-3  # of one side, in one round: a shorter sample finds the caches full of the other's
MARGIN = 1.05
WEIGHTS, WEIGHTS_BYTES = 64, 64 << 20  # of a model: as many matrices, and no more bytes


@dataclass(frozen=True)
class Options:
    """The options of one call. ``out`` is the table; ``arch`` another processor for which this one stands."""

    out: Path | None = None
    arch: str | None = None
    dry: bool = False


def calibrate_cpu(options: Options, *, json: bool = False) -> int:
    """Measure, print and write; returns the exit code. 0: done. 2: oneDNN cannot run here, or ``out`` is another's."""
    people = console(stderr=True)
    arch = options.arch or processor.architecture()
    out = options.out or Path(f"shardfuse-tuned-{arch}.json")
    why = onednn.why_not(torch.float32) or _not_ours(out, arch)
    if why:
        people.print(f"error: {why}", style="red", markup=False, soft_wrap=True)
        return 2
    origin = provenance.describe(torch.device("cpu")) | {"processor": processor.model()}
    points = [(kind, sides) for kind in cpu.KINDS for sides in SIDES]
    share = SECONDS / len(points) / len(TOKENS)
    entries: list[tuning.Entry] = []
    hashed = tuning.source_hash(cpu.SOURCES)
    source = f"bench calibrate --cpu at commit {str(origin['commit'])[:7]} on {processor.model()}"
    if options.arch not in (None, processor.architecture()):
        source += f", standing for {arch}"
    keep_freed_memory()
    with Progress(console=people, transient=True, disable=not people.is_terminal) as progress:
        bar = progress.add_task("products", total=len(points) * len(TOKENS))
        for kind, (features, depth) in points:
            ratios: dict[int, float] = {}
            for tokens in TOKENS:
                ratios[tokens] = _ratio(kind, tokens, features, depth, 0.0 if options.dry else share)
                progress.advance(bar)
            config = {"from_tokens": threshold(ratios)}
            measured = {"stock over oneDNN, by tokens": {str(tokens): round(r, 3) for tokens, r in ratios.items()}}
            entries.append(
                tuning.Entry(cpu.OP, cpu.bucket(kind, features * depth), measured, source, hashed, config=config)
            )
    table = tuning.Table(arch, options.dry, origin, {cpu.OP: cpu.SOURCES}, tuple(entries))
    write_json(out, table.record())
    if json:
        print(dumps({"table": str(out), **table.record()}))
    people.print(_shown(entries))
    people.print(
        f"{arch}, {torch.get_num_threads()} threads{DRY_NOTE if options.dry else ''}: wrote {out}; "
        f"{tuning.VARIABLE}={out} uses it",
        markup=False,
        soft_wrap=True,
    )
    return 0


def threshold(ratios: dict[int, float]) -> int:
    """From how many tokens on oneDNN wins at every measured number of them; 0: not even at the largest."""
    found = 0
    for tokens, ratio in sorted(ratios.items(), reverse=True):
        if ratio < MARGIN:
            break
        found = tokens
    return found


def _not_ours(out: Path, arch: str) -> str | None:
    """Why ``out`` must not be overwritten, or None."""
    if not out.exists():
        return None
    try:
        table = tuning.read(out)
    except ValueError as error:
        return f"{out} exists and is no table of measurements ({error}); name another file with --out"
    if table.arch != arch or set(table.sources) - {cpu.OP}:
        return f"{out} holds a table of {table.arch} for {', '.join(table.sources)}; name another file with --out"
    return None


def _ratio(kind: str, tokens: int, features: int, depth: int, seconds: float) -> float:
    """Stock's time over oneDNN's, the median over rounds in which each is timed once."""
    with onednn.serving(compare=False) if kind.startswith("served") else contextlib.nullcontext():
        return min(
            _ratio_of([_call(kind, impl, tokens, features, depth, count) for impl in ("onednn", "reference")], seconds)
            for count in _models(kind, 4 * features * depth)
        )


def _models(kind: str, size: int) -> tuple[int, ...]:
    """The numbers of matrices of ``size`` bytes that take turns."""
    many = max(1, min(WEIGHTS, WEIGHTS_BYTES // size))
    return {"train": (1,), "packed": (1, many), "packed_act": (1, many)}.get(kind, (many,))


def _ratio_of(sides: list[Callable[[], object]], seconds: float) -> float:
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
    return statistics.median(ratios)


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
    sizes = {cpu.bucket(kind, F * D): (kind, f"{F} x {D}") for kind in cpu.KINDS for F, D in SIDES}
    for entry in entries:
        (ratios,) = entry.measured.values()
        tokens = (entry.config or {})["from_tokens"]
        when = f"from {tokens} tokens" if tokens else "never"
        shown.add(*sizes[entry.bucket], *(f"{ratio:.2f}" for ratio in ratios.values()), when)
    return shown
