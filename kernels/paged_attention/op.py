"""``paged_attention``, ``plan_attention`` and ``merge_attention``: dispatch and schema. For inference: no gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..runtime import dispatch, library, repeated
from ..runtime.dispatch import Choice
from . import checks, cpu, cpu_invariant, reference
from .config import forced
from .options import AttentionOptions, Bounds

if TYPE_CHECKING:
    from .launch import Plan

_OP = "paged_attention"
_MAX_HEAD_SIZE = 256  # of the kernel; the reference takes any

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# q, keys, values, block_tables, seq_lens, query_start_loc
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def paged_attention(
    q: torch.Tensor,
    kv_cache: Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    min_query_len: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: Plan | cpu.Plan | None = None,
    invariant: bool | None = None,
    out: torch.Tensor | None = None,
    check: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a ragged batch over a paged KV cache (PagedAttention, arXiv:2309.06180).

    One call takes whatever mix of prefill chunks, decodes and speculative queries a step holds. This step's keys and
    values must already be in the cache (``kernels.kv_cache``). Formulas and masks: ``reference.py``.

    Args:
        q: [T, N, H] in fp16, bf16 or fp32, all sequences' queries one after another. fp64 runs the reference.
        kv_cache: [num_blocks, K, block_size, H + Hv], keys and values side by side, or a pair (keys [..., H], values
            [..., Hv]); N a multiple of K; any strides but the last, which is 1: other engines' layouts are views. fp16,
            bf16, fp32 (with q in fp32), float8_e4m3fn or int8. Slots that no sequence owns may hold anything, NaN
            included; what a sequence owns is finite.
        block_tables: [S, max_blocks] int32, the blocks of each sequence in order; entries past its length are not read.
        seq_lens: [S] int32, cached tokens of each sequence, this step's included.
        query_start_loc: [S + 1] int32, where each sequence's queries start in q, and where the last one's end; a
            sequence may have none. Query i of sequence s stands at position ``seq_lens[s] - q_len[s] + i``.
        scale: of the scores; default H ** -0.5.
        causal: whether a query sees the keys up to its own only.
        window: a query sees itself and the ``window - 1`` keys before it; where not causal, as many behind it.
        softcap: bends scores to ``softcap * tanh(score / softcap)``.
        sinks: [N], a score without a value for each head, which takes its share of the softmax.
        alibi_slopes: [N] fp32; ``slope * |distance|`` is taken off each score (arXiv:2108.12409).
        prefix_lens: [S] int32: every query of a sequence sees its first ``prefix_lens[s]`` keys (prefix-LM).
        tree_mask: [T, W] bool, W at least the longest q_len: row t sees this step's token j of its sequence where
            ``tree_mask[t, j]``, and all tokens before this step.
        k_scale, v_scale: what stored keys and values are multiplied by: one element, or [num_blocks, K, block_size] for
            each token and head; fp32.
        return_lse: also return the log of each softmax's denominator, for :func:`merge_attention`.
        min_query_len, max_query_len, max_seq_len: bounds that the host knows, of this step's queries (sequences without
            any do not count) and of seq_lens. They leave out launches and programs that would find nothing to do. A
            captured graph is replayed within its bounds.
        plan: from :func:`plan_attention`, made once for all layers of a step.
        invariant: whether a sequence's result must not depend, in any bit, on what shares its batch, how it was chunked
            and how it is spread over the chip; default: what ``kernels/runtime/dispatch.py`` says (``row_invariance``).
        out: [T, N, Hv] in q's dtype, contiguous: where the result is written, and what is returned.
        check: whether the contents of tables and lengths are checked, which reads them on the host. Default: on a CPU,
            where that costs nothing. On a GPU ``True`` waits for the stream, which no graph can capture.
        impl: "auto", "triton" or "reference"; see ``kernels/runtime/dispatch.py``. On a CPU "auto" walks the pages in
            plain torch (``cpu.py``), and in invariant mode all but "triton" run ``cpu_invariant.py``.

    Returns out [T, N, Hv], and with ``return_lse`` the natural logarithms [T, N] fp32. Rows past
    ``query_start_loc[S]`` are padding, for which no table is read. Rows that see nothing are 0, their logarithm that of
    the sink alone, or -inf.

    Raises ValueError for input that does not fit together, RuntimeError when a gradient would be needed.
    """
    k_cache, v_cache = _split_checked(kv_cache, q)
    options = AttentionOptions(
        q.shape[-1] ** -0.5 if scale is None else scale,
        *(causal, window, softcap, sinks, alibi_slopes, prefix_lens, tree_mask, k_scale, v_scale),
    )
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    bounds = Bounds(min_query_len, max_query_len, max_seq_len)
    invariant = dispatch.row_invariant() if invariant is None else invariant
    if isinstance(plan, cpu.Plan):
        walks = dispatch.asked(impl) not in ("reference", "triton") and not invariant and out is None
        if walks and check is False and library.direct(*tensors):
            return _planned(tensors, options, bounds, plan, return_lse)
        plan = None
    elif plan is not None and check is False and out is None and not torch.is_grad_enabled():
        found = _again(tensors, options, bounds, plan, invariant, impl)
        if found is not None:
            return found if return_lse else found[0]
    checks.check(*tensors, options, bounds)
    planned = (None, 0) if plan is None else (plan.data, plan.key)
    call = (*tensors, *options, *bounds, *planned, invariant, check, impl)
    if out is None:
        out, lse = _PAGED_ATTENTION(*call)
    else:
        checks.check_out(q, v_cache, out)
        lse = _INTO(*call, out)
    return (out, lse) if return_lse else out


