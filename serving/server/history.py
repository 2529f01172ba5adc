"""The last minutes of a server, one point per second, for the live page."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from typing import Any

from .metrics import Totals
from .served import Served

POINTS = 300


class History:
    """Samples ``served`` and keeps the last POINTS points."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._before = (time.time() - 1.0, Totals())

    async def sample(self, seconds: float) -> None:
        """Record a point every ``seconds`` until cancelled."""
        while True:
            self._points.append(self._point())
            await asyncio.sleep(seconds)

    def json(self, since: float = 0.0) -> dict[str, Any]:
        """The model and its limits, the load now, and the points later than ``since``, the oldest first."""
        serve, options = self._served.serve, self._served.options
        load = serve.load
        return {
            "model": options.name,
            "max_model_len": self._served.max_model_len,
            "draining": self._served.draining,
            "trouble": self._served.trouble(),
            "needs_key": bool(options.api_keys),
            "chat": bool(self._served.chat.template),
            "now": {**self._load(), "used_blocks": load.used_blocks, "num_blocks": load.num_blocks},
            "points": [point for point in self._points if point["time"] > since],
        }

    def _load(self) -> dict[str, Any]:
        load = self._served.serve.load
        return {"running": load.running, "waiting": load.waiting, "cache": load.used_blocks / load.num_blocks}

    def _point(self) -> dict[str, Any]:
        """Rates and mean latencies cover the time since the last point; None if no token came in it."""
        when, now = time.time(), dataclasses.replace(self._served.metrics.totals)
        (earlier, before), self._before = self._before, (when, now)
        seconds = when - earlier

        def mean(name: str) -> float | None:
            count = getattr(now, f"{name}_count") - getattr(before, f"{name}_count")
            return (getattr(now, f"{name}_s") - getattr(before, f"{name}_s")) / count if count else None

        return {
            "time": when,
            **self._load(),
            "generated_per_s": (now.generated - before.generated) / seconds,
            "prompt_per_s": (now.prompt - before.prompt) / seconds,
            "first_token_s": mean("first"),
            "between_tokens_s": mean("between"),
        }
