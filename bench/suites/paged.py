"""The common parts of ``paged_attention``'s benchmarks: steps and their inputs, ours in each mode, the gate, the rows.

A step is one call of an engine: every sequence's queries, after the keys that it already has in the cache. Ours is the
call of a layer, with the plan that all layers of the step share, and with the bounds that the engine knows. Besides the
peers a row can compare it with another mode of itself: invariant mode (the cost of its guarantee), or without the
shared plan.

The gate compares every mode with the fp64 reference. For a large step it checks a smaller one: three of its sequences,
the longest among them, of at most ``TWIN_CONTEXT`` keys and ``TWIN_QUERIES`` queries each, with the same heads, pages
and dtypes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.paged_attention import paged_attention, plan_attention, reference
from ...kernels.paged_attention.op import split_cache
from ...kernels.paged_attention.options import AttentionOptions
from ...kernels.runtime.dtypes import CACHE_NAMES, QUANTISED
from ..harness.benchmark import Measurement, Settings, Work
from ..harness.gate import check_outputs
from ..harness.timing import Call, Timing, compare, compare_fixed, input_sets

MEASURED_KV = 256 << 20  # bytes of keys and values from which a share of the copy's bandwidth has a target
MAX_KV = 8 << 30  # of one step: two sets of inputs and a peer's copies of them must fit a GPU
TWIN_CONTEXT, TWIN_QUERIES, TWIN_SEQS = 1500, 150, 3
SPARE_KEYS = 32  # room in the tables for the entries that vLLM's tiles read, but do not use, after the last key
GAP_CALLS = 50  # calls between two readings of the clock; few enough that the launch queue never fills
GAP_FLOOR_US = 0.05  # a smaller launch gap counts as none

Prepare = Callable[["Operands"], Call]


@dataclass(frozen=True)
class Step:
    """Sequence s has ``context[s]`` tokens in the cache and adds ``queries[s]``.

    ``scales`` of a quantised cache: "tensor" or "token_head". ``note`` distinguishes steps of the same sizes.
    """

    context: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    scales: str | None = None
    note: str = ""
    short: bool = False

    @property
    def name(self) -> str:
        sizes = f"n{self.heads}k{self.kv_heads}h{self.head_size}-page{self.page}-{CACHE_NAMES[self.dtype]}"
        kv = "" if self.kv_dtype == self.dtype else f"-kv_{CACHE_NAMES[self.kv_dtype]}_per_{self.scales}"
        return f"{self.note}-{sizes}{kv}"

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.context, self.queries)))

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same numbers of keys and queries, so that one dense call suffices."""
        return len(set(self.context)) == len(set(self.queries)) == 1

    @property
    def quantised(self) -> bool:
        return self.kv_dtype in QUANTISED

    @property
    def kv_bytes(self) -> int:
        """Bytes of the visible keys and values, with their scales if each has its own."""
        scales = 4 if self.scales == "token_head" else 0
        return 2 * sum(self.seq_lens) * self.kv_heads * (self.head_size * self.kv_dtype.itemsize + scales)

    @property
    def bytes(self) -> int:
        """Bytes touched at least: each key and value once, q, the result, and an index for each page."""
        pages = sum(-(-length // self.page) for length in self.seq_lens)
        return self.kv_bytes + 2 * self.tokens * self.heads * self.head_size * self.dtype.itemsize + 4 * pages

    @property
    def flops(self) -> int:
        """Operations of both products over the keys that each query sees."""
        seen = sum(n * c + n * (n + 1) // 2 for c, n in zip(self.context, self.queries))
        return 4 * seen * self.heads * self.head_size

    @property
    def work(self) -> Work:
        return Work(self.flops, self.bytes)

    def twin(self) -> Step:
        """This step, or a smaller one with the same features, for the gate."""
        longest = max(range(len(self.context)), key=self.seq_lens.__getitem__)
        chosen = [*[s for s in range(len(self.context)) if s != longest][: TWIN_SEQS - 1], longest]
        return replace(
            self,
            context=tuple(min(self.context[s], TWIN_CONTEXT) for s in chosen),
            queries=tuple(min(self.queries[s], TWIN_QUERIES) for s in chosen),
        )


@dataclass(frozen=True)
class Peer:
    """An implementation to compare with: ``prepare(operands)`` is the call to time.

    ``takes``: the steps that it supports; ``slow``: it compiles for long.
    """

    name: str
    prepare: Prepare
    takes: Callable[[Step], bool] = lambda step: True
    slow: bool = False


def decodes(batch: int, context: int, *, queries: int = 1, **options: Any) -> Step:
    """``batch`` sequences of ``context`` keys in all, of which the last ``queries`` are new."""
    note = f"s{batch}-l{context}" + (f"-q{queries}" if queries > 1 else "")
    return Step((context - queries,) * batch, (queries,) * batch, **{"note": note, **options})


@dataclass(frozen=True)
class Operands:
    """A step's inputs. Its blocks are scattered over a pool that holds no others.

    q [T, N, H]; kv_cache [blocks, K, B, 2H]; block_tables [S, max_blocks], seq_lens [S], query_start_loc [S + 1] int32;
    k_scale, v_scale None, [1] or [blocks, K, B] fp32.
    """

    step: Step
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @classmethod
    def of(cls, step: Step, device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)
        pages = [-(-length // step.page) for length in step.seq_lens]
        blocks = torch.randperm(sum(pages), generator=generator, device=device, dtype=torch.int32)
        tables = blocks.new_zeros(len(pages), -(-(max(step.seq_lens) + SPARE_KEYS) // step.page))
        for row, owned in zip(tables, blocks.split(pages)):
            row[: len(owned)] = owned
        shape = (sum(pages), step.kv_heads, step.page)
        scales = [_scales(step, shape, device, generator) for _ in range(2)]
        q = torch.empty(step.tokens, step.heads, step.head_size, dtype=step.dtype, device=device)
        return cls(
            step,
            q.normal_(generator=generator),
            _random_cache((*shape, 2 * step.head_size), step.kv_dtype, device, generator),
            tables,
            torch.tensor(step.seq_lens, dtype=torch.int32, device=device),
            torch.tensor([0, *accumulate(step.queries)], dtype=torch.int32, device=device),
            *scales,
        )

    @property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The op's first arguments."""
        return self.q, self.kv_cache, self.block_tables, self.seq_lens, self.query_start_loc

    @property
    def bounds(self) -> dict[str, Any]:
        queries = self.step.queries
        bounds = {"min_query_len": min(queries), "max_query_len": max(queries)}
        return {**bounds, "max_seq_len": max(self.step.seq_lens)}

    def plan(self, impl: str, *, invariant: bool = False) -> Any:
        return plan_attention(*self.paged, **self.bounds, invariant=invariant, impl=impl)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, K, H] of all sequences, one after another, in the cache's dtype."""
        step = self.step
        shape = (sum(step.seq_lens), step.kv_heads, step.head_size)
        k, v = (self.kv_cache.new_empty(shape) for _ in range(2))
        start = 0
        for length, table in zip(step.seq_lens, self.block_tables):
            pages = self.kv_cache[table[: -(-length // step.page)].long()]  # [pages, K, B, 2H]
            rows = pages.transpose(1, 2).flatten(0, 1)[:length]  # [length, K, 2H]
            k[start : start + length], v[start : start + length] = rows.split(step.head_size, dim=-1)
            start += length
        return k, v


def _scales(
    step: Step, shape: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> torch.Tensor | None:
    """Scales that give stored values an ordinary size: integers reach 127, and fp8 here 2."""
    if not step.quantised:
        return None
    size = shape if step.scales == "token_head" else (1,)
    largest = 2 / 127 if step.kv_dtype == torch.int8 else 1.0
    return torch.empty(size, device=device).uniform_(0.5 * largest, largest, generator=generator)


def _random_cache(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.empty(shape, dtype=dtype, device=device).random_(-127, 128, generator=generator)
    if dtype == torch.float8_e4m3fn:
        bits = torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
        return bits.bitwise_and_(0b10111111).view(dtype)  # clears the exponent's highest bit: below 2, and no NaN
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(operands: Operands, impl: str, *, invariant: bool = False, planned: bool = True) -> Call:
    """The call of one layer; ``planned``: with the plan that the step's layers share."""
    o = operands
    plan = o.plan(impl, invariant=invariant) if planned else None
    options: dict[str, Any] = {**o.bounds, "k_scale": o.k_scale, "v_scale": o.v_scale}
    return partial(paged_attention, *o.paged, plan=plan, invariant=invariant, impl=impl, **options)


# Other modes of ours, by the names in rows.
INVARIANT, UNPLANNED = "own invariant mode", "own, without a shared plan"
MODES: dict[str, dict[str, Any]] = {INVARIANT: {"invariant": True}, UNPLANNED: {"planned": False}}


def own(settings: Settings, name: str) -> Peer:
    """Another mode of ours as a peer: the ratio is a cost, and has no target."""
    return Peer(name, partial(ours, impl=settings.impl, **MODES[name]))


def _copied(operands: Operands) -> Call:
    """A copy that reads and writes as many bytes as the step touches."""
    half = operands.step.bytes // 2
    source = torch.empty(half, dtype=torch.uint8, device=operands.q.device).random_()
    return partial(torch.empty_like(source).copy_, source)


COPY = Peer("copy of the bytes", _copied)


# --- the gate ---------------------------------------------------------------------------------------------------------


def check(steps: Sequence[Step], settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Compare every mode of the named steps (or their smaller twins) with the reference in fp64."""
    for step in steps:
        if step.name in names:
            for verdict in _check(Operands.of(step.twin(), settings.device, 0), settings.impl):
                yield step.name, verdict


def _check(operands: Operands, impl: str) -> list[Verdict]:
    modes = {"out": {}, **{f"out, {name}": options for name, options in MODES.items()}}
    outs: dict[str, Any] = {name: ours(operands, impl, **options)() for name, options in modes.items()}
    wide = replace(operands, q=operands.q.double())
    if not operands.step.quantised:
        wide = replace(wide, kv_cache=operands.kv_cache.double())
    return check_outputs(
        outs,
        low=lambda: dict.fromkeys(outs, _reference(operands)),
        oracle=lambda: dict.fromkeys(outs, _reference(wide)),
        terms=max(operands.step.head_size, *operands.step.seq_lens),
    )


def _reference(operands: Operands) -> torch.Tensor:
    o = operands
    options = AttentionOptions(o.step.head_size**-0.5, k_scale=o.k_scale, v_scale=o.v_scale)
    k_cache, v_cache = split_cache(o.kv_cache, o.step.head_size)
    return reference.paged_attention(o.q, k_cache, v_cache, o.block_tables, o.seq_lens, o.query_start_loc, options)[0]


def warm(steps: Sequence[Step], settings: Settings, name: str) -> None:
    """Compile the kernels of the step called ``name``."""
    for step in steps:
        if step.name == name:
            operands = Operands.of(step, settings.device, 0)
            ours(operands, settings.impl)()
            for options in MODES.values():
                ours(operands, settings.impl, **options)()


# --- rows -------------------------------------------------------------------------------------------------------------


def row(settings: Settings, step: Step, metric: str, peer: Peer, target: float | None = None) -> Measurement:
    """Ours as a layer calls it against ``peer``, both over inputs that exceed the cache together."""

    def run() -> tuple[Timing, Timing]:
        sets = [Operands.of(step, settings.device, i) for i in range(input_sets(step.bytes, settings.device))]
        with torch.no_grad():
            return compare(
                [ours(each, settings.impl) for each in sets],
                [peer.prepare(each) for each in sets],
                settings.device,
                seconds=settings.seconds,
                dry=settings.dry,
            )

    return Measurement(step.name, metric, peer.name, target, run, slow=peer.slow, work=step.work)


def gap_row(settings: Settings, step: Step, peer: Peer) -> Measurement:
    """The host time of a call beyond the device's own: see :func:`launch_gaps`."""

    def run() -> tuple[Timing, Timing]:
        operands = Operands.of(step, settings.device, 0)
        with torch.no_grad():
            return launch_gaps(ours(operands, settings.impl), peer.prepare(operands), seconds=settings.seconds)

    return Measurement(step.name, "launch gap, us", peer.name, None, run)


def launch_gaps(ours: Call, peer: Call, *, seconds: float) -> tuple[Timing, Timing]:
    """For both sides: microseconds per call, back to back, minus those of the same calls replayed from a CUDA graph.

    The host adds this time to a step that is not captured, if it is slower than the device: Python, the checks, the
    launches. The noise is that of the calls.
    """
    calls = tuple(map(_back_to_back, (ours, peer)))
    graphs = tuple(map(_replayed, (ours, peer)))
    both = (*calls, *graphs)
    started = time.perf_counter()
    for each in both:
        each()
    rounds = max(10, int(seconds / max(time.perf_counter() - started, 1e-6)))
    slow = compare_fixed(*calls, rounds=rounds, calls=1)
    fast = compare_fixed(*graphs, rounds=rounds, calls=1)
    gaps = [max((s.value - f.value) / GAP_CALLS, GAP_FLOOR_US) for s, f in zip(slow, fast)]
    return Timing(gaps[0], slow[0].noise), Timing(gaps[1], slow[1].noise)


def _back_to_back(call: Call) -> Call:
    def run() -> None:
        for _ in range(GAP_CALLS):
            call()
        torch.cuda.synchronize()

    return run


def _replayed(call: Call) -> Call:
    """``GAP_CALLS`` calls as one graph. A few calls come before it: they compile, and fill caches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GAP_CALLS):
            call()

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run
