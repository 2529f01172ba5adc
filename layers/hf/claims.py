"""What a folder's config claims, against what the headers of its weights files hold, before anything is built.

A config of a few bytes can ask for any number of layers. transformers would build them all, and only then would the
files' names be compared with the model's.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

# Fields that size a causal language model, by the least that they may be.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_LEAST = {
    **dict.fromkeys((*_LAYERS, "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"), 1),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size", "max_position_embeddings", "n_positions"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts"), 0),
}
_MOST = 1 << 40  # no dimension has more
_ELSEWHERE = {  # the most of fields at any depth, which transformers makes lists of
    "num_labels": 1 << 17,
    **dict.fromkeys(_LAYERS, 1 << 12),
}
_MOST_NESTED = 1 << 16  # in lists of lists, which some configs repeat
_BOTH_PARTS = ("encoder_layers", "decoder_layers")  # where num_hidden_layers may mean the part that is missing
_MODULES = 4, 200  # for each tensor of the files, and beside them
_BUFFER_BYTES = 1 << 30  # that no file holds, beside as many bytes as the files have


def check_counts(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for a config, as its file has it, with sizes that no model has, or more layers than the files.

    ``names`` are those of the files' tensors. Other fields are compared when a model is built, which they cannot make
    large: see :func:`few_modules`.
    """
    numbers = [int(found[1]) for name in names if (found := re.search(r"\.(\d+)\.", name))]
    layers = 1 + max(numbers, default=-1)
    text = config.get("text_config")
    for inside, part in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for name, least in _LEAST.items():
            value = part.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                continue  # absent, or of a type that the model's own config refuses
            if not least <= value <= _MOST:
                raise ValueError(f"{inside}{name} is {_shown(value)}: expected a number that a model can have")
            if name in _LAYERS and value > layers and not any(each in part for each in _BOTH_PARTS):
                raise ValueError(f"{inside}{name} is {_shown(value)}, and the files hold {layers} layers")
    for field, value in _integers(config):
        if value > (most := _ELSEWHERE.get(field.rpartition(".")[2], value)):
            raise ValueError(f"{field} is {_shown(value)}: expected at most {most}")
    for field, value in config.items():
        if (largest := max(_nested(value, 0), default=0)) > _MOST_NESTED:
            raise ValueError(f"{field} holds {_shown(largest)} in a list of lists: expected at most {_MOST_NESTED}")


@contextmanager
def few_modules(tensors: int, config: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, this thread's models may have a few modules for each of ``tensors`` tensors, in all.

    More raise ValueError, with the fields of ``config`` that may be the cause.
    """
    each, beside = _MODULES
    most, count, thread = each * tensors + beside, 0, threading.get_ident()

    def registered(module: nn.Module, name: str, child: nn.Module) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > most:
            raise ValueError(
                f"it asks for more than {most} modules, and the files hold {tensors} tensors; its largest fields are "
                + largest(config)
            )

    hook = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def check_shape(name: str, held: Iterable[int], expected: Iterable[int], config: Mapping[str, Any]) -> None:
    """Raise ValueError for a tensor whose shape in the files differs, with the fields that ask for the difference."""
    held, expected = list(held), list(expected)
    if held == expected:
        return
    asked = set(expected) - set(held)
    sizes = [(field, value) for field, value in _integers(config) if field.rpartition(".")[2] in _LEAST]
    equal = [(field, value) for field, value in _integers(config) if value in asked]
    parts = [(field, value) for field, value in sizes if value > 1 and any(each % value == 0 for each in asked)]
    fields = [f"{field}={value}" for field, value in equal or sorted(parts, key=lambda item: -item[1])]
    raise ValueError(f"{name} is {held}, expected {expected}" + (f" ({', '.join(fields[:4])})" if fields else ""))


def check_amount(name: str, held: int, expected: int, config: Mapping[str, Any]) -> None:
    """Raise ValueError for tensors made of several in the files, which hold fewer numbers than these ask for."""
    if expected > held:
        raise ValueError(
            f"{name} and what goes with it have {held} numbers, expected {expected}; the largest fields of the config "
            f"are {largest(config)}"
        )


def check_buffers(model: nn.Module, nbytes: int, config: Mapping[str, Any]) -> None:
    """Raise ValueError if buffers that no file holds would take far more than the ``nbytes`` of the files."""
    total = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if total > nbytes + _BUFFER_BYTES:
        raise ValueError(
            f"its tables of positions and masks would take {total / 2**30:.3g} GiB, and the files hold "
            f"{nbytes / 2**30:.3g} GiB; its largest fields are {largest(config)}"
        )


def _integers(config: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, int]]:
    """The integer fields, those of inner objects by their path."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _integers(value, f"{inside}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{inside}{name}", value


def _nested(value: Any, depth: int) -> Iterator[int]:
    """The integers in lists of lists."""
    if isinstance(value, list):
        for each in value:
            yield from _nested(each, depth + 1)
    elif depth > 1 and isinstance(value, int):
        yield value


def largest(config: Mapping[str, Any]) -> str:
    """The largest numbers in a config, with their fields."""
    found = sorted(_integers(config), key=lambda item: -item[1])
    return ", ".join(f"{field}={_shown(value)}" for field, value in found[:3])


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**18 else f"{'-' * (value < 0)}10^{int(math.log10(abs(value)))} or so"
