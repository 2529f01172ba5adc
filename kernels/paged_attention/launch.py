"""From a call's tensors to launches: the plan, a launch for each class of tiles, and the merge of what was split."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton

from ..runtime import alloc, device, fences, tuning
from ..runtime.chips import converts_e4m3, multiplies_asynchronously
from ..runtime.vectors import told
from . import plan_triton
from . import triton as kernels
from .config import Problem, forced
from .options import AttentionOptions, Bounds
from .plan import Section, max_units, sections

_LOG2E = math.log2(math.e)
_PLAN_BLOCK = 128  # sequences, or items, that a program of the plan handles at once
_PLAN_WARPS = 2
_MERGE_PARTS = 16  # at a time
_MERGE_ROWS = 4  # at a time: their maxima and sums fill a sector
_MERGE_COLUMNS = 4  # that a thread holds of each part: 16 bytes
_MERGE_PROGRAMS = 16  # for a tile of one KV head, at most

# q, keys, values, block_tables, seq_lens, query_start_loc
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """A plan on the device, the calls that it is for, and what launches them, by kind."""

    problem: Problem
    data: torch.Tensor
    lengths: tuple[torch.Tensor, torch.Tensor]  # seq_lens and query_start_loc, of which it was made
    settled: dict[Any, Settled | None] = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> int:
        """What stands for ``problem`` where an op is called, which cannot take the problem itself."""
        return hash(self.problem) & _KEY_BITS


_KEY_BITS = 2**62 - 1
_KEPT_PROBLEMS = 1024
_recent: dict[int, Problem] = {}  # by key, for messages


def _check_plan(key: int, asked: Problem) -> None:
    """ValueError where the plan ``key`` was made for another call."""
    if key == hash(asked) & _KEY_BITS:
        return
    made = _recent.get(key, asked)
    wrong = [
        f"{name}={getattr(asked, name)} (plan: {getattr(made, name)})"
        for name in Problem._fields
        if getattr(asked, name) != getattr(made, name)
    ]
    raise ValueError(
        f"paged_attention: plan was made for another call: {', '.join(wrong) or 'an earlier one'}; pass plan_attention "
        "the same arguments, or leave plan out"
    )


def problem_of(tensors: Tensors, options: AttentionOptions, invariant: bool, bounds: Bounds) -> Problem:
    """What the host knows of a call of checked input."""
    q, k_cache, v_cache, block_tables, seq_lens, _ = tensors
    kv_heads = k_cache.shape[1]
    group = q.shape[1] // kv_heads
    max_keys = block_tables.shape[1] * k_cache.shape[2]
    window = options.window
    if window is not None and window >= max_keys + q.shape[0]:
        window = None  # it holds every key, and sums with it stay within 32 bits
    arch = device.architecture(q.device)
    return Problem(
        arch,
        device.program_slots(q.device),
        q.shape[0],
        seq_lens.shape[0],
        max_keys,
        group,
        kv_heads,
        q.shape[2],
        v_cache.shape[3],
        q.dtype,
        k_cache.dtype,
        options.causal,
        window,
        options.prefix_lens is not None,
        options.tree_mask is not None,
        invariant,
        None if not bounds.min_query_len else 1 << (bounds.min_query_len * group).bit_length() - 1,
        None if bounds.max_query_len is None else triton.next_power_of_2(bounds.max_query_len * group),
        None if bounds.max_seq_len is None else triton.next_power_of_2(bounds.max_seq_len),
        forced.config,
        _fenced(arch, q, k_cache, v_cache),
    )


def _fenced(arch: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether asynchronous products may read what cp.async copied (``runtime/fences.py``). fp32 has no such products.

    Triton 3.7.1 fences the keys' product alone where only the values are copied, and the keys come through registers.
    """
    if q.dtype == torch.float32 or not multiplies_asynchronously(arch):
        return True
    if not fences.fenced(arch):
        return False
    alike = k_cache.stride() == v_cache.stride() and not (k_cache.data_ptr() | v_cache.data_ptr()) & 15
    return alike or k_cache.dtype != q.dtype or _copied(k_cache) or not _copied(v_cache)


