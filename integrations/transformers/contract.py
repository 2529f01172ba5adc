"""The contract of the plug-in for transformers from 5.19 on; version 5.17 is supported by its number."""

from __future__ import annotations

from ..contract import Expectation, Has, Says, Takes

_BATCHING = "transformers/generation/continuous_batching/"
_ALLOCATORS = _BATCHING + "cache_allocators/"
_STEP = (
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index", "cache",
    "block_table",
)  # fmt: skip

CONTRACT: tuple[Expectation, ...] = (
    # Pages and indices of a layer.
    Has(_BATCHING + "input_outputs.py", "PagedAttentionArgs", _STEP),
    Has(_BATCHING + "cache.py", "PagedAttentionCache", ("layer_to_allocator",)),
    Takes(_BATCHING + "cache.py", "PagedAttentionCache.update", ("key_states", "value_states", "layer_idx", "kwargs")),
    Has(_ALLOCATORS + "cache_allocator.py", "CacheAllocator", ("index", "sentinel_index", "write_trash_index")),
    Has(_ALLOCATORS + "full_attention.py", "FullAttentionCacheAllocator", ("_kv_page_views", "layer_type")),
    Says(
        _ALLOCATORS + "full_attention.py",
        "FullAttentionCacheAllocator.register_cache_tensor",
        "page_shape = (-1, self.tokens_per_page, self.num_key_value_heads, self.head_dim)",
    ),
    Says(
        _ALLOCATORS + "sliding_attention.py",
        "SlidingAttentionCacheAllocator.get_read_indices",
        "physical_indices + [self.sentinel_index] * query_length",
    ),
    Says(
        _ALLOCATORS + "sliding_attention.py",
        "SlidingAttentionCacheAllocator.get_write_indices",
        "start_index = (past_length + padding_length) % self.sliding_window",
    ),
    # Names of attention functions.
    Says(
        _BATCHING + "continuous_api.py",
        "ContinuousBatchingManager.switch_to_cb_friendly_attn",
        "target_implem in ['paged|eager', 'sdpa'] or is_flash",
    ),
    Says(_BATCHING + "utils.py", "attn_mask_is_needed", "in ['paged|eager', 'sdpa']"),
    Says(_BATCHING + "initialization.py", "ensure_decode_fast_path_is_available", "version=[2, 3]"),
    Takes("transformers/modeling_utils.py", "AttentionInterface.get_interface", ("attn_implementation", "default")),
    Has("transformers/modeling_utils.py", "", ("ALL_ATTENTION_FUNCTIONS",)),
    Has("transformers/masking_utils.py", "", ("AttentionMaskInterface", "eager_mask", "sdpa_mask")),
    Says("transformers/configuration_utils.py", "PreTrainedConfig._attn_implementation", "value.get('', current_attn)"),
    # The command serve.
    Says("transformers/cli/serve.py", "Serve.__init__", "from .serving.model_manager import ModelManager"),
    Has("transformers/cli/serving/model_manager.py", "ModelManager", ("_load_model",)),
)
