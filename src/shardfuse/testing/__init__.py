"""Small seeded models and engines for tests of programs that serve: on a CPU, in seconds, without a download.

Everything computes in fp64, so tokens do not depend on rounding: an engine's tokens equal :func:`solo_tokens` exactly,
in any batch. ``shardfuse.testing.fixtures`` is a plug-in for pytest; docs/serving.md shows both.
"""

from .models import assert_idle, save_tiny_hf, solo_tokens, tiny_engine, tiny_model
from .tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, tiny_tokenizer

__all__ = [
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "assert_idle",
    "save_tiny_hf",
    "solo_tokens",
    "tiny_engine",
    "tiny_model",
    "tiny_tokenizer",
]
