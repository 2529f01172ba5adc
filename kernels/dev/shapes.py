"""The projections of models that people run: the shapes that builds, benchmarks and profiles share.

Sizes are those of GPT-3 (arXiv:2005.14165, table 2.1; the width it gives for 13B, 5140, is not 40 heads of 128, and
5120 is what is run), Llama 3 (arXiv:2407.21783, table 3) and Qwen3's published configuration (arXiv:2505.09388).
Plain Python: no torch, no Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Width D, feed-forward width F, N query heads and K key and value heads of H; gated: SwiGLU, without biases."""

    name: str
    D: int
    F: int
    N: int
    K: int
    H: int
    gated: bool


MODELS = {
    model.name: model
    for model in (
        Model("gpt3-13b", 5120, 20480, 40, 40, 128, gated=False),
        Model("gpt3-175b", 12288, 49152, 96, 96, 128, gated=False),
        Model("llama3-8b", 4096, 14336, 32, 8, 128, gated=True),
        Model("llama3-70b", 8192, 28672, 64, 8, 128, gated=True),
        Model("qwen3-32b", 5120, 25600, 64, 8, 128, gated=True),
    )
}
DEGREES = (1, 2, 4, 8)  # of tensor parallelism
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192, 16384)
FEW_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # a step of decoding
KINDS = ("qkv", "o", "up", "down")  # one weight each, but q, k and v
GATE_UP = "gate_up"  # both weights of a gated layer


@dataclass(frozen=True)
class Projection:
    """What one rank of ``tp`` multiplies: x [T, D] with weights [F, D], one for each of ``widths``.

    D and F are of this GEMM, not of the model: "down" has D = the model's F/R.
    """

    model: str
    kind: str
    tp: int
    T: int
    D: int
    widths: tuple[int, ...]
    activation: str = "identity"
    bias: bool = True

    @property
    def F(self) -> int:
        """All outputs together."""
        return sum(self.widths)

    @property
    def name(self) -> str:
        """ "llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh"."""
        name = f"{self.model}-tp{self.tp}-{self.kind}-t{self.T}-d{self.D}-f{self.F}"
        return name if self.activation == "identity" else f"{name}-{self.activation}"


def projection(model: str, kind: str, tp: int, T: int, activation: str | None = None) -> Projection:
    """One projection of T tokens. ``activation=None``: tanh-GeLU after "up", SiLU for "gate_up", none elsewhere.

    "up" of a gated model is one of its two weights with GeLU and a bias: its size is what counts.
    """
    sizes = MODELS[model]
    D, widths, usual = {
        "qkv": (sizes.D, (sizes.N * sizes.H // tp, *(sizes.K * sizes.H // tp,) * 2), "identity"),
        "o": (sizes.N * sizes.H // tp, (sizes.D,), "identity"),
        "up": (sizes.D, (sizes.F // tp,), "gelu_tanh"),
        "down": (sizes.F // tp, (sizes.D,), "identity"),
        GATE_UP: (sizes.D, (sizes.F // tp,) * 2, "silu"),
    }[kind]
    return Projection(model, kind, tp, T, D, widths, activation or usual, bias=kind == "up" or not sizes.gated)


def grid(kinds: Iterable[str], tokens: Iterable[int] = TOKENS, models: Iterable[str] = MODELS) -> Iterator[Projection]:
    """Every projection of these kinds, models and token counts at every degree."""
    tokens, models = tuple(tokens), tuple(models)
    for kind in kinds:
        for model in models:
            for tp in DEGREES:
                yield from (projection(model, kind, tp, T) for T in tokens)


GATED_MODELS = tuple(model.name for model in MODELS.values() if model.gated)

# The dozen that one short GPU call times, by benchmark, most important first.
SHORT: dict[str, tuple[Projection, ...]] = {
    "linear_act": (
        projection("llama3-8b", "up", 1, 8192),
        projection("llama3-70b", "up", 8, 8192),
        projection("gpt3-13b", "up", 1, 4096, "gelu_erf"),
        projection("llama3-8b", "qkv", 1, 4096),
        projection("qwen3-32b", "down", 4, 1024),
    ),
    "linear_backward": (
        projection("gpt3-13b", "up", 1, 4096),
        projection("llama3-70b", "up", 8, 8192),
    ),
    "gated": (
        projection("llama3-8b", GATE_UP, 1, 8192),
        projection("qwen3-32b", GATE_UP, 8, 4096, "gelu_tanh"),
    ),
    "small_m": tuple(projection("llama3-8b", "up", 1, T) for T in (1, 16, 64)),
}
