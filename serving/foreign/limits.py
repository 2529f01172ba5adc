"""Refuse models of transformers that cannot be served, as far as their settings show, and find the largest position."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...layers.fuse.swap import Fused
from ...parallel.core.mesh import SINGLE, Group

_LAYER_TYPES = ("full_attention", "sliding_attention")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")  # of positions
_UNLIMITED = 1 << 20  # for models without a limit, such as Bloom


def check(model: Any) -> None:
    """Raise ValueError for a model that the engine cannot serve, with an alternative."""
    what, config = type(model).__name__, model.config.get_text_config()

    def refuse(why: str) -> None:
        raise ValueError(f"Engine: this {what} cannot be served: {why}")

    if model.training:
        refuse("it is in training mode and would drop activations; call model.eval() first")
    if model.config.is_encoder_decoder:
        refuse("it has an encoder: the engine serves decoders only; use model.generate")
    if model.get_output_embeddings() is None:
        refuse("it has no language-model head; load it with AutoModelForCausalLM")
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if foreign:
        refuse(
            f"it has layers of type {', '.join(foreign)}: the engine's pages hold keys and values of "
            f"{' and '.join(_LAYER_TYPES)} layers only; use model.generate"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        refuse(
            f"{config.num_kv_shared_layers} of its layers read the keys of others: the engine keeps pages for each "
            "layer; use model.generate"
        )
    convolutions = [path for path, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    if convolutions:
        refuse(
            f"{convolutions[0]} is a convolution over tokens, or a state: the engine keeps keys and values only; use "
            "model.generate"
        )
    devices = sorted({str(param.device) for param in model.parameters()})
    if len(devices) > 1:
        refuse(f"its parameters are on {', '.join(devices)}: expected one device; load it without a device_map")
    group = group_of(model)
    if group.size == 1 and any(isinstance(param, DTensor) for param in model.parameters()):
        refuse("it is sharded by something else than fuse: load it whole and call shardfuse.fuse(model, mesh)")


def group_of(model: nn.Module) -> Group:
    """The tensor-parallel ranks over which ``fuse(model, mesh)`` split the model."""
    for module in model.modules():
        if isinstance(module, Fused) and module._match is not None and module._match.ranks.size > 1:
            ranks: Group = module._match.ranks
            return ranks
    return SINGLE


def max_positions(model: Any) -> int:
    """The number of positions that the model supports. It ends where rotary frequencies begin to change with the
    length, because cached keys would have other frequencies."""
    config = model.config.get_text_config()
    found = [getattr(config, name) for name in _POSITIONS if isinstance(getattr(config, name, None), int)]
    limits = [found[0] if found else _UNLIMITED]
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and "dynamic" in kind:
                limits.append(int(module.original_max_seq_len))
            elif kind == "longrope":
                settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
                limits.append(int(settings["original_max_position_embeddings"]))
    return min(limits)
