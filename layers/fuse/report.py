"""The report of a fused model: which modules run our kernels, which stayed stock, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from . import products
from .finding import errors_of
from .probing import apart
from .ranks.whole import FusedWhole
from .swap import Fused

_Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Stayed(NamedTuple):
    """A module that owns parameters and runs its stock forward."""

    path: str
    kind: str  # the name of its class
    why: str
    nothing_to_fuse: bool  # our version would be stock as well


def readers(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose parameters a fused parent reads in place of calling them, with that parent's path."""
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, Fused) and module.why_stock() is None:
            found.update((module.get_submodule(name), path) for name in module._match.kinds)
    return found


def stayed(model: nn.Module, *, reasons: bool = True) -> list[Stayed]:
    """Every module of ``model`` that owns parameters and runs no fused op; ``reasons``: with its own code's errors."""
    return apart(_stayed, model, errors_of if reasons else lambda *_: [])


def _stayed(model: nn.Module, errors_of: Callable[[str, nn.Module], list[str]]) -> list[Stayed]:
    read, parents = readers(model), {child: module for module in model.modules() for child in module.children()}
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    found = []
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, FusedWhole):
            if module._match.stayed is not None:
                found.append(module._match.stayed)
        elif isinstance(module, Fused):
            if (why := module.why_stock()) is not None:
                found.append(Stayed(path, kind, why, False))
        elif "forward" in module.__dict__:
            found.append(
                Stayed(path, kind, "it has a forward of its own, as accelerate's hooks give it: fuse before", False)
            )
        elif all(param is None for param in module._parameters.values()) or module in read:
            continue
        elif isinstance(module, nn.Embedding):
            found.append(Stayed(path, kind, "a look-up: there is nothing to fuse", True))
        elif products.is_linear(module):
            parent = parents.get(module)
            alone = module is outputs or isinstance(parent, Fused) or "attention" in type(parent).__name__.lower()
            why = "a product by itself: torch's library runs it"
            if not alone:
                raised = errors_of(path.rpartition(".")[0], parent) if parent is not None else []
                why = "; ".join(
                    ["no activation was found to fuse it with", *(f"of its parent, {each}" for each in raised)]
                )
            found.append(Stayed(path, kind, why, alone))
        elif isinstance(module, _Convolution):
            found.append(Stayed(path, kind, "a convolution", True))
        elif any(param is not None and param.dim() > 2 for param in module._parameters.values()):
            found.append(Stayed(path, kind, "experts, or other parameters of three dimensions", False))
        else:
            found.append(Stayed(path, kind, "; ".join(["no matcher knows it", *errors_of(path, module)]), False))
    return found
