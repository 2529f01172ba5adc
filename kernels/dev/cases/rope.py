"""The shapes that tests, ahead-of-time builds and benchmarks share for ``apply_rope``.

A case is B sequences of S tokens (B = 0: T = S tokens in one dimension), N heads of q and K of k (0: no k) of H
elements, of which P are rotated; with tables for every token or, where there are sequences, one for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...rope.op import apply_rope
from ...runtime import device
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from ..registry import Build, Case, OpSpec


def _case(tokens: tuple[int, int], heads: tuple[int, int, int], dtype: torch.dtype, *tags: str, **options: Any) -> Case:
    """``tokens`` is (B, S), ``heads`` (N, K, H)."""
    (B, S), (N, K, H) = tokens, heads
    P = options.pop("rotary", H)
    model = options.pop("model", "")
    options = {"interleaved": False, "inplace": False, "layout": "dense"} | options
    name = f"b{B}-s{S}" if B else f"t{S}"
    name += f"-n{N}-k{K}-h{H}-{NAMES[dtype]}" + ("" if P == H else f"-p{P}")
    name += "".join(f"-{flag}" for flag in ("interleaved", "inplace") if options[flag])
    name += "" if options["layout"] == "dense" else f"-{options['layout']}"
    sizes = {"B": B, "S": S, "N": N, "K": K, "H": H, "P": P}
    return Case(f"{model}-{name}".lstrip("-"), dtype, sizes, options, frozenset(tags))


# Small enough to interpret; a tile is 8 rows there. Odd numbers of heads, head sizes that are no power of two, one
# token, none.
_TEST = (
    _case((0, 7), (4, 2, 16), FP32, "test"),
    _case((2, 5), (3, 1, 20), BF16, "test"),
    _case((2, 5), (4, 4, 16), FP16, "test", layout="fused"),
    _case((3, 4), (9, 2, 24), FP32, "test", layout="heads_first"),
    _case((0, 9), (2, 1, 80), BF16, "test", rotary=32),
    _case((2, 3), (3, 3, 12), FP32, "test", rotary=4, interleaved=True),
    _case((0, 6), (4, 2, 16), BF16, "test", interleaved=True, layout="fused"),
    _case((0, 6), (5, 0, 8), FP32, "test", inplace=True),
    _case((2, 4), (4, 2, 16), FP16, "test", inplace=True, interleaved=True, rotary=12),
    _case((0, 1), (1, 1, 2), FP32, "test"),
    _case((0, 0), (2, 1, 8), BF16, "test"),
    _case((2, 0), (2, 1, 8), FP32, "test", inplace=True),
)
_LLAMA8B, _STARCODER2, _GPT_J = (32, 8, 128), (36, 4, 128), (16, 16, 256)
_BENCH = (
    _case((1, 8192), _LLAMA8B, BF16, "codegen", "bench", "short", model="llama8b"),
    _case((1, 8192), _LLAMA8B, BF16, "codegen", "bench", "short", model="llama8b", inplace=True),
    _case((4, 4096), (64, 8, 128), BF16, "bench", model="llama70b"),
    _case((4, 4096), (8, 1, 128), BF16, "bench", "short", model="llama70b-tp8"),
    _case((4, 4096), _STARCODER2, BF16, "codegen", "bench", model="starcoder2"),
    _case((4, 2048), _GPT_J, BF16, "codegen", "bench", "short", model="gptj", rotary=64, interleaved=True),
    _case((0, 64), _LLAMA8B, BF16, "bench", model="llama8b-decode", inplace=True),
    _case((1, 4096), _LLAMA8B, FP32, "codegen", "bench", model="llama8b"),
)
_BUILDS = (
    _case((1, 4096), (32, 32, 80), FP16, "codegen"),
    _case((1, 4096), (32, 2, 128), BF16, "codegen", rotary=64),  # GLM-4: half of each head
)
_CPU = (
    _case((2, 256), (32, 8, 128), FP32, "bench-cpu", model="llama8b"),
    _case((4, 256), (8, 2, 64), FP32, "bench-cpu"),
    _case((1, 512), (8, 2, 64), BF16, "bench-cpu"),
)
CASES = tuple({case.name: case for case in (*_TEST, *_BENCH, *_BUILDS, *_CPU)}.values())


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """Leaves q and k (None for K = 0), their results' gradients dq_out and dk_out, cos and sin [S, P/2] fp32."""
    B, S, N, K, H, P = (case.sizes[letter] for letter in "BSNKHP")
    generator = torch.Generator(on).manual_seed(seed)
    tokens = (B, S) if B else (S,)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(*tokens, heads, H, generator=generator, device=on, dtype=torch.float32).to(case.dtype)

    if case.options["layout"] == "fused":  # q, k and v side by side, as one projection leaves them
        packed = draw(N + 2 * K)
        q, k = packed[..., :N, :], packed[..., N : N + K, :]
    elif case.options["layout"] == "heads_first":
        q, k = (draw(n).transpose(-2, -3).contiguous().transpose(-2, -3) for n in (N, K))
    else:
        q, k = draw(N), draw(K)
    angles = torch.rand(S, P // 2, generator=generator, device=on) * 1000
    return {
        "q": q.detach().requires_grad_(),
        "k": k.detach().requires_grad_() if K else None,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "dq_out": draw(N),
        "dk_out": draw(K) if K else None,
    }


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Forward and backward: results q_out and k_out, gradients dq and dk."""
    leaves = {name: inputs[name] for name in "qk" if inputs[name] is not None}
    q, k = (inputs["q"], inputs["k"])
    if case.options["inplace"]:  # of what is no leaf
        q, k = q.clone(), None if k is None else k.clone()
    options = {name: case.options[name] for name in ("interleaved", "inplace")}
    rotated = apply_rope(q, k, inputs["cos"], inputs["sin"], impl=impl, **options)
    outs = [x for x in rotated if x is not None]
    grads = torch.autograd.grad(outs, list(leaves.values()), [inputs[f"d{name}_out"] for name in leaves])
    found = {f"{name}_out": out.detach() for name, out in zip(leaves, outs)}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads)}


def _launched(target: str) -> Iterator[Build]:
    """Every launch of the cases tagged "codegen", with their backward."""
    from ...rope import launch

    for case in SPEC.tagged("codegen"):
        B, S, N, K, H, P = (case.sizes[letter] for letter in "BSNKHP")
        q, k = (torch.empty(B, S, n, H, dtype=case.dtype, device="meta") for n in (N, K))
        table = torch.empty(S, P // 2, device="meta")
        with device.capture(target) as launches:
            if case.options["inplace"]:
                launch.apply_rope_(q, k, table, table, case.options["interleaved"], False)
            else:
                # Backward differs in a sign.
                for conjugate in (False, True) if case is _BENCH[0] else (False,):
                    launch.apply_rope(q, k, table, table, case.options["interleaved"], conjugate)
        yield from (_build(item, target, case) for item in launches)


def _build(item: device.Launch, target: str, case: Case) -> Build:
    label = [str(item.config), f"h{case.sizes['H']}", f"p{case.sizes['P']}", NAMES[case.dtype]]
    label += [flag for flag in ("interleaved", "inplace") if case.options[flag]]
    label += ["back"] if item.args["CONJUGATE"] else []
    return Build(
        op="rope",
        config="-".join(label),
        target=target,
        fn=item.fn,
        args=item.args,
        num_warps=item.num_warps,
        num_stages=item.num_stages,
    )


def _work(case: Case) -> tuple[int, int]:
    """Forward and backward each read and write the rotated elements."""
    B, S, N, K, P = (case.sizes[letter] for letter in "BSNKP")
    return 0, 4 * max(B, 1) * S * (N + K) * P * case.dtype.itemsize


SPEC = OpSpec(
    name="rope",
    summary="rotary position embedding of q and k in one launch, forward and backward, in place or not",
    cases=CASES,
    make_inputs=make_inputs,
    run=run,
    launched=_launched,
    sources=(
        *(f"rope/{name}.py" for name in ("triton", "launch", "config", "schemas", "op", "reference")),
        *("runtime/device.py", "runtime/dispatch.py", "runtime/autograd.py"),
    ),
    terms=lambda case: 2,
    work=_work,
)