def plan_attention(
    q: torch.Tensor,
    kv_cache: Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    prefix_lens: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    min_query_len: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    invariant: bool | None = None,
    impl: str = "auto",
) -> Plan | cpu.Plan | None:
    """How the work of :func:`paged_attention` is cut into programs, for all calls that share these arguments.

    Made on the device by one small launch, without a look at its contents on the host. q and kv_cache count by their
    shapes, dtypes and device: one plan serves every layer of a step that has the same ones, and the same mask.

    On a CPU the plan says which pages are visited together. It is for these tables with the contents that they have
    now: a call with ``check=False`` uses it if they are the same tensors and torch counts no change of theirs, and else
    does without.

    Returns None where neither a kernel nor the walk over the pages would run, as in invariant mode on a CPU;
    ``plan=None`` is what such calls take.
    """
    k_cache, v_cache = _split_checked(kv_cache, q)
    options = AttentionOptions(1.0, causal, window, prefix_lens=prefix_lens, tree_mask=tree_mask)
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    invariant = dispatch.row_invariant() if invariant is None else invariant
    if not _choose(q, k_cache, v_cache, impl).triton:
        if not q.is_cpu or dispatch.asked(impl) == "reference" or invariant or not library.direct(*tensors):
            return None
        return cpu.make_plan(q, k_cache, v_cache, tensors[3:], options)
    launch = library.imported(f"{__package__}.launch")
    plan: Plan = launch.make_plan(tensors, options, invariant, Bounds(min_query_len, max_query_len, max_seq_len))
    return plan


def merge_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results over disjoint sets of keys as one over all of them (arXiv:2402.05099, appendix A).

    Args:
        outs: [T, N, Hv] each.
        lses: [T, N] each, natural logarithms; a sink may have been counted in one of them only.

    Returns (out, lse) in their dtypes; computed in fp32, or in the tensors' own precision if that is higher.

    Raises ValueError for shapes that do not fit together.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_attention: {len(outs)} outs and {len(lses)} lses: expected as many, at least one")
    for out, lse in zip(outs, lses):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"merge_attention: out {list(out.shape)} with lse {list(lse.shape)}: expected {list(outs[0].shape)} "
                f"with {list(outs[0].shape[:-1])}"
            )
    stacked = torch.stack(tuple(lses))  # [parts, T, N]
    lse = torch.logsumexp(stacked, 0)
    weights = (stacked - lse).nan_to_num(nan=0.0).exp()  # nothing seen in any part: -inf - -inf
    weights = torch.where(stacked == -torch.inf, 0.0, weights)
    wide = torch.promote_types(outs[0].dtype, lse.dtype)
    out = sum(
        (part.to(wide) * weight.unsqueeze(-1) for part, weight in zip(outs, weights)), torch.zeros((), dtype=wide)
    )
    return out.to(outs[0].dtype), lse


def _planned(tensors: Tensors, options: AttentionOptions, bounds: Bounds, plan: cpu.Plan, return_lse: bool) -> Any:
    """A call on a CPU with a plan, past the dispatcher. What a layer before it had checked is not checked again."""
    q, k_cache, v_cache, *_ = tensors
    plain = options.sinks is options.alibi_slopes is options.tree_mask is options.k_scale is None
    call = (q.shape, q.dtype, k_cache.shape, k_cache.dtype, v_cache.shape, v_cache.dtype, *options[:4], bounds)
    if not plain or plan.checked != call or torch.is_grad_enabled():
        checks.check(*tensors, options, bounds)
        plan.checked = call if plain else None
    dispatch.count(_OP, "reference")
    out, lse = cpu.paged_attention(*tensors, options, plan, want_lse=return_lse)
    return (out, lse) if return_lse else out


