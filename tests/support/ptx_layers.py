"""The package's modules on virtual ranks, as users build them: forward and backward, every exchange in the kernels.

    mlp          ParallelMLP, gated
    linears      a ColumnParallelLinear with an activation, and a RowParallelLinear
    block        ParallelBlock: norms, attention and MLP, residual adds; without sequence parallelism also in inference

Parameters are DTensors over a device mesh, or this rank's plain tensors ("local"); the ranks' process group is one of
threads (``thread_group.py``). x is [T, D], with sequence parallelism T/R rows on each rank.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from thread_group import Network, groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardfuse.kernels.comm import reduce_op
from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.dev.ptx import driver
from shardfuse.kernels.dev.ptx.ranks import seeds
from shardfuse.kernels.dev.ptx.ranks.channels import regions
from shardfuse.kernels.dev.ptx.ranks.host import RIGHT, Wrong, hosting
from shardfuse.kernels.dev.ptx.ranks.programs import Outcome, Tensors
from shardfuse.kernels.dev.ptx.ranks.schedules import SCHEDULES, Schedule, schedule
from shardfuse.kernels.dev.ptx.ranks.world import World
from shardfuse.kernels.runtime import device
from shardfuse.kernels.runtime.dtypes import BF16
from shardfuse.kernels.runtime.signals import EPOCH, rows_of
from shardfuse.layers.block import ParallelBlock
from shardfuse.layers.config import TransformerConfig
from shardfuse.layers.linear import ColumnParallelLinear, RowParallelLinear
from shardfuse.layers.mlp import ParallelMLP
from shardfuse.parallel.core.first_calls import leave_to_caller
from shardfuse.parallel.core.sharding import is_dtensor, local_tensor, spec_of
from shardfuse.parallel.overlap import policy, strategies
from shardfuse.parallel.overlap.memory import pool as pools_of_groups
from shardfuse.parallel.overlap.memory.channel import Channel
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool, model_slots, pool_bytes

T, D, F, B = 72, 48, 64, 2  # tokens, widths, sequences
_FEW = 6  # tokens in inference
_ROOM: dict[str, Any] = {"hidden": D, "tokens": T, "dtype": BF16}  # of symmetric memory


class Layers(NamedTuple):
    """A module, its forward and backward."""

    kind: str  # "mlp", "linears" or "block"
    sequence_parallel: bool
    ranks: int
    recompute: int = 0
    params: str = "dtensor"
    blocks: int = 4  # of kernels whose blocks have flags of their own; usually they are 64
    schedules: int = 2  # under how many it runs

    @property
    def name(self) -> str:
        parts = ["sequence parallel"] * self.sequence_parallel + [f"recompute {self.recompute}"] * (self.recompute > 0)
        return ", ".join([self.kind, *parts])

    @property
    def label(self) -> str:
        return f"{self.name}, {self.params} parameters, t{T}-d{D}-f{F}-r{self.ranks}-bf16"


def layers(ranks: int) -> list[Layers]:
    return [
        Layers("mlp", True, ranks),
        Layers("linears", True, ranks, params="local"),
        Layers("block", False, ranks, schedules=1),
        Layers("mlp", True, ranks, recompute=2),
        Layers("mlp", False, ranks, recompute=1),
        Layers("block", True, ranks),
    ]


# ---------------------------------------------------------------------------------------------------------- the modules


def _module(case: Layers, **options: Any) -> nn.Module:
    if case.kind == "mlp":
        return ParallelMLP(D, F, gated=True, bias=True, recompute=case.recompute, dtype=BF16, **options)
    if case.kind == "linears":
        first = ColumnParallelLinear(D, F, activation="gelu_tanh", dtype=BF16, **options)
        return nn.Sequential(first, RowParallelLinear(F, D, dtype=BF16, **options))
    config = TransformerConfig(
        style="gelu" if case.sequence_parallel else "gated",  # only RMSNorm forms a sum over the ranks
        hidden_size=D, intermediate_size=F, num_heads=4, num_kv_heads=max(2, case.ranks), head_dim=16, init_std=0.1,
    )  # fmt: skip
    return ParallelBlock(config, dtype=BF16, **options)


def _call(case: Layers, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, batch_size=B) if case.kind == "block" else module(x)


def _alone(case: Layers) -> nn.Module:
    """The module in one process, in plain torch, without a constant parameter."""
    torch.manual_seed(1)
    module = _module(case, impl="reference")
    with torch.no_grad():
        for param in module.parameters():
            if param.dim() == 1:
                param.add_(torch.randn(param.shape) * 0.2)
    return module


def _step(case: Layers, module: nn.Module, inputs: Tensors) -> Tensors:
    """Results, and the gradients by the parameters' names."""
    module.zero_grad(set_to_none=True)
    x = inputs["x"].clone().requires_grad_()
    with torch.enable_grad():
        y = _call(case, module, x)
        y.backward(inputs["dy"])
    found = {"y": y.detach(), "dx": x.grad} | {name: param.grad for name, param in module.named_parameters()}
    if case.kind == "block" and not case.sequence_parallel:
        with torch.no_grad():
            found["y in inference"] = _call(case, module, inputs["x"][:_FEW])
    return {name: each for name, each in found.items() if each is not None}


