"""This machine's processors as a cluster: the rates that the planner needs, measured in about a second.

Processes stand for GPUs. They share the cores, the memory and its bandwidth evenly. The rate of gloo over loopback is
assumed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from .hardware import Cluster, Gpu, Network
from .software import PLAIN, Software
from .step_time import LINKS, MEMORY, Efficiency

LOOPBACK = 1.5e9  # bytes per second that each process sends
_ROWS, _WIDTH = 512, 1024
_HEADS, _HEAD_DIM = 8, 64


def this_machine(processes: int) -> tuple[Cluster, Software, Efficiency]:
    """The cluster of ``processes`` on this machine, and what its software reaches, in fp32. ValueError below 1."""
    if processes < 1:
        raise ValueError(f"gpus={processes}: expected at least 1 process")
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    mine = max(1, cores // processes)
    share = min(1.0, cores / processes)
    torch.set_num_threads(mine)
    try:
        product, attention, copied = _product_flops(), _attention_flops(), _copied_bytes()
    finally:
        torch.set_num_threads(threads)
    memory = _free_bytes() / processes
    # The model takes shares of a rate: what was measured is that share already.
    gpu = Gpu("cpu", memory, {"fp32": product * share}, copied * mine / cores / MEMORY)
    network = Network(f"{cores} cores of this machine", max(8, processes), LOOPBACK / LINKS, LOOPBACK / LINKS)
    # gloo's threads work on the cores that form the products: they hide nothing.
    software = replace(PLAIN, attention={"cpu": attention / product}, margin=0.0, hides_tp=0.0, hides_dp=0.0)
    return Cluster(gpu, network, processes, one_machine=True), software, Efficiency(1.0, 1.0, 1.0)


def _free_bytes() -> int:
    """What processes can still take: the kernel's estimate, which counts the caches of files that it would drop."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _product_flops() -> float:
    x, weight = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    return 2 * _ROWS * _WIDTH * _WIDTH / _seconds(lambda: F.linear(x, weight))


def _attention_flops() -> float:
    """Causal attention's, half of the scores counted."""
    q = torch.randn(1, _HEADS, _ROWS, _HEAD_DIM)
    seconds = _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    return 2 * _ROWS * _ROWS * _HEADS * _HEAD_DIM / seconds


def _copied_bytes() -> float:
    source = torch.zeros(16 << 20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(call: Callable[[], object]) -> float:
    """The best of a few calls: what the machine can do."""
    call()
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)
