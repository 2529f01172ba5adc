"""Floor 4, serving: the allocator of the paged KV cache, the scheduler, and the engine that runs a model with both.

Each name is imported at its first use: a command reads its options before it imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .aio import AsyncEngine
    from .allocator import BlockAllocator
    from .engine import Engine
    from .generation import GenerationDefaults
    from .guide import Guide
    from .models import ServableModel, as_servable
    from .ranks import RanksLost
    from .request import QueueFull, Request, ScoredToken, TokenEvent
    from .sampling import LogitsNotFinite
    from .sampling_params import SamplingParams
    from .scheduler import Scheduler
    from .stats import EngineStats
    from .text import Tokenizer

__all__ = [
    "AsyncEngine",
    "BlockAllocator",
    "Engine",
    "EngineStats",
    "GenerationDefaults",
    "Guide",
    "LogitsNotFinite",
    "QueueFull",
    "RanksLost",
    "Request",
    "SamplingParams",
    "Scheduler",
    "ScoredToken",
    "ServableModel",
    "TokenEvent",
    "Tokenizer",
    "as_servable",
]

_HOMES = {
    "AsyncEngine": "aio",
    "BlockAllocator": "allocator",
    "Engine": "engine",
    "GenerationDefaults": "generation",
    "Guide": "guide",
    "ServableModel": "models",
    "as_servable": "models",
    "RanksLost": "ranks",
    "QueueFull": "request",
    "Request": "request",
    "ScoredToken": "request",
    "TokenEvent": "request",
    "LogitsNotFinite": "sampling",
    "SamplingParams": "sampling_params",
    "Scheduler": "scheduler",
    "EngineStats": "stats",
    "Tokenizer": "text",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
