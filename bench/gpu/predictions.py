"""What we expect of an H200, as ranges of rows' ratios; docs/gpu.md says what earlier ranges were and what was found.

A run prints them beside what it found. A prediction that fails is a finding about the kernel, or about our model of it.

Ranges of rows that memory limits follow from what the kernels' accesses were counted to move (``by_memory``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from ...kernels.runtime.printing import Sheet, figure, prose, unbroken
from ..harness import memory_limit
from ..harness.memory_limit import Launches
from ..harness.records import RowKey
from ..harness.report import Row


class Prediction(NamedTuple):
    """The ratio of a row, ours against its peer, is expected within [low, high]."""

    bench: str
    key: RowKey
    low: float
    high: float
    why: str


def by_memory(bench: str, key: RowKey, of: Launches, reached: tuple[float, float], why: str) -> Prediction:
    """Of a row against a copy of the necessary bytes, whose kernels take as long as the slowest level of memory does.

    ``reached``: the shares of the copy's rate that we expect them to get from it, and ``why``.
    """
    most, moved = memory_limit.limit(of)
    low, high = (round(share * most, 2) for share in reached)
    share = f"at {reached[0]:.2f} to {reached[1]:.2f} of the copy's rate"
    return Prediction(bench, key, low, high, f"{moved}, {share}: {why}")


_UP = "llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh-bfloat16"
_QKV = "llama3-8b-tp1-qkv-t4096-d4096-f6144-bfloat16"
_NORM_CASE = "t8192-d4096-bf16-residual_same"
_NORM, _ROPE = f"rms_norm-{_NORM_CASE}", "llama8b-b1-s8192-n32-k8-h128-bf16"
_QUANTISED = "r8192-c4096-bf16-e4m3_per"
_COPY, _FLASH = "copy of the bytes", "SDPA FlashAttention, contiguous KV"

_ALL: tuple[Prediction | partial[Prediction], ...] = (
    Prediction("linear_act", (_QKV, "forward, us", "cuBLAS x @ w.T"), 0.92, 0.97, "a plain GEMM"),
    Prediction("linear_act", (_UP, "forward, us", "cuBLAS x @ w.T"), 0.87, 0.95, "tanh costs 7 % of a tile, unhidden"),
    partial(
        by_memory,
        "paged_decode",
        ("s64-l8192-n32k8h128-page16-bf16", "decode, us", _COPY),
        Launches("paged_attention", "llama8b-decode-bf16", ("_paged_attention_fwd_kernel",)),
        (0.86, 0.92),
        "each page's address is loaded before its keys",
    ),
    partial(
        by_memory,
        "norm",
        (_NORM, "forward, us", _COPY),
        Launches("rms_norm", _NORM_CASE, ("_norm_fwd_kernel",)),
        (0.95, 1.00),
        "a row is summed before it is stored; 0.97 with loads of 2 bytes",
    ),
    partial(
        by_memory,
        "norm",
        (_NORM, "forward + backward, us", _COPY),
        Launches("rms_norm", _NORM_CASE, ("_norm_fwd_kernel", "_norm_bwd_kernel")),
        (0.95, 1.10),
        "as forward, but L2 (50 MB) may still have a tenth of all bytes, which forward wrote and backward reads",
    ),
    partial(
        by_memory,
        "rope",
        (_ROPE, "forward, us", _COPY),
        Launches("rope", _ROPE, ("_rope_kernel",)),
        (0.95, 1.00),
        "a pass, like the copy; 0.98 in the first run, beside its quickest copy of as many bytes",
    ),
    partial(
        by_memory,
        "cache_write",
        ("llama8b-t8192-k8-h128-p16-bf16", "write, us", _COPY),
        Launches("write_kv", "t64-k8-h128-p16-bf16", ("_write_kv_kernel",)),
        (0.85, 1.00),
        "each slot is loaded before its row is stored, and the launch is short",
    ),
    Prediction(
        "quantise",
        (f"{_QUANTISED}_row", "cast, us", _COPY),
        0.75,
        0.95,
        "a program waits for its rows' maxima and reads them again, from L1 or L2; it may miss 0.90",
    ),
    Prediction(
        "quantise",
        (f"{_QUANTISED}_tensor", "cast, us", _COPY),
        0.50,
        0.60,
        "x, 64 MiB, is read twice, and L2 keeps 50 MB at most: 3 bytes of 5, and a second launch",
    ),
    Prediction(
        "cross_entropy",
        ("t8192-d4096-v128256-bfloat16", "forward + backward, us", "the three products alone"),
        0.76,
        0.84,
        "misses 0.93: eight chunks each read and write the weight's gradient in fp32, 34 GB in all, 8 ms beside 37",
    ),
    Prediction(
        "paged_prefill",
        ("s1-t8192-n32k8h128-page16-bf16", "prefill, us", _FLASH),
        0.5,
        0.75,
        "Triton 3.6 leaves tiles of 32 rows, which read each key from shared memory four times as often",
    ),
    Prediction(
        "overlap",
        ("gather-t8192-k8192-n3584-r8-bf16", "every flag set, us", "own plain GEMM"),
        0.98,
        1.04,
        "a look at a flag and a barrier for each tile hide under the products",
    ),
)


def predictions() -> tuple[Prediction, ...]:
    """All of them; without the record of counts, which a wheel lacks, only those that do not rest on it."""
    counted = memory_limit.RECORD.is_file()
    return tuple(
        each if isinstance(each, Prediction) else each() for each in _ALL if counted or isinstance(each, Prediction)
    )


def compared(bench: str, rows: Iterable[Row]) -> list[tuple[Prediction, Row]]:
    """The predictions about ``bench`` that ``rows`` answer."""
    return [(each, row) for each in predictions() for row in rows if (each.bench, each.key) == (bench, row.key)]


def table(pairs: Iterable[tuple[Prediction, Row]]) -> Sheet:
    """The predictions beside what was found."""
    columns = (prose("row"), prose("peer"), unbroken("expected"), figure("found"), unbroken("verdict"))
    shown = Sheet(*columns, title="predictions, for an H200")
    for each, row in pairs:
        verdict = "as expected" if each.low <= row.ratio <= each.high else "below" if row.ratio < each.low else "above"
        shown.add(each.key[0], each.key[2], f"{each.low:.2f} to {each.high:.2f}", f"{row.ratio:.3f}", verdict)
    return shown
