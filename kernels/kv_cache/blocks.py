"""Whole blocks of a cache: ``copy_blocks_``, ``swap_blocks_`` and ``gather_kv``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from ..runtime import dispatch, library
from . import checks, reference
from .checks import Cache

_COPY, _SWAP, _GATHER = "copy_blocks_", "swap_blocks_", "gather_kv"
_MAX_BLOCK = 2**31 - 2**15  # elements; the last program's end still fits 32 bits


def copy_blocks_(
    kv_caches: torch.Tensor | Sequence[torch.Tensor],
    pairs: torch.Tensor,
    *,
    block_dim: int = 0,
    check: bool | None = None,
    impl: str = "auto",
) -> None:
    """Copy blocks within each cache, in place: what copy-on-write needs when a sequence forks. One launch per tensor.

    Args:
        kv_caches: tensors of any dtype, shape and strides that count blocks along ``block_dim``: a layer's cache, its
            scales, or all layers in one tensor [layers, blocks, ...] with ``block_dim=1``. One tensor or several.
        pairs: [n, 2] int64 on the caches' device, of source and target block; pairs with a negative entry are padding.
            No block may be a target twice, nor be a source and a target.
        check: whether ``pairs`` is read to see that it fits; None: on a CPU only.
        impl: see ``kernels/runtime/dispatch.py``.

    Raises ValueError for input that does not fit together, RuntimeError when a gradient would be needed.
    """
    caches = _listed(kv_caches)
    checks.check_blocks(_COPY, "kv_caches", caches, block_dim)
    checks.check_pairs(_COPY, pairs, caches[0].device, "where kv_caches are")
    _COPY_OP(caches, pairs, block_dim, pairs.is_cpu if check is None else check, impl)


def swap_blocks_(
    source: torch.Tensor | Sequence[torch.Tensor],
    target: torch.Tensor | Sequence[torch.Tensor],
    pairs: torch.Tensor,
    *,
    block_dim: int = 0,
) -> None:
    """Copy blocks from ``source`` to ``target``, mostly from a GPU to the host or back. Plain copies, no kernel.

    Neighbouring blocks that go to neighbouring ones are one copy. Where the host's side is pinned, copies do not wait:
    before the host reads what came from a GPU, synchronise with the current stream.

    Args:
        source, target: tensors alike in shape but for the number of blocks, of one dtype, and not the same memory; or
            as many of them on either side.
        pairs: [n, 2] int64 on the CPU, since the host issues the copies: block of source, block of target. Pairs with a
            negative entry are padding; no block may be a target twice.
        block_dim: the dimension that counts blocks. Contiguous memory per block is fastest.

    Raises ValueError for input that does not fit together, RuntimeError when a gradient would be needed.
    """
    sources, targets = _listed(source), _listed(target)
    for name, caches in (("source", sources), ("target", targets)):
        checks.check_blocks(_SWAP, name, caches, block_dim)
    checks.check_pairs(_SWAP, pairs, torch.device("cpu"), "since the host issues the copies")
    if len(sources) != len(targets):
        raise ValueError(f"{_SWAP}: source has {len(sources)} tensors and target {len(targets)}: expected as many")
    for s, t in zip(sources, targets):
        if s.dtype != t.dtype or s.movedim(block_dim, 0).shape[1:] != t.movedim(block_dim, 0).shape[1:]:
            raise ValueError(
                f"{_SWAP}: source is {s.dtype} {tuple(s.shape)} but target {t.dtype} {tuple(t.shape)}: expected the "
                f"same but for the blocks, dimension {block_dim}"
            )
    _SWAP_OP(sources, targets, pairs, block_dim)


def gather_kv(
    kv_cache: Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    head_size: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    max_seq_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous copies of each sequence's K and V, padded to the longest: [S, K, L, H] and [S, K, L, Hv].

    For tests and for attention that knows no pages; plain torch on any device. Slots past a sequence's end are 0,
    whatever the cache holds there.

    Args:
        kv_cache: as in ``write_kv_``.
        block_tables: [S, pages], any integer dtype; entries past a sequence's length may be anything.
        seq_lens: [S], any integer dtype.
        head_size: H, where K and V share one tensor and H is not half of its width.
        k_scale, v_scale: as in ``write_kv_``; dequantise with them.
        dtype: to dequantise to; default fp32 with scales, and the cache's own dtype without.
        max_seq_len: L, at least the largest of seq_lens (positions from it on are left out); None reads that from the
            device, which waits for it.

    Raises ValueError for input that does not fit together.
    """
    k_cache, v_cache = checks.parts_of(_GATHER, kv_cache)
    if block_tables.dim() != 2 or seq_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            f"{_GATHER}: block_tables has shape {tuple(block_tables.shape)} and seq_lens {tuple(seq_lens.shape)}: "
            "expected [S, pages] and [S]"
        )
    length = max_seq_len
    if length is None:
        length = int(seq_lens.max()) if len(seq_lens) else 0
    if length > block_tables.shape[1] * k_cache.shape[2]:
        raise ValueError(
            f"{_GATHER}: a sequence of {length} tokens does not fit {block_tables.shape[1]} pages of "
            f"{k_cache.shape[2]}: pass block_tables with more columns"
        )
    if v_cache is None:
        width = k_cache.shape[3]
        H = width // 2 if head_size is None else head_size
        if not 0 < H < width:
            raise ValueError(f"{_GATHER}: head_size={H}: expected 1 to {width - 1}, as kv_cache's width is {width}")
        k_cache, v_cache = k_cache[..., :H], k_cache[..., H:]
    parts = []
    for name, cache, scale in (("k_scale", k_cache, k_scale), ("v_scale", v_cache, v_scale)):
        if scale is not None:
            checks.check_read_scale(_GATHER, name, scale, cache)
        part = reference.gather(cache, block_tables, seq_lens, length)
        if scale is not None or dtype is not None:
            if scale is not None and scale.shape == cache.shape[:3]:
                scale = reference.gather(scale, block_tables, seq_lens, length).unsqueeze(-1)
            part = reference.dequantise(part, scale, dtype or torch.float32)
        parts.append(part)
    return parts[0], parts[1]


