"""``shardfuse bench tune``: measures kernels' configurations on this GPU and writes a table for ``tuning.py``.

It covers every GEMM that the chosen ops' cases launch (``workload.py``), and every tile in which paged attention runs
them (``attention_workload.py``), except what an earlier run has measured with the same sources. Several processes
compile the most promising candidates (a GEMM's: ``kernels/dev/candidates.py``, ordered by the cost model); those that
spill or do not fit are dropped. The others must agree with the reference by the rule that all gates share, and are then
timed, each interleaved with the current configuration. A GEMM's winner is timed against the stock path as well. If that
is faster beyond noise, the table records it, and ``auto`` uses the stock path there.

Every figure is on disk as it is measured (``<out>.events.jsonl``), so the same command resumes a stopped run; the table
is rewritten after every launch. A candidate that crashed the process is not tried again.

Run it in one process: a table is a file, and all ranks of a job read the same one. If several start together, only rank
0 tunes. ``SHARDFUSE_TUNED`` names a table for a job; copied to ``kernels/tuned/<chip>.json`` it ships.

``--dry`` does the same on a CPU with tiny shapes, interpreted; its table is marked, and the loader refuses it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.dev import registry, workers
from ..kernels.runtime import device, dispatch, tuning
from ..kernels.runtime.chips import CHIPS
from ..kernels.runtime.names import expected
from ..kernels.runtime.printing import Sheet, console, figure, prose
from . import workload
from .gpu.journal import Journal
from .harness import provenance
from .harness.gate import Outputs, check_outputs
from .harness.report import DRY_NOTE, write_json
from .harness.runner import default_device
from .harness.timing import Timing, compare, input_sets
from .tunable import KINDS, Call, answer, calls_of, ops

TOP = 12
BUDGET_S = 3600.0
COMPILE_SHARE = 0.5  # the most of the budget
SECONDS = 0.3  # of timing for one candidate, both sides together
MARGIN = 0.02  # a difference counts if it exceeds this and both sides' own noise
DRY_CASES = 2
TAG = "short"

_UNNAMED = {"group_m": "g", "per_sm": "x"}  # fields that a configuration's own name for people omits


@dataclass(frozen=True)
class Options:
    """The options of one call. ``cases`` are names or tags; ``out`` is the table."""

    op: str | None = None
    cases: tuple[str, ...] = ()
    out: Path | None = None
    budget_s: float = BUDGET_S
    top: int = TOP
    dry: bool = False
    jobs: int | None = None


def tune(options: Options) -> int:
    """Tune and print; returns the exit code.

    0: done, or out of time. 1: the current configuration of some launch gives wrong results, so that was not tuned. 2:
    nothing can be tuned. 130: stopped.
    """
    people = console(stderr=True)
    if int(os.environ.get("RANK", "0")) != 0:
        people.print("rank 0 tunes; a table serves all ranks")
        return 0
    try:
        _require(options)
        if options.dry and not dispatch.interpreting():
            _interpret_instead(options)
        run = Run(options, people)
    except ValueError as error:
        people.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    try:
        return run.run()
    except KeyboardInterrupt:
        people.print(f"stopped; measurements are kept, and the same command resumes ({run.out})", soft_wrap=True)
        return 130


def _require(options: Options) -> None:
    if options.op is not None:
        registry.op(options.op)
    if options.top < 1:
        raise ValueError(f"top={options.top}: expected at least 1")
    if options.budget_s <= 0:
        raise ValueError(f"budget={options.budget_s:g}: expected seconds, more than 0")
    if dispatch.triton_version() is None:
        raise ValueError("tuning needs Triton, which is not installed here (pip install triton; Linux only)")
    if not options.dry and not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that torch can use; --dry does the same without one")


def _interpret_instead(options: Options) -> None:
    """Restart in a Python with interpreted kernels, which is fixed at its start. Does not return."""
    arguments = [options.op] if options.op else []
    for case in options.cases:
        arguments += ["--cases", case]
    arguments += ["--out", str(options.out)] if options.out else []
    arguments += ["--budget", str(options.budget_s), "--top", str(options.top), "--dry"]
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", __spec__.name, *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.execve(sys.executable, command, environment)  # noqa: S606 - this program again, with the user's own arguments


class Run:
    """The work of one call. ``out`` is the table's file.

    Raises ValueError if there is nothing to tune, or if ``out`` holds something that this run must not overwrite.
    """

    def __init__(self, options: Options, people: Console) -> None:
        self.options, self.people = options, people
        self.device = torch.device("cpu") if options.dry else default_device()
        self.arch = device.architecture(self.device)
        if not options.dry and self.arch not in CHIPS:
            raise ValueError(f"nothing is known of {self.arch}: describe it in kernels/runtime/chips.py")
        self.out = options.out or Path(f"shardfuse-tuned-{self.arch}.json")
        self.origin = provenance.describe(self.device)
        self.source_hashes = {op: tuning.source_hash(sources) for op, (_, sources) in KINDS.items()}
        self.entries = self._earlier()
        self.calls = self._calls()
        journal = self.out.with_name(self.out.name + ".events.jsonl")
        self.journal = Journal(journal)
        for run in self.journal.known("run", dry=options.dry):
            provenance.check_machine(journal, run["origin"], self.origin)
        self.red = False

    def run(self) -> int:
        started = time.monotonic()
        until = started + self.options.budget_s
        self.journal.add("run", origin=self.origin, dry=self.options.dry)
        try:
            left = [call for call in self.calls if not self._fresh(call)]
            said = f"{len(left)} launches to tune for {self.arch}, {len(self.calls) - len(left)} done before"
            self.people.print(f"{said}; table: {self.out}", soft_wrap=True)
            ready = self._compile(left, started + COMPILE_SHARE * self.options.budget_s)
            for index, call in enumerate(left):
                if call.bucket in ready and time.monotonic() < until:
                    self.people.print(f"{index + 1} of {len(left)}  {call.bucket}", soft_wrap=True)
                    self._tune(call, ready[call.bucket], until)
            self._write()
            undone = sum(not self._fresh(call) for call in left)
            if undone and not self.red:
                self.people.print(f"out of time with {undone} launches left; the same command resumes", soft_wrap=True)
        finally:
            self.journal.close()
            self._show()
        return 1 if self.red else 0

    # --- the launches to tune -----------------------------------------------------------------------------------------

    def _earlier(self) -> dict[str, tuning.Entry]:
        """The entries in the file; those of other runs stay in it."""
        if not self.out.is_file():
            return {}
        table = tuning.read(self.out)
        if (table.arch, table.dry) != (self.arch, self.options.dry):
            kind = "a dry run" if table.dry else "measurements"
            raise ValueError(f"{self.out} holds {kind} for {table.arch}: choose another file with --out")
        unknown = dict.fromkeys(provenance.MACHINE, "unknown")
        provenance.check_machine(self.out, unknown | table.origin, self.origin)
        return {entry.bucket: entry for entry in table.entries}

    def _calls(self) -> list[Call]:
        """Every launch of the chosen cases, once for each bucket."""
        names = [self.options.op] if self.options.op else ops()
        found: dict[str, Call] = {}
        for name in names:
            spec = registry.op(name)
            if name not in ops():
                continue
            for case in _cases(spec, self.options, known=len(names) == 1):
                for call in calls_of(name, case, self.device, self.arch):
                    found.setdefault(call.bucket, call)
        if not found:
            raise ValueError(f"nothing to tune: no GEMM and no tile in the chosen cases of {', '.join(names)}")
        return list(found.values())

    def _fresh(self, call: Call) -> bool:
        entry = self.entries.get(call.bucket)
        return entry is not None and entry.source_hash == self.source_hashes[entry.op]

    # --- one launch ---------------------------------------------------------------------------------------------------

    def _tune(self, call: Call, chosen: Sequence[Any], until: float) -> None:
        """Time the candidates of one launch and store the winner, unless current results are wrong or time is up."""
        now, tried = call.now(self.arch), self._tried(call)
        sets = [call.draw(self.device, 0)]
        nbytes = sum(each.nbytes for each in tree_leaves(sets[0]) if isinstance(each, torch.Tensor))
        sets += [call.draw(self.device, seed) for seed in range(1, input_sets(nbytes, self.device))]
        gate = _Gate(call, sets[0])
        if not self._right(call, gate, now):
            self.red = True
            return
        for config in chosen:
            if time.monotonic() > until:
                return
            self._try(call, sets, gate, config, now, tried)
        self.entries[call.bucket] = self._entry(call, sets, now, tried)
        self._write()

    def _try(
        self,
        call: Call,
        sets: list[Any],
        gate: _Gate,
        config: Any,
        now: Any,
        tried: dict[str, dict[str, float]],
    ) -> None:
        """Check one candidate and time it against the current configuration; ``tried`` gets the ratio of the two."""
        key = self._key(call, config)
        self.journal.add("trying", **key)
        try:
            if self._right(call, gate, config):
                ours, base = self._compare(_forced(call, sets, config), _forced(call, sets, now))
                tried[str_of(config)] = {"ratio": ours.value / base.value, "noise": _noise(ours, base)}
                self.journal.add("tried", **key, **tried[str_of(config)])
        except KeyboardInterrupt:
            self.journal.add("interrupted", **key)  # not the candidate's fault
            raise

    def _entry(self, call: Call, sets: list[Any], now: Any, tried: dict[str, dict[str, float]]) -> tuning.Entry:
        """The fastest candidate, timed once more against the current configuration, and against the stock path."""
        by_name = {str_of(config): config for config in call.candidates(self.arch)}
        won = {
            name: said["ratio"]
            for name, said in tried.items()
            if name in by_name and said["ratio"] < 1 - max(MARGIN, said["noise"])
        }
        best = by_name[min(won, key=won.__getitem__)] if won else now
        ours, base = self._compare(_forced(call, sets, best), _forced(call, sets, now))
        measured = {"us": ours.value, "now_us": base.value}
        stock_wins = None
        if call.stock:
            again, stock = self._compare(_forced(call, sets, best), [partial(call.reference, args) for args in sets])
            measured["stock_us"] = stock.value
            if not self.options.dry and again.value > stock.value * (1 + max(MARGIN, _noise(again, stock))):
                stock_wins = f"plain torch took {stock.value:.1f} us where the kernel took {again.value:.1f} us"
        predicted = call.predicted_us(self.arch, best)
        if predicted is not None:
            measured["predicted_us"] = predicted
        commit = self.origin["commit"] + ("" if self.origin["dirty"] is False else ", with changes")
        return tuning.Entry(
            op=call.table_op,
            bucket=call.bucket,
            measured={name: round(us, 2) for name, us in measured.items()} | {"tried": len(tried) + 1},
            source=f"{self.out.name}: bench tune at commit {commit} on {self.origin['device']}",
            source_hash=self.source_hashes[call.table_op],
            config=dataclasses.asdict(best),
            stock_wins=stock_wins,
        )

    def _tried(self, call: Call) -> dict[str, dict[str, float]]:
        """Earlier runs' results for the candidates, from the same sources. Infinite: do not try it again."""
        same = {"bucket": call.bucket, "source_hash": self.source_hashes[call.table_op], "dry": self.options.dry}
        last = {
            event["config"]: event
            for event in self.journal.events
            if "config" in event and all(event.get(name) == value for name, value in same.items())
        }
        return {
            config: {"ratio": event.get("ratio", math.inf), "noise": event.get("noise", 0.0)}
            for config, event in last.items()
            if event["event"] != "interrupted"
        }

    def _compile(self, left: Sequence[Call], until: float) -> dict[str, list[Any]]:
        """Compile the candidates; returns, by bucket, those that compile without spilling and fit.

        A launch whose candidates were not all compiled in time is missing.
        """
        wanted = {call.bucket: self._untried(call) for call in left}
        if self.options.dry:  # the interpreter compiles nothing
            return wanted
        pairs = [(call, config) for call in left for config in wanted[call.bucket]]
        pending = collections.Counter(call.bucket for call, _ in pairs)
        with self.people.status("compiling") as status:
            for index, problem in workload.compile_all(pairs, self.arch, self.options.jobs):
                call, config = pairs[index]
                pending[call.bucket] -= 1
                if problem is not None:
                    wanted[call.bucket].remove(config)
                    self._refuse(call, config, problem)
                status.update(f"compiling: {pending.total()} of {len(pairs)} kernels left")
                if time.monotonic() > until:
                    break
        return {bucket: configs for bucket, configs in wanted.items() if not pending[bucket]}

    def _untried(self, call: Call) -> list[Any]:
        now, tried = call.now(self.arch), self._tried(call)
        promising = call.candidates(self.arch)[: self.options.top]
        return [config for config in promising if config != now and str_of(config) not in tried]

    def _refuse(self, call: Call, config: Any, why: str) -> None:
        self.journal.add("refused", **self._key(call, config), why=why)
        self.people.print(f"    {call.bucket}  {config}: {why}", markup=False, soft_wrap=True)

    def _right(self, call: Call, gate: _Gate, config: Any) -> bool:
        wrong = gate.faults(config)
        if wrong:
            self._refuse(call, config, wrong)
        return not wrong

    def _compare(self, ours: list[Callable[[], object]], peer: list[Callable[[], object]]) -> tuple[Timing, Timing]:
        return compare(ours, peer, self.device, seconds=SECONDS, dry=self.options.dry)

    def _key(self, call: Call, config: Any) -> dict[str, Any]:
        source_hash, dry = self.source_hashes[call.table_op], self.options.dry
        return {"bucket": call.bucket, "config": str_of(config), "source_hash": source_hash, "dry": dry}

    def _write(self) -> None:
        sources = {op: sources for op, (_, sources) in KINDS.items()}
        table = tuning.Table(self.arch, self.options.dry, self.origin, sources, tuple(self.entries.values()))
        write_json(self.out, table.record())
        tuning.forget()

    def _show(self) -> None:
        """Print the table's entries for the chosen launches."""
        title = f"tuned for {self.arch}{DRY_NOTE if self.options.dry else ''}"
        headings = ("predicted", "measured", "now", "stock", "gain", "tried")
        caption = "us; now: what ran before; stock: plain torch"
        columns = (prose("launch"), prose("configuration"), *map(figure, headings))
        table = Sheet(*columns, title=title, caption=caption)
        for entry in (self.entries[call.bucket] for call in self.calls if call.bucket in self.entries):
            assert entry.config is not None
            measured = entry.measured
            table.add(
                entry.bucket,
                str_of(KINDS[entry.op][0](**entry.config)),
                *(
                    f"{measured[name]:,.1f}" if name in measured else ""
                    for name in ("predicted_us", "us", "now_us", "stock_us")
                ),
                f"{measured['now_us'] / measured['us']:.3f}",
                str(measured["tried"]),
            )
        if table.rows:
            console().print(table)


