"""The sizes and options of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..kernels.runtime.checks import whole_number
from ..kernels.runtime.names import expected
from ..parallel.pipeline.partition import Part

STYLES = ("gelu", "gated")
# transformers' names for the scalings of rotary positions to longer sequences.
SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3")
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
    The dropout rates of training are ``embedding_dropout`` for the embeddings, ``residual_dropout`` for the branches of
    attention and MLP, and ``attention_dropout`` for the attention weights.
    :func:`~shardfuse.layers.attention.sdpa.attend` documents ``attention_window``, ``attention_softcap`` and
    ``attention_sinks``. ``norm_offset`` is added to the norms' weights: 1 for Gemma's, which are kept around 0.

    The token ids are those of the model's tokenizer, None where it has no such token; ``eos_token_id`` may be several.
    Exports write them. ``pad_token_id`` is also the embedding's ``padding_idx``, whose row gets no gradient from the
    embedding.

    ``rope_scaling`` is transformers' ``rope_parameters`` without theta, such as ``{"rope_type": "linear", "factor":
    2.0}``. ``partial_rotary_factor`` is the share of each head that is rotated, and ``rope_interleaved`` pairs
    neighbouring elements as GPT-J does (see :class:`~shardfuse.layers.attention.rope.Rotary`).

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
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    tie_embeddings: bool = False
    bias: bool = None  # type: ignore[assignment]
    init_std: float = 0.02
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    attention_window: int | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: {expected(self.style, STYLES)}")
        if self.num_kv_heads is None:
            self._set("num_kv_heads", self.num_heads)
        if self.bias is None:
            self._set("bias", self.style == "gelu")
        for name in _SIZES:
            self._set(name, whole_number(name, getattr(self, name)))
        for name in ("embedding_dropout", "residual_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected at least 0 and less than 1")
        if self.attention_window is not None and not (
            isinstance(self.attention_window, int) and self.attention_window > 0
        ):
            raise ValueError(
                f"attention_window={self.attention_window!r}: expected a number of tokens above 0, or None"
            )
        if self.attention_softcap is not None and not self.attention_softcap > 0:
            raise ValueError(f"attention_softcap={self.attention_softcap!r}: expected a bound above 0, or None")
        if not isinstance(self.attention_sinks, bool):
            raise ValueError(f"attention_sinks={self.attention_sinks!r}: expected True or False")
        if self.attention_dropout and (self.attention_softcap is not None or self.attention_sinks):
            raise ValueError(
                f"attention_dropout={self.attention_dropout} with a soft-cap or sinks: no fused path of torch drops "
                "attention weights there; set one of them to nothing"
            )
        check_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim is None:
            self._set("head_dim", default_head_dim(self.hidden_size, self.num_heads))
        self._set("head_dim", whole_number("head_dim", self.head_dim))
        check_rope(self.head_dim, self.partial_rotary_factor, self.rope_scaling)
        self._check_token_ids()
        if self.rope_scaling is not None:
            self._set("rope_scaling", dict(self.rope_scaling))

    def _check_token_ids(self) -> None:
        if isinstance(self.eos_token_id, list | tuple):
            self._set("eos_token_id", tuple(self.eos_token_id))
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                raise ValueError(f"{name}={value!r}: expected a token id, or None")
        if self.pad_token_id is not None:
            check_padding("pad_token_id", self.pad_token_id, self.vocab_size)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen, and __post_init__ fills in its defaults

    @property
    def gated(self) -> bool:
        return self.style == "gated"


def check_padding(name: str, token: Any, vocab_size: int) -> int:
    """The row of ``token`` in the embedding, as nn.Embedding counts: -1 is the last. ValueError if it has none."""
    row = whole_number(name, token, least=-vocab_size)
    if row >= vocab_size:
        raise ValueError(f"{name}={token}: expected a token of the vocabulary, 0 to {vocab_size - 1}")
    return row % vocab_size


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """H = D / N; ValueError where that is not a whole number."""
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}: choose sizes that divide, "
            "or pass head_dim"
        )
    return hidden_size // num_heads


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """ValueError unless every KV head serves the same number of query heads."""
    whole_number("num_heads", num_heads)
    whole_number("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: every KV head serves the same "
            "number of query heads"
        )


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """transformers' name for the kind of a ``rope_scaling``."""
    return "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))


def rotary_dim(head_dim: int, partial_rotary_factor: float) -> int:
    """P, the rotated elements of a head of H."""
    return int(head_dim * partial_rotary_factor)


def check_rope(head_dim: int, partial_rotary_factor: float, scaling: Mapping[str, Any] | None) -> None:
    """ValueError unless these values define a rotation of heads."""
    rotary = rotary_dim(head_dim, partial_rotary_factor)
    if not 0 < rotary <= head_dim or rotary % 2:
        raise ValueError(
            f"partial_rotary_factor={partial_rotary_factor} of head_dim={head_dim} is {rotary} elements: expected an "
            "even number of at least 2 and at most head_dim, as rotary positions turn pairs"
        )
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling={scaling!r}: expected a dict with a rope_type, or None")
    if rope_type(scaling) not in ("default", *SCALINGS):
        raise ValueError(
            f"rope_scaling with rope_type={rope_type(scaling)!r}: {expected(rope_type(scaling), SCALINGS)}"
        )


def part_costs(config: TransformerConfig, length: int) -> list[Part]:
    """The FLOPs of one token's forward through each part, a multiply-add counted as two, in sequences of ``length``.

    Backward costs each part twice its forward, so it does not change a partition. An embedding has no products. A
    block's other work takes about the same time in every block, so this count leaves it out.
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    projections = width * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    seen = min(length, config.attention_window or length)
    scores = 2 * heads * seen / 2  # causal: half of the scores
    products = projections + scores + (3 if config.gated else 2) * width * config.intermediate_size
    blocks = [Part(f"model.layers.{index}", 2.0 * products) for index in range(config.num_layers)]
    return [Part("model.embed_tokens", 0.0), *blocks, Part("lm_head", 2.0 * width * config.vocab_size)]
