"""The ops that fill and move the pages of a KV cache, against a copy of as many bytes and other implementations.

``write_kv_`` stores a step's keys and values unchanged, or in fp8 or int8 with a given scale or with scales that it
writes for each token and head. ``norm_rope_write_kv_`` also normalises the heads of q and k and rotates them, all in
one launch: its peers are the same steps one by one, in eager torch and as this project's own ops. ``copy_blocks_``
copies blocks of all layers over others. Up to 256 tokens are decodes, each in its own page; more are a prefill.

vLLM's Triton kernels (``paged_peers.py``) write into pages of their own layout: [blocks, B, K, H], K and V apart. The
blocks are copied within one cache, which is far larger than the bytes that a call moves; the calls rotate over pairs of
its blocks, and the gate copies in two of its layers. These ops have no targets of their own: the ratio against the copy
gives their share of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.cases import kv_cache as cases
from ...kernels.dev.registry import Case, OpSpec
from ...kernels.kv_cache import copy_blocks_, norm_rope_write_kv_, write_kv_
from ...kernels.norm import rms_norm
from ...kernels.rope import apply_rope
from ...kernels.runtime.dtypes import LARGEST
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import check_case
from ..harness.timing import Call, Timing, compare, input_sets
from . import paged_peers
from .paged_peers import KVQuantMode

TIME = "write, us"
COPY, EAGER, STEPS, VLLM = "copy of the bytes", "eager", "own ops, one by one", paged_peers.VLLM
DRY = ("t7-k2-h16-p4-fp32", "t6-n4-k2-h24-p4-fp32-e4m3-written-r8", "6x2x3x10-fp32-n4")
SHORT = (
    "llama8b-t8192-k8-h128-p16-bf16",
    "llama8b-t8192-k8-h128-p16-bf16-e4m3-written",
    "qwen3-8b-t8192-n32-k8-h128-p16-bf16",
    "qwen3-8b-t64-n32-k8-h128-p16-bf16-e4m3-given",
    "32x1024x8x16x256-bf16-n64-dim1",
)
GATE_LAYERS = 2


@dataclass(frozen=True)
class Problem:
    """One op on one of its cases; the case's name is unique among all three."""

    spec: OpSpec
    case: Case

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def copies(self) -> bool:
        return self.spec is cases.COPY_BLOCKS

    @property
    def fused(self) -> bool:
        return self.spec is cases.NORM_ROPE_WRITE_KV

    @property
    def bytes(self) -> int:
        """Bytes read and written at least."""
        size = self.case.dtype.itemsize
        if self.copies:
            blocks = self.case.options["shape"][self.case.options["block_dim"]]
            return 2 * self.case.sizes["pairs"] * torch.Size(self.case.options["shape"]).numel() // blocks * size
        T, N, K, H, V, P = (self.case.sizes[letter] for letter in "TNKHVP")
        stored = (self.case.options["cache"] or self.case.dtype).itemsize
        scales = 4 if self.case.options["scales"] == "written" else 0
        per_token = K * ((H + V) * (size + stored) + 2 * scales) + 8  # its slot
        return T * (per_token + (2 * N * H * size + 4 * P if self.fused else 0))


Inputs = dict[str, Any]
Prepare = Callable[[Problem, Inputs], Call]


def problems(settings: Settings) -> list[Problem]:
    if settings.dry:
        return [Problem(spec, case) for spec in cases.SPECS for case in spec.tagged("test") if case.name in DRY]
    found = [
        Problem(spec, case) for spec in cases.SPECS for case in spec.tagged("bench" if settings.cuda else "bench-cpu")
    ]
    return [each for each in found if each.name in SHORT] if settings.short and settings.cuda else found


