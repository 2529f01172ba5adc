"""``all_reduce_rmsnorm`` at the sizes of decoding, with virtual ranks on one GPU, against its separate steps.

Ours is one launch a rank: it sends rows to the peers, sums them with the residual, and normalises. The peers copy all
ranks' rows to all ranks, sum them with torch, and launch a norm, ours or torch's. Their ranks do not wait for each
other, so they avoid a cost that every exchange has. Both run on R streams and equal shares of the chip
(``virtual_ranks.py``), launched by the host, and replayed from one CUDA graph for each rank, in which the device counts
the exchanges. In decoding the rows come from the previous product, so the benchmark does not keep them out of the
cache. A step has many layers: it times a series of exchanges without a stop, and a metric is the share of one.

One shot and two shots are both shown. The target holds for the one that a call without ``shots`` chooses. Rows whose
metric contains "projected" come from a model (``projection.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.comm.reduce_config import pick_shots
from ...kernels.comm.reduce_op import all_reduce_rmsnorm, all_reduce_rmsnorm_shape
from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.cases.all_reduce_norm import SPEC
from ...kernels.dev.registry import Case, to_double
from ...kernels.norm import rms_norm
from ...kernels.runtime.signals import CHUNKS
from ...parallel.overlap import link_model
from ..harness import virtual_ranks
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import check_outputs
from ..harness.projection import SOURCES, projection
from ..harness.timing import Timing, compare
from ..harness.virtual_ranks import SYMMETRIC, Body, VirtualRanks

TARGETS = {"against copies, sum and norm, in the number of shots that a call takes by itself": 1.5}
(STEPS,) = TARGETS.values()

EPS = 1e-6
SETS = 8  # of operands: exchanges timed in a series, so that starting and joining R streams adds little to each
OURS, TORCH = "copies, torch's sum, own rms_norm", "copies, torch's sum, F.rms_norm"
DRY = "t5-d80-r2-fp32"


@dataclass(frozen=True)
class Mode:
    """A way to call ours."""

    shots: int
    replayed: bool  # from CUDA graphs

    @property
    def metric(self) -> str:
        shots = "one shot" if self.shots == 1 else "two shots"
        return f"{shots}, {'graph replay' if self.replayed else 'launched'}, us"


MODES = tuple(Mode(shots, replayed) for replayed in (False, True) for shots in (1, 2))


def problems(settings: Settings) -> list[Case]:
    if settings.dry:
        return [case for case in SPEC.cases if case.name == DRY]
    return SPEC.tagged("short" if settings.short else "bench")


def plan(settings: Settings) -> list[Measurement]:
    rows = []
    modes = [mode for mode in MODES if settings.cuda or not mode.replayed]
    for norm in (OURS,) if settings.short and not settings.dry else (OURS, TORCH):
        for case in problems(settings):
            T, D, R = _sizes(case)
            usual = pick_shots(T, D, case.dtype.itemsize, R)
            for mode in modes:
                run = partial(_time, settings, case, mode, norm)
                target = STEPS if mode.shots == usual else None
                rows.append(Measurement(case.name, mode.metric, norm, target, run, work=Work(0, _bytes(case))))
    return rows + [row for case in problems(settings) if (row := _projection(settings, case)) is not None]


def _projection(settings: Settings, case: Case) -> Measurement | None:
    """A projection of the exchange alone: the model leaves out the norm's own pass on both sides."""
    T, D, R = _sizes(case)
    return projection(case.name, link_model.Call(SPEC.name, T, D, D, case.dtype, R), settings.device, exposed=True)


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Check every mode: the last of several exchanges, on all ranks."""
    for case in problems(settings):
        if case.name not in names:
            continue
        drawn = SPEC.make_inputs(case, settings.device, 0)
        exact = to_double(drawn, settings.device)
        for mode in MODES:
            with _ranks(settings, case, mode) as ranks:
                rounds = virtual_ranks.ROUNDS * (
                    2 if mode.replayed else 1
                )  # device-counted exchanges use two slots in turn
                ys, ss = zip(*ranks.settled(_ready(ranks, _ours(ranks, drawn, mode), mode), rounds))
                found = {"y": torch.stack(ys), "s": torch.stack(ss)}
            same = replace(case, options={**case.options, "shots": mode.shots})
            for verdict in check_outputs(
                found,
                low=partial(SPEC.run, drawn, same, "reference"),
                oracle=partial(SPEC.run, exact, same, "reference"),
                rule=partial(SPEC.judge, same),
            ):
                yield case.name, replace(verdict, name=f"{verdict.name}, {mode.metric.removesuffix(', us')}")


def warm(settings: Settings, name: str) -> None:
    for case in problems(settings):
        if case.name == name:
            drawn = SPEC.make_inputs(case, settings.device, 0)
            for mode in MODES:
                with _ranks(settings, case, mode) as ranks:
                    ranks.alone(_ours(ranks, drawn, mode))
                    ranks.alone(_steps(ranks, drawn, OURS))


def _sizes(case: Case) -> tuple[int, int, int]:
    return tuple(case.sizes[letter] for letter in "TDR")  # type: ignore[return-value]


def _bytes(case: Case) -> int:
    """Bytes of all ranks: x read, R partial sums stored and read for each row, residual read, y and s written."""
    T, D, R = _sizes(case)
    return R * (1 + 2 * R + 3) * T * D * case.dtype.itemsize


# --- timed calls ------------------------------------------------------------------------------------------------------


def _ranks(settings: Settings, case: Case, mode: Mode) -> VirtualRanks:
    T, D, R = _sizes(case)
    share = virtual_ranks.share_of(settings.device, R)
    shape = all_reduce_rmsnorm_shape(
        T, D, case.dtype, R, settings.device, shots=mode.shots, programs=min(CHUNKS, share)
    )  # fmt: skip
    return virtual_ranks.make(R, shape, case.dtype, settings.device)


def _ours(ranks: VirtualRanks, drawn: dict[str, Any], mode: Mode) -> Body:
    more = {name: drawn[name] for name in ("weight", "residual", "bias")}

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        peers, signals = ranks.counted(rank) if mode.replayed else ranks.begin(rank)
        found = all_reduce_rmsnorm(
            drawn["x"][rank], peers=peers, signals=signals, eps=EPS, shots=mode.shots,
            programs=min(CHUNKS, ranks.share), impl="triton", **more,
        )  # fmt: skip
        if not mode.replayed:
            ranks.end(rank)
        return found

    return body


def _steps(ranks: VirtualRanks, drawn: dict[str, Any], norm: str) -> Body:
    """The steps after the copies of all ranks' rows to this rank: their sum, and ``norm``."""
    x, weight, residual, bias = (drawn[name] for name in ("x", "weight", "residual", "bias"))
    gathered = [torch.empty_like(x) for _ in range(ranks.size)]

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        for step in range(ranks.size):
            source = (rank + step) % ranks.size
            gathered[rank][source].copy_(x[source], non_blocking=True)
        total = gathered[rank].sum(0)
        if bias is not None:
            total = total + bias
        if norm == OURS:
            return rms_norm(total, weight, residual=residual, eps=EPS, impl="triton")
        s = total + residual
        return F.rms_norm(s, s.shape[-1:], weight, EPS), s

    return body


