"""The contract of the backend with vLLM's sources."""

from __future__ import annotations

from ..contract import Abstract, Expectation, Has, Says, Takes

_BACKEND = "vllm/v1/attention/backend.py"
_REGISTRY = "vllm/v1/attention/backends/registry.py"
_LAYER = "vllm/model_executor/layers/attention/attention.py"
_ROTATION = ("positions", "cos_sin_cache", "is_neox", "kv_cache", "layer_slot_mapping")

CONTRACT: tuple[Expectation, ...] = (
    Takes(_REGISTRY, "register_backend", ("backend", "class_path", "is_mamba")),
    Has(_REGISTRY, "AttentionBackendEnum", ("CPU_ATTN", "CUSTOM")),
    # The base classes.
    Has(_BACKEND, "", ("AttentionMetadata", "AttentionType", "MultipleOf")),
    Has(_BACKEND, "AttentionType", ("DECODER",)),
    Has(_BACKEND, "AttentionCGSupport", ("UNIFORM_BATCH",)),
    Has(
        _BACKEND,
        "AttentionBackend",
        (
            *("supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update"),
            *("get_supported_kernel_block_sizes", "supports_head_size", "supports_kv_cache_dtype", "supports_sink"),
            *("supports_sliding_window", "supports_batch_invariance", "supports_compute_capability"),
        ),
    ),
    Abstract(_BACKEND, "AttentionBackend", ("get_name", "get_impl_cls", "get_builder_cls")),
    Abstract(_BACKEND, "AttentionMetadataBuilder", ("__init__", "build")),
    Abstract(_BACKEND, "AttentionImplBase", ()),
    Abstract(_BACKEND, "AttentionImpl", ("__init__", "forward")),
    # The callers of the backend.
    Takes(
        _BACKEND, "AttentionMetadataBuilder.__init__", ("kv_cache_spec", "layer_names", "vllm_config", "device")
    ),
    Takes(_BACKEND, "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata", "fast_build")),
    Takes(_BACKEND, "AttentionMetadataBuilder.build_for_cudagraph_capture", ("common_attn_metadata",)),
    Has(_BACKEND, "AttentionMetadataBuilder", ("_cudagraph_support",)),
    Takes(
        _BACKEND,
        "AttentionImpl.__init__",
        (
            *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
            *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
        ),
    ),
    Takes(
        _BACKEND,
        "AttentionImpl.forward",
        (
            *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"),
            "output_block_scale",
        ),
    ),
    Says(_LAYER, "unified_kv_cache_update", "attn_layer.impl.do_kv_cache_update(attn_layer, key, value, kv_cache, "
         "layer_slot_mapping)"),
    Takes(_BACKEND, "AttentionImpl.do_rope_and_kv_cache_update", ("layer", "query", "key", "value", *_ROTATION)),
    Takes(
        _BACKEND,
        "AttentionImpl.do_qk_norm_rope_kvcache_update",
        ("layer", "qkv", "q_out", "k_out", "positions", "q_weight", "k_weight", "rms_norm_eps", *_ROTATION[1:]),
    ),
    Has(_BACKEND, "AttentionImpl", ("fused_rope_kvcache_supported", "fused_qk_norm_rope_kvcache_supported")),
    # The attributes that the backend reads.
    Has(
        _BACKEND,
        "CommonAttentionMetadata",
        (
            *("num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc", "seq_lens"),
            *("block_table_tensor", "slot_mapping", "causal"),
        ),
    ),
    Has(_BACKEND, "AttentionLayer", ("_k_scale", "_v_scale")),
)  # fmt: skip
