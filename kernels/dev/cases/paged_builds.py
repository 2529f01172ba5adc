"""What ``paged_attention`` launches, as builds for ahead-of-time compilation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...paged_attention.options import AttentionOptions, Bounds
from ...runtime import device
from ...runtime.dtypes import CACHE_NAMES
from ..registry import Build, Case


def collect(target: str, cases: Iterable[Case]) -> Iterator[Build]:
    """Every launch that the cases make on ``target``."""
    from ...paged_attention import launch

    for case in cases:
        bound = max(case.options["queries"]) if case.options.get("host") else None
        with device.capture(target) as launches:
            tensors, mods = call(case)
            launch.paged_attention_fwd(
                tensors, mods, bool(case.options.get("invariant")), Bounds(max_query_len=bound), plan=None, plan_key=0
            )
        yield from (_build(item, target, case) for item in launches)


def call(case: Case) -> tuple[Any, AttentionOptions]:
    """What a case's call gets, as meta tensors."""
    n, kv_heads, h, hv, block_size = (case.sizes[name] for name in ("N", "K", "H", "Hv", "block_size"))
    options = {"causal": True, "window": None, "softcap": None, **case.options}
    context, queries = options["context"], options["queries"]
    pages = [-(-(c + q) // block_size) for c, q in zip(context, queries)]
    tokens, seqs = sum(queries), len(queries)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def where(asked: object, x: torch.Tensor) -> torch.Tensor | None:
        return x if asked else None

    slots, dtype = (sum(pages), kv_heads, block_size), options.get("cache") or case.dtype
    if options.get("layout") == "pair":
        k_cache, v_cache = (tensor(*slots, size, dtype=dtype) for size in (h, hv))
    else:
        k_cache, v_cache = tensor(*slots, h + hv, dtype=dtype).split((h, hv), dim=-1)
    scales = {None: None, "tensor": tensor(1), "token": tensor(*slots)}[options.get("scales")]
    mods = AttentionOptions(
        1.0,
        options["causal"],
        options["window"],
        options["softcap"],
        where(options.get("sinks"), tensor(n, dtype=case.dtype)),
        where(options.get("alibi"), tensor(n)),
        where(options.get("prefix"), tensor(seqs, dtype=torch.int32)),
        where(options.get("tree"), tensor(tokens, 64, dtype=torch.bool)),
        scales,
        scales,
    )
    tensors = (
        tensor(tokens, n, h, dtype=case.dtype),
        k_cache,
        v_cache,
        tensor(seqs, max(pages), dtype=torch.int32),
        tensor(seqs, dtype=torch.int32),
        tensor(seqs + 1, dtype=torch.int32),
    )
    return tensors, mods


def _build(item: device.Launch, target: str, case: Case) -> Build:
    attends, args = "q_ptr" in item.args, item.args
    label = [str(item.config), *_features(args, case)]
    fp32 = case.dtype == torch.float32
    # A warp group multiplies 64 rows: decode's 16 use the older instruction, and fp32 has none.
    wgmma = attends and args["BLOCK_M"] >= 64 and not fp32
    return Build(
        op="paged_attention",
        config="-".join(label),
        target=target,
        fn=item.fn,
        args=args,
        num_warps=item.num_warps,
        num_stages=item.num_stages,
        wants_wgmma=wgmma,
        # AMD's tiles go through registers: its waits do not tell which of them belong to a later step.
        wants_copies=attends and target.startswith("sm_"),
        unpipelined=_why_serial(args, target) if wgmma else None,
    )


def _why_serial(args: dict[str, Any], target: str) -> str | None:
    """Why the loop waits for each of its wgmma or tcgen05 products, or None if it must not."""
    if target == "sm_90" and args["k_ptr"].dtype != args["q_ptr"].dtype:
        return "each step converts its values into the same shared memory"
    if target == "sm_100" and args["V_SCALES"] == 2 and args["q_ptr"].dtype == torch.float16:
        return "each step's product is scaled before it is added: fp16 holds values' scales as shares of the largest"
    return None


def _features(args: dict[str, Any], case: Case) -> list[str]:
    """What tells one build from another beside its tile."""
    if "q_ptr" not in args:
        found = [f"g{args['GROUP']}"]
        if "V_SIZE" in args:
            found += [
                f"rows{args['PART_ROWS']}",
                f"h{args['V_SIZE']}",
                CACHE_NAMES[case.dtype],
                f"scales{args['V_SCALES']}",
            ]
            return found + (["sinks"] if args["sinks_ptr"] is not None else [])
        masks = {"window": args["window"] is not None, "prefix": args["prefix_lens_ptr"] is not None}
        masks |= {"tree": args["TREE"], "quanta": args["QUANTA"]}
        return found + [name for name, asked in masks.items() if asked] + ([] if args["CAUSAL"] else ["full"])
    sizes = {args["HEAD_SIZE"], args["V_SIZE"]}
    found = [f"h{'x'.join(map(str, sorted(sizes, reverse=True)))}", f"g{args['GROUP']}", f"p{args['PAGE_SIZE']}"]
    found.append(CACHE_NAMES[case.dtype])
    cache = case.options.get("cache") or case.dtype
    if cache != case.dtype:
        found.append("over-" + CACHE_NAMES[cache])
    found += [f"rows{args['PART_ROWS']}"] if args["PART_ROWS"] != args["BLOCK_M"] else []
    flags = {
        "scaled": args["K_SCALES"] == 1,
        "token_scaled": args["K_SCALES"] == 2,
        "full": not args["CAUSAL"],
        "window": args["window"] is not None,
        "softcap": args["softcap"] is not None,
        "sinks": args["sinks_ptr"] is not None,
        "alibi": args["slopes_ptr"] is not None,
        "prefix": args["prefix_lens_ptr"] is not None,
        "tree": args["tree_ptr"] is not None,
    }
    return found + [name for name, asked in flags.items() if asked]