def _ready(ranks: VirtualRanks, body: Body, mode: Mode) -> Body:
    """``body`` with its kernels loaded; as CUDA graphs if ``mode`` replays."""
    ranks.alone(body)
    return ranks.captured(body) if mode.replayed else body


def _time(settings: Settings, case: Case, mode: Mode, norm: str) -> tuple[Timing, Timing]:
    """Microseconds of one exchange, as a share of SETS in a series."""
    with _ranks(settings, case, mode) as ranks:
        sets = [SPEC.make_inputs(case, settings.device, seed) for seed in range(SETS if settings.cuda else 1)]
        ours, steps = (
            partial(ranks.run, _ready(ranks, _in_a_row([make(ranks, drawn) for drawn in sets]), mode))
            for make in (partial(_ours, mode=mode), partial(_steps, norm=norm))
        )
        found = compare([ours], [steps], settings.device, seconds=settings.seconds, dry=settings.dry)
        ranks.check()
    return _each(found[0], len(sets)), _each(found[1], len(sets))


def _in_a_row(bodies: Sequence[Body]) -> Body:
    """The calls of one rank one after another, as in the layers of a step."""

    def body(rank: int) -> list[Any]:
        return [each(rank) for each in bodies]

    return body


def _each(timing: Timing, calls: int) -> Timing:
    """The timing of one of ``calls`` that were timed together."""
    return Timing(timing.value / calls, timing.noise, None if timing.host is None else timing.host / calls)


BENCHMARK = Benchmark(
    name="all_reduce_norm",
    summary="all_reduce_rmsnorm at decode sizes, by virtual ranks on one GPU, against copies, sum and norm",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=(SPEC.name,),
    sources=("bench/harness/virtual_ranks.py", "bench/harness/projection.py", *SYMMETRIC, *SOURCES),
    devices=("cuda",),
)
