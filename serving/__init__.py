"""Floor 4: the paged KV cache's allocator, the scheduler, and the engine that serves a model with them."""

from .allocator import BlockAllocator
from .engine import Engine
from .request import Request, TokenEvent
from .scheduler import Scheduler
from .stats import EngineStats

__all__ = ["BlockAllocator", "Engine", "EngineStats", "Request", "Scheduler", "TokenEvent"]
