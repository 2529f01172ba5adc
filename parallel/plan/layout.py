"""A layout: how a model and its batch are spread over GPUs.

Ranks are numbered so that tensor-parallel ranks are neighbours, then context-parallel ranks. Megatron-LM and torchtitan
go on with data-parallel ranks, this library with the stages of a pipeline (``Software.stages_apart``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.runtime.names import expected
from .shapes import ModelShape
from .software import Software

RECOMPUTE = ("none", "selective", "ops", "full")  # each keeps less than the one before it and takes longer
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Layout:
    """Degrees and choices of a step; ``batch`` and ``length`` in sequences and tokens.

    ``interleave`` is the number of stages on each pipeline rank (virtual stages), ``zero`` the stage of ZeRO over
    ``dp`` ranks of ``replicas`` replicas. ``schedule`` is the pipeline's (``pipeline/schedules.py``); "" is 1F1B, or
    its interleaved form for several stages on a rank. ``recompute``: "none", "selective" (attention's core), "ops" (all
    but attention and every second product: torchtitan's) or "full" (each block). ``mlp_recompute`` is ParallelMLP's
    ``recompute``, 0 to 2. ``offload`` keeps weights, gradients and the optimizer's state in host memory. Raises
    ValueError for degrees below 1, unknown choices, and a batch that does not divide.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    replicas: int = 1
    interleave: int = 1
    zero: int = 0
    micro: int = 1  # sequences of a micro-batch
    batch: int = 1  # sequences of a step, over all ranks
    length: int = 2048
    sequence_parallel: bool = False
    recompute: str = "none"
    precision: str = "bf16"
    offload: bool = False
    schedule: str = ""
    mlp_recompute: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dp", "replicas", "interleave", "micro", "batch", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.zero not in range(4):
            raise ValueError(f"zero={self.zero!r}: expected 0, 1, 2 or 3")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r}: {expected(self.recompute, RECOMPUTE)}")
        if self.mlp_recompute not in range(3):
            raise ValueError(f"mlp_recompute={self.mlp_recompute!r}: expected 0, 1 or 2")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r}: {expected(self.precision, PRECISIONS)}")
        if self.batch % (self.shares * self.micro):
            raise ValueError(
                f"a batch of {self.batch} does not divide over {self.shares} data-parallel ranks in micro-batches of "
                f"{self.micro}: use a multiple of {self.shares * self.micro}"
            )
        if self.interleave > 1 and self.pp == 1:
            raise ValueError(f"interleave={self.interleave} with pp=1: only a pipeline has several stages on a rank")
        if self.schedule and self.pp == 1:
            raise ValueError(f"schedule={self.schedule!r} with pp=1: only a pipeline has a schedule")
        if self.pp > 1 and not self.schedule:
            object.__setattr__(self, "schedule", "interleaved_1f1b" if self.interleave > 1 else "1f1b")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp * self.replicas

    @property
    def shares(self) -> int:
        """Ranks that have batches of their own."""
        return self.dp * self.replicas

    @property
    def microbatches(self) -> int:
        return self.batch // (self.shares * self.micro)

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one context-parallel rank."""
        return self.micro * self.length // self.cp

    @property
    def itemsize(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.precision == "fp32" else 2

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO splits: context-parallel ranks hold the same weights, so they take part."""
        return self.dp * self.cp

    def apart(self, software: Software) -> int:
        """How many ranks lie from a shard of ZeRO to the next."""
        return self.tp if software.stages_apart else self.tp * self.pp

    def why_not(self, shape: ModelShape) -> str:
        """Why ``shape`` cannot be laid out like this; empty if it can."""
        if shape.heads % self.tp or shape.kv_heads % self.tp:
            return f"tp={self.tp} does not divide {shape.heads} heads, {shape.kv_heads} of keys and values"
        if shape.ffn % self.tp or shape.vocab % self.tp:
            return f"tp={self.tp} does not divide a feed-forward width of {shape.ffn}, or {shape.vocab} tokens"
        if self.length % (2 * self.cp if self.cp > 1 else 1):
            return f"cp={self.cp} does not divide sequences of {self.length} tokens in halves"
        if self.sequence_parallel and self.tokens % self.tp:
            return f"sequence parallelism over tp={self.tp} does not divide {self.tokens} tokens"
        if self.pp * self.interleave > shape.layers + 1:
            return f"{self.pp * self.interleave} stages are more than {shape.layers} blocks"
        return ""

    def described(self) -> str:
        """A short text: what differs from one rank."""
        parts = [
            f"{name} {getattr(self, name)}" for name in ("tp", "pp", "cp", "dp", "replicas") if getattr(self, name) > 1
        ]
        parts += [self.schedule] if self.pp > 1 else []
        parts += [f"{self.interleave} stages a rank"] if self.interleave > 1 else []
        parts += [f"ZeRO {self.zero}"] if self.zero else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        parts += [f"MLP recompute {self.mlp_recompute}"] if self.mlp_recompute else []
        parts += ["offload"] if self.offload else []
        return ", ".join((*parts, f"micro-batch {self.micro}"))