def _again(
    tensors: Tensors, options: AttentionOptions, bounds: Bounds, plan: Plan, invariant: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A call like one before with this plan; None where something has to be looked at, or copied, each time."""
    q, k_cache, v_cache, block_tables, *lengths = tensors
    scale, causal, window, softcap, sinks, slopes, prefix_lens, tree_mask, k_scale, v_scale = options
    seq_lens, starts = lengths
    if seq_lens is not plan.lengths[0] or starts is not plan.lengths[1]:
        return None
    if prefix_lens is not None or tree_mask is not None:
        return None
    if v_cache.itemsize == 1 and v_cache.data_ptr() & 15:  # whether it is read in pairs depends on more of the address
        return None
    # Numbers of other types are left to the op's schema, which converts them.
    floats, whole = (scale, softcap), (window, *bounds)
    if not (_FLOATS.issuperset(map(type, floats)) and _WHOLE.issuperset(map(type, whole))):
        return None
    operands = q, k_cache, v_cache, block_tables, sinks, slopes, k_scale, v_scale
    sizes = seq_lens.shape, seq_lens.dtype, starts.shape, starts.dtype  # as they are now
    key = repeated.key_of(impl, operands, (scale, causal, window, softcap, bounds, invariant, forced.config, sizes))
    if key is None:
        return None
    settled = plan.settled.get(key, _UNKNOWN)
    if settled is _UNKNOWN:
        checks.check(*tensors, options, bounds)
        launch = library.imported(f"{__package__}.launch")
        kernel = _choose(q, k_cache, v_cache, impl).triton
        settled = plan.settled[key] = launch.settle(tensors, options, invariant, bounds, plan) if kernel else None
    if settled is None:
        return None
    dispatch.counts[_COUNTED] += 1
    found: tuple[torch.Tensor, torch.Tensor] = settled(plan.data, *operands)
    return found


_FLOATS, _WHOLE = {float, type(None)}, {int, type(None)}
_UNKNOWN: Any = object()
_COUNTED = (_OP, "triton")


def split_cache(kv_cache: Cache, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [..., H], values [..., Hv]) of a cache that holds both side by side, or of a pair."""
    if isinstance(kv_cache, torch.Tensor):
        return kv_cache[..., :head_size], kv_cache[..., head_size:]
    k_cache, v_cache = kv_cache
    return k_cache, v_cache


def _split_checked(kv_cache: Cache, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ValueError where no head size can be read off q, and for a cache that is neither a tensor nor a pair."""
    if q.dim() != 3 or not q.shape[-1]:
        raise ValueError(f"paged_attention: q has shape {tuple(q.shape)}: expected [tokens, heads, head size], not 0")
    if not isinstance(kv_cache, torch.Tensor) and len(kv_cache) != 2:
        raise ValueError(f"paged_attention: kv_cache has {len(kv_cache)} parts: expected one tensor, or (keys, values)")
    return split_cache(kv_cache, q.shape[-1])


def _choose(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, impl: str) -> Choice:
    return dispatch.choose(_OP, q.device, impl, unsupported=_unsupported(q, k_cache, v_cache))


def _unsupported(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> str | None:
    """Why the kernels cannot take this call, or None."""
    if q.dtype == torch.float64:
        return "the kernel computes in fp16, bf16 and fp32 only, and this is fp64"
    largest = max(q.shape[-1], v_cache.shape[-1])
    if largest > _MAX_HEAD_SIZE:
        return f"the kernel holds head sizes up to {_MAX_HEAD_SIZE}, and this is {largest}"
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        stride = max(k_cache.stride(-1), v_cache.stride(-1))
        return f"the kernel wants kv_cache with stride 1 in its last dimension, and this is {stride}"
    return None


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    prefix_lens: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    min_query_len: int | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    plan: torch.Tensor | None,
    plan_key: int,
    invariant: bool,
    check: bool | None,
    impl: str,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    options = AttentionOptions(
        *(scale, causal, window, softcap, sinks, alibi_slopes, prefix_lens, tree_mask, k_scale, v_scale),
    )
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    bounds = Bounds(min_query_len, max_query_len, max_seq_len)
    choice = _choose(q, k_cache, v_cache, impl)
    if check or (check is None and q.is_cpu):
        checks.check_contents(*tensors, options, bounds)
    dispatch.count(_OP, choice.impl)
    if choice.triton:
        from . import launch

        return launch.paged_attention_fwd(tensors, options, invariant, bounds, plan, plan_key, out)
    plain: Any = cpu if q.is_cpu and dispatch.asked(impl) != "reference" else reference
    if invariant and q.is_cpu:
        plain = cpu_invariant
    found, lse = plain.paged_attention(*tensors, options)
    return [found if out is None else out.copy_(found), lse]


def _paged_attention_into_(*call: Any) -> torch.Tensor:
    return _paged_attention(*call)[1]


def _paged_attention_fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: object
) -> list[torch.Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [q.new_empty((*q.shape[:2], v_cache.shape[-1])), q.new_empty(q.shape[:2], dtype=lse)]


def _paged_attention_into_fake_(q: torch.Tensor, *_: object) -> torch.Tensor:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[:2], dtype=lse)


# The choice of implementation is made inside the ops: the reference reads lengths on the host, which no graph can hold.
_ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, "
    "float scale, bool causal, SymInt? window, float? softcap, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? prefix_lens, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, SymInt? min_query_len, "
    "SymInt? max_query_len, SymInt? max_seq_len, Tensor? plan, SymInt plan_key, bool invariant, bool? check, str impl"
)
_PAGED_ATTENTION = library.register(
    f"paged_attention({_ARGUMENTS}) -> Tensor[]", _paged_attention, _paged_attention_fake
)
_INTO = library.register(
    f"paged_attention_into_({_ARGUMENTS}, Tensor(a!) out) -> Tensor",
    _paged_attention_into_,
    _paged_attention_into_fake_,
)
