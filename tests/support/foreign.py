"""Small random models of transformers' architectures, to fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# One size under each of the names that configurations have for it.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx"), 64),
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "vocab_size": 64, "num_local_experts": 4,
    "expansion_ratio": 2, "pad_token_id": 0, "sliding_window": 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "falcon": {"head_dim": None},  # a property there
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
# What has to be fused in each: the ops that run in one layer, and how many norms the model has.
EVERYTHING = ("feed-forward", "norms", "projections", "rope")
ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "falcon",
    "bloom", "starcoder2", "granite", "olmo2", "cohere", "mpt", "stablelm", "gpt_oss", "mixtral", "phi", "gptj",
)  # fmt: skip


def foreign(kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> nn.Module:
    """A causal language model of ``kind``, with the same random weights for every dtype."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    own = {**OWN.get(kind, {}), **changes}
    options = {"experts_implementation": "eager"} if kind in ("gpt_oss", "mixtral") else {}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(sizes_of(CONFIG_MAPPING[kind], **own), **options)
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            if not param.is_meta:  # norms and biases start as constants, which would hide mistakes
                param.add_(torch.randn(param.shape, generator=drawn) * 0.1)
    return model.to(dtype).eval()


def sizes_of(config: Any, **own: Any) -> Any:
    """A small configuration of the class ``config``, and of those within it; ``own`` is what else it is given."""
    default = config()
    sizes = {name: size for name, size in _SIZES.items() if hasattr(default, name)} | own
    for name, kind in getattr(config, "sub_configs", {}).items():
        if hasattr(kind, "from_dict") and name not in own:
            sizes[name] = sizes_of(kind)
    return config(**{name: size for name, size in sizes.items() if size is not None})


_RATES = ("p", "dropout", "attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop")


def without_dropout(model: nn.Module) -> nn.Module:
    """``model``, in training, with no dropout: ranks and stages draw masks of their own."""
    for module in model.train().modules():
        for name in _RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def tokens(batch: int = 2, length: int = 10) -> torch.Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))
