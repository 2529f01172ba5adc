"""The peers of ``paged_attention``: the same step by other implementations.

:func:`load_vllm` and :func:`load_vllm_writes` return vLLM's own Triton kernels. Their files are not part of this
project: they are read from the folder ``.peers/vllm`` of the checkout, which git ignores, unchanged from a release (the
rows were written for 0.33.0)::

    .peers/vllm/triton_unified_attention.py
    .peers/vllm/triton_attention_helpers.py
    .peers/vllm/triton_reshape_and_cache_flash.py

A machine without them has no rows against vLLM.

The other peers are torch's: ``scaled_dot_product_attention`` and ``varlen_attn`` over the same keys and values,
gathered into contiguous ones before the timing, and FlexAttention over pages of its own (``PagedAttention`` in
torch.nn.attention.experimental, 128 keys each, filled with the same keys and values); and FlashInfer's wrappers, if
installed, planned before the timing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...kernels.runtime import dispatch
from ..harness.benchmark import Settings
from ..harness.provenance import package_folder
from ..harness.stock import compiled
from ..harness.timing import Call
from .paged import Operands, Peer, Step

VLLM_FOLDER = Path(".peers", "vllm")
_KERNELS = "vllm.v1.attention.ops"
_ATTENTION, _WRITES = "triton_unified_attention", "triton_reshape_and_cache_flash"
VLLM_SEGMENTS = 16  # into which it splits the keys of short queries, the setting of its own engine
VLLM_PROGRAMS = 128  # of one launch: with fewer, its engine splits the keys
VLLM_SHORT = 8  # the longest query whose keys it splits
FLEX_PAGE = 128  # FlexAttention's own block size, which its pages must have
FLASHINFER_WORKSPACE = 256 << 20  # bytes


VLLM, VARLEN, FLASHINFER, FLEX = "vLLM", "varlen_attn, contiguous KV", "FlashInfer", "FlexAttention, paged"
SDPA_PACKED = "SDPA, contiguous KV, heads as queries"
SDPA, SDPA_FLASH, SDPA_CUDNN = "SDPA, contiguous KV", "SDPA FlashAttention, contiguous KV", "SDPA cuDNN, contiguous KV"


def peers(settings: Settings) -> dict[str, Peer]:
    """The peers that run here, by name. A dry run has SDPA, and vLLM's kernel, interpreted if there is no GPU."""
    found = [Peer(SDPA, sdpa, dense)]
    unified_attention = load_vllm()
    if unified_attention is not None:
        found.append(Peer(VLLM, partial(vllm, launcher=unified_attention)))
    if settings.cuda and not settings.dry:
        found.append(Peer(SDPA_FLASH, partial(sdpa, backend=SDPBackend.FLASH_ATTENTION), dense))
        found.append(Peer(SDPA_CUDNN, partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION), dense))
        found.append(Peer(VARLEN, varlen, lambda step: not step.quantised))
        if importlib.util.find_spec("flashinfer") is not None:
            found.append(Peer(FLASHINFER, flashinfer, lambda step: step.scales != "token_head", slow=True))
        found.append(Peer(FLEX, Flex(), _in_flex, slow=True))
    return {peer.name: peer for peer in found}


def dense(step: Step) -> bool:
    """Whether one dense call computes the same: no mask but the causal one that begins at the first query."""
    return step.uniform and not step.quantised and (max(step.queries) == 1 or max(step.context) == 0)


def _in_flex(step: Step) -> bool:
    """Whether FlexAttention gets a row: it compiles for most of a minute, so only a short run's; q is [S, N, Q, H]."""
    return step.short and len(set(step.queries)) == 1 and not step.quantised


# --- torch's, and FlashInfer ------------------------------------------------------------------------------------------


def sdpa(operands: Operands, backend: SDPBackend | None = None) -> Call:
    """One call of torch's function over [S, K, L, H]; query heads share KV heads."""
    step = operands.step
    seqs, causal = len(step.queries), max(step.queries) > 1
    q = operands.q.unflatten(0, (seqs, -1)).transpose(1, 2)  # [S, N, Q, H]
    k, v = (x.unflatten(0, (seqs, -1)).transpose(1, 2).contiguous() for x in operands.gathered())
    grouped = step.heads != step.kv_heads

    def call() -> torch.Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def sdpa_packed(operands: Operands) -> Call:
    """A decode with the query heads of each KV head as that head's queries: the fastest dense form on a CPU."""
    step = operands.step
    seqs = len(step.queries)
    q = operands.q.view(seqs, step.kv_heads, -1, step.head_size)
    k, v = (x.unflatten(0, (seqs, -1)).transpose(1, 2).contiguous() for x in operands.gathered())
    return partial(F.scaled_dot_product_attention, q, k, v)