def plan(settings: Settings) -> list[Measurement]:
    rows = []
    for problem in problems(settings):
        peers: dict[str, Prepare] = {COPY: _copy, EAGER: _eager_copy if problem.copies else _eager}
        if problem.fused:
            peers[STEPS] = partial(_one_by_one, impl=settings.impl)
        vllm = paged_peers.load_vllm_writes()
        if vllm is not None and settings.cuda and not settings.dry and problem.spec is cases.WRITE_KV:
            peers[VLLM] = partial(_vllm, launchers=vllm)
        if settings.short and settings.cuda:  # the copy, and the closest peer
            peers = {name: peers[name] for name in (COPY, list(peers)[-1])}
        rows += [_row(settings, problem, name, prepare) for name, prepare in peers.items()]
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for problem in problems(settings):
        if problem.name in names:
            for verdict in check_case(problem.spec, _twin(problem), settings.device, settings.impl):
                yield problem.name, verdict


def warm(settings: Settings, name: str) -> None:
    for problem in problems(settings):
        if problem.name == name:
            _ours(problem, next(_input_sets(problem, settings.device, 1)), impl=settings.impl)()


def _twin(problem: Problem) -> Case:
    """The case; for a copy between layers one with fewer layers."""
    case = problem.case
    if not problem.copies or case.options["block_dim"] == 0:
        return case
    layers, *rest = case.options["shape"]
    return replace(case, options={**case.options, "shape": (min(layers, GATE_LAYERS), *rest)})


def _row(settings: Settings, problem: Problem, peer_name: str, prepare: Prepare) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        sets = list(_input_sets(problem, settings.device, input_sets(problem.bytes, settings.device)))
        with torch.no_grad():
            return compare(
                [_ours(problem, each, impl=settings.impl) for each in sets],
                [prepare(problem, each) for each in sets],
                settings.device,
                seconds=settings.seconds,
                dry=settings.dry,
            )

    return Measurement(problem.name, TIME, peer_name, None, run, work=Work(0, problem.bytes))


def _input_sets(problem: Problem, device: torch.device, count: int) -> Iterator[Inputs]:
    """Inputs of the op. Copies share one cache, and use different blocks as long as there are any."""
    if not problem.copies:
        yield from (problem.spec.make_inputs(problem.case, device, seed) for seed in range(count))
        return
    cache = problem.spec.make_inputs(problem.case, device, 0)["cache"]
    blocks, n = cache.shape[problem.case.options["block_dim"]], problem.case.sizes["pairs"]
    for seed in range(count):
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
        sources = order[n:][torch.arange(n) % (blocks - n)]
        yield {"cache": cache, "pairs": torch.stack((sources, order[:n]), 1).to(device)}


def _ours(problem: Problem, inputs: Inputs, impl: str) -> Call:
    if problem.copies:
        dim = problem.case.options["block_dim"]
        return partial(copy_blocks_, inputs["cache"], inputs["pairs"], block_dim=dim, impl=impl)
    if problem.fused:
        return partial(norm_rope_write_kv_, **inputs, **cases.options(problem.case), impl=impl)
    return partial(write_kv_, **inputs, impl=impl)


# --- peers ------------------------------------------------------------------------------------------------------------


