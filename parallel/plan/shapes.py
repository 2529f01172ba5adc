"""What a model is to the planner: the sizes that decide its parameters, products and activations.

The sizes of published models stand in ``shapes.json``; a folder of transformers brings its own in ``config.json``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.runtime.names import nearest

KNOWN = Path(__file__).with_name("shapes.json")


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal blocks: attention and an MLP, each with a norm before it.

    ``kv_heads`` fewer than ``heads`` is grouped-query attention. ``gated`` MLPs have three matrices, others two. A
    gated model's norms are RMSNorm, with one vector, others' LayerNorm, with two. ``biases`` are the linear layers'.
    ``positions`` is the number of learned position embeddings, ``tied`` whether the head is the embedding's matrix.
    Raises ValueError for sizes below 1 and heads that do not divide.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = False
    biases: bool = False
    tied: bool = False
    positions: int = 0
    head_dim: int = 0  # 0: hidden / heads

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name}={getattr(self, name)}: expected at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.heads} heads do not divide by {self.kv_heads} KV heads")
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ValueError(f"{self.name}: a width of {self.hidden} does not divide by {self.heads} heads")
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @functools.cached_property
    def layer_matrices(self) -> int:
        """Elements of one block's matrices."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @functools.cached_property
    def layer_vectors(self) -> int:
        """Elements of one block's norms and biases."""
        norms = 2 * self.norm_parameters
        biases = self.q_width + 2 * self.kv_width + self.hidden + (2 if self.gated else 1) * self.ffn + self.hidden
        return norms + (biases if self.biases else 0)

    @property
    def norm_parameters(self) -> int:
        """Of one norm."""
        return self.hidden * (1 if self.gated else 2)

    @functools.cached_property
    def layer_repeated(self) -> int:
        """Elements of a block that every tensor-parallel rank has: norms, and biases added to a sum over the ranks."""
        return 2 * self.norm_parameters + (2 * self.hidden if self.biases else 0)

    @functools.cached_property
    def layer_parameters(self) -> int:
        return self.layer_matrices + self.layer_vectors

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @functools.cached_property
    def head_parameters(self) -> int:
        """Of the last norm, and of the head unless it is tied."""
        return self.norm_parameters + (0 if self.tied else self.vocab * self.hidden)

    @functools.cached_property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def flops(self, tokens: int, length: int, *, causal: bool = True) -> float:
        """Of a step's products and attention, forward and backward, nothing computed twice: "model FLOPs".

        6 for each matrix element and token; attention 12 S q_width a layer and token, half of it if ``causal``.
        """
        matrices = self.layers * self.layer_matrices + self.vocab * self.hidden
        attention = self.layers * 12 * length * self.q_width / (2 if causal else 1)
        return float(tokens) * (6 * matrices + attention)


@functools.cache
def known() -> dict[str, ModelShape]:
    """The models of ``shapes.json`` by name."""
    table = json.loads(KNOWN.read_text(encoding="utf-8"))
    return {name: ModelShape(name, **sizes) for name, sizes in table["models"].items()}


def find(name: str) -> ModelShape:
    """A known model, or that of a folder of transformers; ValueError for neither, with what there is."""
    if name in known():
        return known()[name]
    config = Path(name) / "config.json"
    if config.is_file():
        try:
            read = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{config}: not JSON ({error}); copy the file again") from None
        if not isinstance(read, dict):
            raise ValueError(f"{config}: expected an object of settings; copy the file again")
        return from_config(read, name=Path(name).resolve().name)
    close = nearest(name, known())
    hint = "" if close is None else f"did you mean {close!r}? "
    raise ValueError(
        f"model {name!r}: {hint}expected a folder with config.json, a TOML file of shardfuse train, or one of "
        f"{', '.join(sorted(known()))}"
    )


