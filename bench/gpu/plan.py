"""What a GPU run measures, in order: rows with their worth and the seconds that they are expected to take.

The headlines come first, then the other rows by worth and second, those that may hang last. The seconds are derived,
for an H100: the time budget of a measurement (or ten rounds of both sides, if that is longer), warming up, and before
the first row of a gate its check. What 230 rows took on an H200, 259 s in all, fixes the two constants of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...kernels.dev import registry
from ..harness.benchmark import Benchmark, Measurement
from ..harness.report import Row
from ..harness.runner import benchmarks
from ..harness.timing import MIN_ROUNDS

Name = tuple[str, str, str, str]  # of a row: benchmark, case, metric, peer

_UP = "llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh-bfloat16"
_GPT = "gpt3-13b-tp1-up-t4096-d5120-f20480-gelu_tanh-bfloat16"
_MLP = "mlp-t4096-d4096-f16384-bfloat16"
_NORM = "rms_norm-t8192-d4096-bf16-residual_same"
_LLAMA = "llama3-8b-2-layers-t4096-bf16"
_PREFILL = "s1-t8192-n32k8h128-page16-bf16"
_CUBLAS, _COPY = "cuBLAS x @ w.T", "copy of the bytes"
_SMALL = "forward without gradients, us"

HEADLINES: tuple[Name, ...] = (
    ("linear_act", "llama3-8b-tp1-qkv-t4096-d4096-f6144-bfloat16", "forward, us", _CUBLAS),
    ("linear_act", _UP, "forward, us", _CUBLAS),
    ("paged_decode", "s64-l8192-n32k8h128-page16-bf16", "decode, us", _COPY),
    ("paged_prefill", _PREFILL, "prefill, us", "SDPA FlashAttention, contiguous KV"),
    ("overlap", "gather-t8192-k8192-n3584-r8-bf16", "every flag set, us", "own plain GEMM"),
    ("gated", "llama3-8b-tp1-gate_up-t8192-d4096-f28672-silu-bfloat16", "forward, us", "cuBLAS, doubled width"),
    ("linear_backward", _GPT, "dgrad with act', us", "cuBLAS dy @ w"),
    ("linear_backward", _GPT, "wgrad into fp32, us", "eager"),
    ("mlp", _MLP, "forward + backward, us", "eager"),
    ("mlp", _MLP, "forward + backward into fp32, us", "eager, added after backward"),
    ("norm", _NORM, "forward, us", _COPY),
    ("norm", _NORM, "forward + backward, us", _COPY),
    ("rope", "llama8b-b1-s8192-n32-k8-h128-bf16", "forward, us", _COPY),
    ("cross_entropy", "t8192-d4096-v128256-bfloat16", "forward + backward, us", "the three products alone"),
    ("paged_decode", "s64-l1024-n32k8h128-page16-bf16", "decode, us", _COPY),
    ("paged_prefill", _PREFILL, "prefill, us", "SDPA cuDNN, contiguous KV"),
    *(("small_m", _UP.replace("t8192", f"t{tokens}"), _SMALL, _CUBLAS) for tokens in (1, 16, 64)),
    ("scaled_linear", _UP, "scales by tensor, us", "torch._scaled_mm"),
    *(("quantise", f"r8192-c4096-bf16-e4m3_per_{what}", "cast, us", _COPY) for what in ("tensor", "row")),
    ("linear_act", _UP.replace("bfloat16", "float32"), "forward, us", "cuBLAS x @ w.T in IEEE fp32"),
    ("linear_act", _GPT.replace("tanh", "erf"), "host time, us", "eager plus 10 us"),
    ("cache_write", "llama8b-t8192-k8-h128-p16-bf16", "write, us", _COPY),
    *(("train_step", _LLAMA, "forward + backward + AdamW, us", peer) for peer in ("stock torch", "Liger")),
    ("train_step", _LLAMA, "peak bytes", "stock torch"),
    ("train_step", _LLAMA, "forward + backward + AdamW, us", "torch.compile"),  # slow: the first of its phase
)
SPIN = ("overlap", "all_reduce_norm")  # benchmarks whose kernels wait for flags, and so may wait for ever

# An H100's operations per second: cuBLAS in bf16, both sides' mean in fp32 (the kernel has a tenth of cuBLAS's rate),
# tensor cores in fp64; a copy's bytes per second.
_FLOPS, _FLOPS_FP32, _FLOPS_FP64, _BYTES = 798e12, 9e12, 50e12, 3.0e12
PROCESS_S = 5.0  # that starts, its ceilings measured
_ROW_S, _GATE_S = 0.1, 1.6  # of the host: a row's operands and compiled calls, a case's operands in three precisions
_COMPILE_S = 40.0  # of a row whose peer is compiled
_WARM_CALLS = 11
SMOKE_CASE_S = 0.55  # by a process that runs


def selection(only: Sequence[str]) -> tuple[list[str], list[Benchmark]]:
    """The ops to smoke-test and the benchmarks to run; ``only`` names ops and keeps their benchmarks."""
    measurable = [benchmark for benchmark in benchmarks().values() if "cuda" in benchmark.devices]
    if not only:
        return sorted(registry.ops()), measurable
    for name in only:
        registry.op(name)
    return list(only), [benchmark for benchmark in measurable if set(benchmark.ops) & set(only)]


class Step(NamedTuple):
    """A row of the plan. ``worth`` is 1 for a headline and for an answer that is open, less for one that is known."""

    name: Name
    worth: float
    seconds: float  # without the gate
    gate: str
    gate_s: float


def steps(planned: Mapping[Name, Measurement], budget_s: float, filed: Mapping[Name, Row]) -> list[Step]:
    """``planned`` in the order of the run. ``budget_s`` is a measurement's, ``filed`` are this card's earlier rows."""
    made = {name: _step(name, row, budget_s, filed.get(name)) for name, row in planned.items()}
    of_gate: dict[tuple[str, str], list[Step]] = {}
    for each in made.values():
        of_gate.setdefault((each.name[0], each.gate), []).append(each)

    def rank(step: Step) -> tuple[bool, float]:
        share = step.gate_s / len(of_gate[step.name[0], step.gate])
        return step.name[0] in SPIN, -step.worth / (step.seconds + share)

    others = sorted((step for name, step in made.items() if name not in HEADLINES), key=rank)
    return [made[name] for name in HEADLINES if name in made] + others


def begins(of: Sequence[Step], start_s: float, factor: float = 1.0) -> Iterator[float]:
    """When each step begins, its gate first, if the process starts at ``start_s``; all seconds times ``factor``."""
    at = start_s + PROCESS_S * factor
    for seconds in whole(of):
        yield at
        at += seconds * factor


def whole(of: Iterable[Step]) -> Iterator[float]:
    """Each step's seconds, with its gate's where it is the first of the gate."""
    done = set[str]()
    for step in of:
        gate = f"{step.name[0]} {step.gate}"
        yield step.seconds + (0.0 if gate in done else step.gate_s)
        done.add(gate)


def lines(of: Sequence[Step], start_s: float) -> Iterator[str]:
    """The plan for people: the clock, seconds and worth beside each row."""
    for step, at, seconds in zip(of, begins(of, start_s), whole(of)):
        yield f"{clock(at):>5}  {seconds:4.1f} s  {step.worth:4.2f}  {step.name[0]}: {', '.join(step.name[1:])}"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _step(name: Name, planned: Measurement, budget_s: float, filed: Row | None) -> Step:
    both_s = _both_s(planned, filed)
    seconds = _ROW_S + max(budget_s, MIN_ROUNDS * both_s) + _WARM_CALLS * both_s + _COMPILE_S * planned.slow
    flops = planned.work.flops if planned.work else 0
    # Forward and backward are three products, which ours, stock torch and the oracle compute.
    gate_s = _GATE_S + 3 * flops / _FLOPS_FP64 + 6 * flops / _rate(planned)
    return Step(name, 1.0 if name in HEADLINES else _openness(planned, filed), seconds, planned.gate, gate_s)


def _both_s(planned: Measurement, filed: Row | None) -> float:
    """Seconds of a call of either side: as filed, or twice the bound by arithmetic and memory."""
    if filed is not None and planned.metric.endswith(", us"):
        return (filed.ours + filed.peer) * 1e-6
    if planned.work is None:
        return 0.0
    return 2 * max(planned.work.flops / _rate(planned), planned.work.bytes / _BYTES)


def _rate(planned: Measurement) -> float:
    return _FLOPS_FP32 if planned.case.endswith("float32") else _FLOPS


def _openness(planned: Measurement, filed: Row | None) -> float:
    """1 where it is open whether the target is met: there is no result yet, or its ratio was close to the target."""
    if planned.target is None:
        return 0.5 if filed is None else 0.25
    return 1.0 if filed is None else 1 / (1 + 20 * abs(filed.ratio / planned.target - 1))
