"""A pytest plugin: tests run while a CPU stands in for the GPU, so that their kernels are compiled.

Nothing runs, so numbers are not compared: a test goes on to its next launch. Tests that read results otherwise fail,
which nobody looks at. ``pytest -p shardfuse.bench.gpu.stand_in_tests``; it ends with a line of JSON.
"""

from __future__ import annotations

import json

import pytest
import torch

from ...kernels.dev import accuracy, stand_in
from ...kernels.runtime import dispatch

_faults: list[str] = []


def _right(name: str, *args: object, **options: object) -> accuracy.Verdict:
    return accuracy.Verdict(name, 0.0, 1.0)


def pytest_configure(config: pytest.Config) -> None:
    stand_in.install(stand_in.TARGET, lambda kernel, error: _faults.append(f"{kernel}: {error}"))
    dispatch._INTERPRETING = True  # which tests of kernels ask for on a CPU
    torch.testing.assert_close = lambda *args, **options: None
    torch.equal = torch.allclose = lambda *args, **options: True
    accuracy.judge = accuracy.within = _right


def pytest_unconfigure(config: pytest.Config) -> None:
    print("\n" + json.dumps({"counts": stand_in.counts, "faults": _faults}))
