"""The product that ``fences.py`` has compiled."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _probe_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """C [BLOCK, BLOCK] = A [BLOCK, K] @ B [K, BLOCK], all contiguous, through pointers."""
    rows = tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + rows[:, None] * K + (k + ks)[None, :])
        b = tl.load(b_ptr + (k + ks)[:, None] * BLOCK + rows[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * BLOCK + rows[None, :], acc.to(tl.bfloat16))


def compile_probe(arch: str) -> str:
    """The PTX of the probe for ``arch`` ("sm_90")."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointer = "*bf16"
    signature = {"a_ptr": pointer, "b_ptr": pointer, "c_ptr": pointer, "K": "i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(
        _probe_kernel,
        signature={**signature, "BLOCK": "constexpr", "BLOCK_K": "constexpr"},
        constexprs={(4,): 64, (5,): 64},
        attrs=aligned,
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 3})
    return str(compiled.asm["ptx"])  # KeyError where Triton keeps machine code alone (TRITON_STORE_BINARY_ONLY)
