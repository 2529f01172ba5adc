"""``shardfuse bench calibrate``: measures this node's links and writes the profile that the overlap policy reads.

    links     alpha and beta of all_gather, reduce_scatter and all_reduce, fitted to a few sizes
    products  their rate, that of a copy in memory and to a peer, and how fast a product runs under a collective
    rows      gather + product, product + reduce-scatter, product + all-reduce on the shapes of real layers: plain, in
              chunks and, where it can run, by the kernel, each timed in turn with plain; for the few tokens of
              decoding also product + all-reduce + norm, whose sum the kernel forms in the norm's launch. Each by two
              clocks: the device's alone, and with the host's part (``calibrate_meter.py``)

A row stands for a bucket of shapes. So a plan that beats plain on the listed shape is also timed on the bucket's
smallest and largest shapes, and the worst of the three counts.

Every plan's result must agree with fp64 before it is timed, by the rule that all gates share. Figures are rank 0's. The
file is rewritten after every row, so the same command resumes a stopped run; a second run for the same file is refused
while the first runs. The command starts the ranks itself, unless torchrun has (over several machines: the profile's
"network" link). ``SHARDFUSE_LINKS`` then names the file.
"""

from __future__ import annotations

import hashlib
import json as jsonlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import torch
from rich.console import Console

from ..kernels.dev import shapes
from ..kernels.runtime.dtypes import short_name
from ..kernels.runtime.printing import Sheet, console, figure, unbroken
from ..parallel.core import collectives
from ..parallel.core.mesh import Group, tp_group
from ..parallel.core.rendezvous import init_mesh, shutdown
from ..parallel.overlap import link_model, policy
from ..parallel.overlap import link_profile as profiles
from ..parallel.overlap.link_profile import CLOCKS, OPS, Profile, Row, RowKey, bucket
from ..parallel.overlap.memory.sizes import DECODE_TOKENS
from ..parallel.overlap.plan import OverlapPlan, fastest
from ..training.launch import Stopped, launch, stop_signals
from .calibrate_meter import Meter
from .calibrate_rig import SITE, Rig, Shares, ends_of
from .harness import provenance
from .harness.report import DRY_NOTE, write_json

GATHER, SCATTER, REDUCE, NORM = OPS
SECONDS, SHORT_SECONDS = 1.5, 0.5  # of timing for two plans in turn
MODELS, TOKENS = ("llama3-8b", "llama3-70b"), (16, 128, 1024, 4096, 16384)  # on GPUs
FEW = tuple(1 << power for power in range(DECODE_TOKENS.bit_length()))  # tokens of decoding: one bucket each
CPU_WIDTHS, CPU_TOKENS = ((256, 1024), (1024, 4096)), (64, 512)  # (D, F) on a CPU
SOURCES = (
    "parallel/core/collectives.py",
    "parallel/core/pieces.py",
    *(f"parallel/overlap/{name}.py" for name in ("strategies", "partial_sum", "memory/channel")),
    *(f"kernels/{name}" for name in ("linear", "comm", "norm")),
    *(f"kernels/runtime/{name}.py" for name in ("copies", "signals", "signals_triton", "device")),
    "bench/calibrate.py",
    "bench/calibrate_meter.py",
    "bench/calibrate_rig.py",
    *provenance.TUNED,
)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Within the block no other process writes ``path``, by a lock on the file ``.NAME.lock`` in its folder.

    Raises ValueError if another process holds the lock, or the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    try:
        held = filelock.FileLock(lock, timeout=0, is_singleton=False)
        held.acquire()
    except filelock.Timeout:
        raise ValueError(
            f"{path} is being written by another run: wait for its end, or choose another file with --out"
        ) from None
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{lock} cannot be locked ({why}): choose a file elsewhere with --out") from None
    try:
        yield
    finally:
        held.release()


