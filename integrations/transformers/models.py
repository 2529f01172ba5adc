"""Check which models can be enabled, by their structure, so that no list of names can be out of date."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...layers.hf import attention
from ..pages import why_not

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name of transformers' registry in modeling files
_INSTEAD = "serve this model without enable, or with another server of docs/integrations.md"
_LAYER_TYPES = ("full_attention", "sliding_attention")  # layer types for which continuous batching has pages


def attention_layers(model: Any) -> list[Any]:
    """The modules of ``model`` that number their layer and look their attention function up when they are called."""
    if not isinstance(model, nn.Module) or not hasattr(model, "generate_batch") or not hasattr(model, "config"):
        raise ValueError(
            f"enable: got a {type(model).__name__}: expected a transformers model that generates, which has "
            "generate_batch; of a wrapper, pass the model within"
        )
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and _looks_up(type(module))
    ]


def check(model: Any, layers: Sequence[Any]) -> None:
    """Raise ValueError for a model that continuous batching or our kernel cannot serve, as far as its settings show."""
    what, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(f"enable: {what} has an encoder: continuous batching serves decoders only")
    if not layers:
        raise ValueError(
            f"enable: {what} never asks transformers' AttentionInterface, so our kernel would not run (what it has: "
            f"{', '.join(_own_attention(model)) or 'no attention'}); {_INSTEAD}"
        )
    missing = sorted(set(range(config.num_hidden_layers)) - {layer.layer_idx for layer in layers})
    if missing:
        raise ValueError(
            f"enable: layers {missing} of {what} do not ask transformers' AttentionInterface: expected all "
            f"{config.num_hidden_layers} to, since continuous batching keeps pages for each; {_INSTEAD}"
        )
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if foreign:
        raise ValueError(
            f"enable: {what} has layers of type {', '.join(foreign)}: continuous batching has pages for "
            f"{' and '.join(_LAYER_TYPES)} only; {_INSTEAD}"
        )
    if reason := why_not(1, model.dtype):
        raise ValueError(f"enable: {what} cannot be served: {reason}; cast the model to one of them")


class Probe:
    """Stands in for a paged cache in one forward pass, and records the arguments of each layer's attention function."""

    def __init__(self) -> None:
        self.heads: dict[int, tuple[int, int, torch.dtype]] = {}  # by layer: sizes of keys and values, dtype of keys

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, None]:
        """Record a layer; return zeros [1, T, N, H] for its attention."""
        if getattr(module, "is_causal", True) is False:
            raise ValueError(
                f"enable: {type(module).__name__} is not causal here: continuous batching serves causal models only"
            )
        self.heads[module.layer_idx] = key.shape[-1], value.shape[-1], key.dtype
        return torch.zeros_like(query.transpose(1, 2)), None

    @torch.no_grad()
    def check(self, model: Any) -> None:
        """Run one token through an enabled model; raise ValueError if a layer is not reached or cannot be served."""
        what, token = type(model).__name__, torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with torch.compiler.set_stance("force_eager"):
            model(input_ids=token, position_ids=token, cache=self, use_cache=False)
        missing = sorted(set(range(model.config.get_text_config().num_hidden_layers)) - set(self.heads))
        if missing:
            raise ValueError(
                f"enable: layers {missing} of {what} do not get what continuous batching passes to the model: its file "
                f"drops keyword arguments on the way, so that any paged attention would be wrong; {_INSTEAD}"
            )
        for layer, (keys, values, dtype) in sorted(self.heads.items()):
            if keys != values:
                raise ValueError(
                    f"enable: layer {layer} of {what} has keys of size {keys} and values of size {values}: continuous "
                    f"batching keeps both in pages of one size; {_INSTEAD}"
                )
            if reason := why_not(keys, dtype):
                raise ValueError(f"enable: layer {layer} of {what} cannot be served: {reason}; {_INSTEAD}")


def stock_attention(model: Any) -> str:
    """The model's attention outside of continuous batching: "sdpa" or "eager"."""
    before = model.config._attn_implementation
    return before if before in ("sdpa", "eager") else "sdpa" if model._supports_sdpa else "eager"


def eager_attention(kind: type) -> Any:
    """The eager attention function of the modeling file that a class of layers comes from."""
    found = attention.eager_attention(kind)
    if found is None:
        raise ValueError(
            f"enable: {kind.__name__} has no eager attention; load the model with attn_implementation='sdpa'"
        )
    return found


def _looks_up(kind: type) -> bool:
    """Whether a method of the class names the registry of attention functions."""
    methods = [
        inspect.unwrap(each) for base in kind.__mro__ for each in vars(base).values() if inspect.isfunction(each)
    ]
    return any(_INTERFACE in method.__code__.co_names for method in methods)


def _own_attention(model: nn.Module) -> list[str]:
    names = [type(module).__name__ for module in model.modules()]
    return sorted({name for name in names if "attention" in name.lower()})