def _listed(x: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)


def _copy_blocks_(caches: list[torch.Tensor], pairs: torch.Tensor, block_dim: int, check: bool, impl: str) -> None:
    if check:
        blocks = caches[0].shape[block_dim]
        checks.check_apart(_COPY, checks.check_targets(_COPY, pairs.tolist(), (blocks, blocks)))
    unsupported = next(filter(None, (_unsupported(cache, block_dim) for cache in caches)), None)
    choice = dispatch.choose(_COPY, pairs.device, impl, unsupported=unsupported)
    dispatch.count(_COPY, choice.impl)
    if choice.triton:
        from . import launch

        launch.copy_blocks_(caches, pairs, block_dim)
    else:
        reference.copy_blocks_(caches, pairs, block_dim)


def _unsupported(cache: torch.Tensor, block_dim: int) -> str | None:
    """Why the kernel cannot copy these, or None."""
    if cache.dtype.itemsize > 8:
        return f"the kernel copies elements of up to 8 bytes, and these are {cache.dtype}"
    elements = cache.numel() // max(cache.shape[block_dim], 1)
    if elements > _MAX_BLOCK:
        return f"the kernel counts up to {_MAX_BLOCK} elements of a block, and these are {elements}"
    return None


def _swap_blocks_(
    sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: torch.Tensor, block_dim: int
) -> None:
    blocks = sources[0].shape[block_dim], targets[0].shape[block_dim]
    runs = _runs(checks.check_targets(_SWAP, pairs.tolist(), blocks))
    for source, target in zip(sources, targets):
        pinned = source.is_pinned() or target.is_pinned()
        for s, t in zip(_by_block(source, block_dim), _by_block(target, block_dim)):
            for first, to, length in runs:
                t[to : to + length].copy_(s[first : first + length], non_blocking=pinned)


def _by_block(cache: torch.Tensor, block_dim: int) -> list[torch.Tensor]:
    """Views [blocks, ...], one for each index of the dimensions before: a run of blocks is one piece of memory."""
    return [cache[index] for index in product(*map(range, cache.shape[:block_dim]))]


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first target, length) of blocks that follow one another on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        if runs:
            first, to, length = runs[-1]
            if (source, target) == (first + length, to + length):
                runs[-1] = first, to, length + 1
                continue
        runs.append((source, target, 1))
    return runs


def _no_result(*_: object) -> None:
    return None


_COPY_OP = library.register(
    "copy_blocks_(Tensor(a!)[] caches, Tensor pairs, int block_dim, bool check, str impl) -> ()",
    _copy_blocks_,
    _no_result,
)
_SWAP_OP = library.register(
    "swap_blocks_(Tensor[] sources, Tensor(a!)[] targets, Tensor pairs, int block_dim) -> ()",
    _swap_blocks_,
    _no_result,
)
