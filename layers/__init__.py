"""Floor 3: nn.Modules with the parameters and ``state_dict`` of the stock modules they replace."""

from .attention.attention import ParallelAttention
from .block import ParallelBlock
from .config import TransformerConfig
from .embedding import VocabParallelEmbedding
from .fp8 import Fp8Linear
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import vocab_parallel_cross_entropy
from .mlp import ParallelMLP
from .norm import LayerNorm, RMSNorm
from .options import LayerKwargs, LayerOptions
from .transformer import ParallelTransformer

__all__ = [
    "ColumnParallelLinear",
    "Fp8Linear",
    "LayerKwargs",
    "LayerNorm",
    "LayerOptions",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelMLP",
    "ParallelTransformer",
    "RMSNorm",
    "RowParallelLinear",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
