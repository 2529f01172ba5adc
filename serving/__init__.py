"""Floor 4, serving: the allocator of the paged KV cache, the scheduler, and the engine that runs a model with both."""

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
