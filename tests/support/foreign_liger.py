"""Liger's kernels (liger-kernel 0.8.5), forward and backward, beside the same maths in plain torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from foreign_kernels import DTYPES, Case, Fault, differentiated, drawn

Tensor = torch.Tensor
EPS = 1e-6
THREADS = 128  # of a block, where rows are short


def cases() -> Iterator[Case]:
    """Small and odd shapes."""
    yield from _norms()
    yield from _products()
    yield from _ropes()
    yield from _losses()


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function").apply


def _in_place(kernel: str, *elements: int) -> tuple[Fault, ...]:
    """The fault of a kernel that writes its results, so many, over its inputs."""
    if min(elements) >= THREADS:
        return ()
    reason = (
        "it writes in place, and of fewer elements than threads several warps load each: the one that stores a result "
        "does not wait for the others, which only drop what they loaded"
    )
    return (Fault(kernel, "race in global memory: write over what another warp read", reason),)


# --- norms ------------------------------------------------------------------------------------------------------------


def _norms() -> Iterator[Case]:
    for kind, shape, mode, offset, weighted in (
        ("fp32", (5, 33), "llama", 0.0, True),
        ("bf16", (3, 300), "llama", 0.0, True),
        ("fp16", (2, 3, 129), "gemma", 1.0, True),
        ("bf16", (1, 2049), "gemma", 0.0, True),
        ("fp32", (4, 64), "none", 0.0, False),
        ("fp16", (3, 100), "none", 0.0, True),
    ):
        inputs = {"x": drawn(*shape, dtype=DTYPES[kind])}
        inputs |= {"w": drawn(shape[-1], dtype=DTYPES[kind], seed=1)} if weighted else {}
        options = {"mode": mode, "offset": offset}
        run = partial(differentiated, _rms_norm, _plain_rms_norm, inputs, **options)
        name = f"{_shape(kind, shape)} {mode}{' + 1' if offset else ''}{'' if weighted else ', no weight'}"
        # All of "none", and the product of "llama" with the weight and its gradient, are computed in x's dtype.
        yield Case("Liger rms_norm", name, run, shape[-1], {"gemma": 1, "llama": 3, "none": 6}[mode])
    for kind, shape in (("fp32", (5, 33)), ("bf16", (2, 3, 300))):
        inputs = {"x": drawn(*shape, dtype=DTYPES[kind]), "residual": drawn(*shape, dtype=DTYPES[kind], seed=1)}
        inputs["w"] = drawn(shape[-1], dtype=DTYPES[kind], seed=2)
        run = partial(differentiated, _add_rms_norm, _plain_add_rms_norm, inputs)
        yield Case("Liger fused_add_rms_norm", _shape(kind, shape), run, shape[-1], 3)
    for kind, shape in (("fp32", (5, 33)), ("bf16", (3, 300)), ("fp16", (2, 3, 129)), ("fp32", (2, 2050))):
        inputs = {"x": drawn(*shape, dtype=DTYPES[kind])}
        inputs |= {name: drawn(shape[-1], dtype=DTYPES[kind], seed=seed) for seed, name in enumerate("wb", 1)}
        run = partial(differentiated, _layer_norm, _plain_layer_norm, inputs)
        yield Case("Liger layer_norm", _shape(kind, shape), run, shape[-1])
    # Its means and deviations are kept in x's dtype.
    for kind, shape, groups in (("fp32", (3, 6, 33), 3), ("fp32", (2, 4, 130), 1), ("bf16", (2, 6, 5, 20), 2)):
        inputs = {"x": drawn(*shape, dtype=DTYPES[kind])}
        inputs |= {name: drawn(shape[1], dtype=DTYPES[kind], seed=seed) for seed, name in enumerate("wb", 1)}
        run = partial(differentiated, _group_norm, _plain_group_norm, inputs, groups=groups)
        size = math.prod(shape[2:])
        terms = max(shape[1] // groups * size, shape[0] * size)
        name = f"{_shape(kind, shape)}, groups of {shape[1] // groups} channels"
        yield Case("Liger group_norm", name, run, terms, 3)


def _rms_norm(x: Tensor, w: Tensor | None = None, mode: str = "llama", offset: float = 0.0) -> Tensor:
    return _function("rms_norm", "RMSNorm")(x, w, EPS, offset, mode, False)


def _plain_rms_norm(x: Tensor, w: Tensor | None = None, mode: str = "llama", offset: float = 0.0) -> Tensor:
    y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return y if w is None else y * (w + offset)


def _add_rms_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return _function("fused_add_rms_norm", "FusedAddRMSNorm")(x, residual, w, EPS, 0.0, "llama", False)


def _plain_add_rms_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return _plain_rms_norm(s, w), s


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return _function("layer_norm", "LayerNorm")(x, w, b, EPS)


def _plain_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt() * w + b


def _group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int) -> Tensor:
    return _function("group_norm", "GroupNorm")(x, w, b, x.shape[1], groups, EPS)


def _plain_group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int) -> Tensor:
    return F.group_norm(x, groups, w, b, EPS)


# --- activations and products -----------------------------------------------------------------------------------------

_OPERATIONS = 16  # in fp32, one after the other


def _products() -> Iterator[Case]:
    for kind, shape, gate in (("fp32", (3, 100), 1.0), ("bf16", (2, 3, 257), 1.0), ("fp16", (5, 64), 0.5)):
        inputs = {name: drawn(*shape, dtype=DTYPES[kind], seed=seed) for seed, name in enumerate("ab")}
        run = partial(differentiated, _swiglu, _plain_swiglu, inputs, gate=gate)
        name, columns = f"{_shape(kind, shape)}, gate {gate}", triton.next_power_of_2(shape[-1])
        faults = _in_place("_swiglu_backward_kernel", columns)
        yield Case("Liger swiglu", name, run, _OPERATIONS, 2, faults=faults)
        run = partial(differentiated, _geglu, _plain_geglu, inputs)
        faults = _in_place("_geglu_tanh_backward_kernel", columns)
        yield Case("Liger geglu", _shape(kind, shape), run, _OPERATIONS, 3, faults=faults)
    for kind, shape in (("fp32", (3, 66)), ("bf16", (5, 514))):
        run = partial(differentiated, _gate_up, _plain_gate_up, {"y": drawn(*shape, dtype=DTYPES[kind])})
        yield Case("Liger swiglu, gate and up in one", _shape(kind, shape), run, _OPERATIONS, 2)
    for kind, shape in (("fp32", (3, 100)), ("bf16", (2, 3, 257)), ("fp16", (1, 2049))):
        run = partial(
            differentiated, _softmax, partial(torch.softmax, dim=-1), {"input": drawn(*shape, dtype=DTYPES[kind])}
        )
        yield Case("Liger softmax", _shape(kind, shape), run, shape[-1], 4)


def _swiglu(a: Tensor, b: Tensor, gate: float) -> Tensor:
    return _function("swiglu", "SiLUMul")(a, b, gate)


def _plain_swiglu(a: Tensor, b: Tensor, gate: float) -> Tensor:
    return F.silu(a * gate) * b


def _gate_up(y: Tensor) -> Tensor:
    return _function("swiglu", "FusedGateUpSiLUMul")(y)


def _plain_gate_up(y: Tensor) -> Tensor:
    a, b = y.chunk(2, dim=-1)
    return F.silu(a) * b


def _geglu(a: Tensor, b: Tensor) -> Tensor:
    return _function("geglu", "GELUMul")(a, b)


def _plain_geglu(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def _softmax(input: Tensor) -> Tensor:
    return _function("softmax", "Softmax")(input)


# --- rotation ---------------------------------------------------------------------------------------------------------


def _ropes() -> Iterator[Case]:
    for kind, batch, tokens, heads, size, rotary in (
        ("fp32", 2, 5, (4, 2), 16, 16),
        ("bf16", 1, 7, (3, 1), 20, 20),
        ("fp16", 2, 3, (5, 5), 64, 24),
    ):
        inputs = {
            name: drawn(batch, count, tokens, size, dtype=DTYPES[kind], seed=seed)
            for seed, (name, count) in enumerate(zip("qk", heads))
        }
        angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
        tables = {"cos": angles.cos().repeat(1, 2), "sin": angles.sin().repeat(1, 2)}
        run = partial(differentiated, _rope, _plain_rope, inputs, **tables)
        name = f"{kind} {batch}x{tokens}, heads {heads[0]} and {heads[1]} of {size}, {rotary} rotated"
        halves = [triton.next_power_of_2(count) * triton.next_power_of_2(rotary) // 2 for count in heads]
        yield Case("Liger rope", name, run, 3, faults=_in_place("_triton_rope", *halves))


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _function("rope", "Rope")(q, k, cos, sin)


def _plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    head, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = head.chunk(2, dim=-1)
    return torch.cat((head * cos + torch.cat((-b, a), dim=-1) * sin, rest), dim=-1)


# --- losses -----------------------------------------------------------------------------------------------------------

IGNORED = -100


def _losses() -> Iterator[Case]:
    for kind, rows, classes, options in (
        ("fp32", 5, 100, {}),
        ("bf16", 7, 257, {"smoothing": 0.1}),
        ("fp16", 4, 1000, {"softcap": 2.0, "reduction": "sum"}),
        ("fp32", 6, 33, {"weighted": True, "smoothing": 0.2}),
        ("fp32", 3, 129, {"z": 1e-2, "reduction": "none"}),
        ("fp32", 2, 33000, {}),  # more than one block of columns
    ):
        x, target = drawn(rows, classes, dtype=DTYPES[kind]), _targets(rows, classes)
        inputs = {"x": x, "target": target}
        run = partial(differentiated, _cross_entropy, _plain_cross_entropy, inputs, **options)
        name = f"{_shape(kind, (rows, classes))} " + ", ".join(f"{key} {value}" for key, value in options.items())
        yield Case("Liger cross_entropy", name.rstrip(), run, classes, 2)
    for kind, rows, size, classes in (("fp32", 7, 20, 50), ("bf16", 5, 32, 129)):
        inputs = {"x": drawn(rows, size, dtype=DTYPES[kind]), "target": _targets(rows, classes)}
        inputs |= {"w": drawn(classes, size, dtype=DTYPES[kind]), "b": drawn(classes, dtype=DTYPES[kind])}
        run = partial(differentiated, _linear_cross_entropy, _plain_linear_cross_entropy, inputs)
        # The logits, their gradients and those of weights, which chunks of tokens add up, are of x's dtype.
        yield Case(
            "Liger fused_linear_cross_entropy",
            _shape(kind, (rows, size, classes)),
            run,
            classes + size,
            16,
            torch.finfo(DTYPES[kind]).eps,
        )


def _targets(rows: int, classes: int) -> Tensor:
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(rows))
    target[1], target[-1] = IGNORED, classes - 1
    return target


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    smoothing: float = 0.0,
    softcap: float | None = None,
    weighted: bool = False,
    z: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    weight = _class_weights(x.shape[-1], torch.float32) if weighted else None
    apply = _function("cross_entropy", "CrossEntropy")
    return apply(x, target, weight, IGNORED, z, smoothing, reduction, softcap)[0]


def _plain_cross_entropy(
    x: Tensor,
    target: Tensor,
    smoothing: float = 0.0,
    softcap: float | None = None,
    weighted: bool = False,
    z: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    weight = _class_weights(x.shape[-1], x.dtype) if weighted else None
    options: dict[str, Any] = {"ignore_index": IGNORED, "reduction": reduction, "label_smoothing": smoothing}
    loss = F.cross_entropy(x, target, weight, **options)
    return loss + z * x.logsumexp(-1).square() * (target != IGNORED) if z else loss


def _class_weights(classes: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.5, 2.0, classes, dtype=torch.float32).to(dtype)


def _linear_cross_entropy(x: Tensor, target: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return _function("fused_linear_cross_entropy", "FusedLinearCrossEntropy")(x, w, target, b)[0]


def _plain_linear_cross_entropy(x: Tensor, target: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.T + b, target, ignore_index=IGNORED)


def _shape(kind: str, shape: tuple[int, ...]) -> str:
    return f"{kind} {'x'.join(map(str, shape))}"
