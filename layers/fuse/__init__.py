"""``fuse``, which puts our kernels into a foreign model module by module, recognising structure; and ``unfuse``."""

from .fuse import Matcher, fuse, unfuse
from .ranks.plan import tp_plan
from .stats import Stats, stats
from .swap import Fused, Match

__all__ = ["Fused", "Match", "Matcher", "Stats", "fuse", "stats", "tp_plan", "unfuse"]
