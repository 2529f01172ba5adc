"""The implementations that ``bench verify`` and ``bench compare`` judge: the project's own, a rival, or a function in a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.dev.registry import Case, OpSpec
from ...kernels.runtime.dispatch import IMPLS
from ...kernels.runtime.names import nearest
from .loading import from_file
from .rivals import Prepared, Rival, find_rival

PREFIX = "impl:"
RIVAL = "rival:"
_EXPECTED = f"one of {', '.join(IMPLS)}, rival:NAME, or PATH:NAME, a function in a Python file"


@dataclass(frozen=True)
class Implementation:
    """One implementation of an op.

    ``run(inputs, case)`` returns outputs and gradients by name, as ``OpSpec.run`` does: ``inputs`` are those that the
    op's ``make_inputs`` makes, ``case.sizes`` and ``case.options`` say what to compute. ``foreign``: it is other
    people's code, so an exception in it is a finding. ``refuses(case)`` and ``prepare`` are those of a ``Rival``.
    """

    name: str
    run: Callable[[dict[str, Any], Case], Mapping[str, torch.Tensor]]
    foreign: bool = False
    refuses: Callable[[Case], str] = lambda case: ""
    prepare: Callable[[dict[str, Any], Case], Prepared] | None = None

    def call(self, inputs: dict[str, Any], case: Case) -> Callable[[], object]:
        """The call to time, over operands in the layout that the implementation wants."""
        if self.prepare is not None:
            return self.prepare(inputs, case).call
        return lambda: self.run(inputs, case)


def load(spec: OpSpec, text: str, device: torch.device | None = None, rivals: Sequence[str] = ()) -> Implementation:
    """The implementation that ``text`` names: "triton", "impl:triton", "rival:liger" or "kernel.py:function".

    ``rivals`` are files that define more rivals, each a "PATH:NAME"; a rival has to run on ``device``, by default a
    CPU. Raises ValueError if there is none of that name, RuntimeError if it cannot be used here.
    """
    if text.startswith(RIVAL):
        name = text.removeprefix(RIVAL)
        return of_rival(find_rival(spec.name, name, device or torch.device("cpu"), rivals))
    text = text.removeprefix(PREFIX)
    if text in IMPLS:
        return Implementation(text, lambda inputs, case: spec.run(inputs, case, text))
    if (close := nearest(text, IMPLS)) is not None:
        raise ValueError(f"--impl {text}: did you mean {close!r}? (expected {_EXPECTED})")
    function = from_file(text, "--impl", _EXPECTED)
    if not callable(function):
        raise ValueError(f"--impl {text}: is no function; it needs `def {text.rpartition(':')[2]}(inputs, case)`")
    return Implementation(text, function, foreign=True)


def of_rival(rival: Rival) -> Implementation:
    """The rival as an implementation, whether or not it is found here."""
    name, prepare = f"{RIVAL}{rival.name}", rival.prepare
    if prepare is None:
        assert rival.run is not None
        return Implementation(name, rival.run, foreign=True, refuses=rival.refuses)

    def run(inputs: dict[str, Any], case: Case) -> Mapping[str, torch.Tensor]:
        prepared = prepare(inputs, case)
        return prepared.outputs(prepared.call())

    return Implementation(name, run, foreign=True, refuses=rival.refuses, prepare=prepare)