_NAMES = {
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}
_GATED = ("silu", "swiglu", "swish")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_GATED_TYPES = ("gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma")  # whose activation is GELU
# How the keys begin of what decoders of equal blocks, of attention and one MLP, do not have.
_OTHER_BLOCKS = {
    "mamba": "state-space layers",
    "ssm": "state-space layers",
    "lru_width": "recurrent layers",
    "linear_num": "linear attention",
    "kv_lora_rank": "latent attention",
    "hidden_size_per_layer_input": "embeddings in every block",
    "is_encoder_decoder": "an encoder",
}


def from_config(config: Mapping[str, Any], *, name: str = "model") -> ModelShape:
    """The shape of a ``config.json`` of transformers, of a multimodal model that of its text decoder.

    Raises ValueError for one that lacks a size or has a wrong one, for experts, and for other kinds of blocks.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    _check_blocks(config, name)
    sizes = {size: _size(config, names, name) for size, names in _NAMES.items()}
    missing = next((size for size, found in sizes.items() if not found), None)
    if missing is not None:
        raise ValueError(f"{name}: its config.json has none of {', '.join(_NAMES[missing])}")
    gated = config.get("model_type") in _GATED_TYPES
    gated = gated or str(config.get("hidden_act", config.get("activation_function", "gelu"))) in _GATED
    ffn = _size(config, _FFN, name) or (_size(config, ("expansion_ratio",), name) or 4) * sizes["hidden"]
    return ModelShape(
        name,
        **sizes,
        kv_heads=_kv_heads(config, name) or sizes["heads"],
        head_dim=_size(config, ("head_dim",), name),
        ffn=ffn,
        gated=gated,
        biases=not (gated or config.get("no_bias") or config.get("bias") is False),
        tied=bool(config.get("tie_word_embeddings", not gated or config.get("model_type") in _GATED_TYPES)),
        positions=_size(config, ("n_positions",), name),
    )


def _size(config: Mapping[str, Any], names: tuple[str, ...], model: str) -> int:
    """The first of ``names`` that is there and not null; 0 for none."""
    found = next((each for each in names if config.get(each)), None)
    if found is None:
        return 0
    if type(config[found]) is not int or config[found] < 0:
        raise ValueError(
            f"{model}: {found} = {config[found]!r} in its config.json: the planner expects a whole number, one for all "
            "blocks"
        )
    return int(config[found])


def _kv_heads(config: Mapping[str, Any], model: str) -> int:
    """0 where each head has its own keys and values. Falcon's first models and StarCoder share one among all."""
    inner = config.get("attn_config")  # MPT's
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    if config.get("model_type") == "falcon" and not config.get("new_decoder_architecture"):
        return 0
    found = _size(config, ("num_key_value_heads", "num_kv_heads"), model)
    return found or (_size(inner, ("kv_n_heads",), model) if isinstance(inner, Mapping) else 0)


def _check_blocks(config: Mapping[str, Any], model: str) -> None:
    """ValueError for experts and other blocks than the planner's. Options with a dot are those of inner tables."""
    inner = {
        f"{key}.{name}": each for key, of in config.items() if isinstance(of, Mapping) for name, each in of.items()
    }
    for key, value in (*config.items(), *inner.items()):
        many = type(value) is int and value > 1
        if many and "experts" in key and "per_tok" not in key:
            raise ValueError(f"{model}: it has experts ({key} = {value}); the planner knows dense decoders only")
    for key, value in config.items():
        what = next((what for start, what in _OTHER_BLOCKS.items() if key.startswith(start)), None)
        if what is not None and value:
            raise ValueError(
                f"{model}: it has {what} ({key} = {value!r}); the planner knows decoders whose blocks are attention "
                "and one MLP"
            )


def described(shape: ModelShape) -> str:
    """A line for people."""
    sizes = dataclasses.asdict(shape)
    many = shape.parameters
    number = f"{many / 1e9:.3g} billion" if many >= 1e9 else f"{many / 1e6:.3g} million"
    return (
        f"{shape.name}: {number} parameters, {sizes['layers']} blocks of width "
        f"{sizes['hidden']}, {sizes['heads']} heads ({sizes['kv_heads']} of keys and values)"
    )
