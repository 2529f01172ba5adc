"""The communicating calls as each rank makes them, exchange after exchange over one channel, and what they should give.

The test cases of the four ops, and the products of layers' backwards: those whose rows arrive while an output gradient
is gathered, and those whose tiles are sent. Each exchange has inputs of its own; results are judged by the rule of the
op (``accuracy.py``) against the reference in fp64.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from ....comm import op, reduce_op
from ....comm.reduce_config import Norm
from ....linear import Product
from ....runtime import device, dispatch
from ....runtime.dtypes import BF16
from ....runtime.signals import COUNTERS, DONE, EPOCH, Signals, own_rows
from ... import registry
from ...accuracy import judge
from ...registry import Case
from .channels import Channel, channels, regions
from .host import RIGHT, Wrong, hosting
from .schedules import Schedule
from .world import World

_CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """A call that all ranks make.

    ``call`` (inputs, case, rank, peers, signals) gives this rank's results by name; ``expected`` (inputs, case, impl)
    those of all ranks, of which ``part`` (a result, rank, ranks) is this rank's.
    """

    name: str  # of the op, or "gathered dgrad", ...
    case: Case
    shape: Callable[[Case], tuple[int, ...]]  # of the slot
    make_inputs: Callable[[Case, torch.device, int], dict[str, Any]]
    call: Callable[[dict[str, Any], Case, int, list[torch.Tensor], Signals], Tensors]
    expected: Callable[[dict[str, Any], Case], Tensors]
    part: Callable[[torch.Tensor, int, int], torch.Tensor]
    judge: Callable[..., Any]
    counted: bool = False  # by the device

    @property
    def label(self) -> str:
        return f"{self.name} {self.case.name}{' counted' * self.counted}"


@dataclass
class Outcome:
    """How the ranks' exchanges went."""

    wrong: list[str] = field(default_factory=list)  # results, deadlocks, errors
    reports: list[str] = field(default_factory=list)  # of races and other faults
    launches: list[Counter[str]] = field(default_factory=list)  # of each rank, by kernel
    share: float = 0.0  # the largest error, of what is allowed
    turns: int = 0
    counted: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.reports

    def run(self, world: World) -> None:
        """Run a world to its end, or note why it has none."""
        try:
            world.run()
        except (RuntimeError, TimeoutError) as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def take(self, world: World) -> None:
        """What a world that has ended has counted and reported."""
        self.turns, self.counted = world.turns, world.counted
        self.launches = [Counter(each.kernel for rank, each in world.launches if rank == r) for r in range(world.ranks)]
        of_launches = [line for _, result in world.launches for line in result.reports]
        self.reports = [line for line in dict.fromkeys([*of_launches, *world.reports]) if ": note: " not in line]


# -------------------------------------------------------------------------------------------------------- the programs


def programs(ranks: int, ops: Sequence[str] = (), *, backward: bool = True) -> Iterator[Program]:
    """Every program with ``ranks`` ranks: the ops' test cases, and with ``backward`` the products of backwards."""
    for name in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "all_reduce_rmsnorm"):
        for case in registry.op(name).tagged("test") if not ops or name in ops else ():
            if case.sizes["R"] > 1:
                yield from _of_op(name, _on(case, ranks))
    if backward and (not ops or "all_gather_linear" in ops):
        yield from (_gathered(kind, ranks) for kind in ("dgrad", "dgrad_act", "dgrad_gated"))
    if backward and (not ops or "linear_reduce_scatter" in ops):
        yield from (_sent(pairs, gather, ranks) for pairs, gather in ((1, False), (2, False), (3, True)))


def _on(case: Case, ranks: int) -> Case:
    """The case with so many ranks, named alike."""
    name = case.name.replace(f"-r{case.sizes['R']}-", f"-r{ranks}-")
    return dataclasses.replace(case, name=name, sizes={**case.sizes, "R": ranks})


def _of_op(name: str, case: Case) -> Iterator[Program]:
    spec = registry.op(name)
    call, shape = _CALLS[name]
    part = own_rows if name == "linear_reduce_scatter" else _one
    common = (name, case, shape, spec.make_inputs, call)
    expected = lambda inputs, case: spec.run(inputs, case, "reference")
    yield Program(*common, expected, part, spec.judge)
    if name == "all_reduce_rmsnorm":
        yield Program(*common, expected, part, spec.judge, counted=True)