def varlen(operands: Operands) -> Call:
    """FlashAttention's ragged kernel through torch, over [tokens, K, H]."""
    from torch.nn.attention.varlen import varlen_attn  # here, because it imports the compiler

    step = operands.step
    starts_k = F.pad(operands.seq_lens.cumsum(0), (1, 0)).to(torch.int32)
    starts = operands.query_start_loc, starts_k, max(step.queries), max(step.seq_lens)
    k, v = operands.gathered()
    attention: Callable[..., Any] = varlen_attn
    # torch 2.11 shares KV heads among query heads without the option.
    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if asked else {}
    return partial(attention, operands.q, k, v, *starts, window_size=(-1, 0), **grouped)


class Flex:
    """FlexAttention over pages of its own, compiled at its first use."""

    def __init__(self) -> None:
        self._attention: Callable[..., torch.Tensor] | None = None

    def __call__(self, operands: Operands) -> Call:
        from torch.nn.attention.flex_attention import flex_attention

        if self._attention is None:
            self._attention = compiled(flex_attention)
        step = operands.step
        q = operands.q.unflatten(0, (len(step.queries), -1)).transpose(1, 2).contiguous()  # [S, N, Q, H]
        k, v, mask = _flex_pages(operands)
        return partial(self._attention, q, k, v, block_mask=mask, enable_gqa=step.heads != step.kv_heads)


