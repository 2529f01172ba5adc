"""Fixtures for pytest. A conftest.py names this module:

pytest_plugins = ["shardfuse.testing.fixtures"]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..layers.transformer import ParallelTransformer
from ..serving.engine import Engine
from .models import assert_idle, tiny_engine, tiny_model


@pytest.fixture(scope="session")
def shardfuse_model() -> ParallelTransformer:
    """A :func:`tiny_model` that all tests share; a test that changes weights must copy it."""
    return tiny_model()


@pytest.fixture
def shardfuse_engine_options() -> dict[str, Any]:
    """The options of ``shardfuse_engine``; override this fixture in a test module or class to change them."""
    return {}


@pytest.fixture
def shardfuse_engine(
    shardfuse_model: ParallelTransformer, shardfuse_engine_options: dict[str, Any]
) -> Iterator[Engine]:
    """A fresh engine. At the end of the test it must have no live request and no leaked block."""
    with tiny_engine(shardfuse_model, **shardfuse_engine_options) as engine:
        yield engine
        assert_idle(engine)
