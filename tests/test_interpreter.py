"""tests/interpreter.py: kernels compute what they did, and the language is searched once for each launch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from shardfuse.kernels import dispatch

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not dispatch.interpreting(), reason="kernels are not interpreted in this process"),
]


@triton.jit
def _plus_one(x):
    return x + 1


@triton.jit
def _count_kernel(out_ptr, CALLS: tl.constexpr):
    number = tl.load(out_ptr)
    for _ in tl.static_range(CALLS):
        number = _plus_one(number)
    tl.store(out_ptr, number + tl.cdiv(CALLS, 2))  # a function of the language's own, in a module of its own


def test_functions_that_a_kernel_calls_do_not_search_the_language_again(monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    searched: list[str] = []
    search = interpreter._patch_builtin

    def counted(package, *rest):
        searched.append(package.__name__)
        search(package, *rest)

    out = torch.zeros(1, dtype=torch.int32)
    _count_kernel[(1,)](out, 1)  # cdiv's module is patched by its first call, and for good
    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    for calls, expected in ((1, 4), (8, 16)):
        _count_kernel[(1,)](out, calls)
        assert out.item() == expected
        assert len(searched) == len(set(searched)), "the language was searched for a function too"
        searched.clear()


def test_the_language_is_the_compilers_again_after_a_launch():
    out = torch.zeros(1, dtype=torch.int32)
    _count_kernel[(1,)](out, 3)
    assert out.item() == 5
    assert tl.core.is_builtin(tl.load)
    with pytest.raises(ValueError, match="outside of JIT"):
        tl.load(out)
