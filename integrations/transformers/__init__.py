"""transformers: ``enable(model)`` makes continuous batching attend with our kernel, over transformers' own pages.

``generate_batch``, ``init_continuous_batching`` and, through ``python -m shardfuse.integrations.transformers serve``,
``transformers serve`` then call it in every layer; ``stats("transformers")`` counts. Everything else that the model
does, ``forward`` and ``generate`` included, attends as before. The files:

``models.py`` says whether a model can be enabled, ``attention.py`` holds the function that its layers call, and
``paged.py`` what that does over a paged cache: ``step.py`` makes the block tables that all layers of a forward pass
share, ``cache.py`` finds a layer's pages.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn

from ..hosts import Host, UnsupportedHost
from . import models, step
from .contract import CONTRACT

__all__ = ["HOST", "UnsupportedHost", "disable", "enable"]

HOST = Host("transformers", "transformers", ("transformers",), ran=("5.23.0", "5.22.2", "5.19.0", "5.17.0"))


class _Enabled(NamedTuple):
    name: str  # the name of the attention that the configurations now select
    before: list[tuple[Any, str]]  # the model's configurations, and the attention that each selected
    hooks: list[Any]


_enabled: weakref.WeakKeyDictionary[nn.Module, _Enabled] = weakref.WeakKeyDictionary()


def enable(model: Any) -> Any:
    """Make continuous batching of this model attend with our kernel; return the model.

    Only this object changes: its configurations select another attention, and two hooks mark the start and the end of
    its forward passes. Outside of continuous batching it attends with SDPA, or in eager mode if it did so before or has
    no SDPA. A second call changes nothing, and :func:`disable` undoes the first.

    Call it before the model's first ``generate_batch`` or ``init_continuous_batching``. This function runs one token
    through the model to check that every layer reaches the kernel and to learn its heads; with tensor parallelism all
    ranks call it.

    Args:
        model: a ``PreTrainedModel`` that generates, in fp16, bf16 or fp32, with head sizes up to 256. Its attention has
            to go through transformers' ``AttentionInterface``; windows, soft-caps and sinks are served.

    Raises:
        UnsupportedHost: transformers is missing, or its version lacks something that this plug-in relies on.
        ValueError: the model cannot be served; the message gives the reason. The model stays unchanged.
    """
    version = HOST.check(CONTRACT)
    from . import attention  # needs transformers

    layers = models.attention_layers(model)
    models.check(model, layers)
    _refuse_running(model, "enable")
    if model in _enabled:
        disable(model)
    name = attention.register(models.stock_attention(model), layers, paged_prefix=version.startswith("5.17."))
    configs = {id(each): each for each in (model.config, model.config.get_text_config(), *(at.config for at in layers))}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation = {"": name}  # "": only the model itself, no vision or audio tower in it
    hooks = [
        model.register_forward_pre_hook(step.begin, with_kwargs=True),
        model.register_forward_hook(step.end, always_call=True),
    ]
    _enabled[model] = _Enabled(name, before, hooks)
    try:
        models.Probe().check(model)
    except BaseException:
        disable(model)
        raise
    return model


def disable(model: Any) -> Any:
    """Make the model attend as it did before :func:`enable`; return the model.

    A later choice by ``set_attn_implementation`` stays. Raises ValueError for a model that is not enabled.
    """
    if model not in _enabled:
        raise ValueError(
            f"disable: this {type(model).__name__} is not enabled; the object that was enabled is expected"
        )
    _refuse_running(model, "disable")
    name, before, hooks = _enabled.pop(model)
    for hook in hooks:
        hook.remove()
    for config, stock in before:
        if config._attn_implementation == name:
            config._attn_implementation = {"": stock}
    return model


def _refuse_running(model: Any, what: str) -> None:
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise ValueError(
            f"{what}: this {type(model).__name__} keeps a manager of continuous batching, made for the attention that "
            "it had; call model.destroy_cached_continuous_batching_manager() first"
        )
