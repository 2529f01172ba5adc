"""The batches that tests, ahead-of-time builds and benchmarks share for ``paged_attention``.

A case lists each sequence's context (tokens cached before this step) and queries (tokens of this step), and what is
asked of the call (``_DEFAULTS``). Blocks are dealt from a shuffled pool that holds a few more than are needed. What may
not matter is poisoned: slots that no sequence owns, and their scales, hold NaN (in int8, which has none, the extremes);
so do the padding rows of q; table entries past a sequence's end name no block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch

from ...paged_attention.op import Cache, paged_attention, plan_attention, split_cache
from ...runtime.dtypes import BF16, E4M3, FP16, FP32, LARGEST
from ..registry import Build, Case, OpSpec

_SPARE_BLOCKS = 3
_PADDING_TOKENS = 2

# What a case's options may say beside ``context`` and ``queries``, and what is meant where they don't.
_DEFAULTS: dict[str, Any] = {
    "cache": None,  # dtype; None: q's
    "causal": True,
    "window": None,
    "softcap": None,
    "sinks": False,
    "alibi": False,
    "prefix": False,
    "tree": False,
    "scales": None,  # "tensor" or "token" (and head)
    "lse": False,
    "invariant": None,
    "max_query_len": None,
    "layout": "one",  # tensor; "pair"; "nhd": one tensor, slots before heads; "views": a pair cut out of one allocation
    "host": "nothing",  # what it knows beforehand: both "bounds" of lengths, or these and a "plan"
}


def _case(
    name: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    context: tuple[int, ...],
    queries: tuple[int, ...],
    *tags: str,
    **options: Any,
) -> Case:
    """``heads`` is (query heads, KV heads, head size); ``context`` and ``queries`` have one entry per sequence."""
    n, k, h = heads
    sizes = {"N": n, "K": k, "H": h, "Hv": options.pop("v_size", h), "block_size": block_size}
    return Case(name, dtype, sizes, {"context": context, "queries": queries, **options}, frozenset(tags))


def _built(
    name: str, dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, queries: int = 64, **options: Any
) -> Case:
    """A model's heads, for what is compiled of them: lengths are no matter where the host does not know them."""
    return _case(name, dtype, heads, block_size, (1023,) * 8, (queries,) * 8, "codegen", **options)


