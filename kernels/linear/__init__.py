"""Linear layers with everything that can ride in their GEMMs' epilogues.

Each name is imported at its first use: the planner asks for configurations and costs without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functional import linear_act_choice
    from .op import gated_linear, linear_act
    from .product import Epilogue, Product
    from .reference import ACTIVATIONS, apply_activation

__all__ = ["ACTIVATIONS", "Epilogue", "Product", "apply_activation", "gated_linear", "linear_act", "linear_act_choice"]

_HOMES = {
    "linear_act_choice": "functional",
    "gated_linear": "op",
    "linear_act": "op",
    "Epilogue": "product",
    "Product": "product",
    "ACTIVATIONS": "reference",
    "apply_activation": "reference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
