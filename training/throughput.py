"""What a token of training costs on paper, and the share of a GPU's peak that a run therefore makes use of.

Model FLOPs utilisation (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B): the arithmetic that the model needs,
whatever a run computes twice, over what the GPUs could have done in that time.
"""

from __future__ import annotations

import torch

from ..kernels.runtime.chips import CHIPS, Chip
from ..layers.config import TransformerConfig

# parallel.precision -> the rate of chips.py that products run at. fp32 ones use tensor cores only where torch may.
_RATES = {"bf16": "bf16", "fp16": "fp16"}


def flops_per_token(config: TransformerConfig, seq: int) -> int:
    """FLOPs of forward and backward per token of sequences of ``seq``: of matrix products alone.

    A multiply-add counts as two, backward as twice the forward, and attention as causal: a token looks at half of the
    sequence on average, or at its window.
    """
    width, inner = config.hidden_size, config.num_heads * config.head_dim
    attention = width * (2 * inner + 2 * config.num_kv_heads * config.head_dim)
    mlp = (3 if config.gated else 2) * width * config.intermediate_size
    looked_at = min(seq / 2, config.attention_window or seq)
    scores = 2 * looked_at * inner  # q k, and weights times v
    forward = config.num_layers * (attention + mlp + scores) + width * config.vocab_size
    return int(3 * 2 * forward)


def chip_of(device: torch.device) -> Chip | None:
    """The data sheet of a GPU that ``chips.py`` knows; None for others and for CPUs."""
    if device.type != "cuda":
        return None
    names = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return CHIPS.get(names.gcnArchName.split(":")[0])
    return CHIPS.get(f"sm_{names.major}{names.minor}")


def peak_flops(chip: Chip, precision: str) -> float:
    """The dense rate of ``chip`` for the products of ``precision``, FLOP/s."""
    tf32 = torch.backends.cuda.matmul.allow_tf32 and "tf32" in chip.flops
    return chip.flops[_RATES.get(precision, "tf32" if tf32 else "fp32")]
