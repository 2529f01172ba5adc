"""The contract of the SGLang plug-in, from sglang 0.5.23: every name that it overrides, calls or reads."""

from __future__ import annotations

from ..contract import Abstract, Expectation, Has, Says, Takes

_ATTENTION = "sglang/srt/layers/attention/"
_BASE = _ATTENTION + "base_attn_backend.py"
_REGISTRY = _ATTENTION + "attention_registry.py"
_BUILD = "sglang/srt/model_executor/model_runner_components/attention_backend_setup.py"
_BATCH = "sglang/srt/model_executor/forward_batch_info.py"
_RUNNER = "sglang/srt/model_executor/model_runner.py"
_CONTEXT = "sglang/srt/runtime_context.py"
_LAYER = "sglang/srt/layers/radix_attention.py"
_POOLS = "sglang/srt/mem_cache/memory_pool.py"
_WINDOWED = "sglang/srt/mem_cache/swa_memory_pool.py"
_CHOICES = "sglang/srt/arg_groups/choices.py"

_FORWARD = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "**kwargs")

_REGISTRATION = (
    Says("sglang/srt/plugins/__init__.py", "", "GENERAL_PLUGINS_GROUP = 'sglang.srt.plugins'"),
    Takes(_REGISTRY, "register_attention_backend", ("name",)),
    Has(_CHOICES, "", ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices")),
    Says(_BUILD, "_build_full_attention_backend_from_str", "return ATTENTION_BACKENDS[backend_str](model_runner)"),
)

_BACKEND = (
    Abstract(_BASE, "AttentionBackend", ()),
    Has(_BASE, "AttentionBackend", ("needs_cpu_seq_lens", "forward_metadata")),
    Takes(_BASE, "AttentionBackend.init_forward_metadata", ("forward_batch",)),
    Says(_BASE, "AttentionBackend.init_forward_metadata", "self.init_forward_metadata_out_graph(forward_batch)"),
    Says(_BASE, "AttentionBackend.init_forward_metadata", "self.init_forward_metadata_in_graph(forward_batch)"),
    Takes(_BASE, "AttentionBackend.init_forward_metadata_out_graph", ("forward_batch", "in_capture")),
    Takes(_BASE, "AttentionBackend.init_forward_metadata_in_graph", ("forward_batch",)),
    Takes(_BASE, "AttentionBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    Takes(_BASE, "AttentionBackend.get_cuda_graph_seq_len_fill_value", ()),
    Takes(_BASE, "AttentionBackend.forward", _FORWARD),
    Says(_BASE, "AttentionBackend.forward", "return self.forward_decode("),
    Says(_BASE, "AttentionBackend.forward", "return self.forward_extend("),
    Takes(_BASE, "AttentionBackend.forward_decode", _FORWARD),
    Takes(_BASE, "AttentionBackend.forward_extend", _FORWARD),
    Says("sglang/srt/model_executor/forward_context.py", "", "return get_attn_backend().token_to_kv_pool"),
    Says("sglang/srt/model_executor/forward_context.py", "", "return get_attn_backend().req_to_token_pool"),
)

_MODEL = (
    Has(
        _LAYER,
        "RadixAttention",
        (
            "tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "qk_head_dim", "v_head_dim", "scaling", "layer_id",
            "logit_cap", "logit_capping_method", "sliding_window_size", "is_cross_attention", "attn_type", "use_irope",
            "pos_encoding_mode", "xai_temperature_len", "k_scale", "v_scale",
        ),
    ),
    Says(_LAYER, "RadixAttention.forward", "forward(q, k, v, self, forward_batch, save_kv_cache, **kwargs)"),
    Has(_LAYER, "AttentionType", ("DECODER",)),
    # SGLang writes a window of W keys as W - 1, without the query itself.
    Says(
        _ATTENTION + "torch_native_backend.py",
        "TorchNativeAttnBackend._make_sliding_window_mask",
        "(k_pos <= q_pos) & (k_pos >= q_pos - sliding_window_size)",
    ),
    Has(
        _RUNNER,
        "ModelRunner",
        (
            "model", "model_config", "dtype", "kv_cache_dtype", "page_size", "use_mla_backend",
            "is_draft_worker", "spec_algorithm", "attention_chunk_size", "kv_index_translator", "req_to_token_pool",
            "token_to_kv_pool",
        ),
    ),
    Has("sglang/srt/configs/model_config.py", "ModelConfig", ("is_encoder_decoder",)),
    Takes("sglang/srt/speculative/spec_info.py", "SpeculativeAlgorithm.is_speculative", ()),
    Has(_CONTEXT, "", ("get_exec", "get_parallel")),
    Says(_CONTEXT, "derive_parallel_widths", "'attn_dcp_size'"),
    Says(_CONTEXT, "parallel_widths_of", "attn_cp_size=cfg.attn_cp_size"),
    Says("sglang/srt/managers/overlap_utils.py", "", "get_exec().overlap.enable_two_batch_overlap"),
    Says(_ATTENTION + "triton_backend.py", "TritonAttnBackend", "get_exec().dllm.dllm_algorithm"),
)  # fmt: skip

_STEP = (
    Has(
        _BATCH,
        "ForwardBatch",
        (
            "forward_mode", "batch_size", "req_pool_indices", "seq_lens", "out_cache_loc", "extend_seq_lens",
            "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
        ),
    ),
    Has(_BATCH, "ForwardMode", ("EXTEND", "DECODE", "MIXED", "IDLE", "SPLIT_PREFILL")),
    Takes(_BATCH, "ForwardMode.is_decode_or_idle", ()),
)  # fmt: skip

_KV = (
    Has(_POOLS, "ReqToTokenPool", ("size", "req_to_token")),
    Takes(_POOLS, "KVWriteLoc.for_batch", ("forward_batch", "swa_loc", "full_loc")),
    Has(_POOLS, "KVCache", ("size", "page_size", "dtype")),
    Has(_POOLS, "MHATokenToKVPool", ("kv_cache_layout", "is_quantized_kv_cache")),
    Takes(_POOLS, "MHATokenToKVPool.get_key_buffer", ("layer_id",)),
    Takes(_POOLS, "MHATokenToKVPool.get_value_buffer", ("layer_id",)),
    Takes(
        _POOLS,
        "MHATokenToKVPool.set_kv_buffer",
        ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override", "dcp_kv_mask"),
    ),
    Has(_POOLS, "HybridLinearKVPool", ("full_kv_pool",)),
    Takes(_POOLS, "HybridLinearKVPool.get_key_buffer", ("layer_id", "scale")),
    Takes(_POOLS, "HybridLinearKVPool.get_value_buffer", ("layer_id", "scale")),
    Takes(
        _POOLS,
        "HybridLinearKVPool.set_kv_buffer",
        ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "dcp_kv_mask"),
    ),
    Has(_WINDOWED, "SWAKVPool", ("full_kv_pool", "swa_kv_pool", "layers_mapping")),
    Says(_WINDOWED, "SWAKVPool", "(swa_layer_id, True)"),
    Takes(_WINDOWED, "SWAKVPool.get_key_buffer", ("layer_id",)),
    Takes(_WINDOWED, "SWAKVPool.get_value_buffer", ("layer_id",)),
    Takes(_WINDOWED, "SWAKVPool.translate_loc_from_full_to_swa", ("kv_indices",)),
    Takes(_WINDOWED, "SWAKVPool.set_kv_buffer", ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")),
    Has("sglang/srt/mem_cache/kv_index_translator.py", "KVIndexTranslator", ("is_translating",)),
)

CONTRACT: tuple[Expectation, ...] = (*_REGISTRATION, *_BACKEND, *_MODEL, *_STEP, *_KV)
