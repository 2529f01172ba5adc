"""The implementations that ``bench verify`` and ``bench compare`` judge: the project's own, or a function in a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...kernels.dev.registry import Case, OpSpec
from ...kernels.runtime.dispatch import IMPLS

PREFIX = "impl:"
_EXPECTED = f"expected one of {', '.join(IMPLS)}, or PATH:NAME, a function in a Python file"


@dataclass(frozen=True)
class Implementation:
    """One implementation of an op.

    ``run(inputs, case)`` returns outputs and gradients by name, as ``OpSpec.run`` does: ``inputs`` are those that the
    op's ``make_inputs`` makes, ``case.sizes`` and ``case.options`` say what to compute. ``foreign``: it comes from a
    file, so an exception in it is a finding.
    """

    name: str
    run: Callable[[dict[str, Any], Case], Mapping[str, torch.Tensor]]
    foreign: bool = False


def load(spec: OpSpec, text: str) -> Implementation:
    """The implementation that ``text`` names: "triton", "impl:triton" or "kernel.py:function".

    Raises ValueError if there is none of that name, RuntimeError if its file cannot be imported.
    """
    text = text.removeprefix(PREFIX)
    if text in IMPLS:
        return Implementation(text, lambda inputs, case: spec.run(inputs, case, text))
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise ValueError(f"--impl {text}: {_EXPECTED}")
    if not Path(path).is_file():
        raise ValueError(f"--impl {text}: there is no file {path}; {_EXPECTED}")
    function = getattr(_module(Path(path)), name, None)
    if not callable(function):
        raise ValueError(f"--impl {text}: {path} defines no function {name}; it needs `def {name}(inputs, case)`")
    return Implementation(text, function, foreign=True)


def _module(path: Path) -> Any:
    """The module in ``path``, registered under a name of its own: Triton looks kernels up by module."""
    name = f"_implementation_{path.stem}_{abs(hash(path.resolve()))}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ValueError(f"--impl {path}: expected a Python file, NAME.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RuntimeError(f"--impl {path}: its import raised {type(error).__name__}: {error}") from error
    return module
