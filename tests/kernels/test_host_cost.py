"""What our layer of Python costs per call, against the stock modules, on tensors so small that nothing else counts.

``pytest --benchmark-only tests/kernels/test_host_cost.py`` prints the times. The assertions compare interleaved runs: a
budget in microseconds would measure the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfuse import ParallelMLP, rms_norm
from shardfuse.bench.harness.stock import StockMLP, training_step
from shardfuse.bench.harness.timing import compare
from shardfuse.kernels.linear import linear_act
from shardfuse.layers.attention.sdpa import attend
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.overlap import policy

T, D, FFN = 4, 16, 32
CPU = torch.device("cpu")


def _linear():
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((T, D), (FFN, D), (FFN,)))
    ours = lambda: linear_act(x, weight, bias, activation="gelu_tanh")
    stock = lambda: F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return ours, stock


def _mlp():
    x = torch.randn(T, D)
    ours, stock = ParallelMLP(D, FFN), StockMLP(D, FFN)
    return lambda: ours(x), lambda: stock(x)


def _mlp_step():
    x, grad = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    ours, stock = ParallelMLP(D, FFN), StockMLP(D, FFN)
    return lambda: training_step(ours, x, grad), lambda: training_step(stock, x, grad)


def _attention():
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    ours = lambda: attend(q, k, v)
    stock = lambda: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    return ours, stock


def _rms_norm():
    x, weight = torch.randn(T, D), torch.randn(D)
    return lambda: rms_norm(x, weight), lambda: F.rms_norm(x, (D,), weight)


# How many times the stock call's host time ours may take.
CALLS = {
    "attention": (_attention, 1.5),
    "rms_norm": (_rms_norm, 2.0),
    "linear_act": (_linear, 3.0),
    "mlp": (_mlp, 3.0),
    "mlp, forward + backward": (_mlp_step, 2.0),
}
# How many times the host time of overlap="none" a step with "auto" may take: for each product it looks up a choice.
AUTO = 1.25


@pytest.mark.parametrize("name", CALLS)
def test_host_cost(benchmark, name):
    build, most = CALLS[name]
    ours, stock = build()
    ours_time, stock_time = compare([ours], [stock], CPU, seconds=0.5)
    benchmark.extra_info["times the stock call"] = round(ours_time.value / stock_time.value, 2)
    benchmark.pedantic(ours, rounds=50, iterations=10, warmup_rounds=2)
    assert ours_time.value <= most * stock_time.value


@pytest.fixture
def two_ranks() -> Iterator[Group]:
    """This process as one of two, of which the other is made up: it answers at once, and what it sends is nonsense."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield tp_group(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_what_auto_costs_over_ranks(benchmark, monkeypatch, two_ranks, sequence_parallel):
    x, grad = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    common = {"mesh": two_ranks, "sequence_parallel": sequence_parallel}
    auto, none = (ParallelMLP(D, FFN, overlap=overlap, **common) for overlap in ("auto", "none"))
    calls = [lambda module=module: training_step(module, x, grad) for module in (auto, none)]
    calls[0]()
    for name in ("_agree", "_decide"):  # from now on a choice is a look-up
        monkeypatch.setattr(policy, name, lambda *args, name=name: pytest.fail(f"{name} again"))
    auto_time, none_time = compare(calls[:1], calls[1:], CPU, seconds=0.5)
    benchmark.extra_info["times overlap='none'"] = round(auto_time.value / none_time.value, 2)
    benchmark.pedantic(calls[0], rounds=50, iterations=10, warmup_rounds=2)
    assert auto_time.value <= AUTO * none_time.value