CASES = (
    # Small enough to interpret: every group size, head size, page size, dtype and kind of step appears. All features
    # with all others: paged_features.py.
    _case("decode-g1-h32-p4-fp32", FP32, (2, 2, 32), 4, (5, 0, 16), (1, 1, 1), "test"),
    _case("decode-g3-h80-p16-fp16", FP16, (6, 2, 80), 16, (40, 3), (1, 1), "test"),
    _case("decode-g8-h128-p32-bf16", BF16, (8, 1, 128), 32, (31, 64, 95), (1, 1, 1), "test", "short"),
    _case("prefill-g1-h64-p1-fp16", FP16, (2, 2, 64), 1, (0,), (70,), "test"),
    _case("prefill-g2-h32-p16-bf16", BF16, (4, 2, 32), 16, (0, 0), (37, 64), "test"),
    _case("prefill-g4-h80-p4-fp32", FP32, (4, 1, 80), 4, (0,), (41,), "test"),
    _case("mixed-g3-h32-p4-fp32", FP32, (3, 1, 32), 4, (9, 0, 30, 2), (1, 25, 1, 7), "test"),
    _case("mixed-g4-h64-p128-bf16", BF16, (8, 2, 64), 128, (130, 17, 0), (1, 40, 80), "test", "short"),
    _case("mixed-g2-h128-p16-fp16", FP16, (4, 2, 128), 16, (15, 0, 16, 50), (1, 0, 33, 1), "test"),
    # Chunks whose first token stands two before the end of a tile of keys, with others behind it.
    _case("chunks-g2-h32-p16-fp16", FP16, (4, 2, 32), 16, (14, 62, 126), (5, 5, 5), "test"),
    # What a GPU is tested with at sizes of models. (What it is timed with: bench/suites/paged.py.)
    _case("decode-llama8b-bf16", BF16, (32, 8, 128), 16, (1023,) * 32, (1,) * 32, "bench", "short"),
    _case("decode-llama70b-bf16", BF16, (64, 8, 128), 16, (4095,) * 16, (1,) * 16, "bench"),
    _case("decode-h64-p256-bf16", BF16, (32, 4, 64), 256, (2047,) * 32, (1,) * 32, "bench"),
    _case("decode-starcoder2-fp32", FP32, (24, 2, 128), 16, (511,) * 8, (1,) * 8, "bench"),
    _case("speculate-llama8b-bf16", BF16, (32, 8, 128), 16, (1019,) * 32, (5,) * 32, "bench"),
    _case("prefill-llama8b-bf16", BF16, (32, 8, 128), 16, (0,), (4096,), "bench", "short"),
    _case("prefill-h80-g1-fp16", FP16, (32, 32, 80), 16, (0,) * 4, (1024,) * 4, "bench"),
    _case("prefill-h64-p256-bf16", BF16, (32, 4, 64), 256, (0,), (4096,), "bench"),
    _case("mixed-llama8b-bf16", BF16, (32, 8, 128), 16, (1023,) * 31 + (0,), (1,) * 31 + (2048,), "bench", "short"),
    # What is compiled: every tile of config.py, every feature.
    _built("llama8b-bf16", BF16, (32, 8, 128), 16),
    _built("llama8b-decode-bf16", BF16, (32, 8, 128), 16, 1, host="bounds"),
    _built("llama8b-speculate8-bf16", BF16, (32, 8, 128), 16, 8, host="bounds"),
    _built("llama8b-speculate16-bf16", BF16, (32, 8, 128), 16, 16, host="bounds"),
    _built("llama8b-invariant-bf16", BF16, (32, 8, 128), 16, invariant=True),
    _built("llama8b-full-bf16", BF16, (32, 8, 128), 16, causal=False),
    _built("llama8b-prefix-bf16", BF16, (32, 8, 128), 16, prefix=True),
    _built("llama8b-tree-bf16", BF16, (32, 8, 128), 16, tree=True),
    _built("llama8b-fp8-bf16", BF16, (32, 8, 128), 16, cache=E4M3, scales="tensor"),
    _built("llama8b-fp8-rows-bf16", BF16, (32, 8, 128), 16, cache=E4M3, scales="token"),
    _built("llama8b-fp8-rows-fp16", FP16, (32, 8, 128), 16, cache=E4M3, scales="token"),
    _built("llama8b-fp8-invariant-bf16", BF16, (32, 8, 128), 16, cache=E4M3, scales="tensor", invariant=True),
    _built("llama8b-fp8-rows-invariant-bf16", BF16, (32, 8, 128), 16, cache=E4M3, scales="token", invariant=True),
    _built("llama8b-int8-bf16", BF16, (32, 8, 128), 16, cache=torch.int8, scales="token"),
    _built("llama8b-mixed-fp16", FP16, (32, 8, 128), 16, cache=BF16),
    _built("llama8b-wide-fp32", FP32, (32, 8, 128), 16, cache=BF16),
    _built("llama70b-p1-bf16", BF16, (64, 8, 128), 1),
    _built("h64-p256-bf16", BF16, (32, 4, 64), 256),
    _built("h64-p256-invariant-bf16", BF16, (32, 4, 64), 256, invariant=True),
    _built("gpt-oss-bf16", BF16, (64, 8, 64), 16, window=128, sinks=True),
    _built("gemma-bf16", BF16, (16, 8, 256), 16, window=4096, softcap=50.0),
    _built("gemma-full-bf16", BF16, (16, 8, 256), 16),
    _built("gemma-invariant-bf16", BF16, (16, 8, 256), 16, window=4096, softcap=50.0, invariant=True),
    _built("gemma-mixed-fp16", FP16, (16, 8, 256), 16, window=4096, softcap=50.0, cache=BF16),
    _built("gemma-mixed-invariant-fp16", FP16, (16, 8, 256), 16, cache=BF16, invariant=True),
    _built("bloom-bf16", BF16, (32, 32, 128), 16, alibi=True),
    _built("falcon-bf16", BF16, (71, 1, 64), 16),
    _built("phi-h80-fp16", FP16, (32, 32, 80), 16),
    _built("phi3-h96-fp16", FP16, (32, 32, 96), 16),
    _built("h112-p100-bf16", BF16, (64, 8, 112), 100),
    _built("h160-fp16", FP16, (32, 32, 160), 16),
    _built("h192-v128-bf16", BF16, (16, 16, 192), 64, v_size=128),
    _built("h72-v64-pair-bf16", BF16, (16, 16, 72), 16, v_size=64, layout="pair"),  # rows of 16 bytes times 9
    _built("starcoder2-fp32", FP32, (24, 2, 128), 16),
    _built("starcoder2-invariant-fp32", FP32, (24, 2, 128), 16, invariant=True),
    _built("gemma-fp32", FP32, (16, 8, 256), 16),
    _case("decode-cpu-fp32", FP32, (8, 2, 64), 16, (1023,) * 32, (1,) * 32, "bench-cpu"),
    _case("prefill-cpu-fp32", FP32, (8, 2, 64), 16, (0,) * 4, (256,) * 4, "bench-cpu"),
)


