"""Serving over a paged KV cache: storage for every layer, one step's batch laid out over it, and attention over both.

``PagedKVCache`` is memory, ``PagedBatch`` says which tokens a step computes and where they belong, ``PagedAttention``
is the layer that an adapter to a serving engine calls. ``ParallelAttention`` calls ``PagedBatch.attend`` itself.

Each rank holds the KV heads that its query heads attend to: K/R of them, or one, repeated, where there are fewer heads
than ranks (Pope et al., arXiv:2211.05102, section 3.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from ...kernels.kv_cache import copy_blocks_, norm_rope_write_kv_, plan_write, swap_blocks_, write_kv_
from ...kernels.paged_attention import paged_attention, plan_attention
from ...kernels.runtime import alloc
from ...kernels.runtime.checks import whole_number
from ...kernels.runtime.dtypes import QUANTISED
from ...parallel.core.mesh import Group, MeshLike, tp_group
from ..config import check_heads
from ..module import Init, ShardedModule, check_divides
from ..options import LayerOptions, ParameterKwargs, Unpack
from .rope import Rope

KV_SCALES = ("tensor", "token")


def default_block_size(device: torch.device | str) -> int:
    """Token slots of a block: 256 on a CPU, where each page has a fixed cost, and 16 on a GPU, where it has none."""
    return 256 if torch.device(device).type == "cpu" else 16


def local_kv_heads(num_kv_heads: int, group: Group) -> range:
    """The number of KV heads that this rank holds, out of ``num_kv_heads``.

    Raises ValueError unless ``num_kv_heads`` divides by the group's size or the group's size by ``num_kv_heads``.
    """
    rank, size = group.rank, group.size
    if num_kv_heads >= 1 and num_kv_heads % size == 0:
        count = num_kv_heads // size
        return range(rank * count, (rank + 1) * count)
    if num_kv_heads >= 1 and size % num_kv_heads == 0:
        first = rank // (size // num_kv_heads)
        return range(first, first + 1)
    raise ValueError(
        f"num_kv_heads={num_kv_heads} over {size} ranks: expected a multiple of {size}, so that each rank holds as "
        "many, or a divisor, so that as many ranks share each; change the number of ranks"
    )


class PagedKVCache:
    """Keys and values of all layers on this rank, in blocks of ``block_size`` token slots.

    ``data`` is [layers, num_blocks, K/R, block_size, H + Hv], K and V side by side: per layer vLLM's layout. The
    allocator decides which sequence owns which block. A block that was never written to holds zeros on a CPU and
    undefined values on a GPU.

    Args:
        num_layers, num_blocks: of the storage.
        num_kv_heads: of the whole model, K.
        head_dim, v_head_dim: H of keys, Hv of values; default the same.
        block_size: any; default :func:`default_block_size`.
        dtype: the model's, or float8_e4m3fn or int8.
        kv_scales: the scales of a quantised cache. ``"token"`` (default): ``k_scale`` and ``v_scale`` [layers,
            num_blocks, K/R, block_size] fp32, which each write fills. ``"tensor"``: [layers] fp32, 1 until the caller
            sets them, as a calibration does.
        mesh: the tensor-parallel ranks that the heads are split over, see :func:`local_kv_heads`.
        device: of the storage.

    Raises ValueError for sizes below 1, heads that cannot be split, and scales that do not go with the dtype.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        block_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_scales: str | None = None,
        mesh: MeshLike = None,
        device: torch.device | str = "cpu",
    ) -> None:
        block_size = default_block_size(device) if block_size is None else block_size
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "num_kv_heads": num_kv_heads,
            "block_size": block_size,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
        }
        for name, size in sizes.items():
            whole_number(f"PagedKVCache: {name}", size)
        if dtype in QUANTISED and kv_scales is None:
            kv_scales = "token"
        if kv_scales is not None and (dtype not in QUANTISED or kv_scales not in KV_SCALES):
            raise ValueError(
                f"PagedKVCache: kv_scales={kv_scales!r} with {dtype}: expected one of {', '.join(KV_SCALES)} with "
                f"{' or '.join(map(str, QUANTISED))}, and None with any other dtype"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.head_dim = head_dim
        self.kv_heads = local_kv_heads(num_kv_heads, tp_group(mesh))
        slots = (num_layers, num_blocks, len(self.kv_heads), block_size)
        self.data = alloc.empty((*slots, head_dim + v_head_dim), dtype, torch.device(device))
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None
        if kv_scales == "token":
            self.k_scale, self.v_scale = (alloc.empty(slots, torch.float32, self.data.device) for _ in range(2))
        elif kv_scales == "tensor":
            self.k_scale, self.v_scale = (torch.ones(num_layers, device=device) for _ in range(2))
        if self.data.is_cpu:  # attention reads a page twice if one of its unowned slots holds NaN
            for x in self.by_block():
                x.view(torch.uint8).zero_()

    def layer(self, index: int) -> torch.Tensor:
        """[num_blocks, K/R, block_size, H + Hv] of one layer, a view."""
        return self.data[index]

    def scales(self, index: int) -> dict[str, torch.Tensor]:
        """``k_scale`` and ``v_scale`` of one layer as the ops take them; empty where the cache is not quantised."""
        if self.k_scale is None or self.v_scale is None:
            return {}
        # With one scale for the layer, the slice is a view of one element.
        where = slice(index, index + 1) if self.k_scale.dim() == 1 else index
        return {"k_scale": self.k_scale[where], "v_scale": self.v_scale[where]}

    def by_block(self) -> list[torch.Tensor]:
        """Every tensor with a block dimension, which is its second one."""
        scales = [x for x in (self.k_scale, self.v_scale) if x is not None and x.dim() > 1]
        return [self.data, *scales]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in every layer: copy-on-write for sequences that diverge."""
        where = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2)
        copy_blocks_(self.by_block(), where.to(self.data.device, non_blocking=True), block_dim=1)

    def swap_blocks(self, target: PagedKVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs (block here, block there), into ``target``, a cache that differs at most in
        device and number of blocks.

        A copy from a GPU to pinned memory is asynchronous: synchronise before reading it.
        """
        where = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2)
        swap_blocks_(self.by_block(), target.by_block(), where, block_dim=1)

    @property
    def nbytes(self) -> int:
        """Bytes of storage on this rank, scales included."""
        stored = (self.data, self.k_scale, self.v_scale)
        return sum(x.numel() * x.element_size() for x in stored if x is not None)


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence that a step computes: positions ``start`` to ``start + length``.

    ``blocks`` is the sequence's block table and reaches at least to the end of the span. Positions before ``start``
    are in the cache already. ``logits`` is the number of tokens at the span's end whose logits the caller wants; True
    means one, False none.
    """

    blocks: Sequence[int]
    start: int
    length: int
    logits: int = 1


@dataclass(frozen=True)
class PagedBatch:
    """One step of several sequences, their tokens one after another; attention layers call :meth:`attend`.

    T tokens of S sequences; the shapes are those of ``paged_attention`` and ``write_kv_``, plus ``positions`` [T] and
    ``logit_indices``, the tokens whose logits the caller wants. ``min_query_len``, ``max_query_len`` and
    ``max_seq_len`` are the host's bounds of the lengths. ``prefix_lens`` [S] and ``tree_mask`` [T, W] go to every
    layer's attention, ``impl`` and ``invariant`` to the ops.

    An adapter that already has these tensors calls the constructor. The layers do not check the tensors' contents.
    """

    cache: PagedKVCache
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    logit_indices: torch.Tensor
    min_query_len: int | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    prefix_lens: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    invariant: bool | None = None
    impl: str = "auto"
    _plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, cache: PagedKVCache, spans: Sequence[Span], **options: Any) -> PagedBatch:
        """Lay ``spans`` out over ``cache``, in this order; ``options`` are the last fields, from ``prefix_lens`` on.

        Raises ValueError for an empty span, one that its blocks do not cover, blocks that the cache does not have, more
        logits than tokens, or tokens that would be written to the same slot.
        """
        size, on = cache.block_size, cache.data.device
        for span in spans:
            _check_span(span, cache)
        width = max((len(span.blocks) for span in spans), default=0)
        ends = list(accumulate(span.length for span in spans))
        lens = [span.start + span.length for span in spans]
        positions = [range(span.start, span.start + span.length) for span in spans]
        slots = [span.blocks[p // size] * size + p % size for span, where in zip(spans, positions) for p in where]
        _check_slots(slots, size)

        def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device="cpu").to(on, non_blocking=True)

        tables = [block for span in spans for block in (*span.blocks, *([-1] * (width - len(span.blocks))))]
        return cls(
            cache,
            block_tables=tensor(tables, torch.int32).view(len(spans), width),
            seq_lens=tensor(lens, torch.int32),
            query_start_loc=tensor([0, *ends], torch.int32),
            slot_mapping=tensor(slots, torch.int64),
            positions=tensor([p for where in positions for p in where], torch.int64),
            logit_indices=tensor(
                [i for span, end in zip(spans, ends) for i in range(end - span.logits, end)], torch.int64
            ),
            min_query_len=min((span.length for span in spans), default=0),
            max_query_len=max((span.length for span in spans), default=0),
            max_seq_len=max(lens, default=0),
            **options,
        )

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        rope: Rope | None = None,
        interleaved: bool = False,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        norm_offset: float = 0.0,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store this step's keys and values, then attend over all of each sequence's.

        q [T, N/R, H], k [T, K/R, H] and v [T, K/R, Hv] -> [T, N/R, Hv]. With ``rope`` (tables [T, P/2] of the tokens'
        positions) or norms (weights [H]), the launch that writes k and v also normalises and rotates q and k. The other
        arguments are those of ``kernels.paged_attention``.
        """
        pages, scales = self.cache.layer(layer_index), self.cache.scales(layer_index)
        # `of` checked the spans, so the layers do not read the tables again.
        common: dict[str, Any] = {**scales, "check": False, "impl": self.impl}
        if rope is None and q_norm is None and k_norm is None:
            write_kv_(pages, k, v, self.slot_mapping, **common)
        else:
            cos, sin = (None, None) if rope is None else rope
            norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps, "norm_offset": norm_offset}
            rotary: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved}
            plan = self._write_plan(q, pages, rope, interleaved)
            q = norm_rope_write_kv_(q, k, v, pages, self.slot_mapping, plan=plan, **rotary, **norms, **common)
        masks: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "prefix_lens": self.prefix_lens,
            "tree_mask": self.tree_mask,
        }
        out: Any = paged_attention(
            q,
            pages,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            min_query_len=self.min_query_len,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            plan=self._plan(q, pages, masks),
            invariant=self.invariant,
            **masks,
            **common,
        )
        return out

    def _plan(self, q: torch.Tensor, pages: torch.Tensor, masks: dict[str, Any]) -> Any:
        """The attention plan shared by all layers with these heads and masks; the first of them makes it."""
        key = (q.shape, q.dtype, masks["causal"], masks["window"])
        if key not in self._plans:
            self._plans[key] = plan_attention(
                *(q, pages, self.block_tables, self.seq_lens, self.query_start_loc),
                min_query_len=self.min_query_len,
                max_query_len=self.max_query_len,
                max_seq_len=self.max_seq_len,
                invariant=self.invariant,
                impl=self.impl,
                **masks,
            )
        return self._plans[key]

    def _write_plan(self, q: torch.Tensor, pages: torch.Tensor, rope: Rope | None, interleaved: bool) -> Any:
        """The write plan shared by all layers that rotate such heads by ``rope``; the first of them makes it."""
        if rope is None or not q.is_cpu:
            return None
        made_for, plan = self._plans.get((q.shape, interleaved), (None, None))
        if made_for is not rope:
            plan = plan_write(
                q, pages, self.slot_mapping, cos=rope.cos, sin=rope.sin, interleaved=interleaved, impl=self.impl
            )
            self._plans[q.shape, interleaved] = rope, plan
        return plan


