"""Plain data as bytes: numbers, strings, tensors, and containers of them, without pickle.

The bytes are the length of a JSON text in eight bytes, the text, and the elements of the tensors. In the text, numbers,
strings, booleans and None stand for themselves, and {KIND: [...]} for anything else.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from .index import DTYPES

_LENGTH = 8
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def encode(value: Any) -> bytes:
    """``value`` as bytes. Raises TypeError for anything but plain data."""
    elements = bytearray()
    text = json.dumps(_to_json(value, elements)).encode("ascii")
    return len(text).to_bytes(_LENGTH, "little") + text + elements


def decode(data: bytes) -> Any:
    """The inverse of :func:`encode`. Raises ValueError for other bytes."""
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if len(data) < end:
        raise ValueError(f"{len(data)} bytes, and its text alone would end at {end}")
    try:
        return _from_json(json.loads(data[_LENGTH:end].decode("ascii")), data[end:])
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:  # a RecursionError, too
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _to_json(value: Any, elements: bytearray) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__name__ in _SEQUENCES and _SEQUENCES[kind.__name__] is kind:
        return {kind.__name__: [_to_json(each, elements) for each in value]}
    if kind.__name__ in _MAPPINGS and _MAPPINGS[kind.__name__] is kind:
        return {kind.__name__: [[_to_json(each, elements) for each in pair] for pair in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: [base64.b64encode(value).decode("ascii")]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: [str(value).removeprefix("torch.")]}
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        name, start = str(value.dtype).removeprefix("torch."), len(elements)
        if name in DTYPES:
            whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            elements += whole.flatten().view(torch.uint8).numpy().tobytes()
            return {"tensor": [name, list(value.shape), start]}
    raise TypeError(f"it holds a {kind.__module__}.{kind.__qualname__}")


def _from_json(value: Any, elements: bytes) -> Any:
    if not isinstance(value, dict | list):
        return value
    if isinstance(value, list) or len(value) != 1:
        raise ValueError("a container without its kind")
    ((kind, parts),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([_from_json(each, elements) for each in parts])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_from_json(key, elements): _from_json(each, elements) for key, each in parts})
    if kind in ("bytes", "bytearray"):
        (text,) = parts
        data = base64.b64decode(text, validate=True)
        return data if kind == "bytes" else bytearray(data)
    if kind == "complex":
        return complex(*map(float, parts))
    if kind in ("dtype", "device"):
        (text,) = parts
        return DTYPES[text] if kind == "dtype" else torch.device(text)
    if kind == "tensor":
        name, shape, start = parts
        size = torch.Size(shape).numel() * DTYPES[name].itemsize
        if not 0 <= start <= start + size <= len(elements):
            raise ValueError(f"a tensor of {size} bytes at {start}, and {len(elements)} are there")
        bits = (
            torch.frombuffer(bytearray(elements[start : start + size]), dtype=torch.uint8) if size else torch.empty(0)
        )
        return bits.view(DTYPES[name]).view(shape) if size else bits.to(DTYPES[name]).view(shape)
    raise ValueError(f"it has the kind {kind!r}")