def asked(case: Case) -> dict[str, Any]:
    """The options of a case, each of ``_DEFAULTS`` among them."""
    return {**_DEFAULTS, **case.options, "cache": case.options.get("cache") or case.dtype}


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """A call's tensors by their names in ``paged_attention``; those that the case does not ask for are left out."""
    generator, shuffle = torch.Generator(on).manual_seed(seed), torch.Generator().manual_seed(seed)
    n, h = case.sizes["N"], case.sizes["H"]
    options = asked(case)
    context, queries = options["context"], options["queries"]
    tokens = sum(queries) + _PADDING_TOKENS
    q = torch.randn(tokens, n, h, generator=generator, device=on).to(case.dtype)
    q[sum(queries) :] = float("nan")
    block_tables, owned = _deal(case, shuffle)
    inputs: dict[str, Any] = {
        "q": q,
        "block_tables": block_tables.to(on),
        "seq_lens": torch.tensor([c + q for c, q in zip(context, queries)], dtype=torch.int32, device=on),
        "query_start_loc": torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=on),
        **_cached(case, owned.to(on), generator),
    }
    if options["sinks"]:
        inputs["sinks"] = torch.randn(n, generator=generator, device=on)
    if options["alibi"]:
        inputs["alibi_slopes"] = 2.0 ** (-8 / n * torch.arange(1, n + 1, device=on))
    if options["prefix"]:  # none, part of a sequence, more than it has
        lengths = [(c + q) * (s % 3) * 2 // 3 for s, (c, q) in enumerate(zip(context, queries), start=1)]
        inputs["prefix_lens"] = torch.tensor(lengths, dtype=torch.int32, device=on)
    if options["tree"]:  # wider than needed; some rows see no token of this step
        mask = torch.rand(tokens, max(queries) + 1, generator=generator, device=on) < 0.5
        mask[::4] = False
        inputs["tree_mask"] = mask
    return inputs


def _deal(case: Case, shuffle: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_tables [S, P] int32, which slots are owned [blocks, B] bool)."""
    block_size = case.sizes["block_size"]
    lengths = [c + q for c, q in zip(case.options["context"], case.options["queries"])]
    pages = [-(-length // block_size) for length in lengths]
    tables = torch.full((len(pages), max(pages) + 1), -1, dtype=torch.int32)
    tables[:, 1::2] = 2**31 - 1
    owned = torch.zeros(sum(pages) + _SPARE_BLOCKS, block_size, dtype=torch.bool)
    pool = torch.randperm(len(owned), generator=shuffle)
    for s, (length, mine) in enumerate(zip(lengths, pool.split([*pages, _SPARE_BLOCKS]))):
        tables[s, : pages[s]] = mine
        positions = torch.arange(length)
        owned[mine[positions // block_size], positions % block_size] = True
    return tables, owned


def _cached(case: Case, owned: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
    """kv_cache in its layout, k_scale and v_scale."""
    options, h = asked(case), case.sizes["H"]
    k, k_scale = _stored(case, h, owned, generator)
    v, v_scale = _stored(case, case.sizes["Hv"], owned, generator)
    cache = {"kv_cache": _laid_out(k, v, options["layout"])}
    return {**cache, "k_scale": k_scale, "v_scale": v_scale} if options["scales"] else cache


def _stored(
    case: Case, size: int, owned: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normal numbers as the cache holds them, [blocks, K, B, size], and their scale."""
    options, scale = asked(case), None
    kv_heads, free = case.sizes["K"], ~owned[:, None]
    x = torch.randn(len(owned), kv_heads, owned.shape[1], size, generator=generator, device=owned.device)
    if options["scales"]:
        scale = x.abs().amax(-1) / LARGEST.get(options["cache"], 1.0)  # others take no scale: to be refused
        if options["scales"] == "tensor":
            scale = scale.amax()[None, None, None]
        x = x / scale[..., None]
        scale = scale.masked_fill(free, float("nan")) if options["scales"] == "token" else scale.flatten()
    if options["cache"] == torch.int8:
        x = x.round().masked_fill(free[..., None], 127.0)
        x[::2].masked_fill_(free[::2, ..., None], -128.0)
    else:
        x = x.masked_fill(free[..., None], float("nan"))
    return x.to(options["cache"]), scale


def _laid_out(k: torch.Tensor, v: torch.Tensor, layout: str) -> Cache:
    """k [blocks, K, B, H] and v [blocks, K, B, Hv] as a cache in the layout of that name."""
    if layout == "pair":
        return k, v
    both = torch.cat((k, v), dim=-1)
    if layout in ("nhd", "views"):
        both = both.transpose(1, 2).contiguous().transpose(1, 2)
    return split_cache(both, k.shape[-1]) if layout == "views" else both


def arguments(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """What ``paged_attention`` takes for a case, but for ``impl`` and ``plan``."""
    options = asked(case)
    plain = ("causal", "window", "softcap", "invariant", "max_query_len")
    call: dict[str, Any] = {**inputs, **{name: options[name] for name in plain}}
    if options["cache"] == E4M3 and case.dtype != inputs["q"].dtype:  # an oracle's inputs, all in fp64: back to codes
        cache = inputs["kv_cache"]
        call["kv_cache"] = cache.to(E4M3) if isinstance(cache, torch.Tensor) else tuple(x.to(E4M3) for x in cache)
    if options["host"] != "nothing":
        call["min_query_len"] = min((n for n in options["queries"] if n), default=0)
        call["max_query_len"] = max(options["queries"])
        call["max_seq_len"] = max(c + q for c, q in zip(options["context"], options["queries"]))
    return call


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """``out``, and ``lse`` where the case asks for it: there -1 stands for -inf, which has no distance to anything."""
    options, call = asked(case), arguments(inputs, case)
    if options["host"] == "plan":
        bounds = ("min_query_len", "max_query_len", "max_seq_len")
        of_plan = ("causal", "window", "prefix_lens", "tree_mask", *bounds, "invariant")
        tensors = (call[name] for name in ("q", "kv_cache", "block_tables", "seq_lens", "query_start_loc"))
        call["plan"] = plan_attention(*tensors, **{name: call[name] for name in of_plan if name in call}, impl=impl)
    found = paged_attention(**call, return_lse=options["lse"], impl=impl)
    if isinstance(found, torch.Tensor):
        return {"out": found}
    out, lse = found
    return {"out": out, "lse": lse.masked_fill(lse == float("-inf"), -1.0)}


def _launched(target: str) -> Iterator[Build]:
    from .paged_builds import collect

    return collect(target, [case for case in CASES if "codegen" in case.tags])


SPEC = OpSpec(
    name="paged_attention",
    summary="attention of a ragged batch over a paged KV cache: prefill, decode and speculation in one call",
    cases=CASES,
    make_inputs=make_inputs,
    run=run,
    launched=_launched,
    sources=(
        *(f"paged_attention/{name}.py" for name in ("triton", "scores_triton", "widen_triton", "plan_triton")),
        *(f"paged_attention/{name}.py" for name in ("plan", "config", "launch", "op")),
        "runtime/fp8_bits.py",
        "runtime/device.py",
        "runtime/dispatch.py",
    ),
    terms=lambda case: max(*case.options["context"], *case.options["queries"], case.sizes["H"]),
    sums=lambda case, name: {"weights": case.dtype} if name == "lse" else {},
)
