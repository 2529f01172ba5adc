"""The batches that tests, ahead-of-time builds and benchmarks share for ``paged_attention`` and ``write_kv_``.

A case lists each sequence's context (tokens cached before this step) and queries (tokens of this step). Running one
writes this step's keys and values into the pages and attends over them, as a model does. Blocks are dealt from a
shuffled pool that holds a few more than are needed; every slot that no sequence owns holds NaN.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from .. import device
from ..registry import Build, Case, OpSpec
from .op import paged_attention, write_kv_

_SPARE_BLOCKS = 3
_PADDING_TOKENS = 2
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_NAMES = {_BF16: "bf16", _FP16: "fp16", _FP32: "fp32"}


def _case(
    name: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    context: tuple[int, ...],
    queries: tuple[int, ...],
    *tags: str,
) -> Case:
    """``heads`` is (query heads, KV heads, head size); ``context`` and ``queries`` have one entry per sequence."""
    n, k, h = heads
    return Case(
        name,
        dtype,
        {"N": n, "K": k, "H": h, "block_size": block_size},
        {"context": context, "queries": queries},
        frozenset(tags),
    )


CASES = (
    # Small enough to interpret: every group size, head size, page size, dtype and kind of step appears.
    _case("decode-g1-h32-p4-fp32", _FP32, (2, 2, 32), 4, (5, 0, 16), (1, 1, 1), "test"),
    _case("decode-g3-h80-p16-fp16", _FP16, (6, 2, 80), 16, (40, 3), (1, 1), "test"),
    _case("decode-g8-h128-p32-bf16", _BF16, (8, 1, 128), 32, (31, 64, 95), (1, 1, 1), "test", "short"),
    _case("prefill-g1-h64-p1-fp16", _FP16, (2, 2, 64), 1, (0,), (70,), "test"),
    _case("prefill-g2-h32-p16-bf16", _BF16, (4, 2, 32), 16, (0, 0), (37, 64), "test"),
    _case("prefill-g4-h80-p4-fp32", _FP32, (4, 1, 80), 4, (0,), (41,), "test"),
    _case("mixed-g3-h32-p4-fp32", _FP32, (3, 1, 32), 4, (9, 0, 30, 2), (1, 25, 1, 7), "test"),
    _case("mixed-g4-h64-p128-bf16", _BF16, (8, 2, 64), 128, (130, 17, 0), (1, 40, 80), "test", "short"),
    _case("mixed-g2-h128-p16-fp16", _FP16, (4, 2, 128), 16, (15, 0, 16, 50), (1, 0, 33, 1), "test"),
    # What a GPU runs. Of these, the ones tagged codegen reach every tile of pick_config.
    _case("decode-llama8b-bf16", _BF16, (32, 8, 128), 16, (1023,) * 32, (1,) * 32, "codegen", "bench", "short"),
    _case("decode-llama70b-bf16", _BF16, (64, 8, 128), 16, (4095,) * 16, (1,) * 16, "codegen", "bench"),
    _case("decode-h64-p256-bf16", _BF16, (32, 4, 64), 256, (2047,) * 32, (1,) * 32, "codegen", "bench"),
    _case("decode-starcoder2-fp32", _FP32, (24, 2, 128), 16, (511,) * 8, (1,) * 8, "codegen", "bench"),
    _case("speculate-llama8b-bf16", _BF16, (32, 8, 128), 16, (1019,) * 32, (5,) * 32, "codegen", "bench"),
    _case("prefill-llama8b-bf16", _BF16, (32, 8, 128), 16, (0,), (4096,), "codegen", "bench", "short"),
    _case("prefill-h80-g1-fp16", _FP16, (32, 32, 80), 16, (0,) * 4, (1024,) * 4, "codegen", "bench"),
    _case("prefill-h64-p256-bf16", _BF16, (32, 4, 64), 256, (0,), (4096,), "codegen", "bench"),
    _case("prefill-starcoder2-fp32", _FP32, (24, 2, 128), 16, (0,), (512,), "codegen"),
    _case("mixed-llama8b-bf16", _BF16, (32, 8, 128), 16, (1023,) * 31 + (0,), (1,) * 31 + (2048,), "bench", "short"),
    _case("decode-cpu-fp32", _FP32, (8, 2, 64), 16, (1023,) * 32, (1,) * 32, "bench-cpu"),
    _case("prefill-cpu-fp32", _FP32, (8, 2, 64), 16, (0,) * 4, (256,) * 4, "bench-cpu"),
)


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """q, k, v of this step, the cache holding each sequence's context, and the tables that tie them together."""
    generator, shuffle = torch.Generator(on).manual_seed(seed), torch.Generator().manual_seed(seed)
    n, kv_heads, h, block_size = (case.sizes[name] for name in ("N", "K", "H", "block_size"))
    context, queries = case.options["context"], case.options["queries"]
    tokens = sum(queries) + _PADDING_TOKENS
    pages = [-(-(c + q) // block_size) for c, q in zip(context, queries)]
    num_blocks = sum(pages) + _SPARE_BLOCKS

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=on).to(case.dtype)

    kv_cache = torch.full((num_blocks, kv_heads, block_size, 2 * h), float("nan"), dtype=case.dtype, device=on)
    block_tables = torch.full((len(queries), max(pages)), -1, dtype=torch.int32)
    slot_mapping = torch.full((tokens,), -1)
    pool, start = torch.randperm(num_blocks, generator=shuffle), 0
    for s, (c, q) in enumerate(zip(context, queries)):
        mine, pool = pool[: pages[s]], pool[pages[s] :]
        block_tables[s, : pages[s]] = mine
        positions = torch.arange(c + q)
        slots = mine[positions // block_size] * block_size + positions % block_size
        slot_mapping[start : start + q] = slots[c:]
        old = slots[:c].to(on)
        kv_cache[old // block_size, :, old % block_size] = draw(c, kv_heads, 2 * h)
        start += q
    return {
        "q": draw(tokens, n, h),
        "k": draw(tokens, kv_heads, h),
        "v": draw(tokens, kv_heads, h),
        "kv_cache": kv_cache,
        "block_tables": block_tables.to(on),
        "seq_lens": torch.tensor([c + q for c, q in zip(context, queries)], dtype=torch.int32, device=on),
        "query_start_loc": torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=on),
        "slot_mapping": slot_mapping.to(on),
    }


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Write, then attend. The cache is written in place, with the same values every time.

    Returns the cache too, empty slots as 0, so that a write into a wrong slot shows. In fp64, because what is copied
    must arrive exactly: there the comparison leaves no room for one slot among thousands.
    """
    write_kv_(inputs["kv_cache"], inputs["k"], inputs["v"], inputs["slot_mapping"], impl=impl)
    out = paged_attention(
        inputs["q"],
        inputs["kv_cache"],
        inputs["block_tables"],
        inputs["seq_lens"],
        inputs["query_start_loc"],
        impl=impl,
    )
    return {"out": out, "kv_cache": inputs["kv_cache"].nan_to_num().double()}


def builds(target: str) -> list[Build]:
    """Every launch that the cases tagged ``codegen`` make on ``target``, each kernel once."""
    from . import launch

    found: dict[str, Build] = {}
    for case in CASES:
        if "codegen" not in case.tags:
            continue
        with device.capture(target) as launches:
            x = _shapes(case)
            launch.write_kv_(x["kv_cache"], x["k"], x["k"], x["slot_mapping"])
            launch.paged_attention_fwd(
                *(x["q"], x["kv_cache"], x["block_tables"], x["seq_lens"], x["query_start_loc"]), scale=1.0
            )
        for item in launches:
            build = _build(item, target, case)
            found.setdefault(build.config, build)
    return list(found.values())


def _shapes(case: Case) -> dict[str, torch.Tensor]:
    """What ``make_inputs`` gives, as meta tensors."""
    n, kv_heads, h, block_size = (case.sizes[name] for name in ("N", "K", "H", "block_size"))
    context, queries = case.options["context"], case.options["queries"]
    pages = [-(-(c + q) // block_size) for c, q in zip(context, queries)]
    tokens, seqs = sum(queries), len(queries)

    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return {
        "q": tensor(tokens, n, h, dtype=case.dtype),
        "k": tensor(tokens, kv_heads, h, dtype=case.dtype),
        "kv_cache": tensor(sum(pages), kv_heads, block_size, 2 * h, dtype=case.dtype),
        "block_tables": tensor(seqs, max(pages), dtype=torch.int32),
        "seq_lens": tensor(seqs, dtype=torch.int32),
        "query_start_loc": tensor(seqs + 1, dtype=torch.int32),
        "slot_mapping": tensor(tokens, dtype=torch.int64),
    }


def _build(item: device.Launch, target: str, case: Case) -> Build:
    attends = "q_ptr" in item.args
    label = ["attend" if attends else "write", str(item.config), f"h{item.args['HEAD_SIZE']}"]
    label += [f"g{item.args['GROUP']}"] if attends else []
    label += [f"p{item.args['PAGE_SIZE']}", _NAMES[case.dtype]]
    return Build(
        op="paged_attention",
        config="-".join(label),
        target=target,
        fn=item.fn,
        args=item.args,
        num_warps=item.num_warps,
        num_stages=item.num_stages,
        # A warp group multiplies 64 rows: decode's 16 use the older instruction, and fp32 has none.
        wants_wgmma=attends and item.args["BLOCK_M"] >= 64 and case.dtype != _FP32,
    )


SPEC = OpSpec(
    name="paged_attention",
    summary="causal attention of a ragged batch over a paged KV cache, and the write into its pages",
    cases=CASES,
    make_inputs=make_inputs,
    run=run,
    builds=builds,
    sources=(
        "paged_attention/triton.py",
        "paged_attention/launch.py",
        "paged_attention/op.py",
        "device.py",
        "dispatch.py",
    ),
)