class _Gate:
    """Compares one launch with the fp64 oracle; the expected results are computed once for all configurations."""

    def __init__(self, call: Call, args: Any) -> None:
        self._call, self._args = call, args
        self._low: Outputs = call.reference(_copied(args))
        self._oracle: Outputs = call.reference(_copied(args, double=True))

    def faults(self, config: Any) -> str:
        """What is wrong with the results of ``config``, or why it cannot run; empty if they are right."""
        from triton.runtime.errors import OutOfResources

        args = _copied(self._args)
        try:
            ours = _run_forced(self._call, config, args)
        except OutOfResources as error:
            return str(error)
        verdicts = check_outputs(ours, low=lambda: self._low, oracle=lambda: self._oracle, terms=self._call.terms)
        return "; ".join(str(verdict) for verdict in verdicts if not verdict.ok)


def str_of(config: Any) -> str:
    """A configuration with every field that is tuned; its own name for people omits some."""
    rest = (f"{letter}{getattr(config, name)}" for name, letter in _UNNAMED.items() if hasattr(config, name))
    return "-".join([str(config), *rest])


def _copied(args: Any, *, double: bool = False) -> Any:
    """The same values in new tensors: an op may write into its arguments. ``double``: numbers in fp64."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        wide = x.double() if double and x.is_floating_point() else x
        return wide.clone(memory_format=torch.preserve_format)

    return tree_map_only(torch.Tensor, copy, args)


def _forced(call: Call, sets: list[Any], config: Any) -> list[Callable[[], object]]:
    return [partial(_run_forced, call, config, args) for args in sets]


def _run_forced(call: Call, config: Any, args: Any) -> Outputs:
    with call.forced(config):
        return call(args)


def _noise(*sides: Timing) -> float:
    return max((side.noise for side in sides if side.noise is not None), default=0.0)


def _cases(spec: registry.OpSpec, options: Options, *, known: bool) -> Iterator[registry.Case]:
    """The cases requested by name or tag; otherwise the dozen most important ones, in a dry run a few small ones."""
    if not options.cases:
        yield from spec.tagged("test")[:DRY_CASES] if options.dry else spec.tagged(TAG)
        return
    by_name = {case.name: case for case in spec.cases}
    for wanted in options.cases:
        chosen = [by_name[wanted]] if wanted in by_name else spec.tagged(wanted)
        if not chosen and known:
            raise ValueError(
                f"{spec.name} has no case and no tag called {wanted!r}; {expected(wanted, by_name, 'it has')}"
            )
        yield from chosen


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardfuse.bench.tune", description="Tune kernels on this GPU.")
    parser.add_argument("op", nargs="?", help="one op; default: all that launch GEMMs, and paged_attention")
    parser.add_argument("--cases", action="append", default=[], help="a case or a tag; may be repeated")
    parser.add_argument("--out", type=Path, help="the table; an earlier call's is resumed")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds")
    parser.add_argument("--top", type=int, default=TOP, help="candidates to time for each launch")
    parser.add_argument("--dry", action="store_true", help="do the same on a CPU, with tiny shapes, no measurement")
    parser.add_argument("--jobs", type=int, help="processes that compile (default: one per core)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        workers.serve(answer)
        return 0
    return tune(
        Options(options.op, tuple(options.cases), options.out, options.budget, options.top, options.dry, options.jobs)
    )


if __name__ == "__main__":
    sys.exit(main())
