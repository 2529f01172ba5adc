"""``paged_attention`` and ``write_kv_``: validation, schemas, dispatch. Inference only; there is no gradient.

The checks of shapes, dtypes and devices always run; the contents of tables and lengths are checked where reading them
costs nothing, which is on a CPU (on a GPU it would stop the stream).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .. import dispatch, library
from . import reference

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_HEAD_SIZE = 256  # of the kernel; the reference takes any


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Causal attention of a ragged batch over a paged KV cache (PagedAttention, arXiv:2309.06180).

    One call takes whatever mix of prefill chunks and single-token decodes a step holds. This step's keys and values
    must already be in the cache (``write_kv_``).

    Args:
        q: [T, N, H], all sequences' queries one after another.
        kv_cache: [num_blocks, K, block_size, 2H], K and V side by side in the last dimension; N a multiple of K,
            block_size a power of two, q's dtype. Slots that no sequence owns may hold anything, NaN included.
        block_tables: [S, max_blocks] int32, the blocks of each sequence in order; entries past its length are not read.
        seq_lens: [S] int32, cached tokens of each sequence, this step's included.
        query_start_loc: [S + 1] int32, where each sequence's queries start in q, and where the last one's end; a
            sequence may have none. Query i of sequence s sits at position ``seq_lens[s] - q_len[s] + i``.
        scale: of the scores; default H ** -0.5.
        impl: see ``kernels/dispatch.py``.

    Returns [T, N, H]; rows past ``query_start_loc[S]`` are padding and hold zeros.

    Raises ValueError for input that does not fit together, RuntimeError when a gradient would be needed.
    """
    _check_attention(q, kv_cache, block_tables, seq_lens, query_start_loc)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _PAGED_ATTENTION(q, kv_cache, block_tables, seq_lens, query_start_loc, scale, impl)


def write_kv_(
    kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *, impl: str = "auto"
) -> None:
    """Write this step's keys and values into their pages, in place.

    Args:
        kv_cache: [num_blocks, K, block_size, 2H].
        k, v: [T, K, H], in the cache's dtype.
        slot_mapping: [T] int64, ``block * block_size + offset`` of each token; negative: padding, nothing is written.
            No slot may be named twice.
        impl: see ``kernels/dispatch.py``.

    Raises ValueError for input that does not fit together, RuntimeError when a gradient would be needed.
    """
    _check_write(kv_cache, k, v, slot_mapping)
    _WRITE_KV(kv_cache, k, v, slot_mapping, impl)


def _paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    impl: str,
) -> torch.Tensor:
    choice = dispatch.choose("paged_attention", q.device, impl, unsupported=_unsupported(q, kv_cache))
    if q.device.type == "cpu":
        _check_contents(q, kv_cache, block_tables, seq_lens, query_start_loc)
    dispatch.count("paged_attention", choice.impl)
    if choice.triton:
        from . import launch

        return launch.paged_attention_fwd(q, kv_cache, block_tables, seq_lens, query_start_loc, scale)
    return reference.paged_attention(q, kv_cache, block_tables, seq_lens, query_start_loc, scale)


def _write_kv_(kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, impl: str) -> None:
    choice = dispatch.choose("write_kv_", kv_cache.device, impl, unsupported=_unsupported(k, kv_cache))
    if kv_cache.device.type == "cpu":
        _check_slots(kv_cache, slot_mapping)
    dispatch.count("write_kv_", choice.impl)
    if choice.triton:
        from . import launch

        launch.write_kv_(kv_cache, k, v, slot_mapping)
    else:
        reference.write_kv_(kv_cache, k, v, slot_mapping)


