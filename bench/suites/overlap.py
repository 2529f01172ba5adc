"""Products that exchange rows with other ranks while they run, with virtual ranks on one GPU.

One GPU can show two things: whether a product that waits for its rows costs more than one whose rows are there (all
flags set); and whether R ranks that share the chip hide their copies under their products (``virtual_ranks.py``). The
peer of the latter is the slower of the products alone and the copies alone, on the same shares of the chip at the same
time: doing both cannot take less. Exposed is the time minus that of the products alone, as a share of the call; the
peer of that row runs the same steps one after another, each for all ranks.

Links between GPUs cannot be measured here: rows whose metric contains "projected" come from a model
(``projection.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...kernels.comm import all_gather_linear, linear_all_reduce, linear_reduce_scatter, op, transport
from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.cases import comm as cases
from ...kernels.dev.registry import Case, OpSpec, to_double
from ...kernels.linear import Product, linear_act, linear_act_choice, reference
from ...kernels.runtime.dtypes import NAMES
from ...kernels.runtime.signals import Gathered, in_one_process, own_rows, rows_of
from ...parallel.overlap import link_model
from ..harness import virtual_ranks
from ..harness.benchmark import Benchmark, Measurement, Settings, Work, gates
from ..harness.gate import check_outputs
from ..harness.projection import SOURCES, projection
from ..harness.timing import Call, Timing, compare, input_sets
from ..harness.virtual_ranks import SYMMETRIC, Body, VirtualRanks

TARGETS = {
    "all-gather and GEMM with every flag set, against the plain GEMM": 1 / 1.03,
    "all-gather and GEMM, GEMM and reduce-scatter, against the slower of GEMM and copies alone": 1 / 1.10,
}
FLAGS_SET, OVERLAPPED = TARGETS.values()

SET, TIME, EXPOSED = "every flag set, us", "overlapped, us", "exposed, %"
PLAIN, SLOWER, IN_TURN = "own plain GEMM", "slower of GEMM and copies alone", "GEMM and copies in turn"
FLAGGED = "y, every flag set"
GATHER, SCATTER, REDUCE = cases.GATHER, cases.REDUCE_SCATTER, cases.ALL_REDUCE
FLOOR_PERCENT = 0.1  # a smaller exposed share counts as none
# Llama 70B's MLP, whose hidden rows are exchanged, and Megatron's of width 4096: (T, D, F).
_LARGE, _SMALL = (8192, 8192, 28672), (4096, 4096, 16384)
_SHORT = {GATHER.name: "gather", SCATTER.name: "scatter", REDUCE.name: "reduce"}

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """An op on a case like those of ``kernels/dev/cases/comm.py``. Its name is the case of a benchmark."""

    spec: OpSpec
    case: Case

    @property
    def name(self) -> str:
        return f"{_SHORT[self.spec.name]}-{self.case.name}"

    @property
    def gathers(self) -> bool:
        return self.spec is GATHER

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, K, N, R."""
        return tuple(self.case.sizes[letter] for letter in "TKNR")  # type: ignore[return-value]

    @property
    def slot(self) -> tuple[int, ...]:
        """The shape of a rank's slot."""
        T, K, N, R = self.sizes
        if self.gathers:
            return T, K
        return op.reduce_scatter_shape(T, N, R) if self.spec is SCATTER else op.all_reduce_shape(T, N, R)

    def work(self, ranks: int) -> Work:
        """The work of ``ranks`` products, every operand touched once."""
        T, K, N, _ = self.sizes
        return Work(ranks * 2 * T * K * N, self.bytes(ranks))

    @property
    def activation(self) -> str:
        return str(self.case.options.get("activation", "identity"))

    def bytes(self, ranks: int) -> int:
        """Bytes of the operands and results of ``ranks`` ranks."""
        T, K, N, _ = self.sizes
        return ranks * (T * K + N * K + T * N) * self.case.dtype.itemsize

    def draw(self, device: torch.device, seed: int) -> dict[str, Any]:
        """Random operands of all ranks, drawn as in the op's cases."""
        return self.spec.make_inputs(self.case, device, seed)


