"""The short training run of the tests here."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(scope="module")
def case() -> Iterator[Any]:
    """tests/support/train_case.py, importable here and in the workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_SUPPORT)
        patch.setenv("PYTHONPATH", _SUPPORT, prepend=os.pathsep)
        yield importlib.import_module("train_case")
