"""Linear layers on fp8 operands: quantisation, the scaled product, and training through both."""

from .op import Quantized, fp8_linear, quantize, scaled_linear, scaled_linear_choice

__all__ = ["Quantized", "fp8_linear", "quantize", "scaled_linear", "scaled_linear_choice"]
