"""The backend SHARDFUSE. vLLM imports this module when the backend is chosen.

vLLM's cache is ``[blocks, KV heads, block size, 2 * head size]`` with strides of its layout. Our kernels read and write
it directly, without a copy. vLLM writes keys and values by :meth:`ShardfuseImpl.do_kv_cache_update` or by one of the
fused hooks, and then calls :meth:`ShardfuseImpl.forward`.

Letters: T tokens of a step, N query heads, K KV heads, H head size, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from .. import pages
from ..pages import Batch, PagedLayer
from . import NAME

_E4M3 = ("fp8", "fp8_e4m3")


class ShardfuseBackend(AttentionBackend):
    """The properties that vLLM checks before it accepts the backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(pages.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_E4M3]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[ShardfuseImpl]:
        return ShardfuseImpl

    @staticmethod
    def get_builder_cls() -> type[ShardfuseBuilder]:
        return ShardfuseBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= pages.MAX_HEAD_SIZE

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        if kv_cache_dtype in _E4M3:
            return current_platform.fp8_dtype() == torch.float8_e4m3fn  # others have a different bias
        return super().supports_kv_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8


@dataclass
class ShardfuseMetadata(AttentionMetadata):
    """One step, for all layers of a group of the cache; ``batch`` holds the kernel's arguments."""

    num_actual_tokens: int  # without padding
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    batch: Batch


class ShardfuseBuilder(AttentionMetadataBuilder[ShardfuseMetadata]):
    """Makes the metadata of a step. It creates and reads no tensor, so it never waits for the device.

    A captured graph holds the launch that plans the work, in its first layer. It serves batches with at most as many
    queries per sequence as at capture, and sequences of any length.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ShardfuseMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                f"the attention backend {NAME} has one mask for a whole batch, and this model asks for one for each "
                "request: choose another backend for it"
            )
        batch = Batch(
            *(common.block_table_tensor, common.seq_lens, common.query_start_loc),
            *(common.max_query_len, common.max_seq_len, common.causal),
        )
        return ShardfuseMetadata(
            *(common.num_actual_tokens, common.max_query_len, common.max_seq_len, common.query_start_loc),
            *(common.seq_lens, common.block_table_tensor, common.slot_mapping, batch),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> ShardfuseMetadata:
        metadata = self.build(0, common_attn_metadata)
        metadata.batch.max_seq_len = None  # bounds the replays, which may be longer
        return metadata


class ShardfuseImpl(AttentionImpl[ShardfuseMetadata]):
    """One attention layer. The constructor refuses unsupported options while the model is built."""

    supports_kv_cache_update_bypass = True  # this backend reads keys and values from the cache alone

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        lacks = pages.why_not(head_size, torch.get_default_dtype())
        if attn_type != AttentionType.DECODER:
            lacks = f"attention of type {attn_type}: only decoders' keys and values lie in pages"
        if kv_cache_dtype not in ShardfuseBackend.supported_kv_cache_dtypes:
            lacks = f"kv_cache_dtype={kv_cache_dtype}: {', '.join(ShardfuseBackend.supported_kv_cache_dtypes)} are"
        if others:
            lacks = f"{', '.join(sorted(others))} of this model"
        if envs.VLLM_BATCH_INVARIANT and current_platform.is_cpu():
            lacks = "VLLM_BATCH_INVARIANT on a CPU, where torch's products depend on the batch"
        if lacks:
            raise ValueError(f"the attention backend {NAME} does not support {lacks}; choose another backend")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.layer = PagedLayer(
            "vllm",
            scale=scale,
            window=sliding_window,
            softcap=logits_soft_cap,
            sinks=sinks,
            alibi_slopes=None if slopes is None else slopes.to(current_platform.device_type),
            invariant=True if envs.VLLM_BATCH_INVARIANT else None,
        )
        self._quantised = kv_cache_dtype in _E4M3

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: ShardfuseMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, N, H] over the pages, into output [T, N, H]; the rows of padding stay as they are."""
        if attn_metadata is None:  # vLLM is measuring memory
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        out = output[:tokens].view(tokens, self.num_heads, -1)
        cache, scales = self._cache(kv_cache), self._scales(layer)
        self.layer.attend(query[:tokens], cache, attn_metadata.batch, out=out, **scales)
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value [T, K, H] to the slots [T' <= T]; rows after the slots are padding."""
        tokens = slot_mapping.shape[0]
        self.layer.write_(self._cache(kv_cache), key[:tokens], value[:tokens], slot_mapping, **self._scales(layer))

    def fused_rope_kvcache_supported(self) -> bool:
        return True

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        return True

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate query and key in place, and write key and value."""
        rotation = _rotation(positions, cos_sin_cache, is_neox)
        self._rotate(layer, (query, key, value), (query, key), kv_cache, layer_slot_mapping, rotation)

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Normalise and rotate the heads of qkv [T, (N + 2 K) H] into q_out and k_out, and write keys and values."""
        heads = qkv.view(qkv.shape[0], -1, self.head_size)
        parts = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        norms = {"q_norm": q_weight, "k_norm": k_weight, "eps": rms_norm_eps}
        rotation = _rotation(positions, cos_sin_cache, is_neox) | norms
        self._rotate(layer, parts, (q_out, k_out), kv_cache, layer_slot_mapping, rotation)

    def _rotate(
        self,
        layer: Any,
        qkv: tuple[torch.Tensor, ...],
        into: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        rotation: dict[str, Any],
    ) -> None:
        """``slots`` may be fewer than tokens; the other tokens are padding, rotated like the others."""
        q, k, v = (part.view(part.shape[0], -1, self.head_size) for part in qkv)
        cache, scales = self._cache(kv_cache), self._scales(layer)
        padding = slots.new_full((q.shape[0] - slots.shape[0],), -1)
        slots = torch.cat([slots, padding]) if len(padding) else slots
        rotated = self.layer.rotate_and_write_(cache, q, k, v, slots, **scales, **rotation)
        # The same arithmetic gives the keys that vLLM requests beside those in the cache; this call writes nothing.
        as_keys = rotation | ({"q_norm": rotation["k_norm"]} if "k_norm" in rotation else {})
        keys = self.layer.rotate_and_write_(cache, k, k, v, torch.full_like(slots, -1), **scales, **as_keys)
        into[0].copy_(rotated.view_as(into[0]))
        into[1].copy_(keys.view_as(into[1]))

    def _cache(self, kv_cache: torch.Tensor) -> torch.Tensor:
        return kv_cache.view(torch.float8_e4m3fn) if self._quantised else kv_cache

    def _scales(self, layer: Any) -> dict[str, torch.Tensor]:
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if self._quantised else {}


def _rotation(positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool) -> dict[str, Any]:
    """cos and sin [T, P/2] of the tokens' positions [T], from vLLM's table [positions, P], cosines first."""
    cos, sin = cos_sin_cache[positions].float().chunk(2, dim=-1)
    return {"cos": cos, "sin": sin, "interleaved": not is_neox}
