"""The ops of kernels/comm between processes that share one GPU, against plain collectives: correctness only.

Contexts on one GPU take turns: what one process waits for, another writes in its own slice of time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse.kernels.comm import (
    Norm,
    all_gather_linear,
    all_reduce_rmsnorm,
    all_reduce_shape,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_scatter_shape,
)
from shardfuse.kernels.comm.reduce_op import all_reduce_rmsnorm_shape
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.linear import reference as linear
from shardfuse.kernels.norm import reference as norms
from shardfuse.kernels.runtime.signals import describe, in_one_process, rows_of
from shardfuse.parallel.core.mesh import everyone
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="processes that share a GPU need one"),
]
DEVICE = "cuda:0"
ROUNDS = 3  # exchanges: both slots, and the first of them again
SLOT = 1 << 22  # bytes
PATIENCE = 100.0  # seconds: kernels are compiled meanwhile, and contexts take turns
# T, K, N: several tiles; fewer rows than a tile; a rank with one row less; a rank without rows.
SIZES = [(512, 256, 384), (40, 64, 48), (35, 33, 31), (1, 64, 64)]


def _drawn(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def _sum_over_ranks(addend: torch.Tensor) -> torch.Tensor:
    """By gloo, in fp64."""
    total = addend.double().cpu()
    dist.all_reduce(total)
    return total.to(DEVICE)


def _rows_of_all(rows: torch.Tensor, size: int, tokens: int) -> torch.Tensor:
    """By gloo: what every rank has, one after another."""
    per = -(-tokens // size)
    padded = torch.zeros(per, rows.shape[1], dtype=rows.dtype)
    padded[: len(rows)] = rows.cpu()
    whole = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(whole, padded)
    return torch.cat(whole)[:tokens].to(DEVICE)


def _check(name: str, out: torch.Tensor, low: torch.Tensor, oracle: torch.Tensor, terms: int) -> None:
    verdict = judge(name, out, low, oracle, terms=terms)
    assert verdict.ok, verdict


def _gather(channel: Any, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    T, K, N = sizes
    first, last = rows_of(channel.rank, channel.size, T)
    x = _drawn(seed + 10 * channel.rank, last - first, K, dtype=dtype)
    weight, bias = _drawn(seed + 1, N, K, dtype=dtype, scale=K**-0.5), _drawn(seed + 2, N, dtype=dtype)
    peers, signals = channel.begin((T, K), dtype)
    y = all_gather_linear(x, weight, bias, peers=peers, signals=signals, activation="gelu_tanh", impl="triton")
    channel.end()
    whole = _rows_of_all(x, channel.size, T)
    low, oracle = (
        linear.linear_act(*operands, "gelu_tanh")[0]
        for operands in ((whole, [weight], [bias]), (whole.double(), [weight.double()], [bias.double()]))
    )
    _check(f"gather {sizes}", y, low, oracle, K)


def _reduce(channel: Any, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int, *, gather: bool) -> None:
    T, K, N = sizes
    x, weight = (
        _drawn(seed + 10 * channel.rank + i, *shape, dtype=dtype, scale=K**-0.25)
        for i, shape in enumerate(((T, K), (N, K)))
    )
    bias, residual, scale = (
        _drawn(seed + 100 + i, *shape, dtype=dtype) for i, shape in enumerate(((N,), (T, N), (N,)))
    )
    run, shape = (linear_all_reduce, all_reduce_shape) if gather else (linear_reduce_scatter, reduce_scatter_shape)
    first, last = (0, T) if gather else rows_of(channel.rank, channel.size, T)
    peers, signals = channel.begin(shape(T, N, channel.size), dtype)
    y, s = run(
        x, weight, bias, peers=peers, signals=signals, residual=residual[first:last], norm=Norm(scale), impl="triton"
    )
    channel.end()
    own = slice(first, last)
    total = _sum_over_ranks(x.double() @ weight.double().t())
    rounded = _sum_over_ranks(x @ weight.t()).float()  # of addends in their own dtype
    after = (bias, residual[own], scale)
    _check_normed(f"sum {sizes} gather={gather}", (y, s), total[own], rounded[own], after, 2 * K + N)


def _decode(channel: Any, counted: Any, shots: int, dtype: torch.dtype, seed: int) -> None:
    """Launched, then from a CUDA graph."""
    T, D = 5, 512
    x = _drawn(seed + 10 * channel.rank, T, D, dtype=dtype)
    bias, residual, scale = (
        _drawn(seed + 100 + i, *shape, dtype=dtype) for i, shape in enumerate(((D,), (T, D), (D,)))
    )
    options = {"residual": residual, "bias": bias, "shots": shots, "impl": "triton"}
    shape = all_reduce_rmsnorm_shape(T, D, dtype, channel.size, x.device, shots=shots)
    total = _sum_over_ranks(x)
    peers, signals = channel.begin(shape, dtype)
    outs = all_reduce_rmsnorm(x, scale, peers=peers, signals=signals, **options)
    channel.end()
    _check_normed(f"decode, {shots} shots", outs, total, total.float(), (bias, residual, scale), D)
    peers, signals = counted.device_counted(shape, dtype)
    all_reduce_rmsnorm(x, scale, peers=peers, signals=signals, **options)  # compiles, which a graph must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = all_reduce_rmsnorm(x, scale, peers=peers, signals=signals, **options)
    for _ in range(ROUNDS):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        _check_normed(f"decode, {shots} shots, replayed", outs, total, total.float(), (bias, residual, scale), D)


def _check_normed(name: str, outs: Any, total: torch.Tensor, rounded: torch.Tensor, after: Any, terms: int) -> None:
    """(y, s) against ``total`` in fp64, and ``rounded``, the sum of ``terms`` as its own dtype allows it."""
    dtype = outs[0].dtype
    expected = []
    for found, wide in ((rounded, torch.float32), (total, torch.float64)):
        bias, residual, scale = (each.to(wide) for each in after)
        s = found + bias + residual
        s = s.to(dtype) if wide is torch.float32 else s
        expected.append((norms.rms_norm(s, scale.to(s.dtype), 1e-6, 0.0, s.dtype), s))
    for what, out, low, oracle in zip(("y", "s"), outs, *expected):
        _check(f"{what} of {name}", out, low, oracle, terms)


def _body(rank: int, world: int, dtype: torch.dtype) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        pool = SymmetricMemoryPool.of(everyone(), device=DEVICE, timeout_s=PATIENCE)
        try:
            channels = {name: pool.channel(name, SLOT) for name in ("gather", "reduce", "decode", "one", "two")}
            why = pool.probe()
            if why is not None:
                return why
            with torch.no_grad():
                for seed in range(ROUNDS):
                    for sizes in SIZES:
                        _gather(channels["gather"], sizes, dtype, seed)
                        _reduce(channels["reduce"], sizes, dtype, seed, gather=False)
                        _reduce(channels["reduce"], sizes, dtype, seed, gather=True)
                for shots, name in ((1, "one"), (2, "two")):
                    _decode(channels["decode"], channels[name], shots, dtype, 7)
            torch.cuda.synchronize()
            pool.check()
            pool.barrier()
        finally:
            pool.close()
    return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_processes_that_share_a_gpu(ranks: Any, dtype: torch.dtype):
    assert ranks(2, _body, dtype, timeout=400.0) == [None, None]


@pytest.mark.parametrize("op", ["gather", "sum"])
def test_a_wait_in_vain_says_what_it_was_for(op: str):
    """NVIDIA's waits write the report in PTX, which no interpreter runs: rank 1 never comes."""
    T, D = 32, 64
    shape = (
        (T, D) if op == "gather" else all_reduce_rmsnorm_shape(T, D, torch.float32, 2, torch.device(DEVICE), shots=1)
    )
    peers = [torch.zeros(shape, device=DEVICE) for _ in range(2)]
    signals = in_one_process(peers, timeout_s=0.2, epoch=7)[0]
    options = {"peers": peers, "signals": signals, "impl": "triton"}
    if op == "gather":
        all_gather_linear(
            _drawn(0, T // 2, D, dtype=torch.float32), torch.ones(D, D, device=DEVICE), pieces=1, **options
        )
    else:
        all_reduce_rmsnorm(_drawn(0, T, D, dtype=torch.float32), shots=1, **options)
    torch.cuda.synchronize()
    said = describe(signals.report, 0, "test")
    assert said is not None
    assert "waited in vain for data from rank 1 (chunk" in said
    assert "exchange 7; its flag stands at 0)" in said
