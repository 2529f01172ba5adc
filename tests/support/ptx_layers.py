"""The layers' autograd functions on virtual ranks: forward and backward with every exchange inside the kernels.

    mlp          h = silu(x Wg^T) * (x Wu^T);  y = h W2^T + b2                      ``parallel/mlp.py``
    linears      h = gelu(x W1^T + b1);        y = h W2^T + b2                      ``parallel/linear.py``

x [T, D], with sequence parallelism T/R rows on each rank; Wg, Wu, W1 [F/R, D]; W2 [D, F/R]. The ranks' process group is
one of threads: its all-gathers pass the baton on until every rank has come.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.dev.ptx import driver
from shardfuse.kernels.dev.ptx.ranks.channels import regions
from shardfuse.kernels.dev.ptx.ranks.clocks import Region
from shardfuse.kernels.dev.ptx.ranks.host import hosting
from shardfuse.kernels.dev.ptx.ranks.programs import Outcome, Tensors
from shardfuse.kernels.dev.ptx.ranks.schedules import SCHEDULES, Schedule, schedule
from shardfuse.kernels.dev.ptx.ranks.world import World, current
from shardfuse.kernels.linear import apply_activation
from shardfuse.kernels.runtime import device
from shardfuse.kernels.runtime.dtypes import BF16
from shardfuse.kernels.runtime.signals import own_rows
from shardfuse.parallel import linear, mlp
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group
from shardfuse.parallel.core.options import TPOptions
from shardfuse.parallel.overlap import policy, strategies
from shardfuse.parallel.overlap.memory.channel import Channel
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool
from shardfuse.parallel.overlap.plan import OverlapPlan

T, D, F = 64, 48, 64
_SLOT = 1 << 16  # bytes, enough for each exchange
_GATHER, _REDUCE = strategies.GATHER, strategies.REDUCE


class Layers(NamedTuple):
    """A feed-forward layer, its forward and backward."""

    kind: str  # "mlp" or "linears"
    sequence_parallel: bool
    ranks: int
    recompute: int = 0
    blocks: int = 4  # of kernels whose blocks have flags of their own; usually they are 64

    @property
    def label(self) -> str:
        parts = ["sequence parallel"] * self.sequence_parallel + [f"recompute {self.recompute}"] * (self.recompute > 0)
        return ", ".join([f"layers {self.kind} t{T}-d{D}-f{F}-r{self.ranks}-bf16", *parts])


def layers(ranks: int) -> list[Layers]:
    found = [Layers("mlp", True, ranks), Layers("linears", True, ranks), Layers("linears", False, ranks)]
    return [*found, Layers("mlp", True, ranks, recompute=2), Layers("mlp", False, ranks, recompute=1)]


class _Threads:
    """In place of a process group: what each rank has brought to its nth all-gather."""

    def __init__(self, world: World) -> None:
        self.world, self.brought = world, dict[tuple[int, int], torch.Tensor]()
        self.calls: Counter[int] = Counter()  # by rank

    def gather(self, out: torch.Tensor, x: torch.Tensor) -> Callable[[], None]:
        actor = current()
        assert actor is not None
        rank, call, ranks = actor.rank, self.calls[actor.rank], self.world.ranks
        self.calls[rank] += 1
        self.brought[rank, call] = x.clone()
        self.world.progress = True

        def arrived() -> None:
            while missing := [each for each in range(ranks) if (each, call) not in self.brought]:
                actor.pause(lambda: [f"waits in all-gather {call} for rank {missing[0]}"])
            torch.cat([self.brought[each, call] for each in range(ranks)], out=out)
            view = self.world.host_view[rank]
            for view_ in self.world.host_view:  # a collective orders what came before it on any rank
                view = self.world.clocks.join(view, view_)
            self.world.host_view[rank] = view

        return arrived


class _Work(NamedTuple):
    """What a collective that is under way returns."""

    wait: Callable[[], None]


@contextlib.contextmanager
def _in_threads(world: World, pools: list[SymmetricMemoryPool]) -> Iterator[None]:
    """Within the block the layers' exchanges are in kernels over ``pools``, their collectives between threads."""
    begin, end = Channel.begin, Channel.end

    def gather(out: torch.Tensor, x: torch.Tensor, group: _Threads, async_op: bool = False) -> _Work | None:
        arrived = group.gather(out, x)
        if async_op:
            return _Work(arrived)
        arrived()
        return None

    def begun(channel: Channel, *args: Any, **options: Any) -> Any:
        world.host_writes(channel.rank, channel._slots[channel.rank][channel.epoch % 2])  # which begin() poisons
        return begin(channel, *args, **options)

    def ended(channel: Channel) -> None:
        if channel.name == _GATHER:  # the host may have copied the rows that have come
            slot, rank = channel._slots[channel.rank][channel.epoch % 2], channel.rank
            clock = int(world.host[rank]), world.host_time[rank], world.host_view[rank]
            world.host_access(rank, slot.data_ptr(), slot.numel(), False, *clock)
        end(channel)

    class Pools:
        @staticmethod
        def of(group: Group, **options: Any) -> SymmetricMemoryPool:
            return pools[group.rank]

    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (collectives, "_all_gather_single", gather),
            (strategies, "SymmetricMemoryPool", Pools),
            (policy, "select", lambda *args, **options: OverlapPlan("kernel")),
            (Channel, "begin", begun),
            (Channel, "end", ended),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def run(case: Layers, order: Schedule, steps: int = 2) -> Outcome:
    """Steps of training on all ranks, each with inputs of its own, judged against torch's."""
    world = World(case.ranks, order)
    pools = SymmetricMemoryPool.virtual(case.ranks, 8 * _SLOT, "cpu", timeout_s=60.0)
    channels = [{name: pool.channel(name, _SLOT) for name in (_GATHER, _REDUCE)} for pool in pools]
    watched: list[Region] = []
    for pool in pools:
        pool.settle()
    for name in (_GATHER, _REDUCE):
        first, states = channels[0][name], [of_rank[name]._state for of_rank in channels]
        watched += regions(first._slots, first._pads, states)
    world.watch(watched)
    draws = [_inputs(case, 1 + step) for step in range(steps)]
    found: list[list[Tensors]] = [[] for _ in range(case.ranks)]
    group = _Threads(world)

    def body(rank: int) -> None:
        with torch.enable_grad():
            for inputs in draws:
                found[rank].append(_step(case, inputs, Group(group, rank, case.ranks, None)))

    outcome = Outcome()
    capped = mock.patch.object(device, "_most_programs", case.blocks or None)
    with capped, hosting(world), _in_threads(world, pools):
        for rank in range(case.ranks):
            world.start(f"rank {rank}", rank, partial(body, rank))
        outcome.run(world)
    if not outcome.wrong:
        _judge(case, draws, found, outcome)
    outcome.take(world)
    return outcome


