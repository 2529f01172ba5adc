"""What a transformer is made of."""

from __future__ import annotations

from dataclasses import dataclass

STYLES = ("gelu", "gated")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "max_positions",
)


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a decoder, in one of two styles that equal published models.

    ``gelu`` is transformers' Starcoder2: LayerNorm, grouped-query attention with RoPE, a tanh-GeLU MLP, biases.
    ``gated`` is its Llama: RMSNorm, the same attention, a SwiGLU MLP, no biases.

    ``num_kv_heads`` defaults to ``num_heads``, ``head_dim`` to ``hidden_size / num_heads``, ``bias`` (of the linear
    layers; norms follow the style) to what the style says. ``init_std`` is the standard deviation of fresh weights.

    Raises ValueError for sizes that cannot make a model.
    """

    style: str = "gelu"
    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = None  # type: ignore[assignment]  # None until __post_init__
    head_dim: int = None  # type: ignore[assignment]
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    bias: bool = None  # type: ignore[assignment]
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: expected one of {', '.join(STYLES)}")
        if self.num_kv_heads is None:
            self._set("num_kv_heads", self.num_heads)
        if self.bias is None:
            self._set("bias", self.style == "gelu")
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
        check_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim is None:
            self._set("head_dim", default_head_dim(self.hidden_size, self.num_heads))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for its users only

    @property
    def gated(self) -> bool:
        return self.style == "gated"


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """H = D / N; ValueError where that is no whole number."""
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}: choose sizes that divide, "
            "or pass head_dim"
        )
    return hidden_size // num_heads


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """ValueError unless every KV head serves the same number of query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: every KV head serves the same "
            "number of query heads"
        )
