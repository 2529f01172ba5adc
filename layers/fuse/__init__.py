"""``fuse``, which puts our kernels into a foreign model module by module, recognising structure; and ``unfuse``."""

from .finding import Matcher
from .fuse import fuse, unfuse
from .ranks.plan import tp_plan
from .stats import Stats, stats
from .swap import Fused, Match

__all__ = ["Fused", "Match", "Matcher", "Stats", "fuse", "stats", "tp_plan", "unfuse"]