def _copy(problem: Problem, inputs: Inputs) -> Call:
    device = inputs["pairs" if problem.copies else "k"].device
    source = torch.empty(problem.bytes // 2, dtype=torch.uint8, device=device).random_()
    return partial(torch.empty_like(source).copy_, source)


def _eager_copy(problem: Problem, inputs: Inputs) -> Call:
    blocks = inputs["cache"].movedim(problem.case.options["block_dim"], 0)
    blocks = blocks.view(torch.uint8) if blocks.dtype == torch.float8_e4m3fn else blocks  # not every device indexes fp8
    sources, targets = inputs["pairs"].unbind(1)

    def call() -> None:
        blocks[targets] = blocks[sources]

    return call


def _eager(problem: Problem, inputs: Inputs) -> Call:
    """Norm, rotation of pairs (i, i + P/2), quantisation and the write, each by torch's own operations."""
    slots = inputs["slot_mapping"][inputs["slot_mapping"] >= 0]  # only the last token may be padding
    count, page = len(slots), problem.case.sizes["B"]
    where = slots // page, slots % page
    caches = inputs["kv_cache"].split([problem.case.sizes[letter] for letter in "HV"], dim=-1)
    tables = _stock_tables(inputs) if problem.fused else None

    def call() -> object:
        q, k = (_stock_norm_rope(inputs, name, tables) for name in "qk") if problem.fused else (None, inputs["k"])
        for cache, x, name in zip(caches, (k, inputs["v"]), "kv"):
            _stock_write(cache, x[:count], where, inputs[f"{name}_scale"])
        return q

    return call


def _stock_tables(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Each element's own cosine and sine [T, 1, P] in q's dtype, as in transformers' models."""
    if inputs["cos"] is None:
        return None
    cos, sin = (
        torch.cat((table, table), dim=-1).unsqueeze(1).to(inputs["q"].dtype) for table in (inputs["cos"], inputs["sin"])
    )
    return cos, sin


def _stock_norm_rope(inputs: Inputs, name: str, tables: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    x, weight = inputs[name], inputs[f"{name}_norm"]
    if weight is not None:
        x = F.rms_norm(x, x.shape[-1:], weight, eps=1e-6)
    if tables is None:
        return x
    cos, sin = tables
    head, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = head.chunk(2, dim=-1)
    rotated = head * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _stock_write(
    cache: torch.Tensor, x: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], scale: torch.Tensor | None
) -> None:
    """Write x [T, K, H] into a cache [blocks, K, B, H] at (blocks, offsets)."""
    if scale is not None:
        largest = LARGEST[cache.dtype]
        x = x.float()
        if scale.numel() > 1:
            rows = x.abs().amax(-1) / largest  # [T, K]
            scale.transpose(1, 2)[where] = rows
            scale = rows.unsqueeze(-1)
        x = (x / scale).clamp(-largest, largest)
        x = (x.round() if cache.dtype == torch.int8 else x).to(cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:
        cache, x = cache.view(torch.uint8), x.view(torch.uint8)
    cache.transpose(1, 2)[where] = x


def _one_by_one(problem: Problem, inputs: Inputs, impl: str) -> Call:
    """The same by this project's separate ops: at most four launches instead of one."""
    how = cases.options(problem.case)
    cache = {name: inputs[name] for name in ("kv_cache", "slot_mapping", "k_scale", "v_scale")}

    def call() -> torch.Tensor:
        q, k = inputs["q"], inputs["k"]
        if inputs["q_norm"] is not None:
            q, k = (
                rms_norm(x, inputs[f"{name}_norm"], weight_offset=how["norm_offset"], impl=impl)
                for name, x in (("q", q), ("k", k))
            )
        if inputs["cos"] is not None:
            q, k = apply_rope(q, k, inputs["cos"], inputs["sin"], interleaved=how["interleaved"], impl=impl)
        write_kv_(k=k, v=inputs["v"], **cache, impl=impl)
        return q

    return call


def _vllm(problem: Problem, inputs: Inputs, launchers: tuple[Callable[..., None], Callable[..., None]]) -> Call:
    """Write into pages of vLLM's own layout, as many as ours."""
    plain, quantising = launchers
    pages = inputs["kv_cache"]
    blocks, K, B, _ = pages.shape
    where = [pages.new_empty(blocks, B, K, problem.case.sizes[letter]) for letter in "HV"]
    if problem.case.options["scales"] == "written":
        scales = [torch.empty(blocks, B, K, device=pages.device) for _ in range(2)]
        mode = KVQuantMode.INT8_PER_TOKEN_HEAD if pages.dtype == torch.int8 else KVQuantMode.FP8_PER_TOKEN_HEAD
        return partial(quantising, inputs["k"], inputs["v"], *where, *scales, inputs["slot_mapping"], mode)
    kind = "auto" if problem.case.options["cache"] is None else "fp8"
    scale = [inputs[name] for name in ("k_scale", "v_scale")]
    return partial(plain, inputs["k"], inputs["v"], *where, inputs["slot_mapping"], kind, *scale)


BENCHMARK = Benchmark(
    name="cache_write",
    summary="write_kv_, norm_rope_write_kv_ and copy_blocks_, against a copy of the bytes, eager, own ops and vLLM",
    targets={},
    plan=plan,
    check=check,
    warm=warm,
    ops=tuple(spec.name for spec in cases.SPECS),
    sources=("bench/suites/paged_peers.py",),
)
