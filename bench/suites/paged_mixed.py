"""``paged_attention`` of an engine's mixed steps: a prefill chunk beside decodes, and speculative decodes.

The chunk has long programs and the decodes many: neither may wait for the other. A speculative decode has five queries
per sequence, a token and four guesses, over keys that are still read once. No dense call supports ragged sequences; the
peers (``paged_peers.py``) are those that do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ..harness.benchmark import Benchmark, Measurement, Settings
from . import paged, paged_decode, paged_peers, paged_prefill
from .paged import Step, decodes

TARGETS = {
    "a chunk of 8k tokens beside decodes, against vLLM's kernel": paged_prefill.VLLM,
    "speculative decodes, against a copy of the bytes, 256 MiB of keys and values and up": paged_decode.COPY,
    "speculative decodes, against every other peer": paged_decode.PEERS,
}

TIME = "mixed, us"
GUESSED = 5  # queries of a sequence with four guessed tokens
PEER_NAMES = (paged_peers.VLLM, paged_peers.VARLEN, paged_peers.FLASHINFER)


def chunk_beside(tokens: int, batch: int, length: int, **options: Any) -> Step:
    """A prompt's first ``tokens`` among ``batch`` decodes over ``length`` keys each."""
    before = batch // 2
    after = batch - before
    context = (length - 1,) * before + (0,) + (length - 1,) * after
    queries = (1,) * before + (tokens,) + (1,) * after
    return Step(context, queries, note=f"t{tokens}-and_s{batch}-l{length}", **options)


def steps(settings: Settings) -> list[Step]:
    if settings.dry or not settings.cuda:
        tiny: dict[str, Any] = {
            "heads": 4,
            "kv_heads": 2,
            "head_size": 16,
            "dtype": torch.float32,
            "kv_dtype": torch.float32,
        }
        return [chunk_beside(7, 2, 19, short=True, **tiny), decodes(1, 20, queries=GUESSED, short=True, **tiny)]
    found = [chunk_beside(8192, 64, 4096, short=True), chunk_beside(2048, 64, 4096), chunk_beside(512, 128, 8192)]
    found += [decodes(*size, queries=GUESSED) for size in ((8, 1024), (8, 32768), (128, 1024))]
    found.append(decodes(64, 8192, queries=GUESSED, short=True))
    return [step for step in found if step.short] if settings.short else found


def plan(settings: Settings) -> list[Measurement]:
    peers = paged_peers.peers(settings)
    rows = []
    for step in steps(settings):
        rows.append(paged.row(settings, step, TIME, paged.COPY, target(step, paged.COPY.name)))
        those = [peers[name] for name in PEER_NAMES if name in peers and peers[name].takes(step)]
        rows += [paged.row(settings, step, TIME, peer, target(step, peer.name)) for peer in those]
        rows.append(paged.row(settings, step, TIME, paged.own(settings, paged.INVARIANT)))
    return rows


def target(step: Step, peer_name: str) -> float | None:
    if max(step.queries) == GUESSED:
        return paged_decode.copy_target(step) if peer_name == paged.COPY.name else paged_decode.PEERS
    whole = max(step.queries) == paged_prefill.MEASURED_TOKENS
    return paged_prefill.VLLM if peer_name == paged_peers.VLLM and whole else None


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    yield from paged.check(steps(settings), settings, names)


def warm(settings: Settings, name: str) -> None:
    paged.warm(steps(settings), settings, name)


BENCHMARK = Benchmark(
    name="paged_mixed",
    summary="paged_attention of a prefill chunk beside decodes, and of speculative decodes, against vLLM and others",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("paged_attention",),
    sources=(
        "bench/suites/paged.py",
        "bench/suites/paged_peers.py",
        "bench/suites/paged_decode.py",
        "bench/suites/paged_prefill.py",
    ),
    devices=("cuda",),
)
