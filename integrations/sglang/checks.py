"""The backend's refusals, raised when SGLang makes it: before any capture of a graph or any request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_parallel

from ..pages import why_not

_OTHER = "choose another --attention-backend"


def check_runner(runner: Any) -> None:
    """Refuse a model, its cache or a mode of the server. The ValueError says what was found and what to do."""
    _raise_first(_of_server(runner))
    _raise_first(_of_cache(runner))
    for module in runner.model.modules():
        if isinstance(module, RadixAttention):
            check_layer(module, runner)


def check_layer(layer: Any, runner: Any) -> None:
    """Refuse one ``RadixAttention``. The ValueError says what was found and what to do."""
    _raise_first(f"layer {layer.layer_id}: {reason}" for reason in _of_layer(layer, runner))


def _raise_first(reasons: Iterator[str]) -> None:
    reason = next(reasons, None)
    if reason is not None:
        raise ValueError(f"the attention backend shardfuse does not serve this: {reason}")


def _of_server(runner: Any) -> Iterator[str]:
    if runner.use_mla_backend:
        yield f"the model uses multi-head latent attention (MLA); expected keys and values of each head; {_OTHER}"
    if runner.model_config.is_encoder_decoder:
        yield f"the model has an encoder and cross attention; expected a decoder; {_OTHER}"
    if runner.spec_algorithm.is_speculative() or runner.is_draft_worker:
        yield f"speculative decoding is on; leave --speculative-algorithm out, or {_OTHER}"
    if get_exec().dllm.dllm_algorithm is not None:
        yield f"a diffusion model decodes in blocks that see each other; {_OTHER}"
    if get_exec().overlap.enable_two_batch_overlap:
        yield f"batches are split in two; leave --enable-two-batch-overlap out, or {_OTHER}"
    shards = {name: getattr(get_parallel(), name) for name in ("attn_cp_size", "attn_dcp_size")}
    if any(size > 1 for size in shards.values()):
        yield f"sequences are split over ranks ({shards}); expected 1 and 1; {_OTHER}"
    if runner.kv_index_translator.is_translating:
        yield f"the tables of a unified memory pool hold virtual slots; leave --enable-unified-memory out, or {_OTHER}"


def _of_cache(runner: Any) -> Iterator[str]:
    pool, page = runner.token_to_kv_pool, runner.page_size
    parts: tuple[Any, ...] = (pool,)
    if type(pool) is SWAKVPool:
        parts = (pool.full_kv_pool, pool.swa_kv_pool)
    elif type(pool) is HybridLinearKVPool:
        parts = (pool.full_kv_pool,)
    for part in parts:
        if type(part) is not MHATokenToKVPool or part.kv_cache_layout != "nhd" or part.is_quantized_kv_cache:
            name, layout = type(part).__name__, getattr(part, "kv_cache_layout", "another")
            yield f"the cache is a {name} in the layout {layout!r}; expected MHATokenToKVPool in 'nhd'; {_OTHER}"
        elif part.size % page:
            yield f"the cache has {part.size} slots in pages of {page}; expected whole pages; change --page-size"
    q, kv = runner.dtype, runner.kv_cache_dtype
    reason = why_not(1, q)
    if reason:
        yield f"the model computes in {reason}; change --dtype"
    taken = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, *((q,) if q == torch.float32 else ()))
    if kv not in taken:
        names = ", ".join(map(str, taken))
        yield f"the cache holds {kv} for a model in {q}; expected one of {names}; change --kv-cache-dtype"


def _of_layer(layer: Any, runner: Any) -> Iterator[str]:
    reason = why_not(layer.qk_head_dim, runner.dtype, v_head_size=layer.v_head_dim)
    if reason:
        yield f"{reason}; {_OTHER}"
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        kind = "cross attention" if layer.is_cross_attention else layer.attn_type
        yield f"{kind}; expected AttentionType.DECODER, where a query sees what stands before it; {_OTHER}"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield f"scores are capped by {layer.logit_capping_method!r}; expected 'tanh'; {_OTHER}"
    if layer.use_irope and runner.attention_chunk_size is not None:
        yield f"attention is cut into chunks of {runner.attention_chunk_size} positions; {_OTHER}"
    if layer.pos_encoding_mode != "NONE" or (layer.xai_temperature_len or 0) > 0:
        yield (
            f"scores depend on positions (pos_encoding_mode {layer.pos_encoding_mode!r}, xai_temperature_len "
            f"{layer.xai_temperature_len}); expected 'NONE' and -1; {_OTHER}"
        )
