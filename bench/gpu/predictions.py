"""What we expect of an H200, as ranges of rows' ratios; docs/gpu.md says what earlier ranges were and what was found.

A run prints them beside what it found. A prediction that fails is a finding about the kernel, or about our model of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...kernels.runtime.printing import Sheet, figure, prose, unbroken
from ..harness.records import RowKey
from ..harness.report import Row


class Prediction(NamedTuple):
    """The ratio of a row, ours against its peer, is expected within [low, high]."""

    bench: str
    key: RowKey
    low: float
    high: float
    why: str


_UP = "llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh-bfloat16"
_QKV = "llama3-8b-tp1-qkv-t4096-d4096-f6144-bfloat16"
_COPY, _FLASH = "copy of the bytes", "SDPA FlashAttention, contiguous KV"

PREDICTIONS = (
    Prediction("linear_act", (_QKV, "forward, us", "cuBLAS x @ w.T"), 0.92, 0.97, "a plain GEMM"),
    Prediction("linear_act", (_UP, "forward, us", "cuBLAS x @ w.T"), 0.87, 0.95, "tanh costs 7 % of a tile, unhidden"),
    Prediction(
        "paged_decode", ("s64-l8192-n32k8h128-page16-bf16", "decode, us", _COPY), 0.86, 0.92, "limited by memory"
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


def compared(bench: str, rows: Iterable[Row]) -> Iterator[tuple[Prediction, Row]]:
    """The predictions about ``bench`` that ``rows`` answer."""
    found = {row.key: row for row in rows}
    yield from ((each, found[each.key]) for each in PREDICTIONS if each.bench == bench and each.key in found)


def table(pairs: Iterable[tuple[Prediction, Row]]) -> Sheet:
    """The predictions beside what was found."""
    columns = (prose("row"), prose("peer"), unbroken("expected"), figure("found"), unbroken("verdict"))
    shown = Sheet(*columns, title="predictions")
    for each, row in pairs:
        verdict = "as expected" if each.low <= row.ratio <= each.high else "below" if row.ratio < each.low else "above"
        shown.add(each.key[0], each.key[2], f"{each.low:.2f} to {each.high:.2f}", f"{row.ratio:.3f}", verdict)
    return shown