def problems(settings: Settings) -> list[Problem]:
    if settings.dry:
        return [_problem(spec, 20, 32, 24, 2, torch.float32) for spec in (GATHER, SCATTER, REDUCE)]
    found = []
    for R in (8, 4, 2):
        T, D, F = _LARGE
        found += [_problem(GATHER, T, D, F // R, R), _problem(SCATTER, T, F // R, D, R)]
    if settings.short:
        return found[:4]
    T, D, F = _SMALL
    found += [_problem(GATHER, T, D, F // 4, 4), _problem(SCATTER, T, F // 4, D, 4)]
    return [*found, _problem(REDUCE, 1024, 28672 // 8, 8192, 8)]


def _problem(spec: OpSpec, T: int, K: int, N: int, R: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    options: dict[str, Any] = {"bias": False, "residual": False}
    if spec is GATHER:
        options = {"weights": 1, "gated": False, "activation": "gelu_tanh", "bias": True}
    return Problem(spec, Case(f"t{T}-k{K}-n{N}-r{R}-{NAMES[dtype]}", dtype, {"T": T, "K": K, "N": N, "R": R}, options))


def plan(settings: Settings) -> list[Measurement]:
    rows, projections = [], []
    for each in problems(settings):
        if each.gathers:
            flagged = _row(each, SET, PLAIN, FLAGS_SET, partial(_flags_set, settings, each), each.work(1))
            rows.append(replace(flagged, own_gate=True))
        target, work = None if each.spec is REDUCE else OVERLAPPED, each.work(each.sizes[-1])
        rows.append(_row(each, TIME, SLOWER, target, partial(_overlapped, settings, each), work))
        rows.append(_row(each, EXPOSED, IN_TURN, None, partial(_exposed, settings, each)))
        call = link_model.Call(each.spec.name, *each.sizes[:3], each.case.dtype, each.sizes[-1])
        projections.append(projection(each.name, call, settings.device))
    return rows + [row for row in projections if row is not None]


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Check the ranks' results after several exchanges; for its own row the product with all flags set, alone."""
    for problem in problems(settings):
        for gate in gates(problem.name, SET):
            if gate not in names:
                continue
            flagged = gate != problem.name
            drawn = problem.draw(settings.device, 0)
            for verdict in check_outputs(
                {FLAGGED: _waiting(problem, drawn)()} if flagged else _exchanged(settings, problem, drawn),
                low=partial(_reference, problem, drawn, flagged),
                oracle=partial(_reference, problem, to_double(drawn, settings.device), flagged),
                rule=partial(problem.spec.judge, problem.case),
            ):
                yield gate, verdict


def _exchanged(settings: Settings, problem: Problem, drawn: dict[str, Any]) -> dict[str, torch.Tensor]:
    with _ranks(settings, problem) as ranks:
        body = _ours(problem, ranks, drawn)
        ranks.alone(body)
        ys = ranks.settled(body)
    return {"y": torch.cat(ys) if problem.spec is SCATTER else torch.stack(ys)}


def _reference(problem: Problem, drawn: dict[str, Any], flagged: bool = False) -> dict[str, torch.Tensor]:
    T, _, N, R = problem.sizes
    if not problem.gathers:
        return problem.spec.run(drawn, problem.case, "reference")
    (y,) = reference.linear_act(drawn["x"], drawn["weights"], drawn["biases"], problem.activation)
    return {FLAGGED: y} if flagged else {"y": y.expand(R, T, N)}


def warm(settings: Settings, name: str) -> None:
    for problem in problems(settings):
        if problem.name == name:
            with _ranks(settings, problem) as ranks:
                sides = _Sides.of(problem, ranks, 0)
                ranks.alone(sides.ours)
                ranks.alone(sides.product)
            if problem.gathers:
                _waiting(problem, sides.drawn)()


# --- one rank's product, all flags set --------------------------------------------------------------------------------


def _waiting(problem: Problem, drawn: dict[str, Any]) -> Run:
    """The product of a rank in the middle, over the whole chip, with all rows there."""
    T, _, _, R = problem.sizes
    x = drawn["x"]
    signals = in_one_process([x] * R, timeout_s=virtual_ranks.TIMEOUT_S)[R // 2]
    signals.pads[signals.rank].fill_(virtual_ranks.AHEAD)
    return _forward(problem, drawn, Gathered([x] * R, signals, transport.pieces_for(-(-T // R))))


def _forward(problem: Problem, drawn: dict[str, Any], remote: Gathered | None = None) -> Run:
    x = drawn["x"]
    choice = linear_act_choice(x.dtype, x.device, "triton")

    def run() -> torch.Tensor:
        arguments = x, drawn["weights"], drawn["biases"], problem.activation, choice
        return Product.linear_act(*arguments).compute(remote)[0]

    return run


def _flags_set(settings: Settings, problem: Problem) -> tuple[Timing, Timing]:
    sets = [problem.draw(settings.device, seed) for seed in range(input_sets(problem.bytes(1), settings.device))]
    return _compare(settings, [_waiting(problem, each) for each in sets], [_forward(problem, each) for each in sets])


# --- virtual ranks ----------------------------------------------------------------------------------------------------


def _ranks(settings: Settings, problem: Problem) -> VirtualRanks:
    return virtual_ranks.make(problem.sizes[-1], problem.slot, problem.case.dtype, settings.device)


def _ours(problem: Problem, ranks: VirtualRanks, drawn: dict[str, Any]) -> Body:
    """A rank's exchange, as in a layer."""
    x = drawn["x"]

    def gather(rank: int) -> torch.Tensor:
        peers, signals = ranks.begin(rank)
        y = all_gather_linear(
            own_rows(x, rank, ranks.size), drawn["weights"][0], drawn["biases"][0], peers=peers, signals=signals,
            activation=problem.activation, impl="triton",
        )  # fmt: skip
        ranks.end(rank)
        return y  # type: ignore[return-value]

    def reduce(rank: int) -> torch.Tensor:
        peers, signals = ranks.begin(rank)
        run = linear_reduce_scatter if problem.spec is SCATTER else linear_all_reduce
        y = run(x[rank], drawn["weight"][rank], peers=peers, signals=signals, impl="triton")
        ranks.end(rank)
        return y  # type: ignore[return-value]

    return gather if problem.gathers else reduce


@dataclass(frozen=True)
class _Sides:
    """The timed calls on one set of operands: bodies of a rank."""

    problem: Problem
    drawn: dict[str, Any]
    ours: Body
    slots: list[torch.Tensor]  # targets of the copies; for a gather all rows are there
    addends: list[torch.Tensor]  # sources of the copies in place of the product's results

    @classmethod
    def of(cls, problem: Problem, ranks: VirtualRanks, seed: int) -> _Sides:
        drawn = problem.draw(ranks.device, seed)
        T, _, N, R = problem.sizes
        make = drawn["x"].new_zeros
        slots = [drawn["x"].clone() if problem.gathers else make(problem.slot) for _ in range(R)]
        return cls(problem, drawn, _ours(problem, ranks, drawn), slots, [make(T, N)] * R)

    def product(self, rank: int) -> torch.Tensor:
        """The rank's product alone, on rows of its own."""
        drawn = self.drawn
        if self.problem.gathers:
            (weight,), (bias,) = drawn["weights"], drawn["biases"]
            return linear_act(self.slots[rank], weight, bias, activation=self.problem.activation, impl="triton")
        return linear_act(drawn["x"][rank], drawn["weight"][rank], impl="triton")

    def copies(self, rank: int) -> None:
        """Copies of all that the rank sends."""
        if self.problem.gathers:
            self._to_all(own_rows(self.drawn["x"], rank, len(self.slots)), rank, 0)
            return
        self._to_owners(self.addends[rank], rank)
        if self.problem.spec is REDUCE:
            self._to_all(own_rows(self.addends[rank], rank, len(self.slots)), rank, self._sums_at)

    def in_turn(self, ranks: VirtualRanks) -> list[torch.Tensor]:
        """The results of ours, computed step by step over all ranks."""
        if self.problem.gathers:
            ranks.run(self.copies)
            return ranks.run(self.product)
        addends = ranks.run(self.product)
        ranks.run(lambda rank: self._to_owners(addends[rank], rank))
        totals = ranks.run(self._total)
        if self.problem.spec is SCATTER:
            return totals
        ranks.run(lambda rank: self._to_all(totals[rank], rank, self._sums_at))
        T, _, N, _ = self.problem.sizes
        return [slot.view(-1, N)[self._sums_at :][:T] for slot in self.slots]

    @property
    def _sums_at(self) -> int:
        """The row of a slot at which the sums of an all-reduce begin."""
        T, _, _, R = self.problem.sizes
        return R * -(-T // R)

    def _by_source(self, rank: int) -> torch.Tensor:
        """The rank's slot for partial sums, [R, ceil(T/R), N]."""
        T, _, N, R = self.problem.sizes
        per = -(-T // R)
        return self.slots[rank].view(-1, N)[: R * per].view(R, per, N)

    def _to_all(self, rows: torch.Tensor, rank: int, at: int) -> None:
        """Copy ``rows``, the rank's own of T, to their place in all ranks' slots, where row 0 is row ``at``."""
        first, last = rows_of(rank, len(self.slots), self.problem.sizes[0])
        for peer in transport.order(rank, len(self.slots)):
            self.slots[peer].view(-1, rows.shape[-1])[at + first : at + last].copy_(rows, non_blocking=True)

    def _to_owners(self, rows: torch.Tensor, rank: int) -> None:
        for owner in transport.order(rank, len(self.slots)):
            first, last = rows_of(owner, len(self.slots), rows.shape[0])
            self._by_source(owner)[rank, : last - first].copy_(rows[first:last], non_blocking=True)

    def _total(self, rank: int) -> torch.Tensor:
        """The rank's own rows of the sum, computed by torch in fp32."""
        first, last = rows_of(rank, len(self.slots), self.problem.sizes[0])
        return self._by_source(rank)[:, : last - first].sum(0)


def _overlapped(settings: Settings, problem: Problem) -> tuple[Timing, Timing]:
    """Ours against the slower of its two halves, with the times of the run that compared those two."""
    with _ranks(settings, problem) as ranks:
        sets = _sets(problem, ranks)
        half = replace(settings, seconds=settings.seconds / 2)
        ours = [partial(ranks.run, each.ours) for each in sets]
        products = [partial(ranks.run, each.product) for each in sets]
        copies = [partial(ranks.run, each.copies) for each in sets]
        against = [_compare(half, ours, alone) for alone in (products, copies)]
        ranks.check()
    return max(against, key=lambda pair: pair[1].value)


def _exposed(settings: Settings, problem: Problem) -> tuple[Timing, Timing]:
    """Percent of the time outside the products: for ours, and for the same steps one after another."""
    with _ranks(settings, problem) as ranks:
        sets = _sets(problem, ranks)
        half = replace(settings, seconds=settings.seconds / 2)
        ours = [partial(ranks.run, each.ours) for each in sets]
        products = [partial(ranks.run, each.product) for each in sets]
        in_turn = [partial(each.in_turn, ranks) for each in sets]
        shares = [_share(*_compare(half, side, products)) for side in (ours, in_turn)]
        ranks.check()
    return shares[0], shares[1]


def _sets(problem: Problem, ranks: VirtualRanks) -> list[_Sides]:
    """As many sets as exceed the cache, with all kernels loaded."""
    count = input_sets(problem.bytes(ranks.size), ranks.device)
    sets = [_Sides.of(problem, ranks, seed) for seed in range(count)]
    ranks.alone(sets[0].ours)
    ranks.alone(sets[0].product)
    return sets


def _share(whole: Timing, products: Timing) -> Timing:
    noise = max((timing.noise for timing in (whole, products) if timing.noise is not None), default=None)
    return Timing(max(FLOOR_PERCENT, 100 * (1 - products.value / whole.value)), noise)


def _compare(settings: Settings, ours: Sequence[Call], peer: Sequence[Call]) -> tuple[Timing, Timing]:
    return compare(ours, peer, settings.device, seconds=settings.seconds, dry=settings.dry)


def _row(
    problem: Problem,
    metric: str,
    peer_name: str,
    target: float | None,
    run: Callable[[], tuple[Timing, Timing]],
    work: Work | None = None,
) -> Measurement:
    return Measurement(problem.name, metric, peer_name, target, run, work=work)


BENCHMARK = Benchmark(
    name="overlap",
    summary="products that exchange rows while they run, by virtual ranks on one GPU, against product and copies alone",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=tuple(spec.name for spec in (GATHER, SCATTER, REDUCE)),
    sources=("bench/harness/virtual_ranks.py", "bench/harness/projection.py", *SYMMETRIC, *SOURCES),
    devices=("cuda",),
)
