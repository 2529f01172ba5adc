"""Invariant mode: a sequence's output is the same, bit for bit, whatever shares its batch and however it was chunked.

On a GPU at a model's sizes, and interpreted at small ones: there, too, the rows of products of one shape do not touch.
On a CPU also in plain torch, which has a path of its own for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardfuse.kernels.paged_attention import paged_attention
from shardfuse.kernels.runtime import dispatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
KERNEL = pytest.param("triton", marks=pytest.mark.gpu if ON_GPU else pytest.mark.interpret)
IMPLS = [KERNEL] if ON_GPU else [KERNEL, "auto"]

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 37},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.arange(3.0) - 1},
    "alibi": {"alibi_slopes": torch.arange(1.0, 4.0) / 8},
    "int8": {"cache": torch.int8},
}
Step = tuple[int, int]  # context and queries


@dataclass(frozen=True)
class Sizes:
    """Of the sequence that is looked at, and of all that may share its batch."""

    length: int
    heads: tuple[int, int, int]  # query heads, KV heads, head size
    block_size: int
    chunkings: tuple[tuple[int, ...], ...]  # where chunks end
    others: tuple[tuple[Step, ...], ...]


# Borders of tiles (16), quanta (32), pages (8) are crossed; six programs run at once.
SMALL = Sizes(
    length=70,
    heads=(3, 1, 16),
    block_size=8,
    chunkings=((69, 70), (33, 34, 70)),
    others=((), ((20, 1), (100, 1), (0, 9))),
)
# Quanta of 1024 keys, pages of 16.
LARGE = Sizes(
    length=5000,
    heads=(32, 8, 128),
    block_size=16,
    chunkings=((1, 1000, 1025, 3333, 4999, 5000), (2048, 4998, 4999, 5000)),
    others=((), ((900, 1), (70_000, 1), (0, 777), (12, 5)), ((1023, 1),) * 200),
)
# Blocks of 8 queries, segments of 256 keys.
PLAIN = dataclasses.replace(SMALL, length=600, chunkings=((1, 255, 256, 600), (263, 266, 599, 600)))
SIZES = {"triton": LARGE if ON_GPU else SMALL, "auto": PLAIN}


def _sequence(dtype: torch.dtype, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [L, N, H], kv [L, K, 2H])"""
    n, k, h = sizes.heads
    generator = torch.Generator().manual_seed(3)
    q, kv = (torch.randn(sizes.length, *shape, generator=generator) for shape in ((n, h), (k, 2 * h)))
    return q.to(DEVICE, dtype), kv.to(DEVICE, dtype)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    start: int,
    end: int,
    others: Sequence[Step],
    seed: int,
    impl: str = "triton",
    **options: Any,
) -> torch.Tensor:
    """out and lse of the queries from ``start`` to ``end``, computed beside ``others``: [end - start, N, H + 1] fp32.

    The sequence stands in the middle of the batch, in blocks that the seed deals. ``cache`` is a quantised dtype, with
    a scale for each token and head.
    """
    n, k, h = SIZES[impl].heads
    size, middle = SIZES[impl].block_size, len(others) // 2
    steps = [*others[:middle], (start, end - start), *others[middle:]]
    lengths, queries = [c + q_len for c, q_len in steps], [q_len for _, q_len in steps]
    pages = [-(-length // size) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    tables = torch.full((len(steps), max(pages)), -1, dtype=torch.int32)
    for row, mine in zip(tables, torch.randperm(sum(pages), generator=generator).split(pages)):
        row[: len(mine)] = mine
    cache = torch.randn(sum(pages), k, size, 2 * h, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    cache = cache.to(kv.dtype)
    positions = torch.arange(end)
    blocks = tables[middle][positions // size].long().to(DEVICE)
    cache[blocks, :, (positions % size).to(DEVICE)] = kv[:end]
    all_q = torch.randn(sum(queries) + 2, n, h, generator=generator).to(DEVICE, q.dtype)
    first = sum(queries[:middle])
    all_q[first : first + end - start] = q[start:end]
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if "cache" in options:
        cache, options["k_scale"], options["v_scale"] = _quantised(cache, options.pop("cache"))
    out, lse = paged_attention(
        *(all_q, cache, tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), starts),
        return_lse=True,
        impl=impl,
        **options,
    )
    return torch.cat((out.float(), lse.unsqueeze(-1)), -1)[first : first + end - start]


def _quantised(cache: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, their scales for keys, for values): each token's and head's largest is 127."""
    halves = cache.float().chunk(2, -1)
    scales = [half.abs().amax(-1) / 127 for half in halves]
    codes = [(half / scale.unsqueeze(-1)).round() for half, scale in zip(halves, scales)]
    return torch.cat(codes, -1).to(dtype), scales[0], scales[1]


def _features() -> dict[str, dict[str, Any]]:
    if not ON_GPU:
        return FEATURES
    heads = LARGE.heads[0]
    return {
        **FEATURES,
        "window": {"window": 1500},
        "sinks": {"sinks": torch.arange(heads) / 8 - 2},
        "alibi": {"alibi_slopes": torch.arange(1, heads + 1) / 64},
    }


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("feature", "dtype"),
    [
        ("causal", torch.bfloat16),
        ("int8", torch.bfloat16),
        ("window", torch.float32),
        ("alibi", torch.bfloat16),
        ("window", torch.bfloat16),
        ("softcap", torch.bfloat16),
        ("sinks", torch.bfloat16),
        ("int8", torch.float16),
    ],
)
def test_the_same_bits_however_a_sequence_is_computed(feature: str, dtype: torch.dtype, impl: str) -> None:
    sizes = SIZES[impl]
    q, kv = _sequence(dtype, sizes)
    options = {**_features()[feature], "invariant": True, "impl": impl}
    whole = _attend(q, kv, 0, sizes.length, (), 0, **options)
    batches = zip(sizes.chunkings, sizes.others[1:] + sizes.others[:1])  # each chunking once, each company once
    for seed, (ends, others) in enumerate(batches):
        starts = (0, *ends[:-1])
        parts = [_attend(q, kv, *chunk, others, seed + 1, **options) for chunk in zip(starts, ends)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_process_wide_switch_is_heard(impl: str) -> None:
    sizes = SIZES[impl]
    q, kv = _sequence(torch.bfloat16, sizes)
    last = sizes.length - 1
    asked = _attend(q, kv, last, last + 1, (), 1, impl, invariant=True)
    with dispatch.row_invariance():
        assert torch.equal(_attend(q, kv, last, last + 1, sizes.others[1], 2, impl), asked)


@pytest.mark.parametrize("impl", [KERNEL])
def test_fast_mode_makes_no_such_promise(impl: str) -> None:
    """So that the equality above means something: the same sequence, cut or not by how much else there is to do."""
    sizes = SIZES[impl]
    q, kv = _sequence(torch.float32, sizes)
    last = sizes.length - 1
    company = sizes.others[1] if ON_GPU else ((1500, 1),)
    alone = _attend(q, kv, last, last + 1, (), 1)
    assert not torch.equal(_attend(q, kv, last, last + 1, company, 2), alone)