def _copied(cache: torch.Tensor) -> bool:
    """Whether the kernel is compiled for rows that begin at multiples of 16 bytes, which cp.async can load."""
    return not cache.data_ptr() & 15 and not any(stride * cache.itemsize & 15 for stride in cache.stride()[:3])


def make_plan(tensors: Tensors, options: AttentionOptions, invariant: bool, bounds: Bounds) -> Plan:
    """The plan of :func:`paged_attention_fwd` for checked input; what it points to is not read but for lengths."""
    problem = problem_of(tensors, options, invariant, bounds)
    plan = Plan(problem, _make_plan(problem, tensors[4], tensors[5], options.prefix_lens), tensors[4:])
    if len(_recent) >= _KEPT_PROBLEMS:
        _recent.clear()
    _recent[plan.key] = problem
    return plan


def _make_plan(
    problem: Problem, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, prefix_lens: torch.Tensor | None
) -> torch.Tensor:
    lengths = [
        device.dense_rows(query_start_loc),
        device.dense_rows(seq_lens),
        None if prefix_lens is None else device.dense_rows(prefix_lens),
    ]
    data = alloc.empty((sections(problem)[-1].end,), torch.int32, seq_lens.device)
    tensors = (data, *lengths)
    for run in _planning(problem, device.kinds_of(tensors)):
        run.launch((problem.seqs + 1, 1, 1), tensors, on=data)
    return data


@functools.lru_cache(4096)
def _planning(problem: Problem, kinds: tuple[Any, ...]) -> tuple[device.Prepared, ...]:
    return tuple([_planning_of(problem, section) for section in sections(problem)])


def _planning_of(problem: Problem, section: Section) -> device.Prepared:
    config, tiles = section.config, section.tiles
    rest = {
        "num_seqs": problem.seqs,
        "num_tokens": problem.tokens,
        "max_keys": problem.max_keys,
        "window": problem.window,
        "above": tiles.above,
        "upto": 2**31 - 1 if tiles.upto is None else tiles.upto,
        "block_m": config.block_m,
        "unit": config.unit,
        "reach": max_units(problem, config, 2**31 - config.unit),
        "smallest": config.smallest_split,
        "balance": section.balance,
        "max_slots": section.max_slots,
        "max_items": section.max_items,
        "max_merges": section.max_merges,
        "header_at": section.header_at,
        "items_at": section.items_at,
        "merges_at": section.merges_at,
        "GROUP": problem.group,
        "CAUSAL": problem.causal,
        "TREE": problem.tree,
        "QUANTA": problem.invariant,
        "BLOCK": _PLAN_BLOCK if problem.arch != device.INTERPRETER else 4,
    }
    return device.Prepared(plan_triton._plan_kernel, rest, num_warps=_PLAN_WARPS, num_stages=1, config="plan")


class _Layout(NamedTuple):
    """What the arguments of the launches depend on beside the problem, but for addresses."""

    page_size: int
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    v_pairs: bool  # of bytes
    table_stride: int
    tree: tuple[int, int] | None  # stride and width
    k_scales: tuple[int, ...] | None  # strides; empty for one element
    v_scales: tuple[int, ...] | None
    scale: float
    softcap: float | None
    tf32: bool


