"""Compile products that wait and products that send, for sm_90, and print the result as one line of JSON.

It is a separate script, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardfuse.kernels.dev import registry

OPS = ("all_gather_linear", "linear_reduce_scatter", "all_reduce_rmsnorm")


def _compiled(build: registry.Build) -> dict[str, Any]:
    signature, constexprs, attrs = build.specialise()
    source = ASTSource(fn=build.fn, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tile = build.tile
    return {
        "config": build.config,
        "ptx": [line for each in kernel.asm["ptx"].splitlines() if not (line := each.strip()).startswith(".loc")],
        "flags": build.args.get("FLAGS", build.args.get("LANES")),
        "layouts": _layouts(kernel.asm["ttgir"]),
        "shared": kernel.metadata.shared,
        "stage": 0 if tile is None else (tile.block_m + tile.block_n) * tile.block_k * build.gemm.dtype.itemsize,
        "stages": build.num_stages,
    }


def _layouts(ttgir: str) -> list[str]:
    """How the threads share the flags of each wait."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    waits = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line and "ld.acquire" in line]
    return [layouts[re.findall(r"-> tensor<\d+xi32, (#\w+)>", line)[0]] for line in waits]


if __name__ == "__main__":
    print(json.dumps({op: _compiled(registry.op(op).builds("sm_90")[0]) for op in OPS}))
