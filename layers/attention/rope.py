"""Rotary positions of a model: its frequencies, and the tables of cosines and sines that attention rotates with.

Su et al., "RoFormer" (arXiv:2104.09864), section 3.4: pair i of a head turns by the angle position * theta^(-2i/P). The
scalings that extend a model beyond the lengths it was trained on change these frequencies; transformers' own functions
compute them, so a checkpoint has the same meaning here and there.

Every forward computes the tables from the positions, once for all layers. They are not a buffer: ``model.bfloat16()``
would round it, ``to_empty`` would leave it unset, and a longer prompt would exceed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import TransformerConfig, check_rope, rope_type, rotary_dim


class Rope:
    """Tables (cos, sin), each [..., P/2] fp32; ``cos, sin = rope``.

    This is not a tuple because FSDP's mixed precision casts every tensor that it finds in the arguments of a forward.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos, self.sin = cos, sin

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.cos, self.sin)[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.cos, self.sin))


@dataclass(frozen=True)
class Rotary:
    """How a model's heads are rotated.

    Args:
        head_dim: H.
        theta: the base of the frequencies.
        partial_rotary_factor: P / H, the share of each head that is rotated.
        scaling: transformers' ``rope_parameters`` without theta: ``{"rope_type": "llama3", "factor": 8.0, ...}``, with
            a type of ``config.SCALINGS``. None: no scaling.
        max_positions: the longest sequence that the model supports.
        interleaved: whether elements 2i and 2i + 1 make a pair (GPT-J), or i and i + P/2 (GPT-NeoX, Llama).

    Raises ValueError for values that define no rotation, RuntimeError for a scaling without transformers.
    """

    head_dim: int
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    max_positions: int = 2048
    interleaved: bool = False
    # Scaled frequencies and the attention factor, by device and length.
    _known: dict[Any, tuple[torch.Tensor, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rope(self.head_dim, self.partial_rotary_factor, self.scaling)
        if self.scaled:
            self.frequencies(torch.device("cpu"))  # a wrong scaling raises while the model is built

    @classmethod
    def of(cls, config: TransformerConfig) -> Rotary:
        """The rotation of ``config``'s attention layers."""
        return cls(
            config.head_dim,
            config.rope_theta,
            config.partial_rotary_factor,
            config.rope_scaling,
            config.max_positions,
            config.rope_interleaved,
        )

    @property
    def rotary_dim(self) -> int:
        """P, the rotated elements of a head."""
        return rotary_dim(self.head_dim, self.partial_rotary_factor)

    @property
    def scaled(self) -> bool:
        return rope_type(self.scaling) != "default"

    def frequencies(self, device: torch.device, length: int | None = None) -> tuple[torch.Tensor, float]:
        """The angle per position of each pair, [P/2] fp32, and the factor of cosines and sines (YaRN's mscale).

        ``length`` is the length of the longest sequence. Two scalings depend on it: "dynamic" beyond ``max_positions``,
        and "longrope", which has other frequencies for more than ``original_max_position_embeddings`` tokens. None
        means ``max_positions``, for serving: there a token must not depend on the other sequences of its batch.
        """
        if not self.scaled:
            return _frequencies(self.rotary_dim, self.theta, device), 1.0
        length = self._standing_for(self.max_positions if length is None else length)
        found = self._known.get((device, length))
        if found is None:
            frequencies, factor = _scaled_frequencies(self, length)
            found = frequencies.to(device), factor
            # Longer lengths would add an entry for every token, and a FakeTensor must not outlive its trace.
            if length <= self.max_positions and type(found[0]) is torch.Tensor:
                self._known[device, length] = found
        return found

    def _standing_for(self, length: int) -> int:
        """The length of the shortest sequence that has the same frequencies as one of ``length`` tokens."""
        kind = rope_type(self.scaling)
        if kind == "dynamic":
            return max(length, self.max_positions)
        if kind == "longrope":
            original = (self.scaling or {}).get("original_max_position_embeddings", self.max_positions)
            return original + 1 if length > original else 1
        return 1


def _frequencies(rotary: int, theta: float, device: torch.device) -> torch.Tensor:
    exponents = torch.arange(0, rotary, 2, dtype=torch.float32, device=device) / rotary
    return 1.0 / theta**exponents


def _scaled_frequencies(rotary: Rotary, length: int) -> tuple[torch.Tensor, float]:
    """The frequencies by transformers' function for the scaling, on the CPU as in its models."""
    kind = rope_type(rotary.scaling)
    try:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    except ImportError as error:
        raise RuntimeError(
            f"rope_scaling with rope_type={kind!r}: its frequencies come from transformers, which is not installed "
            "(pip install 'shardfuse[hf]')"
        ) from error
    parameters: dict[str, Any] = {**(rotary.scaling or {}), "rope_type": kind, "rope_theta": rotary.theta}
    if rotary.partial_rotary_factor != 1.0:
        parameters["partial_rotary_factor"] = rotary.partial_rotary_factor
    try:
        # The functions read only these fields of a configuration; one attention head is enough.
        config = LlamaConfig(
            hidden_size=rotary.head_dim,
            num_attention_heads=1,
            head_dim=rotary.head_dim,
            max_position_embeddings=rotary.max_positions,
            rope_parameters=parameters,
        )
        cpu = torch.device("cpu")
        with torch.inference_mode(False):
            # A tensor, as transformers' models pass it: the functions round differently with a number.
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, cpu, seq_len=torch.tensor(length, device=cpu))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"rope_scaling={dict(rotary.scaling or {})}: {error}") from error
    return frequencies, float(factor)


def rope_tables(positions: torch.Tensor, rotary: Rotary, *, length: int | None = None) -> Rope:
    """(cos, sin), each [..., P/2] fp32, for integer ``positions`` [...] of sequences of up to ``length`` tokens.

    ``kernels.rope.apply_rope`` takes them. They are fp32 in every precision of the model, as in the models of
    transformers. See :meth:`Rotary.frequencies` for ``length``.
    """
    frequencies, factor = rotary.frequencies(positions.device, length)
    angles = positions.to(torch.float32)[..., None] * frequencies  # [..., P/2]
    cos, sin = angles.cos(), angles.sin()
    return Rope(cos, sin) if factor == 1.0 else Rope(cos * factor, sin * factor)