# ----------------------------------------------------------------------------------------------------- on virtual ranks


class _Ranks:
    """The symmetric memory of a world's ranks."""

    def __init__(self, world: World) -> None:
        ranks, self.world = world.ranks, world
        self.pools = SymmetricMemoryPool.virtual(ranks, pool_bytes(ranks=ranks, **_ROOM), "cpu", timeout_s=60.0)
        slots = model_slots(ranks=ranks, **_ROOM)
        self.channels = [{name: pool.channel(name, slots[name]) for name in slots} for pool in self.pools]
        for pool in self.pools:
            pool.settle()
        watched = []
        for name, first in self.channels[0].items():
            watched += regions(first._slots, first._pads, [of_rank[name]._state for of_rank in self.channels])
        world.watch(watched)

    def exchanges(self, rank: int) -> Counter[str]:
        """How many this rank has made, by channel; the device counts those of "decode"."""
        found = Counter[str]()
        for name, channel in self.channels[rank].items():
            found[name] = int(channel._state[EPOCH]) if channel._counts == "device" else channel.epoch
        return found

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block the layers' kernels can exchange rows, and the host's accesses to slots are checked."""
        begin, end, world = Channel.begin, Channel.end, self.world

        def begun(channel: Channel, *args: Any, **options: Any) -> Any:
            world.host_writes(channel.rank, channel._slots[channel.rank][channel.epoch % 2])  # which begin() poisons
            return begin(channel, *args, **options)

        def ended(channel: Channel) -> None:
            if channel.name == strategies.GATHER:  # the host may have copied the rows that have come
                slot, rank = channel._slots[channel.rank][channel.epoch % 2], channel.rank
                clock = int(world.host[rank]), world.host_time[rank], world.host_view[rank]
                world.host_access(rank, slot.data_ptr(), slot.numel(), False, *clock)
            end(channel)

        with contextlib.ExitStack() as stack:
            for owner, name, new in (
                (policy, "lacking", lambda on: None),  # kernels run on a CPU here, too
                (Channel, "begin", begun),
                (Channel, "end", ended),
            ):
                stack.enter_context(mock.patch.object(owner, name, new))
            yield


class Trained(NamedTuple):
    """What came out of a rank's steps, and what its last one consisted of."""

    results: list[Tensors]
    parts: dict[str, Any]  # of the whole results, as indices
    exchanges: Counter[str]  # in kernels, by channel
    collectives: Counter[str]  # of the process group


def _train(case: Layers, rank: int, state: Tensors, draws: list[Tensors], memory: _Ranks, network: Network) -> Trained:
    """All steps of one rank, as its program would make them. The first compares the layers between the ranks."""
    with network.joined():
        mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("tp",))
        options: dict[str, Any] = {"mesh": mesh, "sequence_parallel": case.sequence_parallel, "params": case.params}
        module = _module(case, impl="triton", overlap="kernel", strict=True, **options)
        assert all(is_dtensor(param) == (case.params == "dtensor") for param in module.parameters())
        module.load_state_dict(state)
        pools_of_groups._pools[mesh.get_group()] = memory.pools[rank]
        rows = slice(*rows_of(rank, case.ranks, T)) if case.sequence_parallel else slice(None)
        results = []
        for inputs in draws:
            before = memory.exchanges(rank), network.counts[rank].copy()
            found = _step(case, module, {name: whole[rows] for name, whole in inputs.items()})
            exchanges, calls = memory.exchanges(rank) - before[0], network.counts[rank] - before[1]
            for name, param in module.named_parameters():
                found[name] = _laid_out_as(param, found[name])
            results.append(found)
            leave_to_caller(module)
        parts = {name: spec_of(param).index for name, param in module.named_parameters()}
        return Trained(results, dict.fromkeys(found, rows) | parts, exchanges, calls)


