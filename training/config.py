"""What a training run is made of, as one value that goes to every process and into the report."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from ..layers.config import TransformerConfig
from .precision import PRECISIONS


@dataclass(frozen=True)
class TrainConfig:
    """A run of ``training.loop.train``.

    ``batch`` sequences of ``seq`` tokens a step, the same on every tensor-parallel rank. The learning rate rises
    linearly over ``warmup`` steps and falls linearly to zero at the end, which is ``steps`` or, if that comes first,
    ``time_cap`` seconds. ``clip`` bounds the gradient's norm. ``data`` is a path, None for the standard library's
    sources. ``recorded_steps`` losses and gradient norms are kept from the start of the run.

    Raises ValueError for values that cannot make a run.
    """

    model: TransformerConfig = field(default_factory=TransformerConfig)
    steps: int = 240
    batch: int = 8
    seq: int = 128
    lr: float = 2e-3
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1
    clip: float = 1.0
    time_cap: float | None = None
    seed: int = 0
    data: str | None = None
    eval_batches: int = 32
    recorded_steps: int = 8
    device: str = "cpu"
    sequence_parallel: bool = False
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seq", "warmup", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number above 0")
        if self.time_cap is not None and not self.time_cap > 0:
            raise ValueError(f"time_cap={self.time_cap}: expected seconds above 0, or None")
        if self.seq > self.model.max_positions:
            raise ValueError(f"seq={self.seq}: the model was made for at most {self.model.max_positions} positions")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: expected 0 to {2**63 - 1}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r}: expected one of {', '.join(PRECISIONS)}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: expected 'cpu' or 'cuda'")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """The inverse of :meth:`to_json`. Raises ValueError for a field that does not exist."""
        values: dict[str, Any] = json.loads(text)
        model = _checked(TransformerConfig, values.pop("model", {}), "model.")
        return cls(model=TransformerConfig(**model), **_checked(cls, values))


def _checked(kind: type, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    unknown = values.keys() - {f.name for f in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"unknown settings {', '.join(prefix + name for name in sorted(unknown))}")
    return values
