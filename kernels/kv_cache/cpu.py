"""``norm_rope_write_kv_`` without norms on a CPU, for a step whose layers share slots and tables.

In inference q, k and v are often columns of one product's result. They are rotated as one tensor, of which the heads of
v are multiplied by 1, and K and V are written side by side:

    x = q | k | v [T, N + 2K, H]    y = x * cos,    y[of q and k] += partners(x) * sin,    cache[rows] = y[of k | v]

with cos, sin and rows [T, K] worked out once a step: a :class:`Plan`. Results are ``reference.py``'s, bit for bit.
"""

from __future__ import annotations

import torch

from ..rope import reference as rope


class Plan:
    """What all layers of a step share.

    It belongs to the contents that ``slot_mapping`` [T], ``cos`` and ``sin`` [T, P/2] had when it was made:
    :meth:`fits` says whether a call has the same ones.
    """

    def __init__(
        self,
        heads: tuple[int, int],
        cache: torch.Size,
        written: int,
        slot_mapping: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
    ) -> None:
        """``heads`` are N and K, ``cache`` is [blocks, K, B, 2H]; tokens from ``written`` on are padding."""
        (count, kv_heads), (block_size, width) = heads, cache[2:]
        self._heads, self._cache, self._interleaved = heads, cache, interleaved
        self._given = slot_mapping, cos, sin
        self._versions = [x._version for x in self._given]
        # Rows of [blocks * K * B, 2, H]: (block * K + head) * B + slot, and the mapping is block * B + slot.
        slots = slot_mapping[:written]
        rows = torch.add(slots, slots // block_size, alpha=(kv_heads - 1) * block_size)
        self._rows = rows[:, None] + torch.arange(0, kv_heads * block_size, block_size, device=rows.device)
        cos, self._sin = rope.spread(cos, sin, interleaved)
        self._cos = cos.new_ones(len(cos), count + 2 * kv_heads, width // 2)
        self._cos[:, : count + kv_heads, : cos.shape[-1]] = cos

    def fits(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        interleaved: bool,
    ) -> bool:
        """Whether it is for this call: for tensors that are the same objects, in which torch counts no change."""
        mine = self._given
        if mine[0] is not slot_mapping or mine[1] is not cos or mine[2] is not sin or self._interleaved != interleaved:
            return False
        (count, kv_heads), tokens, size = self._heads, len(slot_mapping), self._cache[3] // 2
        return (
            kv_cache.shape == self._cache
            and kv_cache.is_contiguous()
            and q.dtype is k.dtype is v.dtype is kv_cache.dtype is torch.float32
            and q.shape == (tokens, count, size)
            and k.shape == v.shape == (tokens, kv_heads, size)
            and self._versions == [x._version for x in mine]
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write k and v of a call that fits; returns q rotated, [T, N, H], a view of rows with what was written."""
        return self.run_columns(side_by_side(q, k, v), kv_cache)

    def run_columns(self, x: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """:meth:`run` of x = q | k | v [T, N + 2K, H]."""
        (count, kv_heads), size = self._heads, x.shape[2]
        rotary = self._sin.shape[-1]
        y = x * self._cos
        turned = slice(0, count + kv_heads)
        partners = rope.partners(x[:, turned, :rotary], self._interleaved)
        y[:, turned, :rotary].addcmul_(partners, self._sin)
        written = y[: len(self._rows), count:].unflatten(1, (2, kv_heads)).transpose(1, 2)  # [T, K, 2, H]
        kv_cache.view(-1, 2, size).index_put_((self._rows,), written)
        return y[:, :count]


def make_plan(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> Plan | None:
    """A plan for calls of q [T, N, H] and kv_cache [blocks, K, B, 2H], None where none could fit."""
    fp32 = q.dtype is kv_cache.dtype is cos.dtype is sin.dtype is torch.float32
    if not fp32 or q.dim() != 3 or kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * q.shape[2]:
        return None
    tables = cos.dim() == 2 and cos.shape == sin.shape and 0 < 2 * cos.shape[1] <= q.shape[2]
    if not tables or not len(q) == len(cos) == slot_mapping.numel() == len(slot_mapping):
        return None
    if slot_mapping.dtype is not torch.int64:
        return None
    written, padding = len(slot_mapping), slot_mapping < 0
    if bool(padding.any()):
        written -= int(padding.sum())
        if bool(padding[:written].any()):
            return None
    if any(x.is_inference() for x in (slot_mapping, cos, sin)):  # of which torch counts no changes
        return None
    heads = q.shape[1], kv_cache.shape[1]
    return Plan(heads, kv_cache.shape, written, slot_mapping, cos, sin, interleaved)


def side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    """[T, N_i, H] as [T, sum N_i, H]: a view where they are columns of one matrix, else a copy."""
    first, last = parts[0], parts[-1]
    tokens, size, end = len(first), first.shape[2], first.data_ptr()
    for part in parts:
        row, *columns = part.stride()
        if part.data_ptr() != end or columns != [size, 1] or (tokens > 1 and row != first.stride(0)):
            return torch.cat(parts, 1)
        end += part.shape[1] * size * part.element_size()
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return torch.cat(parts, 1)
    count = sum([part.shape[1] for part in parts])
    return first.as_strided((tokens, count, size), (first.stride(0) if tokens > 1 else count * size, size, 1))