def _inputs(case: Layers, seed: int) -> dict[str, Any]:
    generator, R = torch.Generator().manual_seed(seed), case.ranks

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul(scale).to(BF16)

    firsts = 2 if case.kind == "mlp" else 1
    return {
        "x": draw(T, D),
        "dy": draw(T, D),
        "w1": [[draw(F // R, D, scale=D**-0.5) for _ in range(firsts)] for _ in range(R)],
        "w2": [draw(D, F // R, scale=F**-0.5) for _ in range(R)],
        "b2": draw(D),
    }


def _step(case: Layers, inputs: dict[str, Any], group: Group) -> Tensors:
    """Forward and backward of one rank."""
    rank, R = group.rank, group.size
    options = TPOptions(group, case.sequence_parallel, impl="triton", overlap="kernel", strict=True, site="emulated")
    mine = (lambda t: own_rows(t, rank, R)) if case.sequence_parallel else (lambda t: t)
    x, b2, w2 = (t.clone().requires_grad_() for t in (mine(inputs["x"]), inputs["b2"], inputs["w2"][rank]))
    w1 = [w.clone().requires_grad_() for w in inputs["w1"][rank]]
    if case.kind == "mlp":
        none = [None] * len(w1)
        y = mlp.fused_mlp(x, w1, none, w2, b2, options, activation="silu", recompute=case.recompute)
    else:
        (h,) = linear.column_linear(x, w1, [None], options, activation="gelu_tanh")
        y = linear.row_linear(h, w2, b2, options)
    y.backward(mine(inputs["dy"]))
    leaves = {"dx": x, "dw2": w2, "db2": b2, **{f"dw1.{i}": w for i, w in enumerate(w1)}}
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


def _expected(case: Layers, inputs: dict[str, Any]) -> list[Tensors]:
    """By torch, on each rank: the ranks' parts are rounded as they travel, and added in fp32 or wider."""
    leaf = lambda t: t.detach().clone().requires_grad_()
    x, b2, w2s = leaf(inputs["x"]), leaf(inputs["b2"]), [leaf(w) for w in inputs["w2"]]
    xs = [x * 1 for _ in w2s]  # each rank's, so that each has a gradient of its own
    w1s = [[leaf(w) for w in ws] for ws in inputs["w1"]]
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for x_, ws, w2 in zip(xs, w1s, w2s):
        x_.retain_grad()
        zs = [x_ @ w.t() for w in ws]
        h = apply_activation(zs[0], "silu" if case.kind == "mlp" else "gelu_tanh")
        parts.append((h * zs[1] if len(zs) > 1 else h) @ w2.t())
    y = sum(part.to(wide) for part in parts).to(x.dtype) + b2
    y.backward(inputs["dy"])
    dx = sum(x_.grad.to(wide) for x_ in xs).to(x.dtype)
    found = []
    for rank, (ws, w2) in enumerate(zip(w1s, w2s)):
        mine = (lambda t, rank=rank: own_rows(t, rank, case.ranks)) if case.sequence_parallel else (lambda t: t)
        grads = {f"dw1.{i}": w.grad for i, w in enumerate(ws)}
        found.append({"y": mine(y.detach()), "dx": mine(dx), "dw2": w2.grad, "db2": b2.grad, **grads})
    return found


def _judge(case: Layers, draws: list[dict[str, Any]], found: list[list[Tensors]], outcome: Outcome) -> None:
    with torch.enable_grad():
        twins = [(_expected(case, each), _expected(case, registry.to_double(each))) for each in draws]
    for rank, of_rank in enumerate(found):
        for step, (results, (low, oracle)) in enumerate(zip(of_rank, twins, strict=True)):
            assert results.keys() == oracle[rank].keys(), (results.keys(), oracle[rank].keys())
            for name, out in results.items():
                verdict = judge(name, out, low[rank][name], oracle[rank][name], terms=max(T, D, F))
                outcome.share = max(outcome.share, verdict.error / verdict.budget)
                if not verdict.ok:
                    outcome.wrong.append(f"rank {rank}, step {step}: {verdict}")


def main() -> None:
    """Arguments: architecture, ranks, I/N. A line of JSON for every Nth layer from the Ith on, under two schedules."""
    arch, ranks, part = sys.argv[1:]
    os.environ["SHARDFUSE_POISON"] = "1"
    driver.install(arch)
    torch.set_num_threads(1)
    first, step = map(int, part.split("/"))
    names = list(SCHEDULES)
    for n, case in enumerate(layers(int(ranks))):
        for name in (names[2 * n], names[2 * n + 1]) if n % step == first - 1 else ():
            found = run(case, schedule(name))
            why = [*found.wrong, *found.reports]
            answer = {"program": case.label, "schedule": name, "ok": not why, "why": why, "launches": found.launches}
            print(json.dumps(answer), flush=True)
