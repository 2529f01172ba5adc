"""``paged_attention`` of whole prompts, 512 to 32k tokens, and of chunks after a cached context.

The products are the limit here, so a row gives the share of the device's peak that they reach, over the keys that
causal queries see. SDPA and ``varlen_attn`` run over contiguous keys and values, which a serving engine would first
have to gather; the comparison does not count that. The peers are in ``paged_peers.py``; ours is also compared with its
invariant mode, which uses the arithmetic of decodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ..harness.benchmark import Benchmark, Measurement, Settings
from . import paged, paged_peers
from .paged import Step

TARGETS = {
    "against vLLM's kernel, a prompt of 8k tokens": 2.0,
    "against SDPA's FlashAttention over contiguous KV": 0.9,
}
VLLM, FLASH = TARGETS.values()

TIME = "prefill, us"
PEER_NAMES = (
    paged_peers.VLLM,
    paged_peers.SDPA_FLASH,
    paged_peers.SDPA_CUDNN,
    paged_peers.VARLEN,
    paged_peers.FLASHINFER,
    paged_peers.FLEX,
)
SHORT_NAMES = PEER_NAMES[:3]
MEASURED_TOKENS = 8192
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SHORT = {2048, 8192}


def prompts(batch: int, length: int, *, context: int = 0, **options: Any) -> Step:
    """``batch`` chunks of ``length`` tokens, each after ``context`` cached ones."""
    note = f"s{batch}-t{length}" + (f"-behind{context}" if context else "")
    return Step((context,) * batch, (length,) * batch, note=note, **options)


def steps(settings: Settings) -> list[Step]:
    if settings.dry or not settings.cuda:
        tiny: dict[str, Any] = {
            "heads": 4,
            "kv_heads": 2,
            "head_size": 16,
            "dtype": torch.float32,
            "kv_dtype": torch.float32,
        }
        return [prompts(1, 18, short=True, **tiny), prompts(1, 5, context=14, short=True, **tiny)]
    found = [prompts(1, length, short=length in SHORT) for length in LENGTHS]
    found += [prompts(8, 1024), prompts(1, 8192, page=256), prompts(1, 8192, head_size=64)]
    found += [prompts(1, 8192, heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((32, 32), (64, 4))]
    found.append(prompts(1, 8192, kv_dtype=torch.float8_e4m3fn, scales="tensor"))
    found.append(prompts(1, 2048, context=6144, short=True))
    found += [prompts(1, 512, context=32256), prompts(4, 2048, context=30720)]
    return [step for step in found if step.short] if settings.short else found


def plan(settings: Settings) -> list[Measurement]:
    peers = paged_peers.peers(settings)
    names = SHORT_NAMES if settings.short else (paged_peers.SDPA, *PEER_NAMES) if settings.dry else PEER_NAMES
    rows = []
    for step in steps(settings):
        those = [peers[name] for name in names if name in peers and peers[name].takes(step)]
        rows += [paged.row(settings, step, TIME, peer, target(step, peer.name)) for peer in those]
        rows.append(paged.row(settings, step, TIME, paged.own(settings, paged.INVARIANT)))
    return rows


def target(step: Step, peer_name: str) -> float | None:
    if peer_name == paged_peers.SDPA_FLASH:
        return FLASH
    whole = max(step.context) == 0 and max(step.queries) == MEASURED_TOKENS
    return VLLM if peer_name == paged_peers.VLLM and whole else None


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    yield from paged.check(steps(settings), settings, names)


def warm(settings: Settings, name: str) -> None:
    paged.warm(steps(settings), settings, name)


BENCHMARK = Benchmark(
    name="paged_prefill",
    summary="paged_attention of prompts and chunks, against vLLM, SDPA over contiguous KV, FlexAttention and itself",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("paged_attention",),
    sources=("bench/suites/paged.py", "bench/suites/paged_peers.py", "bench/harness/stock.py"),
    devices=("cuda",),
)