def paged_attention_fwd(
    tensors: Tensors,
    options: AttentionOptions,
    invariant: bool,
    bounds: Bounds,
    plan: torch.Tensor | None,
    plan_key: int,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[out [T, N, Hv], lse [T, N]] of checked input; shapes as in ``op.paged_attention``. ``out`` is contiguous.

    Raises ValueError for a plan that was made for another call.
    """
    q, _, _, _, seq_lens, query_start_loc = tensors
    problem = problem_of(tensors, options, invariant, bounds)
    if out is None:
        out = alloc.empty((problem.tokens, q.shape[1], problem.v_size), q.dtype, q.device)
    lse = alloc.empty((problem.tokens, q.shape[1]), torch.float32, q.device)
    if not out.numel():
        return [out, lse]
    if plan is None:
        plan = _make_plan(problem, seq_lens, query_start_loc, options.prefix_lens)
    else:
        _check_plan(plan_key, problem)
    launches, read, more = _prepared(problem, tensors, options, plan, out, lse)
    _run(launches, (*read, plan, out, lse), more)
    return [out, lse]


def _prepared(
    problem: Problem, tensors: Tensors, options: AttentionOptions, *written: torch.Tensor
) -> tuple[tuple[_Launches, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """The launches; q, keys, values and block_tables as they take them; and what they read beside these. ``written``:
    the plan, out and lse.
    """
    q, k_cache, v_cache, block_tables, _, _ = tensors
    q, block_tables = device.dense_rows(q), device.dense_rows(block_tables)
    k_cache, v_cache = (_stored(cache, problem.arch) for cache in (k_cache, v_cache))
    tree = None if options.tree_mask is None else device.dense_rows(options.tree_mask).view(torch.uint8)
    sinks, slopes, prefix_lens = (
        x if x is None else x.contiguous() for x in (options.sinks, options.alibi_slopes, options.prefix_lens)
    )
    layout = _Layout(
        k_cache.shape[2],
        q.stride(),
        k_cache.stride(),
        v_cache.stride(),
        _in_pairs(v_cache),
        block_tables.stride(0),
        None if tree is None else (tree.stride(0), tree.shape[1]),
        _scale_strides(options.k_scale),
        _scale_strides(options.v_scale),
        options.scale,
        options.softcap,
        q.dtype == torch.float32 and device.allow_tf32(),
    )
    # The largest alignment is all that tells the partial results from other tensors, and torch's allocator gives it.
    read = (q, k_cache, v_cache, block_tables)
    more = (sinks, slopes, prefix_lens, tree, options.k_scale, options.v_scale)
    return _launches(problem, layout, device.kinds_of((*read, *written, *more))), read, more


def _run(
    launches: tuple[_Launches, ...], given: tuple[torch.Tensor, ...], more: tuple[torch.Tensor | None, ...]
) -> None:
    q, _, _, _, plan, out, lse = given
    sinks, _, _, _, _, v_scale = more
    for launched in launches:
        # Where nothing is split another tensor takes the place of the partial results: the kernel stays the same.
        parts = alloc.new_empty_of(lse, torch.float32, launched.part_size) if launched.part_size else lse
        launched.attend.launch(launched.grid, (*given, parts, *more), on=q)
        if launched.merge is not None:
            launched.merge.launch(launched.merge_grid, (plan, parts, out, lse, sinks, v_scale), on=q)


class Settled:
    """Calls of one kind with one plan, without masks beside causality and windows; :func:`settle` makes them."""

    def __init__(self, launches: tuple[_Launches, ...], out: torch.Tensor) -> None:
        self._launches, self._size = launches, out.shape

    def __call__(
        self,
        plan: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = alloc.new_empty(q, *self._size)
        lse = alloc.new_empty_of(q, torch.float32, *self._size[:2])
        given = q, k_cache, v_cache, block_tables, plan, out, lse
        _run(self._launches, given, (sinks, slopes, None, None, k_scale, v_scale))
        return out, lse


def settle(tensors: Tensors, options: AttentionOptions, invariant: bool, bounds: Bounds, plan: Plan) -> Settled | None:
    """What launches calls like this one, of checked input; None where an operand has to be copied first.

    Raises ValueError for a plan that was made for another call.
    """
    problem = problem_of(tensors, options, invariant, bounds)
    _check_plan(plan.key, problem)
    q = tensors[0]
    out, lse = (
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in (((problem.tokens, q.shape[1], problem.v_size), q.dtype), (q.shape[:2], torch.float32))
    )
    launches, read, more = _prepared(problem, tensors, options, plan.data, out, lse)
    given = (options.sinks, options.alibi_slopes, options.prefix_lens, options.tree_mask)
    copied = any(x is not y for x, y in zip((*read, *more[:4]), (*tensors[:4], *given), strict=True))
    return None if copied or not out.numel() else Settled(launches, out)


class _Launches(NamedTuple):
    """Those of one class of tiles."""

    attend: device.Prepared
    grid: tuple[int, int, int]
    merge: device.Prepared | None  # where sequences may be split
    merge_grid: tuple[int, int, int]
    part_size: int  # of all partial results, in elements


@functools.lru_cache(4096)
def _launches(problem: Problem, layout: _Layout, kinds: tuple[Any, ...]) -> tuple[_Launches, ...]:
    """How a call is launched. ``kinds`` stand for what Triton looks at in tensors."""
    return tuple([_launches_of(problem, section, layout) for section in sections(problem)])


tuning.also_forget += [_planning.cache_clear, _launches.cache_clear]


def _launches_of(problem: Problem, section: Section, layout: _Layout) -> _Launches:
    rows = section.max_slots * problem.kv_heads * section.part_rows
    if layout.page_size * max(layout.k_strides[2], layout.v_strides[2]) >= 2**31:
        raise ValueError(
            f"paged_attention: slots of kv_cache are {max(layout.k_strides[2], layout.v_strides[2])} elements apart, "
            f"{layout.page_size} to a block: expected less than 2^31 elements within a block; put slots further in"
        )
    attend = _attending(problem, section, layout, rows)
    grid = (section.max_items, problem.kv_heads, 1)
    if not section.max_slots:
        return _Launches(attend, grid, None, (0, 0, 0), 0)
    blocks = triton.cdiv(problem.kv_heads * section.part_rows, _MERGE_ROWS)
    columns = triton.cdiv(problem.v_size, _merged_columns(problem))
    merge_grid = (section.max_merges, min(blocks, problem.kv_heads * _MERGE_PROGRAMS), columns)
    merge = _merging(problem, section, layout, rows)
    return _Launches(attend, grid, merge, merge_grid, rows * (problem.v_size + 2))


def _attending(problem: Problem, section: Section, layout: _Layout, part_rows: int) -> device.Prepared:
    config = section.config
    wide, precision = _product(problem, layout.tf32)
    # For operands in registers: wgmma's (64 rows) stay in shared memory. On AMD's chips two products take too many.
    pairs = layout.v_pairs and config.block_m < 64 and not problem.arch.startswith("gfx")
    v_strides = tuple(stride // (1 + pairs) for stride in layout.v_strides[:3])
    rest = {
        "part_rows": part_rows,
        "header_at": section.header_at,
        "items_at": section.items_at,
        "scale": layout.scale if layout.softcap is not None else layout.scale * _LOG2E,
        "softcap": layout.softcap,
        "window": problem.window,
        "tree_width": None if layout.tree is None else layout.tree[1],
        "stride_table": layout.table_stride,
        "stride_tree": None if layout.tree is None else layout.tree[0],
        "q_strides": layout.q_strides[:2],
        "k_strides": layout.k_strides[:3],
        "v_strides": v_strides,
        "k_scale_strides": layout.k_scales or (0, 0, 0),
        "v_scale_strides": layout.v_scales or (0, 0, 0),
        "GROUP": problem.group,
        "HEAD_SIZE": problem.head_size,
        "V_SIZE": problem.v_size,
        "Q_ALIGN": told(layout.q_strides[:2], problem.q_dtype.itemsize),
        "K_ALIGN": told(layout.k_strides[:3], problem.kv_dtype.itemsize),
        "V_ALIGN": told(v_strides, problem.kv_dtype.itemsize * (1 + pairs)),
        "PAGE_SIZE": layout.page_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_H": max(16, triton.next_power_of_2(problem.head_size)),
        "BLOCK_V": max(16, triton.next_power_of_2(problem.v_size)),
        "PART_ROWS": section.part_rows,
        "QUANTUM": config.quantum,
        "CAUSAL": problem.causal,
        "K_SCALES": _scales(layout.k_scales),
        "V_SCALES": _scales(layout.v_scales),
        "WIDE": wide,
        "PRECISION": precision,
        "UPCAST": problem.arch == device.INTERPRETER,
        "PAIRS": pairs,
        "PTX": problem.arch.startswith("sm_"),
        # Asynchronous products read widened codes from shared memory: 16 codes, 32 bytes, would be stored at two
        # wavefronts for one.
        "RUN": 8 if config.block_m >= 64 and multiplies_asynchronously(problem.arch) else 16,
    }
    return device.Prepared(
        kernels._paged_attention_fwd_kernel,
        rest,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        config=config,
    )


def _merged_columns(problem: Problem) -> int:
    """Of a program that merges ``_MERGE_ROWS`` rows: what one warp holds."""
    lanes = 64 if problem.arch.startswith("gfx") else 32
    return min(_MERGE_COLUMNS * lanes // _MERGE_ROWS, triton.next_power_of_2(problem.v_size))


def _merging(problem: Problem, section: Section, layout: _Layout, part_rows: int) -> device.Prepared:
    rest = {
        "part_rows": part_rows,
        "kv_heads": problem.kv_heads,
        "header_at": section.header_at,
        "merges_at": section.merges_at,
        "GROUP": problem.group,
        "V_SIZE": problem.v_size,
        "PART_ROWS": section.part_rows,
        "BLOCK_R": _MERGE_ROWS,
        "BLOCK_V": _merged_columns(problem),
        "BLOCK_P": 1 if problem.invariant else _MERGE_PARTS,
        "QUANTA": problem.invariant,
        "V_SCALES": _scales(layout.v_scales),
    }
    return device.Prepared(kernels._merge_kernel, rest, num_warps=1, num_stages=1, config=f"merge-{section.config}")


def _product(problem: Problem, tf32: bool) -> tuple[bool, str]:
    """(whether products are formed in fp32's format, their precision)."""
    quantised = problem.kv_dtype.itemsize == 1
    if problem.q_dtype == torch.float32:
        return True, "tf32" if tf32 and not problem.arch.startswith("gfx") else "ieee"
    if quantised or problem.kv_dtype == problem.q_dtype:
        return False, "ieee"
    # fp16 with bf16: tf32 holds both.
    return True, "ieee" if problem.arch.startswith("gfx") else "tf32"


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, ...] | None:
    if scale is None:
        return None
    return () if scale.numel() == 1 else scale.stride()


def _scales(strides: tuple[int, ...] | None) -> int:
    if strides is None:
        return kernels.NO_SCALE.value
    return kernels.TOKEN_SCALES.value if strides else kernels.ONE_SCALE.value


def _stored(cache: torch.Tensor, arch: str) -> torch.Tensor:
    """The cache as a kernel on ``arch`` can load it: e4m3 as bytes where the chip has no conversion of it."""
    if cache.dtype != torch.float8_e4m3fn or converts_e4m3(arch):
        return cache
    return cache.view(torch.uint8)


def _in_pairs(v_cache: torch.Tensor) -> bool:
    """Whether values are bytes that can be read two by two, enough of them for a product of each half."""
    if v_cache.itemsize != 1 or v_cache.shape[3] <= 16:
        return False
    return not any(n % 2 for n in (v_cache.shape[3], v_cache.storage_offset(), *v_cache.stride()[:3]))
