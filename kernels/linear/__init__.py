"""Linear layers with everything that can ride in their GEMMs' epilogues."""

from .op import gated_linear, linear_act
from .parts import linear_act_choice
from .reference import ACTIVATIONS, apply_activation

__all__ = ["ACTIVATIONS", "apply_activation", "gated_linear", "linear_act", "linear_act_choice"]
