"""What ``paged_attention`` refuses, before anything is launched.

``check`` looks at shapes, dtypes and devices: cheap, and always run. ``check_contents`` looks into lengths and tables,
which on a GPU waits for the stream: run on a CPU, or where the caller asks for it.

Letters: T tokens of this step, S sequences, N query heads, K KV heads, H head size of q and k, Hv of v, B block size,
P table columns.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from ..runtime.dtypes import BF16, FP16, FP32, FP64, QUANTISED
from .options import REFUSED, AttentionOptions, Bounds

_NO_BOUNDS = Bounds()
# dtype of q -> dtypes of a cache that it may attend over.
CACHE_DTYPES = {
    FP16: (FP16, BF16, *QUANTISED),
    BF16: (FP16, BF16, *QUANTISED),
    FP32: (FP16, BF16, FP32, *QUANTISED),
    FP64: (FP16, BF16, FP32, FP64, *QUANTISED),
}


def check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: AttentionOptions,
    bounds: Bounds = _NO_BOUNDS,
) -> None:
    """Refuse what does not fit together, by shape, dtype, device and option. Reads no element of a tensor.

    q [T, N, H], k_cache [blocks, K, B, H], v_cache [blocks, K, B, Hv], block_tables [S, P] int32, seq_lens [S] int32,
    query_start_loc [S + 1] int32.

    Raises ValueError, and RuntimeError where a gradient would be lost.
    """
    _check_qkv(q, k_cache, v_cache)
    device = q.device
    tokens, heads = q.shape[0], q.shape[1]
    if seq_lens.dim() != 1:
        raise _wrong_shape("seq_lens", seq_lens, "[sequences]")
    seqs = seq_lens.shape[0]
    if block_tables.dim() != 2 or block_tables.shape[0] != seqs:
        raise _wrong_shape("block_tables", block_tables, f"[{seqs}, blocks], a row for each of seq_lens")
    if query_start_loc.dim() != 1 or query_start_loc.shape[0] != seqs + 1:
        raise _wrong_shape("query_start_loc", query_start_loc, f"[{seqs + 1}], one more than seq_lens has")
    _check_kind("seq_lens", seq_lens, torch.int32, device)
    _check_kind("block_tables", block_tables, torch.int32, device)
    _check_kind("query_start_loc", query_start_loc, torch.int32, device)
    if torch.is_grad_enabled():
        _check_no_grad(q, k_cache, v_cache, options.sinks, options.alibi_slopes, options.k_scale, options.v_scale)

    refused = options.refused(k_cache.dtype)
    if refused is not None:
        raise ValueError(f"paged_attention refuses {refused}: {REFUSED[refused]}")
    if not 0 < options.scale < math.inf:
        raise ValueError(f"paged_attention: scale is {options.scale}: expected a positive number, such as H ** -0.5")
    if options.window is not None and options.window < 1:
        raise ValueError(f"paged_attention: window is {options.window}: expected at least 1 key, or None for no window")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(
            f"paged_attention: softcap is {options.softcap}: expected a positive number, or None for no cap"
        )
    if options.sinks is not None:
        _check_row("sinks", options.sinks, heads, "q's heads")
        if not options.sinks.is_floating_point():
            raise ValueError(f"paged_attention: sinks is {options.sinks.dtype}: expected a floating-point dtype")
        _check_kind("sinks", options.sinks, options.sinks.dtype, device)
    if options.alibi_slopes is not None:
        _check_row("alibi_slopes", options.alibi_slopes, heads, "q's heads")
        _check_fp32("alibi_slopes", options.alibi_slopes, device)
    if options.prefix_lens is not None:
        _check_row("prefix_lens", options.prefix_lens, seqs, "seq_lens")
        _check_kind("prefix_lens", options.prefix_lens, torch.int32, device)
    if options.tree_mask is not None:
        _check_tree(options.tree_mask, tokens, bounds.max_query_len, device)
    if options.k_scale is not None:
        _check_scale("k_scale", options.k_scale, k_cache)
    if options.v_scale is not None:
        _check_scale("v_scale", options.v_scale, v_cache)
    _check_bounds(bounds, block_tables.shape[1], k_cache.shape[2])


def check_out(q: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> None:
    """ValueError unless ``out`` can hold the result of q over v_cache, both checked, and nothing of it is read."""
    expected = (*q.shape[:2], v_cache.shape[-1])
    if out.shape != expected:
        raise _wrong_shape("out", out, f"{list(expected)}, that of the result")
    _check_kind("out", out, q.dtype, q.device)
    if not out.is_contiguous():
        raise ValueError(f"paged_attention: out has strides {out.stride()}: expected a contiguous tensor")


def check_contents(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: AttentionOptions,
    bounds: Bounds = _NO_BOUNDS,
) -> None:
    """Refuse lengths, starts and tables whose values do not fit together; arguments as ``check`` has let them through.

    Sequences without queries are not looked at. Reads tensors on the host. Raises ValueError.
    """
    num_blocks, _, block_size, _ = k_cache.shape
    starts = query_start_loc.tolist()
    if starts[0] != 0 or starts[-1] > q.shape[0] or any(a > b for a, b in pairwise(starts)):
        raise ValueError(
            f"paged_attention: query_start_loc is {starts}: expected it to start at 0, never fall, and end within q's "
            f"{q.shape[0]} tokens"
        )
    lens = seq_lens.tolist()
    busy = [(s, lens[s], end - start) for s, (start, end) in enumerate(pairwise(starts)) if end > start]
    for s, length, queries in busy:
        if length < queries:
            raise ValueError(
                f"paged_attention: sequence {s} has {queries} queries but seq_lens {length}: seq_lens counts this "
                "step's tokens too"
            )
        if queries < (bounds.min_query_len or 0):
            raise ValueError(
                f"paged_attention: sequence {s} has {queries} queries: fewer than min_query_len, {bounds.min_query_len}"
            )
        _check_bounded(s, "queries", queries, "max_query_len", bounds.max_query_len)
        _check_bounded(s, "tokens", length, "max_seq_len", bounds.max_seq_len)
        if options.tree_mask is not None and options.tree_mask.shape[1] < queries:
            raise ValueError(
                f"paged_attention: sequence {s} has {queries} queries: expected tree_mask with at least as many "
                f"columns, not {options.tree_mask.shape[1]}"
            )
    if busy:
        _check_tables(block_tables, busy, num_blocks, block_size, options.window)
    if options.prefix_lens is not None:
        for s, prefix in enumerate(options.prefix_lens.tolist()):
            if prefix < 0:
                raise ValueError(f"paged_attention: prefix_lens[{s}] is {prefix}: expected 0 or more tokens")


# ------------------------------------------------------------------------------------------- shapes, dtypes, devices


def _check_qkv(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if q.dim() != 3:
        raise _wrong_shape("q", q, "[tokens, heads, head size]")
    for name, cache in (("keys", k_cache), ("values", v_cache)):
        if cache.dim() != 4:
            raise _wrong_shape(f"kv_cache ({name})", cache, "[blocks, KV heads, block size, head size]")
    heads, size = q.shape[1], q.shape[2]
    k_shape, v_shape = k_cache.shape, v_cache.shape
    if k_shape[3] != size or v_shape[3] < 1:
        raise ValueError(
            f"paged_attention: kv_cache holds keys of size {k_shape[3]} and values of size {v_shape[3]}, and q has "
            f"head size {size}: expected one tensor [blocks, KV heads, block size, {size} + size of v], or a pair "
            f"whose first has size {size}"
        )
    if k_shape[:3] != v_shape[:3]:
        raise ValueError(
            f"paged_attention: kv_cache's keys have shape {tuple(k_shape)} and its values {tuple(v_shape)}: expected "
            "the same blocks, KV heads and block size in both"
        )
    if k_shape[2] < 1:
        raise ValueError("paged_attention: kv_cache has block size 0: expected at least 1 slot in a block")
    if k_shape[1] < 1 or heads % k_shape[1]:
        raise ValueError(
            f"paged_attention: q has {heads} heads and kv_cache {k_shape[1]}: expected a multiple of the KV heads"
        )
    dtype = k_cache.dtype
    if dtype != v_cache.dtype or dtype not in CACHE_DTYPES.get(q.dtype, ()):
        raise _wrong_dtypes(q.dtype, dtype, v_cache.dtype)
    if k_cache.device != q.device or v_cache.device != q.device:
        raise ValueError(
            f"paged_attention: kv_cache is on {k_cache.device} and {v_cache.device}: expected {q.device}, where q is"
        )


def _wrong_dtypes(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> ValueError:
    cache = str(k) if k == v else f"{k} (keys) and {v} (values)"
    allowed = CACHE_DTYPES.get(q)
    which = "keys and values both in" if allowed else "q in"
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed or CACHE_DTYPES)
    return ValueError(f"paged_attention: q is {q} and kv_cache {cache}: expected {which} one of {names}")


def _wrong_shape(name: str, given: torch.Tensor, expected: str) -> ValueError:
    return ValueError(f"paged_attention: {name} has shape {tuple(given.shape)}: expected {expected}")


def _check_kind(name: str, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if x.dtype != dtype:
        raise ValueError(f"paged_attention: {name} is {x.dtype}: expected {dtype}; convert it with .to({dtype})")
    if x.device != device:
        raise ValueError(f"paged_attention: {name} is on {x.device}: expected {device}, where q is")


def _check_fp32(name: str, x: torch.Tensor, device: torch.device) -> None:
    # fp64 is what an oracle in fp64 has.
    _check_kind(name, x, torch.float64 if x.dtype == torch.float64 else torch.float32, device)


def _check_row(name: str, x: torch.Tensor, size: int, of: str) -> None:
    if x.dim() != 1 or x.shape[0] != size:
        raise _wrong_shape(name, x, f"[{size}], one for each of {of}")


def _check_tree(mask: torch.Tensor, tokens: int, max_query_len: int | None, device: torch.device) -> None:
    if mask.dim() != 2 or mask.shape[0] != tokens or mask.shape[1] < 1:
        raise _wrong_shape("tree_mask", mask, f"[{tokens}, most queries of a sequence], a row for each of q")
    if max_query_len is not None and mask.shape[1] < max_query_len:
        raise ValueError(
            f"paged_attention: tree_mask has {mask.shape[1]} columns: expected at least max_query_len, {max_query_len}"
        )
    _check_kind("tree_mask", mask, torch.bool, device)


def _check_scale(name: str, scale: torch.Tensor, cache: torch.Tensor) -> None:
    if scale.numel() != 1 and scale.shape != cache.shape[:3]:
        raise _wrong_shape(name, scale, f"one element, or {list(cache.shape[:3])}, one for each token and KV head")
    _check_fp32(name, scale, cache.device)


def _check_bounds(bounds: Bounds, pages: int, block_size: int) -> None:
    least, most, max_seq_len = bounds
    if most is not None and most < 0:
        raise ValueError(f"paged_attention: max_query_len is {most}: expected 0 or more, or None")
    if least is not None and not 0 <= least <= (least if most is None else most):
        raise ValueError(
            f"paged_attention: min_query_len is {least}: expected 0 or more, at most max_query_len ({most}), or None"
        )
    if max_seq_len is not None and not 0 <= max_seq_len <= pages * block_size:
        raise ValueError(
            f"paged_attention: max_seq_len is {max_seq_len}: expected at most {pages * block_size}, the slots in "
            f"block_tables' {pages} blocks of {block_size}; widen block_tables, or leave max_seq_len out"
        )


def _check_no_grad(*tensors: torch.Tensor | None) -> None:
    if any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError("paged_attention has no gradient: call it under torch.no_grad() or torch.inference_mode()")


# ----------------------------------------------------------------------------------------------------------- contents


def _check_bounded(s: int, what: str, given: int, name: str, bound: int | None) -> None:
    if bound is not None and given > bound:
        raise ValueError(f"paged_attention: sequence {s} has {given} {what}: more than {name}, {bound}")


def _check_tables(
    block_tables: torch.Tensor, busy: list[tuple[int, int, int]], blocks: int, block_size: int, window: int | None
) -> None:
    """``busy`` lists (sequence, its length, its queries). Pages that no query's window reaches may be anything."""
    columns = block_tables.shape[1]
    reach = [0 if window is None else max(0, length - queries - window + 1) for _, length, queries in busy]
    pages = [-(-length // block_size) for _, length, _ in busy]
    for (s, length, _), needed in zip(busy, pages):
        if needed > columns:
            raise ValueError(
                f"paged_attention: sequence {s} has {length} tokens in blocks of {block_size}: expected block_tables "
                f"with at least {needed} columns, not {columns}"
            )
    tables = block_tables[[s for s, _, _ in busy]]
    column = torch.arange(columns, device=tables.device)
    ends = torch.tensor([pages, [key // block_size for key in reach]], device=tables.device).unsqueeze(-1)
    used = (column < ends[0]) & (column >= ends[1])
    wrong = (used & ((tables < 0) | (tables >= blocks))).nonzero()
    if len(wrong):
        row, page = wrong[0].tolist()
        raise ValueError(
            f"paged_attention: block_tables[{busy[row][0]}, {page}] names block {int(tables[row, page])}: "
            f"expected 0 to {blocks - 1}, the blocks of kv_cache"
        )
