"""The name that a caller probably meant, in errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardfuse.kernels.runtime.names import expected, nearest

OPS = ("linear_act", "gated_linear", "rms_norm", "layer_norm")
PARAMETERS = ("max_tokens", "temperature", "presence_penalty", "add_special_tokens", "top_logprobs")


@pytest.mark.parametrize(
    ("given", "known", "near"),
    [
        ("linaer_act", OPS, "linear_act"),
        ("rmsnorm", OPS, "rms_norm"),
        ("RMS-Norm", OPS, "rms_norm"),
        ("h10", ("a100-40", "h100"), "h100"),
        ("temprature", PARAMETERS, "temperature"),
        ("max_token", PARAMETERS, "max_tokens"),
        ("max_new_tokens", PARAMETERS, "max_tokens"),
        # other words, which servers have too
        ("length_penalty", PARAMETERS, None),
        ("skip_special_tokens", PARAMETERS, None),
        ("", OPS, None),
        ("rms_norm" * 1000, OPS, None),
        (3, (3, "3"), None),
        ("a", (), None),
    ],
)
def test_the_nearest_name(given: object, known: tuple[object, ...], near: str | None) -> None:
    assert nearest(given, known) == near


def test_a_suggestion_comes_with_a_short_list_and_in_place_of_a_long_one() -> None:
    assert expected("swish", ["gelu", "silu"]) == "expected one of gelu, silu"
    assert expected("sillu", ["gelu", "silu"]) == "did you mean 'silu'? (expected one of gelu, silu)"
    many = [f"llama-{size}b" for size in range(1, 10)]
    assert expected("lama-7b", many) == "did you mean 'llama-7b'?"
    assert expected("lama-7b", many[:8], "known are").endswith("? (known are " + ", ".join(many[:8]) + ")")
    assert expected("gpt", many) == "expected one of " + ", ".join(many)
    assert expected("a", [], "it has") == "it has none"


def test_its_module_imports_the_standard_library_alone() -> None:
    code = "import sys, shardfuse.kernels.runtime.names; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
