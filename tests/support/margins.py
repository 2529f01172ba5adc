"""Records the ratios of errors to budgets in tests, for ``make test-portable``.

With ``SHARDFUSE_MARGINS=FOLDER`` every verdict (``kernels/dev/accuracy.py``) and every ``torch.testing.assert_close``
adds a line to its process's file in FOLDER: the error over the budget, the test, the compared tensor. Bitwise
comparisons, whose budget is zero, are left out, and so are tests marked ``spoiled``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

VARIABLE = "SHARDFUSE_MARGINS"
DEFAULTS = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}


_left_out = False


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Record nothing that this process compares meanwhile."""
    global _left_out
    _left_out = True
    try:
        yield
    finally:
        _left_out = False


def install() -> None:
    """Start recording in this process, if the variable is set."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from shardfuse.kernels.dev import accuracy

    path = Path(folder) / f"{os.getpid()}.jsonl"

    def note(kind: str, name: str, ratio: float, budget: float = 0.0) -> None:
        if _left_out:
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" (")[0]
        with path.open("a") as file:
            file.write(json.dumps({"test": test, "kind": kind, "name": name, "ratio": ratio, "budget": budget}) + "\n")

    ok = accuracy.Verdict.ok.fget
    assert ok is not None

    def noted(self: accuracy.Verdict) -> bool:
        note("verdict", self.name, self.error / self.budget if self.budget else 0.0, self.budget)
        return ok(self)

    accuracy.Verdict.ok = property(noted)  # type: ignore[assignment,method-assign]
    torch.testing.assert_close = _noting(torch.testing.assert_close, note)


def _noting(assert_close: Callable[..., None], note: Callable[[str, str, float], None]) -> Callable[..., None]:
    @functools.wraps(assert_close)
    def compare(
        actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, **options: Any
    ) -> None:
        ratios = [_ratio(a, b, rtol, atol) for a, b in _pairs(actual, expected)]
        if ratios:
            note("close", "", max(ratios))
        assert_close(actual, expected, rtol=rtol, atol=atol, **options)

    return compare


def _pairs(actual: Any, expected: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        yield actual, expected
    elif isinstance(actual, Mapping):
        for key in actual:
            yield from _pairs(actual[key], expected[key])
    elif isinstance(actual, Sequence) and not isinstance(actual, str):
        for a, b in zip(actual, expected):
            yield from _pairs(a, b)


def _ratio(actual: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None) -> float:
    default = DEFAULTS.get(actual.dtype, (0.0, 0.0))
    rtol, atol = (given if given is not None else other for given, other in zip((rtol, atol), default))
    if actual.shape != expected.shape or not actual.numel() or rtol == atol == 0:
        return 0.0
    error = (actual.detach().double() - expected.detach().double()).abs()
    return (error / (atol + rtol * expected.detach().double().abs())).nan_to_num(0.0).max().item()