def _laid_out_as(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient; RuntimeError unless it is laid out as its parameter."""
    layouts = [(t.device_mesh, t.placements) if is_dtensor(t) else tuple(t.shape) for t in (param, grad)]
    if layouts[0] != layouts[1]:
        raise RuntimeError(f"a gradient is laid out as {layouts[1]}, and its parameter as {layouts[0]}")
    return local_tensor(grad)


@contextlib.contextmanager
def _with_blocks(blocks: int) -> Iterator[None]:
    """Within the block so many blocks run of kernels whose blocks have flags of their own."""
    few = mock.patch.object(reduce_op, "flagged_programs", return_value=blocks)
    with mock.patch.object(device, "_most_programs", blocks), few:
        yield


def run(case: Layers, order: Schedule, steps: int = 2, wrong: Wrong = RIGHT) -> tuple[Outcome, list[Trained]]:
    """Steps of training on all ranks, each with inputs of its own, judged against torch's in one process."""
    world, module, trained = World(case.ranks, order), _alone(case), dict[int, Trained]()
    memory, outcome, generator = _Ranks(world), Outcome(), torch.Generator().manual_seed(1)
    draws = [{name: torch.randn(T, D, generator=generator).to(BF16) for name in ("x", "dy")} for _ in range(steps)]
    with _with_blocks(case.blocks), hosting(world, wrong), groups(world) as network, memory.in_use():

        def body(rank: int) -> None:
            trained[rank] = _train(case, rank, module.state_dict(), draws, memory, network)

        for rank in range(case.ranks):
            world.start(f"rank {rank}", rank, partial(body, rank))
        outcome.run(world)
    if not outcome.wrong:
        _judge(case, module, draws, trained, outcome)
    outcome.take(world)
    return outcome, [trained[rank] for rank in sorted(trained)]


def _judge(case: Layers, low: nn.Module, draws: list[Tensors], trained: dict[int, Trained], outcome: Outcome) -> None:
    exact = copy.deepcopy(low).double()
    for step, inputs in enumerate(draws):
        near, oracle = _step(case, low, inputs), _step(case, exact, registry.to_double(inputs))
        for rank, of_rank in trained.items():
            results = of_rank.results[step]
            assert results.keys() == oracle.keys(), (results.keys(), oracle.keys())
            for name, out in results.items():
                part = of_rank.parts[name]
                verdict = judge(name, out, near[name][part], oracle[name][part], terms=max(T, D, F))
                outcome.share = max(outcome.share, verdict.error / verdict.budget)
                if not verdict.ok:
                    outcome.wrong.append(f"rank {rank}, step {step}: {verdict}")


# --------------------------------------------------------------------------------------------------------- in a process


def _answer(case: Layers, name: str) -> dict[str, Any]:
    outcome, trained = run(case, schedule(name))
    why = [*outcome.wrong, *outcome.reports]
    answer = {"program": case.label, "schedule": name, "ok": not why, "why": why, "launches": outcome.launches}
    counted = {"exchanges": [each.exchanges for each in trained], "collectives": [each.collectives for each in trained]}
    return answer | counted | {"module": case.name, "share": outcome.share, **outcome.counted}


def _found(case: Layers, seed: seeds.Seed) -> dict[str, Any]:
    """Whether a fault is found through a module, under one of the fault's schedules."""
    answer: dict[str, Any] = {"fault": f"{seed.name}: {case.label}", "ok": False}
    for name in seed.schedules:
        with seeds._seeded(seed) as places:
            outcome, _ = run(case, schedule(name), wrong=seed.setup.wrong)
        if seed.change is not None and not any(places.values()):
            raise ValueError(f"{seed.name}: no kernel of {case.label} has {seed.change[0]!r}: change the pattern")
        if not outcome.ok:
            lines = [*outcome.wrong, *outcome.reports]
            return answer | {"ok": True, "schedule": name, "kinds": sorted(set(seeds.kinds_of(outcome))), "why": lines}
    return answer


def main() -> None:
    """Arguments: architecture, ranks, I/N, faults. A line of JSON for every Nth module from the Ith on, under schedules
    that take turns, and for each of the ``faults`` that are named in the first of these modules."""
    arch, ranks, part, *named = sys.argv[1:]
    os.environ["SHARDFUSE_POISON"] = "1"
    driver.install(arch)
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 100)  # translated kernels are many objects, and stay
    first, step = map(int, part.split("/"))
    names = itertools.cycle(SCHEDULES)
    jobs = [(case, list(itertools.islice(names, case.schedules))) for case in layers(int(ranks))][first - 1 :: step]
    for case, under in jobs:
        for name in under:
            print(json.dumps(_answer(case, name)), flush=True)
    for name in named:
        seed = next(each for each in seeds.seeds(arch) if each.name == name)
        print(json.dumps(_found(jobs[0][0], seed)), flush=True)
