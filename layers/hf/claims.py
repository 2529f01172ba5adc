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

# Names of fields that count layers, and of those that size anything.
_LAYERS = re.compile(r"(^|_)(layers?|blocks|depth)$")
_SIZES = re.compile(
    r"(^|_)(layers?|blocks|depth|heads?|experts?|groups?|size|dims?|rank|width|channels|kernel|states?|embd|inner|"
    r"model|ff|ffn|kv|ctx|positions?|embeddings)$"
)
_MOST = 1 << 40  # no dimension has more
_MODULES = 4, 200  # for each tensor of the files, and beside them
_BUFFER_BYTES = 1 << 30  # that no file holds, beside as many bytes as the files have


def check_counts(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for a config, as its file has it, with sizes that no model has, or more layers than the files.

    ``names`` are those of the files' tensors.
    """
    names = list(names)
    numbers = [int(found[1]) for name in names if (found := re.search(r"\.(\d+)\.", name))]
    layers = 1 + max(numbers, default=-1)
    for field, value in _integers(config):
        name = field.rpartition(".")[2]
        least = 1 if name in _NEEDED else -1  # many fields say "none" by 0 or -1
        if _SIZES.search(name) and not least <= value <= _MOST:
            raise ValueError(f"{field} is {_shown(value)}: expected a number that a model can have")
        # Some fields count parts of layers, or layers that a file may lack: each has a tensor at least.
        most = layers if name in _ALL_LAYERS else len(names)
        if _LAYERS.search(name) and value > most:
            raise ValueError(
                f"{field} is {_shown(value)}, and the files hold {layers} layers, {len(names)} tensors in all"
            )


_ALL_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_NEEDED = (
    *(*_ALL_LAYERS, "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"),
    *("hidden_size", "n_embd", "d_model", "vocab_size"),
)


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
    sizes = [(field, value) for field, value in _integers(config) if _SIZES.search(field.rpartition(".")[2])]
    equal = [(field, value) for field, value in sizes if value in asked]
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


def largest(config: Mapping[str, Any]) -> str:
    """The largest numbers in a config, with their fields."""
    found = sorted(_integers(config), key=lambda item: -item[1])
    return ", ".join(f"{field}={_shown(value)}" for field, value in found[:3])


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**18 else f"{'-' * (value < 0)}10^{int(math.log10(abs(value)))} or so"