def _flex_pages(operands: Operands) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Keys and values [1, K, slots, H] in FlexAttention's pages, and the mask that finds and bounds them."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask

    step, device = operands.step, operands.q.device
    seqs = len(step.queries)
    pages = [-(-length // FLEX_PAGE) for length in step.seq_lens]
    pool = PagedAttention(sum(pages), FLEX_PAGE, seqs, device=str(device))
    caches = [
        operands.q.new_zeros(1, step.kv_heads, sum(pages) * FLEX_PAGE, step.head_size, dtype=step.kv_dtype)
        for _ in range(2)
    ]
    parts = zip(*(x.split(step.seq_lens) for x in operands.gathered()))
    for s, (length, kv) in enumerate(zip(step.seq_lens, parts)):
        which = torch.tensor([s], device=device)
        pool.reserve(which, torch.tensor([length], device=device))
        stored = (x.transpose(0, 1).unsqueeze(0) for x in kv)  # [1, K, length, H]
        pool.assign(which, torch.arange(length, device=device).unsqueeze(0), *stored, *caches)
    context = torch.tensor(step.context, device=device)

    def causal(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query + context[b]

    shape = seqs, None, max(step.queries), max(pages) * FLEX_PAGE
    mask = create_block_mask(causal, *shape, device=str(device), BLOCK_SIZE=FLEX_PAGE)
    return caches[0], caches[1], pool.convert_logical_block_mask(mask, kv_len=operands.seq_lens)


def flashinfer(operands: Operands) -> Call:
    """FlashInfer's wrapper for decodes, or the one for any queries; both on the same pages as ours."""
    library = importlib.import_module("flashinfer")
    step, device = operands.step, operands.q.device
    pages = [-(-length // step.page) for length in step.seq_lens]
    starts = F.pad(torch.tensor(pages, device=device).cumsum(0), (1, 0)).to(torch.int32)
    owned = torch.cat([row[:count] for row, count in zip(operands.block_tables, pages)])
    used = (operands.seq_lens - 1) % step.page + 1  # slots of each last page
    sizes = step.heads, step.kv_heads, step.head_size, step.page
    dtypes = {"q_data_type": step.dtype, "kv_data_type": step.kv_dtype}
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    if max(step.queries) == 1:
        several = step.heads // step.kv_heads >= 4
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=several)
        wrapper.plan(starts, owned, used, *sizes, **dtypes)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(operands.query_start_loc, starts, owned, used, *sizes, causal=True, **dtypes)
    scales = {}
    if operands.k_scale is not None and operands.v_scale is not None:
        scales = {"k_scale": operands.k_scale.item(), "v_scale": operands.v_scale.item()}
    return partial(wrapper.run, operands.q, operands.kv_cache.split(step.head_size, dim=-1), **scales)


# --- vLLM's kernels ---------------------------------------------------------------------------------------------------


class KVQuantMode(IntEnum):
    """vLLM's names for the quantisation of a cache, with the numbers that its kernels use."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def load_vllm(folder: Path | None = None) -> Callable[..., None] | None:
    """vLLM's ``unified_attention``, its own launcher with its own arguments; None if ``folder`` lacks it.

    Raises RuntimeError for files that do not load.
    """
    return _load(_ATTENTION, "unified_attention", folder)


def load_vllm_writes(folder: Path | None = None) -> tuple[Callable[..., None], Callable[..., None]] | None:
    """vLLM's ``triton_reshape_and_cache_flash`` and its version that quantises per token and head; None without them.

    Raises RuntimeError for files that do not load.
    """
    plain = _load(_WRITES, "triton_reshape_and_cache_flash", folder)
    quantising = _load(_WRITES, "triton_reshape_and_cache_flash_per_token_head_quant", folder)
    return None if plain is None or quantising is None else (plain, quantising)


def vllm(operands: Operands, launcher: Callable[..., None]) -> Call:
    """vLLM's kernel on the same pages as ours, with the scratch memory that its engine keeps for short queries."""
    step = operands.step
    most = VLLM_PROGRAMS // step.kv_heads
    rows = step.tokens if len(step.queries) <= most and max(step.queries) <= VLLM_SHORT else 0
    sizes = rows, step.heads, VLLM_SEGMENTS
    scratch = [
        torch.empty(*sizes, *last, device=operands.q.device) for last in ((_power_of_2(step.head_size),), (), ())
    ]
    k, v = operands.kv_cache.transpose(1, 2).split(step.head_size, dim=-1)  # [blocks, B, K, H]
    per_token = step.scales == "token_head"
    scales: dict[str, Any] = {"k_descale": None, "v_descale": None}
    if operands.k_scale is not None and operands.v_scale is not None:
        if per_token:
            scales |= {
                "k_scale_cache": operands.k_scale.transpose(1, 2),
                "v_scale_cache": operands.v_scale.transpose(1, 2),
            }
        else:
            scales = {"k_descale": operands.k_scale, "v_descale": operands.v_scale}
    return partial(
        launcher,
        q=operands.q,
        k=k,
        v=v,
        out=torch.empty_like(operands.q),
        cu_seqlens_q=operands.query_start_loc,
        max_seqlen_q=max(step.queries),
        seqused_k=operands.seq_lens,
        max_seqlen_k=max(step.seq_lens),
        softmax_scale=step.head_size**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=operands.block_tables,
        softcap=0.0,
        q_descale=None,
        kv_quant_mode=_quant_mode(step),
        seq_threshold_3D=most,
        num_par_softmax_segments=VLLM_SEGMENTS,
        softmax_segm_output=scratch[0],
        softmax_segm_max=scratch[1],
        softmax_segm_expsum=scratch[2],
        **scales,
    )


def _quant_mode(step: Step) -> KVQuantMode:
    if not step.quantised:
        return KVQuantMode.NONE
    if step.scales == "tensor":
        return KVQuantMode.FP8_PER_TENSOR
    return KVQuantMode.INT8_PER_TOKEN_HEAD if step.kv_dtype == torch.int8 else KVQuantMode.FP8_PER_TOKEN_HEAD


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _load(module: str, function: str, folder: Path | None) -> Callable[..., None] | None:
    folder = package_folder("bench").parent / VLLM_FOLDER if folder is None else folder
    if dispatch.triton_version() is None or not (folder / f"{module}.py").is_file():
        return None
    try:
        return getattr(_module(module, folder), function)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{folder / module}.py does not load ({error}): put {_ATTENTION}.py, triton_attention_helpers.py and "
            f"{_WRITES}.py of one release of vLLM there, or remove the folder"
        ) from error


@cache
def _module(name: str, folder: Path) -> ModuleType:
    """The file ``folder/name.py`` imported as vLLM's module, with stand-ins for the rest of vLLM."""
    with _stand_ins(folder):
        return importlib.import_module(f"{_KERNELS}.{name}")


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Modules called ``vllm...`` with the names that the kernels' files import, while these are imported.

    An installed or imported vLLM is hidden meanwhile, and restored afterwards.
    """
    import triton
    import triton.language as tl

    fp8 = torch.float8_e4m3fn
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(debug_once=lambda *message: None)},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": lambda name: name.startswith("fp8")},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        _KERNELS: {"__path__": [str(folder)]},
        "vllm.v1.kv_cache_interface": {
            "KVQuantMode": KVQuantMode,
            "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.quantization": {},
        "vllm.model_executor.layers.quantization.utils": {},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "FP8_DTYPE": fp8,
            "get_fp8_min_max": lambda: (torch.finfo(fp8).min, torch.finfo(fp8).max),
        },
    }
    before = _take_out()
    try:
        for name, attributes in contents.items():
            module = ModuleType(name)
            module.__dict__.update({"__path__": [], **attributes})
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        yield
    finally:
        _take_out()
        sys.modules.update(before)


def _take_out() -> dict[str, ModuleType]:
    """Remove all of vLLM's modules from ``sys.modules``; returns them."""
    names = [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
    return {name: sys.modules.pop(name) for name in names}


class _Platform:
    """The GPU as vLLM's launchers query it. Interpreted kernels run as if on a Hopper GPU."""

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def has_device_capability(self, capability: int) -> bool:
        return self._capability() >= capability

    def is_device_capability_family(self, capability: int) -> bool:
        return self._capability() // 10 == capability // 10

    def is_rocm(self) -> bool:
        return torch.version.hip is not None

    def is_xpu(self) -> bool:
        return False

    def _capability(self) -> int:
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        return 10 * major + minor
