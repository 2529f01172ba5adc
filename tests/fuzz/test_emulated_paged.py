"""Random calls of paged attention, compiled and emulated: all features, layouts and tiles, over odd pages and views."""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import product
from random import Random
from typing import Any

import emulated
import pytest
import torch
from emulated import Refused, Trial
from fuzz import Fuzz

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.registry import Case
from shardfuse.kernels.paged_attention import config as tiles
from shardfuse.kernels.paged_attention import tuned
from shardfuse.kernels.paged_attention.config import AttentionConfig, Problem
from shardfuse.kernels.paged_attention.options import AttentionOptions
from shardfuse.kernels.runtime.dtypes import BF16, E4M3, FP16, FP32, INT8

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

HEAD_SIZES = (17, 32, 33, 40, 64, 80, 96, 128, 128, 256)
PAGES = (1, 2, 3, 8, 16, 16, 32, 64, 100, 128, 256)
CACHES = {BF16: (FP16, E4M3, E4M3, INT8), FP16: (BF16, E4M3, E4M3, INT8), FP32: (FP16, BF16, E4M3, INT8)}
# What a case may ask for, and how often.
FEATURES: dict[str, tuple[float, tuple[Any, ...]]] = {
    "window": (0.3, (1, 7, 64, 128, 300)),
    "softcap": (0.25, (5.0, 30.0)),
    "sinks": (0.25, (True,)),
    "alibi": (0.15, (True,)),
    "invariant": (0.25, (True,)),
    "prefix": (0.1, (True,)),
    "tree": (0.15, (True,)),
    "causal": (0.1, (False,)),
}
AS_THEY_ARE = ("kv_cache", "k_scale", "v_scale")  # whose layouts are the case's, with NaN around
GRID = ((16, 32, 64, 128), (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4, 5), (1, 2, 3))  # as AttentionConfig has them


def _drawn(draw: Random, arch: str) -> Trial:
    dtype, size = draw.choice((BF16, BF16, FP16, FP32)), draw.choice(HEAD_SIZES)
    kv_heads = 1 if size > 128 else draw.choice((1, 2, 3))
    group, page = draw.choice((1, 2, 3, 4, 7, 8, 16)), draw.choice(PAGES)
    context, queries = _lengths(draw, page, most=40_000 // (group * size * kv_heads))
    options = {name: draw.choice(values) for name, (share, values) in FEATURES.items() if draw.random() < share}
    options |= {"context": context, "queries": queries, "lse": True}
    options |= {"layout": draw.choice(("one", "pair", "nhd", "views"))}
    options |= {"host": draw.choice(("nothing", "bounds", "plan"))}
    if draw.random() < 0.45:
        options["cache"] = draw.choice(CACHES[dtype])
        scaled = options["cache"] == INT8 or options["cache"] == E4M3
        options["scales"] = draw.choice(("tensor", "token")) if scaled != (draw.random() < 0.1) else None
    sizes = {"N": kv_heads * group, "K": kv_heads, "H": size, "Hv": draw.choice((size, size, size, 64, 24))}
    case = Case("drawn", dtype, sizes | {"block_size": page}, options)
    notes: list[str] = []
    around = _any_tiles(draw, notes) if draw.random() < 0.5 else None
    spec = registry.op("paged_attention")
    trial = emulated.of_op(draw, spec, case, as_they_are=AS_THEY_ARE, around=around, notes=notes)
    trial = dataclasses.replace(trial, kind=f"{'invariant ' if options.get('invariant') else ''}{_step(queries)}")
    refused = _refused(case)
    return dataclasses.replace(trial, check=lambda: _must_refuse(trial, refused)) if refused else trial


def _lengths(draw: Random, page: int, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(context, queries) of each sequence: at most ``most`` of these; lengths end at, before and behind pages."""
    seqs = draw.randint(1, 4)
    share = max(1, min(150, most // seqs))
    one = {
        "decode": lambda: 1,
        "speculate": lambda: draw.randint(0, min(9, share)),
        "prefill": lambda: draw.randint(1, share),
        "mixed": lambda: draw.choice((0, 1, 1, draw.randint(1, share))),
    }[draw.choice(("decode", "speculate", "prefill", "mixed"))]
    queries = (*(one() for _ in range(seqs - 1)), max(1, one()))
    longest = draw.choice((60, 300) if max(queries) > 9 else (60, 300, 900, 2500))
    lengths = lambda: (0, draw.randint(0, longest), max(0, page * draw.randint(0, longest // page) - 1))
    return tuple(draw.choice(lengths()) for _ in range(seqs)), queries


def _step(queries: tuple[int, ...]) -> str:
    return "decode" if max(queries) == 1 else "prefill"


def _refused(case: Case) -> str | None:
    """What the op refuses of a case's options, by the name that it has there."""
    options, some = case.options, torch.empty(0)
    given = [some if options.get(name) else None for name in ("alibi", "prefix", "tree", "scales", "scales")]
    asked = AttentionOptions(1.0, options.get("causal", True), options.get("window"), None, None, *given)
    return asked.refused(options.get("cache") or case.dtype)


def _must_refuse(trial: Trial, name: str) -> list[str]:
    try:
        trial.check()
    except ValueError as error:
        if f"paged_attention refuses {name}: " not in str(error):
            raise
        raise Refused(name) from error
    return [f"expected the refusal of {name}"]


def _any_tiles(draw: Random, notes: list[str]) -> contextlib.AbstractContextManager[None]:
    """Every launch whose tile a table may decide runs in any that fits; with the rule's tile where none does."""
    plain = tiles.pick_tile

    def choose(problem: Problem, rows: int) -> AttentionConfig:
        every = (AttentionConfig(*sizes[:4], split_keys=64, per_sm=sizes[4]) for sizes in product(*GRID))
        found = [tile for tile in every if tuned.fits(problem, tile)] or [plain(problem, rows)]
        notes.append(f"up to {rows} rows in {(tile := draw.choice(found))}, {tile.per_sm} programs to a multiprocessor")
        return tile

    return emulated.choosing(tiles, "pick_tile", choose)


@emulated.needed
def test_paged_attention(fuzz: Fuzz):
    emulated.run(fuzz, _drawn)
