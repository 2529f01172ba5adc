"""RMSNorm and LayerNorm over the last dimension, with the residual sum (and its dropout) that comes before them."""

from .op import layer_norm, norm_choice, rms_norm

__all__ = ["layer_norm", "norm_choice", "rms_norm"]
