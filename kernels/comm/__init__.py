"""Matrix products and norms that exchange rows with other ranks while they run, over symmetric memory."""

from .op import (
    all_gather_linear,
    all_reduce_shape,
    compute_gathered,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_scatter_shape,
    scatter_sum,
)
from .reduce_config import Norm
from .reduce_op import all_reduce_rmsnorm, all_reduce_rmsnorm_shape

__all__ = [
    "Norm",
    "all_gather_linear",
    "all_reduce_rmsnorm",
    "all_reduce_rmsnorm_shape",
    "all_reduce_shape",
    "compute_gathered",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "reduce_scatter_shape",
    "scatter_sum",
]