def _check_span(span: Span, cache: PagedKVCache) -> None:
    size = cache.block_size
    if span.length < 1 or span.start < 0:
        raise ValueError(f"a span of {span.length} tokens from position {span.start}: expected at least one")
    if not 0 <= span.logits <= span.length:
        raise ValueError(f"logits={span.logits} of a span of {span.length} tokens: expected 0 to {span.length}")
    if span.start + span.length > len(span.blocks) * size:
        raise ValueError(
            f"a span to position {span.start + span.length} has {len(span.blocks)} blocks of {size}: "
            "allocate blocks up to its end first"
        )
    if min(span.blocks) < 0 or max(span.blocks) >= cache.num_blocks:
        raise ValueError(
            f"a span has blocks {list(span.blocks)}: expected 0 to {cache.num_blocks - 1}, as the cache has"
        )


def _check_slots(slots: list[int], size: int) -> None:
    if len(set(slots)) != len(slots):
        twice = next(slot for slot, count in Counter(slots).items() if count > 1)
        raise ValueError(
            f"spans write slot {twice % size} of block {twice // size} twice: expected a slot of its own for each "
            "token; blocks may be shared before a span only, so copy one that is not (copy_blocks)"
        )


class PagedAttention(ShardedModule):
    """Attention over a paged cache for one layer: N/R query heads per rank over the KV heads that they attend to.

    ``kernels/paged_attention/reference.py`` defines the masks and the scores.

    Args:
        num_heads, num_kv_heads, head_dim, v_head_dim: of the whole model; the last defaults to ``head_dim``.
        scale: of the scores; default head_dim ** -0.5.
        window, softcap, causal: as defined there.
        sinks: learn a logit for each head, ``sinks`` [N], sharded as the heads are.
        alibi: subtract the standard slopes times the distance, see :func:`alibi_slopes`.
        mesh, params, dtype, device: see :class:`~shardfuse.layers.options.LayerOptions`.

    Raises ValueError for heads that cannot be split over the ranks.
    """

    sinks: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        causal: bool = True,
        **options: Unpack[ParameterKwargs],
    ) -> None:
        super().__init__(LayerOptions.of(type(self), options, ParameterKwargs))
        check_heads(num_heads, num_kv_heads)
        check_divides("num_heads", num_heads, self.group)
        self.kv_heads = local_kv_heads(num_kv_heads, self.group)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = whole_number("head_dim", head_dim)
        self.v_head_dim = whole_number("v_head_dim", head_dim if v_head_dim is None else v_head_dim)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.softcap, self.alibi, self.causal = window, softcap, alibi, causal
        self._slopes: dict[torch.device, torch.Tensor] = {}
        self.add_parameter("sinks", (num_heads,) if sinks else None, 0, Init(constant=0.0))
        self.reset_parameters()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, layer_index: int, **rotation: Any
    ) -> torch.Tensor:
        """q [T, N/R, H], k [T, K/R, H], v [T, K/R, Hv], this rank's heads -> [T, N/R, Hv].

        ``rotation``: ``rope``, ``interleaved``, ``q_norm``, ``k_norm``, ``eps``, ``norm_offset`` of
        :meth:`PagedBatch.attend`; without any, q and k are already normalised and rotated.

        Raises ValueError for tensors of other heads than this rank's.
        """
        heads = self.num_heads // self.group.size
        for name, x, shape in (
            ("q", q, (heads, self.head_dim)),
            ("k", k, (len(self.kv_heads), self.head_dim)),
            ("v", v, (len(self.kv_heads), self.v_head_dim)),
        ):
            if x.shape[1:] != shape:
                raise ValueError(
                    f"PagedAttention: {name} is {list(x.shape)}: expected [tokens, {shape[0]}, {shape[1]}], this "
                    f"rank's heads of {self.num_heads} query and {self.num_kv_heads} KV heads over {self.group.size} "
                    "ranks"
                )
        (sinks,) = self.local("sinks")
        return batch.attend(
            *(layer_index, q, k, v),
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            sinks=sinks,
            alibi_slopes=self._local_slopes(q.device) if self.alibi else None,
            **rotation,
        )

    def _local_slopes(self, device: torch.device) -> torch.Tensor:
        """This rank's slopes on ``device``. They are not a buffer, which ``bfloat16()`` would round."""
        if device not in self._slopes:
            count = self.num_heads // self.group.size
            mine = alibi_slopes(self.num_heads)[self.group.rank * count :][:count]
            self._slopes[device] = torch.tensor(mine, dtype=torch.float32, device=device)
        return self._slopes[device]

    def extra_repr(self) -> str:
        shape = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{shape}, {self.sharding_repr()}"


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head (Press et al., arXiv:2108.12409, section 3).

    For n heads, n a power of two: 2^(-8/n), 2^(-16/n), ... For other n: the slopes of the next lower power of two,
    then every second slope of the next higher one, as in the authors' code.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    return slopes + [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (num_heads - below), 2)]
