"""The base class of what stands between the engine and a model of another kind."""

from __future__ import annotations

from typing import Any


class Wrapper:
    """Gives ``module`` the interface that the engine needs."""

    module: Any
