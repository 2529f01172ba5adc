"""Linear layers with everything that can ride in their GEMMs' epilogues."""

from .functional import linear_act_choice
from .op import gated_linear, linear_act
from .product import Epilogue, Product
from .reference import ACTIVATIONS, apply_activation

__all__ = ["ACTIVATIONS", "Epilogue", "Product", "apply_activation", "gated_linear", "linear_act", "linear_act_choice"]