def _one(result: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return result[rank]


def _whole(result: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return result


def _gather(inputs: dict[str, Any], case: Case, rank: int, peers: list[torch.Tensor], signals: Signals) -> Tensors:
    options = case.options
    ys = op.all_gather_linear(
        own_rows(inputs["x"], rank, len(peers)), inputs["weights"], inputs["biases"], peers=peers, signals=signals,
        activation=options["activation"], gated=options["gated"], pieces=options.get("pieces", 2), impl="triton",
    )  # fmt: skip
    return {f"y{i}": y for i, y in enumerate([ys] if isinstance(ys, torch.Tensor) else ys)}


def _reduce(
    inputs: dict[str, Any], case: Case, rank: int, peers: list[torch.Tensor], signals: Signals, *, gather: bool
) -> Tensors:
    residual = inputs["residual"]
    residual = residual if gather or residual is None else own_rows(residual, rank, len(peers))
    y = (op.linear_all_reduce if gather else op.linear_reduce_scatter)(
        inputs["x"][rank], inputs["weight"][rank], inputs["bias"], peers=peers, signals=signals, residual=residual,
        impl="triton",
    )  # fmt: skip
    assert isinstance(y, torch.Tensor)
    return {"y": y}


def _norm(inputs: dict[str, Any], case: Case, rank: int, peers: list[torch.Tensor], signals: Signals) -> Tensors:
    more = {name: inputs[name] for name in ("weight", "residual", "bias")}
    y, s = reduce_op.all_reduce_rmsnorm(
        inputs["x"][rank], peers=peers, signals=signals, weight_offset=case.options["weight_offset"],
        shots=case.options["shots"], programs=case.options.get("programs"), impl="triton", **more,
    )  # fmt: skip
    return {"y": y, "s": s}


def _sizes(case: Case, letters: str) -> tuple[int, ...]:
    return tuple(case.sizes[letter] for letter in letters)


def _norm_shape(case: Case) -> tuple[int, ...]:
    T, D, R = _sizes(case, "TDR")
    options = {"shots": case.options["shots"], "programs": case.options.get("programs")}
    return reduce_op.all_reduce_rmsnorm_shape(T, D, case.dtype, R, _CPU, **options)


_CALLS: dict[str, tuple[Callable[..., Tensors], Callable[[Case], tuple[int, ...]]]] = {
    "all_gather_linear": (_gather, lambda case: _sizes(case, "TK")),
    "linear_reduce_scatter": (
        lambda *given: _reduce(*given, gather=False),
        lambda case: op.reduce_scatter_shape(*_sizes(case, "TNR")),
    ),
    "linear_all_reduce": (
        lambda *given: _reduce(*given, gather=True),
        lambda case: op.all_reduce_shape(*_sizes(case, "TNR")),
    ),
    "all_reduce_rmsnorm": (_norm, _norm_shape),
}


def _choice() -> dispatch.Choice:
    return dispatch.choose("linear_act", _CPU, "triton")


def _gathered(kind: str, ranks: int) -> Program:
    """A backward's product, whose output gradient arrives."""
    T, D, F = 70, 72, 48
    options: dict[str, Any] = {"activation": "silu" if kind == "dgrad_gated" else "gelu_tanh", "recompute_act": True}
    case = Case(f"t{T}-d{D}-f{F}-r{ranks}-bf16", BF16, {"T": T, "D": D, "F": F, "R": ranks}, options)
    spec = registry.op("dgrad_act" if kind == "dgrad" else kind)

    def call(inputs: dict[str, Any], case: Case, rank: int, peers: list[torch.Tensor], signals: Signals) -> Tensors:
        rows, weight = own_rows(inputs["dy"], rank, len(peers)), inputs["weight"]
        preacts = [inputs[name] for name in ("z", "g", "u") if name in inputs]
        if kind == "dgrad":
            product, names = Product.input_grad([rows], [weight], _choice()), ("dx",)
        else:
            product = Product.input_grad_act(
                rows, weight, preacts, options["activation"], _choice(), recompute_act=True
            )
            names = ("dz", "h") if kind == "dgrad_act" else ("dg", "du", "h")  # type: ignore[assignment]
        return dict(zip(names, op.compute_gathered(product, peers, signals, 2), strict=True))

    def expected(inputs: dict[str, Any], case: Case) -> Tensors:
        if kind == "dgrad":
            return {"dx": inputs["dy"] @ inputs["weight"]}
        return spec.run(inputs, case, "reference")

    shape = lambda case: _sizes(case, "TD")
    return Program(f"gathered {kind}", case, shape, spec.make_inputs, call, expected, _whole, spec.judge)


def _sent(pairs: int, gather: bool, ranks: int) -> Program:
    """A backward's product, whose tiles are sent: dz_i @ W_i, of so many pairs; with ``gather`` a LayerNorm follows."""
    T, K, N = 70, 72, 48
    kind = "all-reduce and LayerNorm" if gather else "reduce-scatter"
    case = Case(f"t{T}-k{K}-n{N}-r{ranks}-bf16-pairs_{pairs}", BF16, {"T": T, "K": K, "N": N, "R": ranks})

    def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
        generator = torch.Generator(on).manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, device=on)
        return {
            "dz": [draw(ranks, T, K).to(case.dtype) for _ in range(pairs)],
            "weight": [(draw(ranks, K, N) * (pairs * ranks * K) ** -0.5).to(case.dtype) for _ in range(pairs)],
            "residual": draw(T, N).to(case.dtype),
            "norm": [draw(N).to(case.dtype) for _ in range(2)],
        }

    def call(inputs: dict[str, Any], case: Case, rank: int, peers: list[torch.Tensor], signals: Signals) -> Tensors:
        dzs, weights = ([each[rank] for each in inputs[name]] for name in ("dz", "weight"))
        residual = inputs["residual"] if gather else own_rows(inputs["residual"], rank, ranks)
        norm = Norm(inputs["norm"][0], inputs["norm"][1], centred=True) if gather else None
        product = Product.input_grad(dzs, weights, _choice())
        found = op.scatter_sum(product, peers, signals, residual=residual, norm=norm, gather=gather)()
        return dict(zip(("y", "s") if gather else ("s",), found, strict=True))

    def expected(inputs: dict[str, Any], case: Case) -> Tensors:
        products = [(dz @ weight).sum(0) for dz, weight in zip(inputs["dz"], inputs["weight"])]
        s = torch.stack(products).sum(0) + inputs["residual"]
        if not gather:
            return {"s": s}
        weight, bias = inputs["norm"]
        return {"y": torch.nn.functional.layer_norm(s, (N,), weight, bias, 1e-6), "s": s}

    def judged(case: Case, *given: Any) -> Any:
        return judge(*given, terms=pairs * K * ranks)

    shape = (op.all_reduce_shape if gather else op.reduce_scatter_shape)(T, N, ranks)
    part = _whole if gather else own_rows
    return Program(f"sent dgrad, {kind}", case, lambda case: shape, make_inputs, call, expected, part, judged)


# ------------------------------------------------------------------------------------------------------ running them


@dataclass(frozen=True)
class Setup:
    """What beside the program and the schedule is chosen: the count of exchanges, and what is wrong on purpose."""

    exchanges: int = 3
    seed: int = 1
    first_epoch: int = 0
    absent: int | None = None  # the rank that never comes
    pace_ns: int = 0  # by which %globaltimer goes on with each turn
    timeout_s: float = 60.0  # of a wait, by that clock
    one_slot: bool = False
    epoch_shift: int = 0  # of the epochs that the kernels are told
    crossed_pads: bool = False  # flags go to the next rank's pad
    counters: int = 0  # with which the counters of tiles begin
    ended: int = 0  # with which that of the blocks that have ended does
    wrong: Wrong = RIGHT


USUAL = Setup()


def run(program: Program, schedule: Schedule, setup: Setup = USUAL) -> Outcome:
    """Make the exchanges on all ranks of the program's case, under the schedule, and judge every result."""
    case, ranks = program.case, program.case.sizes["R"]
    world = World(ranks, schedule, pace_ns=setup.pace_ns)
    of_ranks = _channels(program, ranks, setup)
    first = of_ranks[0]
    world.watch(list(regions(first.slots, first.pads, [each.state for each in of_ranks])))
    draws = [program.make_inputs(case, _CPU, setup.seed + e) for e in range(setup.exchanges)]
    found: list[list[Tensors]] = [[] for _ in range(ranks)]

    def body(rank: int) -> Callable[[], None]:
        return lambda: _exchanges(program, world, of_ranks[rank], draws, found[rank], setup)

    outcome = Outcome()
    capped = mock.patch.object(device, "_most_programs", case.options.get("programs"))
    with capped, hosting(world, setup.wrong):
        for rank in range(ranks):
            if rank != setup.absent:
                world.start(f"rank {rank}", rank, body(rank))
        outcome.run(world)
    if not outcome.wrong:
        _judge(program, draws, found, outcome)
    outcome.take(world)
    return outcome


def _exchanges(
    program: Program, world: World, channel: Channel, draws: list[dict[str, Any]], found: list[Tensors], setup: Setup
) -> None:
    """All exchanges of one rank."""
    case, rank, shape = program.case, channel.rank, program.shape(program.case)
    for inputs in draws:
        if program.counted:
            peers, signals = channel.device_counted(shape, case.dtype)
        else:
            world.host_writes(rank, channel.stale)
            peers, signals = channel.begin(shape, case.dtype)
            if setup.one_slot:
                peers = channel.views(0, shape, case.dtype)
                signals = signals._replace(table=channel.tables[0])
            assert signals.epoch is not None
            signals = signals._replace(epoch=signals.epoch + setup.epoch_shift)
        if setup.crossed_pads:
            table = signals.table.clone()
            table[1] = table[1].roll(-1)
            signals = signals._replace(table=table)
        results = program.call(inputs, case, rank, peers, signals)
        found.append({name: each.clone() for name, each in results.items()})
        if not program.counted:
            channel.end()


def _channels(program: Program, ranks: int, setup: Setup) -> list[Channel]:
    nbytes = math.prod(program.shape(program.case)) * program.case.dtype.itemsize
    found = channels(ranks, nbytes, setup.timeout_s)
    for channel in found:
        channel.epoch = setup.first_epoch
        channel.state[EPOCH], channel.state[DONE] = setup.first_epoch, setup.ended
        channel.state[COUNTERS:] = setup.counters
        channel.pads[channel.rank].fill_(setup.first_epoch)
    return found


def _judge(program: Program, draws: list[dict[str, Any]], found: list[list[Tensors]], outcome: Outcome) -> None:
    case, ranks = program.case, program.case.sizes["R"]
    for e, inputs in enumerate(draws):
        low = program.expected(inputs, case)
        oracle = program.expected(registry.to_double(inputs), case)
        for rank, of_rank in enumerate(found):
            for name, out in of_rank[e].items() if e < len(of_rank) else ():
                near, exact = (program.part(each[name], rank, ranks) for each in (low, oracle))
                verdict = program.judge(case, name, out, near, exact)
                share = verdict.error / verdict.budget if verdict.budget else float(verdict.error > 0)
                outcome.share = max(outcome.share, share)
                if not verdict.ok:
                    outcome.wrong.append(f"rank {rank}, exchange {e}: {verdict}")


def fewer(program: Program, blocks: int) -> Program:
    """The program with so many blocks where every block has flags of its own; usually they are 64."""
    options = {**program.case.options, "programs": blocks}
    return dataclasses.replace(program, case=dataclasses.replace(program.case, options=options))


def kernels_of(program: Program) -> set[str]:
    """The kernels that have to run on every rank."""
    sizes = program.case.sizes
    if program.name == "all_reduce_rmsnorm":
        return {"_reduce_kernel"}
    gathers = program.name == "all_gather_linear" or program.name.startswith("gathered")
    product = {"_gemm_kernel"} if sizes["T"] else {"_wait_kernel"} if gathers else set()
    return product if gathers else product | {"_reduce_kernel"}