def _unsupported(x: torch.Tensor, kv_cache: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot take this call, or None."""
    if x.dtype == torch.float64:
        return "the kernel computes in fp16, bf16 and fp32 only, and this is fp64"
    if x.shape[-1] > _MAX_HEAD_SIZE:
        return f"the kernel holds head sizes up to {_MAX_HEAD_SIZE}, and this is {x.shape[-1]}"
    if kv_cache.stride(-1) != 1:
        return f"the kernel wants kv_cache with stride 1 in its last dimension, and this is {kv_cache.stride(-1)}"
    return None


def _paged_attention_fake(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _write_kv_fake_(*_: object) -> None:
    return None


# The choice of implementation is made inside the ops: the reference reads lengths on the host, which no graph can hold.
_PAGED_ATTENTION = library.register(
    "paged_attention(Tensor q, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, "
    "float scale, str impl) -> Tensor",
    _paged_attention,
    _paged_attention_fake,
)
_WRITE_KV = library.register(
    "write_kv_(Tensor(a!) kv_cache, Tensor k, Tensor v, Tensor slot_mapping, str impl) -> ()",
    _write_kv_,
    _write_kv_fake_,
)


# ---------------------------------------------------------------------------------------------------- validation


def _check_cache(op: str, kv_cache: torch.Tensor, like: torch.Tensor, name: str) -> None:
    """What both ops ask of the cache, given the tensor ``like`` [T, heads, H] called ``name``."""
    if like.dim() != 3:
        raise ValueError(f"{op}: {name} has shape {tuple(like.shape)}: expected [tokens, heads, head size]")
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * like.shape[-1]:
        raise ValueError(
            f"{op}: kv_cache has shape {tuple(kv_cache.shape)}: expected [blocks, KV heads, block size, "
            f"{2 * like.shape[-1]}], K and V of {name}'s head size {like.shape[-1]} side by side"
        )
    block_size = kv_cache.shape[2]
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"{op}: kv_cache has block size {block_size}: expected a power of two")
    if like.dtype not in _FLOATS or kv_cache.dtype != like.dtype:
        raise ValueError(
            f"{op}: {name} is {like.dtype} and kv_cache {kv_cache.dtype}: expected the same floating-point dtype; "
            "allocate the cache in the model's dtype"
        )


def _check_no_grad(op: str, *tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(f"{op} has no gradient: call it under torch.no_grad() or torch.inference_mode()")


def _check_index(
    op: str, name: str, x: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """An index tensor's shape (None: any size), dtype and device."""
    if x.dim() != len(shape) or any(want is not None and have != want for have, want in zip(x.shape, shape)):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}: expected [{expected}]")
    if x.dtype != dtype:
        raise ValueError(f"{op}: {name} is {x.dtype}: expected {dtype}; convert it with .to({dtype})")
    if x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}: expected {device}, where the other arguments are")


def _check_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    op = "paged_attention"
    _check_cache(op, kv_cache, q, "q")
    _check_no_grad(op, q, kv_cache)
    heads, kv_heads = q.shape[1], kv_cache.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: q has {heads} heads and kv_cache {kv_heads}: expected a multiple of the KV heads")
    if kv_cache.device != q.device:
        raise ValueError(f"{op}: kv_cache is on {kv_cache.device}: expected {q.device}, where q is")
    num_seqs = seq_lens.shape[0] if seq_lens.dim() == 1 else None
    _check_index(op, "seq_lens", seq_lens, (None,), torch.int32, q.device)
    _check_index(op, "block_tables", block_tables, (num_seqs, None), torch.int32, q.device)
    _check_index(op, "query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), torch.int32, q.device)


def _check_write(kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    op = "write_kv_"
    _check_cache(op, kv_cache, k, "k")
    _check_no_grad(op, kv_cache, k, v)
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"{op}: v is {v.dtype} {tuple(v.shape)}: expected {k.dtype} {tuple(k.shape)}, as k is")
    if k.shape[1] != kv_cache.shape[1]:
        raise ValueError(f"{op}: k has {k.shape[1]} heads: expected kv_cache's {kv_cache.shape[1]}")
    for name, x in (("k", k), ("v", v)):
        if x.device != kv_cache.device:
            raise ValueError(f"{op}: {name} is on {x.device}: expected {kv_cache.device}, where kv_cache is")
    _check_index(op, "slot_mapping", slot_mapping, (k.shape[0],), torch.int64, kv_cache.device)


def _check_contents(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """The values of lengths and tables against each other. Reads them, so: CPU only."""
    op = "paged_attention"
    num_blocks, block_size = kv_cache.shape[0], kv_cache.shape[2]
    starts = query_start_loc.tolist()
    if starts[0] != 0 or starts[-1] > q.shape[0] or any(a > b for a, b in pairwise(starts)):
        raise ValueError(
            f"{op}: query_start_loc is {starts}: expected it to start at 0, never fall, and end within q's "
            f"{q.shape[0]} tokens"
        )
    pages_per_table = block_tables.shape[1]
    for s, (length, start, end) in enumerate(zip(seq_lens.tolist(), starts, starts[1:])):
        if start == end:
            continue
        if length < end - start:
            raise ValueError(
                f"{op}: sequence {s} has {end - start} queries but seq_lens {length}: seq_lens counts this step's "
                "tokens too"
            )
        pages = -(-length // block_size)
        if pages > pages_per_table:
            raise ValueError(
                f"{op}: sequence {s} has {length} tokens in blocks of {block_size}: expected block_tables with at "
                f"least {pages} columns, not {pages_per_table}"
            )
        used = block_tables[s, :pages]
        low, high = (int(bound) for bound in torch.aminmax(used))
        if low < 0 or high >= num_blocks:
            raise ValueError(
                f"{op}: block_tables[{s}] names blocks {low} to {high}: expected 0 to {num_blocks - 1}, the blocks "
                "of kv_cache"
            )


def _check_slots(kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots = kv_cache.shape[0] * kv_cache.shape[2]
    if slot_mapping.numel() and int(slot_mapping.max()) >= slots:
        raise ValueError(f"write_kv_: slot_mapping names slot {int(slot_mapping.max())}: kv_cache has {slots} slots")
