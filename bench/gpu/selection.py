"""What a GPU run tests and measures."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.dev import registry
from ..harness.benchmark import Benchmark
from ..harness.runner import benchmarks

# Their tests marked interpret create tensors on the device where the kernels run.
OP_TESTS = (
    "test_autograd_gate.py",
    "test_bench_comm.py",
    "test_block_launches.py",
    "test_comm.py",
    "test_cross_entropy.py",
    "test_cross_entropy_backward.py",
    "test_dropout.py",
    "test_fp8_bits.py",
    "test_kv_cache.py",
    "test_kv_cache_blocks.py",
    "test_linear_act.py",
    "test_linear_fused.py",
    "test_linear_torch.py",
    "test_main_grad.py",
    "test_mlp_fused.py",
    "test_norm.py",
    "test_paged_attention.py",
    "test_paged_invariance.py",
    "test_paged_plan.py",
    "test_rope.py",
    "test_rope_tables.py",
    "test_scaled_linear.py",
)
OP_SUITE = "interpret and not (gpu or ranks or nightly)"


def selection(only: Sequence[str]) -> tuple[list[str], list[Benchmark]]:
    """The ops to smoke-test and the benchmarks to run; ``only`` names ops and keeps their benchmarks."""
    measurable = [benchmark for benchmark in benchmarks().values() if "cuda" in benchmark.devices]
    if not only:
        return sorted(registry.ops()), measurable
    for name in only:
        registry.op(name)
    return list(only), [benchmark for benchmark in measurable if set(benchmark.ops) & set(only)]
