"""transformers' names for its files and for our configs' fields: gelu style is Starcoder2, gated style is Llama."""

from __future__ import annotations

from typing import Any

from ..config import TransformerConfig, rope_type

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
CHECKSUMS = "checksums.json"  # our own file: size and CRC-32 of the other files, by name
CHECKSUMS_FORMAT = "shardfuse export 1"
PART, ANY_PART = "model-{:05d}-of-{:05d}.safetensors", "model-*-of-*.safetensors"

# The files beside a model's weights: its tokenizer, and its settings for generation.
COMPANIONS = (
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)

# Settings for generation that an older folder has in config.json, with the values that transformers takes for unset.
IN_CONFIG: dict[str, Any] = {
    **dict.fromkeys(("do_sample", "early_stopping", "remove_invalid_values"), False),
    **{"max_length": 20, "min_length": 0, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "top_k": 50},
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty"), 0),
    **dict.fromkeys(("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"), None),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty"), None),
}

# Style -> its name in config.json.
MODEL_TYPES = {"gelu": "starcoder2", "gated": "llama"}
_ARCHITECTURES = {"gelu": "Starcoder2ForCausalLM", "gated": "LlamaForCausalLM"}
_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "gated": "silu"}
_NORM_EPS = {"gelu": "norm_epsilon", "gated": "rms_norm_eps"}
_BIASES = {"gelu": ("use_bias",), "gated": ("attention_bias", "mlp_bias")}
# Our name -> config.json's.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OPTIONAL = ("num_key_value_heads", "head_dim")
# transformers' defaults for keys that a config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gelu": {
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "tie_word_embeddings": True,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    "gated": {
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def config_to_hf(config: TransformerConfig, dtype: str = "float32") -> dict[str, Any]:
    """The ``config.json`` of ``config``, as transformers 5 writes it; ValueError where it has no such model."""
    style = config.style
    gated_only = ("attention_window", "residual_dropout", "embedding_dropout") if config.gated else ()
    for name in ("attention_softcap", "attention_sinks", "norm_offset", *gated_only):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)}: transformers' {MODEL_TYPES[style]} has no such thing; a model that "
                "differs cannot be exported as one"
            )
    out: dict[str, Any] = {"architectures": [_ARCHITECTURES[style]], "model_type": MODEL_TYPES[style], "dtype": dtype}
    out |= {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    out |= dict.fromkeys(_BIASES[style], config.bias)
    out[_NORM_EPS[style]] = config.norm_eps
    out["hidden_act"] = _ACTIVATIONS[style]
    out["rope_parameters"] = _rope_parameters(config)
    out["rope_theta"] = config.rope_theta  # transformers 4 reads this key
    out |= {
        "attention_dropout": config.attention_dropout,
        "use_cache": True,
    }
    out |= {name: getattr(config, name) for name in _TOKEN_IDS}
    if style == "gelu":
        out |= {"embedding_dropout": config.embedding_dropout, "residual_dropout": config.residual_dropout}
        out["sliding_window"] = config.attention_window
    return out


def config_from_hf(raw: dict[str, Any]) -> TransformerConfig:
    """Our config for a ``config.json``; ValueError for a feature that the layers do not have."""
    styles = {model_type: style for style, model_type in MODEL_TYPES.items()}
    if raw.get("model_type") not in styles:
        raise ValueError(
            f"model_type={raw.get('model_type')!r}: expected one of {', '.join(styles)}, which a ParallelTransformer "
            "can be; load_pretrained takes any causal language model of transformers"
        )
    style = styles[raw["model_type"]]
    tokens = {name: raw.get(name, _DEFAULTS[style].get(name)) for name in _TOKEN_IDS}  # null: no such token
    raw = _DEFAULTS[style] | {key: value for key, value in raw.items() if value is not None}

    if raw["hidden_act"] not in (_ACTIVATIONS[style], "swish" if style == "gated" else None):
        raise ValueError(f"hidden_act={raw['hidden_act']!r}: {raw['model_type']} here means {_ACTIVATIONS[style]}")
    for name, neutral in (("is_causal", True), ("per_layer_config", {})):
        if raw.get(name, neutral) != neutral:
            raise ValueError(f"{name}={raw[name]!r}: transformers reads it, and the layers here do not")
    biases = {raw[key] for key in _BIASES[style]}
    if len(biases) > 1:
        raise ValueError(f"{' and '.join(_BIASES[style])} differ: here all linear layers have a bias or none has")
    fields = {ours: raw[theirs] for ours, theirs in _FIELDS.items() if theirs in raw or theirs not in _OPTIONAL}
    for theirs in (theirs for ours, theirs in _FIELDS.items() if ours not in ("init_std", "tie_embeddings")):
        if theirs in raw and type(raw[theirs]) is not int:
            raise ValueError(f"{theirs}={raw[theirs]!r}: expected a whole number")
    if not isinstance(raw["tie_word_embeddings"], bool):
        raise ValueError(f"tie_word_embeddings={raw['tie_word_embeddings']!r}: expected true or false")
    fields |= _rope_fields(raw) | tokens
    fields |= {name: raw[name] for name in ("attention_dropout", *_OF_GELU) if raw.get(name) and _has(style, name)}
    window = raw.get("sliding_window")
    if window is not None and window < raw["max_position_embeddings"]:
        if style == "gated":
            raise ValueError(f"sliding_window={window}: transformers' {raw['model_type']} has none; which is meant?")
        fields["attention_window"] = window
    try:
        return TransformerConfig(style=style, norm_eps=raw[_NORM_EPS[style]], bias=biases.pop(), **fields)
    except TypeError as error:
        raise ValueError(f"a value has the wrong type: {error}") from error


_OF_GELU = ("embedding_dropout", "residual_dropout")


def _has(style: str, name: str) -> bool:
    return style == "gelu" or name not in _OF_GELU


def _rope_parameters(config: TransformerConfig) -> dict[str, Any]:
    if config.partial_rotary_factor != 1.0 or config.rope_interleaved:
        raise ValueError(
            f"partial_rotary_factor={config.partial_rotary_factor}, rope_interleaved={config.rope_interleaved}: "
            f"transformers' {MODEL_TYPES[config.style]} rotates whole heads, element i with i + head_dim / 2; a model "
            "that differs cannot be exported as one"
        )
    scaling = {name: value for name, value in (config.rope_scaling or {}).items() if name != "type"}
    return {**scaling, "rope_type": rope_type(config.rope_scaling), "rope_theta": config.rope_theta}


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``; transformers 4 stored theta outside ``rope_scaling``."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})  # transformers' order
    theta = rope.pop("rope_theta", raw.get("rope_theta", 10000.0))
    partial = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    kind = rope_type(rope)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor={partial}: transformers' {raw['model_type']} rotates whole heads all the same, and "
            "others do not; which is meant cannot be told"
        )
    rope.pop("type", None)
    if kind in ("llama3", "yarn", "longrope") and "original_max_position_embeddings" in raw:  # which goes first
        rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    return {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else rope | {"rope_type": kind}}