@dataclass(frozen=True)
class Options:
    """The options of one call. ``device`` is "cpu", "cuda" or None for a GPU if there is one."""

    ranks: int = 2
    device: str | None = None
    out: Path | None = None
    short: bool = False
    dry: bool = False

    @property
    def device_type(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def seconds(self) -> float:
        return 0.0 if self.dry else SHORT_SECONDS if self.short else SECONDS


def calibrate(options: Options, *, json: bool = False) -> int:
    """Measure, write and print; returns the exit code. 1: a plan's result is wrong, and the run ended there.

    Raises ValueError for invalid options and for a file that must not be overwritten.
    """
    if options.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={options.device!r}: expected cpu or cuda")
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not together and options.ranks < 2:
        raise ValueError(f"ranks={options.ranks}: links join at least 2 ranks")
    if together:
        outcome = run(options)
        if int(os.environ["RANK"]) != 0:
            return outcome.code
    else:
        try:
            with stop_signals():
                outcome = launch(run, options, processes=options.ranks)[0]
        except Stopped as stop:
            console(stderr=True).print("stopped; measured rows are kept, and the same command resumes")
            sys.exit(128 + stop.signum)
    people = console(stderr=json)
    for line in outcome.red:
        people.print(line, style="red", markup=False, soft_wrap=True)
    show(people, outcome, dry=options.dry)
    if json:
        print(jsonlib.dumps({"out": outcome.out, "gate": "red" if outcome.red else "green", **outcome.profile}))
    return outcome.code


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: the file, the profile as written, and the comparisons that failed."""

    out: str
    profile: dict[str, Any]
    red: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        return 1 if self.red else 0


def run(options: Options) -> Outcome:
    """One rank's part of a calibration."""
    mesh = init_mesh(device_type=options.device_type)
    try:
        return Run(options, tp_group(mesh)).run()
    finally:
        shutdown()


class _WrongResult(Exception):
    """Comparisons that failed on some rank, one line each."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        super().__init__(*lines)
        self.lines = lines


class Run:
    """A calibration in progress. All ranks run the same steps; rank 0 writes and prints."""

    def __init__(self, options: Options, group: Group) -> None:
        self.options, self.group = options, group
        on_gpu = options.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.link = policy.link_of(collectives.gather_objects(policy.machine(), group, site=SITE))
        name, arch = profiles.device_names(self.device)
        self.meter = Meter(group, self.device, self.dtype, seconds=options.seconds, dry=options.dry)
        self.out = options.out or Path(f"shardfuse-links-{arch}.json")
        self.people: Console = console(stderr=True)
        self.profile = Profile(name, arch, measured=True, dry=options.dry, origin=self._origin(), sources=(_SOURCE,))

    def run(self) -> Outcome:
        with ExitStack() as held:
            self.profile = self._from_first(lambda: self._earlier(held))
            red: tuple[str, ...] = ()
            try:
                self._measure()
            except _WrongResult as wrong:
                red = wrong.lines
            return Outcome(str(self.out), self.profile.record(), red)

    def _measure(self) -> None:
        """Measure everything that the profile lacks."""
        if self.link not in self.profile.links:
            self._say(f"links: {len(self.meter.sizes())} sizes of each collective")
            self._keep(links=dict(self.profile.links) | {self.link: self.meter.links()})
        if short_name(self.dtype) not in self.profile.gemm_flops:
            self._say("products, copies, and both at once")
            self._keep(**self.meter.rates(self.profile.gemm_flops))
        if self.link == "node" and self.profile.copy_bytes_per_s is None:  # also after a run over a network
            self._keep(copy_bytes_per_s=self.meter.peer_copy())
        left = [call for call in self._calls() if any(key not in self.profile.table for key in self._keys(call))]
        for index, call in enumerate(left):
            where = bucket(call.T, call.K, call.N)
            self._say(f"{index + 1} of {len(left)}  {call.op} {where} {short_name(call.dtype)}")
            self._keep(rows=(*self.profile.rows, *self._rows(call)))

    # --- the file -----------------------------------------------------------------------------------------------------

    def _origin(self) -> dict[str, Any]:
        said = provenance.describe(self.device)
        names = ("date", "torch", "triton", "shardfuse", "python", "cuda", "device", "cpu", "cpus", "threads")
        return {name: said[name] for name in names} | {"ranks": self.group.size, "source_hash": source_hash()}

    def _earlier(self, held_open: ExitStack) -> Profile:
        """The file's profile if this run can resume it, else the empty profile. No other process writes the file until
        ``held_open`` closes.
        """
        held_open.enter_context(only_writer(self.out))
        fresh = self.profile
        if not self.out.is_file() or not self.out.read_text().strip():
            return fresh
        held = profiles.read(self.out)
        if not held.measured or (held.arch, held.dry) != (fresh.arch, fresh.dry):
            kind = "a dry run" if held.dry else "measurements" if held.measured else "published figures"
            raise ValueError(f"{self.out} holds {kind} for {held.device}: choose another file with --out")
        unknown = dict.fromkeys(provenance.MACHINE, "unknown")
        provenance.check_machine(self.out, unknown | dict(held.origin), fresh.origin)
        if held.origin.get("source_hash") != fresh.origin["source_hash"]:
            self._say(f"{self.out} was measured with other sources: starting again")
            return fresh
        return replace(held, origin=fresh.origin)

    def _from_first(self, work: Callable[[], Profile]) -> Profile:
        """Rank 0's profile, or its error, on every rank."""
        content: Any = None
        if self.group.rank == 0:
            try:
                content = work().record()
            except ValueError as error:
                content = str(error)
        content = collectives.gather_objects(content, self.group, site=SITE)[0]
        if isinstance(content, str):
            raise ValueError(content)
        return profiles.parse(content, str(self.out))

    def _keep(self, **changes: Any) -> None:
        self.profile = replace(self.profile, **changes)
        if self.group.rank == 0:
            write_json(self.out, self.profile.record())
        # All ranks must decide by the same figures: rank 0's.
        self.profile = self._from_first(lambda: self.profile)

    def _say(self, line: str) -> None:
        if self.group.rank == 0:
            self.people.print(line, markup=False, soft_wrap=True)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _calls(self) -> list[link_model.Call]:
        """The shapes to measure, one for each bucket."""
        found: dict[Any, link_model.Call] = {}
        for op, T, K, N in shapes_of(self.options, self.device.type, self.group.size):
            call = link_model.Call(op, T, K, N, self.dtype, self.group.size)
            if self._plans(call):
                found.setdefault(self._keys(call)[0], call)
        return list(found.values())

    def _keys(self, call: link_model.Call) -> list[RowKey]:
        """The keys of the call's rows, one for each clock."""
        where = call.op, short_name(call.dtype), call.R, self.link, bucket(call.T, call.K, call.N)
        return [(*where, clock) for clock in CLOCKS]

    def _plans(self, call: link_model.Call) -> list[OverlapPlan]:
        plans = [OverlapPlan("chunked", pieces) for pieces in link_model.pieces_of(call)]
        if self.link == "node" and policy.kernel_unavailable(self.group, self.device) is None:
            plans.append(OverlapPlan("kernel"))
        return plans

    def _checked(self, call: link_model.Call, plans: Sequence[OverlapPlan]) -> Rig:
        """A rig with checked ``plans``. Raises _WrongResult on every rank if a result is wrong on one."""
        rig = Rig.of(call, self.group, self.device)
        verdicts = [str(verdict) for plan in plans for verdict in rig.verdicts(plan) if not verdict.ok]
        everyone = collectives.gather_objects(verdicts, self.group, site=SITE)
        red = tuple(f"rank {rank}: {line}" for rank, lines in enumerate(everyone) for line in lines)
        if red:
            raise _WrongResult(red)
        return rig

    def _rows(self, call: link_model.Call) -> list[Row]:
        """Each plan timed in turn with plain on ``call``; all relative to the first of plain's times, by each clock.

        The fastest is timed twice and counts by the slower time: the best of several similar plans would otherwise be
        the luckiest. A plan that still beats plain by some clock must do so at both ends of the bucket.
        """
        shares, plans = {clock: Shares() for clock in CLOCKS}, self._plans(call)
        rig = self._checked(call, plans)
        self._time(rig, plans, shares)
        self._time(rig, self._first([each.fastest() for each in shares.values()]), shares)
        winners = self._first([plan for each in shares.values() for plan in each.winners()])
        for end in ends_of(call):
            possible = link_model.pieces_of(end)
            these = [plan for plan in winners if plan.kind == "kernel" or plan.pieces in possible]
            if these:
                self._time(self._checked(end, these), these, shares)
        return [of.row(key) for of, key in zip(shares.values(), self._keys(call))]

    def _first(self, plans: list[OverlapPlan]) -> list[OverlapPlan]:
        """Rank 0's ``plans``, each once: the order may differ on other ranks."""
        return list(dict.fromkeys(collectives.gather_objects(plans, self.group, site=SITE)[0]))

    def _time(self, rig: Rig, plans: Sequence[OverlapPlan], shares: Mapping[str, Shares]) -> None:
        for plan in plans:
            for of, found in zip(shares.values(), self._shares(rig, plan)):
                of.add(plan, *found)

    def _shares(self, rig: Rig, plan: OverlapPlan) -> list[tuple[float, float, float]]:
        """By each clock a plan's share of plain's time, plain's time in seconds, and the larger noise of the two."""
        times = self.meter.compare(partial(rig.result, plan), partial(rig.result, OverlapPlan()))
        found = []
        for clock in CLOCKS:
            ours, plain = (each.by(clock) for each in times)
            found.append(
                (ours.value / plain.value, plain.value * 1e-6, max(each.noise or 0.0 for each in (ours, plain)))
            )
        return found


_SOURCE = "measured by shardfuse bench calibrate"


def shapes_of(options: Options, device_type: str, R: int) -> Iterator[tuple[str, int, int, int]]:
    """(op, T, K, N) of common layers; tokens are rounded up to a multiple of the ranks, except for a norm's sum."""
    pairs: Sequence[tuple[str, int, int]]
    tokens: tuple[int, ...]
    few = (8,) if options.dry else FEW[::4] if options.short else FEW
    if options.dry:
        pairs, tokens = [("up", 16, 32), ("down", 32, 16)], (8,)
    elif device_type == "cpu":
        widths = CPU_WIDTHS[: 1 if options.short else None]
        pairs = [pair for D, F in widths for pair in (("up", D, F // R), ("down", F // R, D), ("o", D // R, D))]
        tokens = CPU_TOKENS[: 1 if options.short else None]
    else:
        models = MODELS[: 1 if options.short else None]
        made = [shapes.projection(model, kind, R, 1) for model in models for kind in shapes.KINDS]
        pairs = [(found.kind, found.D, found.F) for found in made]
        tokens = (4096,) if options.short else TOKENS
    for kind, K, N in pairs:
        for T in tokens:
            for op in (GATHER,) if kind in ("up", "qkv") else (SCATTER, REDUCE):
                yield op, -(-T // R) * R, K, N
        for T in few if kind not in ("up", "qkv") else ():
            yield NORM, T, K, N


def source_hash() -> str:
    """16 digits of a SHA-256 over the sources that the figures depend on."""
    digest = hashlib.sha256()
    for name in SOURCES:
        floor, _, rest = name.partition("/")
        path = provenance.package_folder(floor) / rest
        for file in sorted((*path.glob("*.py"), *path.glob("*.json"))) if path.is_dir() else [path]:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def show(people: Console, outcome: Outcome, *, dry: bool) -> None:
    """Print the links, then one row for each bucket: each plan's share of plain's time, and the chosen plan."""
    profile = profiles.parse(outcome.profile, outcome.out)
    columns = (unbroken("link"), unbroken("collective"), figure("alpha us"), figure("GB/s"))
    table = Sheet(*columns, title=f"{profile.device}: links{DRY_NOTE if dry else ''}")
    for kind, collectives_ in profile.links.items():
        for collective, link in collectives_.items():
            table.add(kind, collective, f"{link.alpha_s * 1e6:.1f}", f"{link.bytes_per_s / 1e9:.2f}")
    people.print(table)
    counts = sorted({pieces for row in profile.rows for pieces in row.chunked_s})
    names = (unbroken("op"), unbroken("bucket"), unbroken("dtype"), unbroken("clock"))
    figures = map(figure, ("ranks", *(f"in {count}" for count in counts), "kernel", "noise"))
    rows = Sheet(*names, *figures, unbroken("taken"), title="share of plain's time", caption="< 1: faster than plain")
    for row in sorted(profile.rows, key=lambda row: row.key):
        shares = [row.chunked_s[count] / row.plain_s if count in row.chunked_s else None for count in counts]
        shares.append(None if row.kernel_s is None else row.kernel_s / row.plain_s)
        told = ("" if share is None else f"{share:.2f}" for share in shares)
        rows.add(
            row.op, row.bucket, row.dtype, row.clock, str(row.ranks), *told, f"{row.noise:.1%}", _taken(profile, row)
        )
    people.print(rows)
    use = "no job uses a dry run's" if dry else f"{profiles.VARIABLE}={outcome.out} has every job use it"
    people.print(f"written: {outcome.out}; {use}", soft_wrap=True)


def _taken(profile: Profile, row: Row) -> str:
    kind, pieces = fastest(row, unavailable=None)
    if profile.dry:
        return "plain"
    return f"{kind} in {pieces}" if kind == "chunked" else kind
