"""``paged_attention`` of one new token per sequence, against the bandwidth at which keys and values can be read.

A decode reads every cached key and value once, so its target is relative to a copy of as many bytes, if they exceed a
cache (256 MiB). Batches of 1 to 256, contexts of 128 to 128k tokens as far as they fit; 1 to 16 query heads per KV
head; pages of 1, 16 and 256; quantised caches; and one long sequence among short ones, which must not delay them. The
peers are in ``paged_peers.py``; ours is also compared with its invariant mode and with itself without the plan that a
step's layers share. The launch gap (``paged.py``) is a call's cost on the host.

On a CPU the peer is one ``scaled_dot_product_attention`` over contiguous keys and values, called as models do (query
heads share KV heads by ``enable_gqa``), and without a target in its fastest form there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ..harness.benchmark import Benchmark, Measurement, Settings
from . import paged, paged_peers
from .paged import Peer, Step, decodes

TARGETS = {
    "against a copy of the bytes, 256 MiB of keys and values and up": 0.88,
    "against every other peer": 1.0,
    "CPU, pages of 256, against SDPA over contiguous KV": 1 / 1.5,
}
COPY, PEERS, CPU = TARGETS.values()

TIME = "decode, us"
PEER_NAMES = (paged_peers.VLLM, paged_peers.VARLEN, paged_peers.SDPA, paged_peers.FLASHINFER, paged_peers.FLEX)
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (128, 1024, 8192, 32768, 131072)
SHORT = {(64, 1024), (64, 8192)}
GAP = decodes(1, 128)  # so little work that the host's part shows
CPU_PAGE = 256  # the default there
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def steps(settings: Settings) -> list[Step]:
    if settings.dry:
        tiny: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_size": 16, "dtype": torch.float32}
        return [
            decodes(2, 21, kv_dtype=torch.float32, short=True, **tiny),
            decodes(1, 18, kv_dtype=FP8, scales="tensor", short=True, **tiny),
        ]
    if not settings.cuda:
        small: dict[str, Any] = {
            "heads": 8,
            "kv_heads": 2,
            "head_size": 64,
            "dtype": torch.float32,
            "kv_dtype": torch.float32,
        }
        return [decodes(32, 1024, page=page, **small) for page in (CPU_PAGE, 16)]
    found = _on_a_gpu()
    return [step for step in found if step.short or step.name == GAP.name] if settings.short else found


def _on_a_gpu() -> list[Step]:
    sizes = [(batch, context) for batch in BATCHES for context in CONTEXTS]
    found = [decodes(*size, short=size in SHORT) for size in sizes if decodes(*size).kv_bytes <= paged.MAX_KV]
    found.append(_outlier(63, 1024, 131072))
    found += [decodes(32, 4096, heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((32, 32), (64, 8), (64, 4))]
    found += [decodes(64, 8192, page=page) for page in (1, 256)]
    quantised = (FP8, "tensor"), (FP8, "token_head"), (INT8, "token_head")
    found += [decodes(64, 8192, kv_dtype=dtype, scales=scales) for dtype, scales in quantised]
    return found


def _outlier(others: int, context: int, longest: int) -> Step:
    contexts = (context - 1,) * others + (longest - 1,)
    return Step(contexts, (1,) * len(contexts), note=f"s{others}-l{context}-and_l{longest}", short=True)


def plan(settings: Settings) -> list[Measurement]:
    found = steps(settings)
    if not settings.cuda and not settings.dry:
        sdpa = Peer(paged_peers.SDPA, paged_peers.sdpa)
        packed = Peer(paged_peers.SDPA_PACKED, paged_peers.sdpa_packed)
        rows = [paged.row(settings, step, TIME, sdpa, CPU if step.page == CPU_PAGE else None) for step in found]
        return rows + [paged.row(settings, step, TIME, packed) for step in found]
    peers = paged_peers.peers(settings)
    rows = []
    timed = [step for step in found if step.short or not settings.short]  # the others only serve the launch gap
    for step in timed:
        rows.append(paged.row(settings, step, TIME, paged.COPY, copy_target(step)))
        names = PEER_NAMES[:1] if settings.short else PEER_NAMES
        those = [peers[name] for name in names if name in peers and peers[name].takes(step)]
        rows += [paged.row(settings, step, TIME, peer, PEERS) for peer in those]
        modes = [paged.INVARIANT] if settings.short and step is not timed[0] else paged.MODES
        rows += [paged.row(settings, step, TIME, paged.own(settings, mode)) for mode in modes]
    if settings.cuda and not settings.dry:  # otherwise there is no graph to compare with
        rows.append(paged.gap_row(settings, GAP, peers.get(paged_peers.VLLM, paged.own(settings, paged.UNPLANNED))))
    return rows


def copy_target(step: Step) -> float | None:
    return COPY if step.kv_bytes >= paged.MEASURED_KV else None


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    yield from paged.check(steps(settings), settings, names)


def warm(settings: Settings, name: str) -> None:
    paged.warm(steps(settings), settings, name)


BENCHMARK = Benchmark(
    name="paged_decode",
    summary="paged_attention of one token per sequence, against a copy of the bytes, vLLM, torch and itself",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("paged_attention",),
    sources=("bench/suites/paged.py", "bench/suites/paged_peers.py", "bench/harness/stock.py"),
)
