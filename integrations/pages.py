"""The kernel object that every plug-in calls: one attention layer of a host, over the host's own pages.

A host keeps its cache, its block tables and its batch. This module views them as the arguments of
:func:`~shardfuse.paged_attention`, without a copy, and counts every call: a layer that never reaches the kernel would
otherwise go unnoticed.

Letters: T tokens of a step, N query heads, K KV heads, H head size of q and k, Hv of v, S sequences.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.kv_cache import norm_rope_write_kv_, write_kv_
from ..kernels.paged_attention import paged_attention, plan_attention
from ..kernels.runtime import dispatch

if TYPE_CHECKING:
    from ..kernels.paged_attention import cpu
    from ..kernels.paged_attention.launch import Plan

MAX_HEAD_SIZE = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED = (torch.float8_e4m3fn, torch.int8)

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_counts: Counter[tuple[str, str]] = Counter()  # (host, kind of call) -> count


def stats(host: str | None = None) -> dict[str, int]:
    """The counts of calls in this process since its start or :func:`reset_stats`, for all hosts or one ("vllm",
    "transformers", "sglang").

    ``attention`` and ``writes`` count kernel calls by layers, ``queries`` the tokens that attended, and
    ``attention.triton`` or ``attention.reference`` the calls of each implementation. ``rotated_writes`` are the
    ``writes`` that also rotated, ``copied_pages`` the calls whose pages the host had gathered before. Calls in a
    captured CUDA graph count once, at capture.
    """
    found: Counter[str] = Counter()
    for (name, what), times in _counts.items():
        if host in (None, name):
            found[what] += times
    return dict(sorted(found.items()))


def reset_stats() -> None:
    """Count from 0 again."""
    _counts.clear()


def count(host: str, what: str, times: int = 1) -> None:
    """Count calls of a plug-in."""
    _counts[host, what] += times


def why_not(head_size: int, dtype: torch.dtype, *, v_head_size: int | None = None) -> str | None:
    """The reason why the kernel cannot serve a layer of these sizes, or None. All devices give the same answer."""
    largest = max(head_size, v_head_size or 0)
    if largest > MAX_HEAD_SIZE:
        return f"head size {largest}: the kernel holds head sizes up to {MAX_HEAD_SIZE}"
    if dtype not in DTYPES:
        return f"{dtype}: the kernel takes {', '.join(map(str, DTYPES))}"
    return None


@dataclass
class Batch:
    """One step of a host, for all layers that share its pages.

    Attributes:
        block_tables: [S, max_blocks] int32; entries past a sequence's length are not read.
        seq_lens: [S] int32, cached tokens of each sequence, this step's included.
        query_start_loc: [S + 1] int32, where each sequence's queries start among the T rows of q.
        max_query_len, max_seq_len: bounds that the host knows; None: not known.
        causal: whether a query sees the keys up to its own only.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int | None = None
    max_seq_len: int | None = None
    causal: bool = True
    check: bool | None = False  # the host guarantees its tables
    plans: dict[Any, Plan | cpu.Plan | None] = field(default_factory=dict, repr=False)

    def plan(self, q: torch.Tensor, cache: Cache, window: int | None, invariant: bool | None) -> Plan | cpu.Plan | None:
        """The plan of all layers of this shape, made by the first one, inside the graph during a capture."""
        if not q.is_cuda:
            return None
        captured = torch.cuda.is_current_stream_capturing()  # a graph must replay its own plan, not an earlier one
        key = (q.shape, q.dtype, window, invariant, _shapes(cache), captured)
        if key not in self.plans:
            self.plans[key] = plan_attention(
                q, cache, self.block_tables, self.seq_lens, self.query_start_loc, causal=self.causal, window=window,
                max_query_len=self.max_query_len, max_seq_len=self.max_seq_len, invariant=invariant,
            )  # fmt: skip
        return self.plans[key]


def _shapes(cache: Cache) -> tuple[Any, ...]:
    parts = (cache,) if isinstance(cache, torch.Tensor) else cache
    return tuple([(part.shape, part.dtype) for part in parts])


class PagedLayer:
    """One attention layer of ``host``: the values that do not change between steps.

    Args:
        host: the name under which calls are counted.
        scale: of the scores.
        window: a query sees itself and the ``window - 1`` keys before it.
        softcap: bounds scores to ``softcap * tanh(score / softcap)``.
        sinks: [N], a score without a value for each head. Read at each call: a host may load it later.
        alibi_slopes: [N].
        invariant: whether every bit of a sequence's result is independent of the rest of its batch; None: by
            ``row_invariance``.
        impl: "auto", "triton" or "reference".
    """

    def __init__(
        self,
        host: str,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        invariant: bool | None = None,
        impl: str = "auto",
    ) -> None:
        self.host = host
        self.scale = float(scale)
        self.window = window
        self.softcap = softcap or None  # hosts write 0 for no soft-cap
        self.sinks = sinks
        self.alibi_slopes = alibi_slopes
        self.invariant = invariant
        self.impl = impl

    def write_(
        self,
        cache: Cache,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Write keys [T, K, H] and values [T, K, Hv] to ``slots`` [T]; negative slots are padding."""
        write_kv_(cache, k, v, slots, k_scale=k_scale, v_scale=v_scale, check=False, impl=self.impl)
        _counts[self.host, "writes"] += 1

    def rotate_and_write_(
        self,
        cache: Cache,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        **rotation: Any,
    ) -> torch.Tensor:
        """q [T, N, H], normalised and rotated; k and v go into the cache. ``rotation``: as ``norm_rope_write_kv_``."""
        q = norm_rope_write_kv_(q, k, v, cache, slots, check=False, impl=self.impl, **rotation)
        _counts[self.host, "writes"] += 1
        _counts[self.host, "rotated_writes"] += 1
        return q

    def attend(
        self,
        q: torch.Tensor,
        cache: Cache,
        batch: Batch,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of q [T, N, H] over the sequences' pages -> [T, N, Hv], written to ``out`` if given."""
        before = dispatch.counts["paged_attention", "triton"]
        found = paged_attention(
            q, cache, batch.block_tables, batch.seq_lens, batch.query_start_loc,
            scale=self.scale, causal=batch.causal, window=self.window, softcap=self.softcap, sinks=self.sinks,
            alibi_slopes=self.alibi_slopes, k_scale=k_scale, v_scale=v_scale, max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len, plan=batch.plan(q, cache, self.window, self.invariant),
            invariant=self.invariant, out=out, check=batch.check, impl=self.impl,
        )  # fmt: skip
        assert isinstance(found, torch.Tensor)
        ran = "triton" if dispatch.counts["paged_attention", "triton"] > before else "reference"
        _counts[self.host, "attention"] += 1
        _counts[self.host, f"attention.{ran}"] += 1
        _counts[self.host, "queries"] += q.shape[0]
        return found
