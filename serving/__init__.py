"""Floor 4: serving. The allocator of the paged KV cache, the scheduler, and the engine that runs a model with them."""

from .allocator import BlockAllocator
from .engine import Engine
from .ranks import RanksLost
from .request import QueueFull, Request, TokenEvent
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .stats import EngineStats

__all__ = [
    "BlockAllocator",
    "Engine",
    "EngineStats",
    "QueueFull",
    "RanksLost",
    "Request",
    "SamplingParams",
    "Scheduler",
    "TokenEvent",
]
