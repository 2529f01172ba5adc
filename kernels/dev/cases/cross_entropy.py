"""The shapes that tests and ahead-of-time builds share for ``linear_cross_entropy``, on one rank.

A case is T tokens, D inputs and V words, ``padding`` rows of weight beyond them, the terms of the loss, tokens per
chunk (0: chosen), and which pass forms the gradients: "once", with the loss, or "again", from each token's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...cross_entropy import chunks, reference, schemas
from ...cross_entropy.reference import Loss
from ...runtime import device
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from ..registry import Build, Case, OpSpec
from .linear_fused import SOURCES

IGNORED = -100


def _case(T: int, D: int, V: int, dtype: torch.dtype, way: str, *tags: str, **options: Any) -> Case:
    stock = {"smoothing": 0.0, "z_loss": 0.0, "softcap": None, "bias": False, "padding": 0, "chunk": 0, "all": False}
    marks = [f"{name}{value:g}" if value is not True else name for name, value in options.items()]
    options = stock | options | {"way": way}
    return Case(
        "-".join([f"t{T}-d{D}-v{V}", NAMES[dtype], way, *marks]),
        dtype,
        {"T": T, "D": D, "V": V},
        options,
        frozenset(tags),
    )


_EVERY: dict[str, Any] = {"smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "bias": True}

CASES = (
    *(_case(20, 16, 72, FP32, way, "test", chunk=8) for way in ("once", "again")),
    *(_case(20, 16, 71, dtype, way, "test", chunk=12, **_EVERY) for dtype in (FP32, BF16) for way in ("once", "again")),
    _case(20, 24, 64, FP16, "once", "test", bias=True),
    _case(20, 24, 40, FP16, "again", "test", smoothing=0.3, chunk=7),
    *(_case(9, 16, 50, FP32, way, "test", padding=14, chunk=4, smoothing=0.1) for way in ("once", "again")),
    *(_case(0, 8, 24, FP32, way, "test", bias=True) for way in ("once", "again")),
    *(_case(5, 8, 24, FP32, way, "test", all=True, **_EVERY) for way in ("once", "again")),  # all ignored
    _case(3, 1, 1, FP32, "once", "test", bias=True),
    # One rank's words of a vocabulary of 128k at TP 1 and 8, and of an odd one.
    *(_case(8192, 4096, V, BF16, way, "codegen") for V in (131072, 16384) for way in ("once", "again")),
    _case(4096, 4096, 50257, BF16, "once", "codegen"),
    _case(8192, 4096, 131072, BF16, "once", "codegen", **_EVERY),
    _case(2048, 2048, 32000, FP32, "once", "codegen", z_loss=1e-4),
)


def make_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """rows, weight and bias, whose scores are of order 1; targets, some ignored; the gradients of the losses."""
    T, D, V = (case.sizes[letter] for letter in "TDV")
    width = V + case.options["padding"]
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=on).mul(scale).to(case.dtype).requires_grad_()

    targets = torch.randint(V, (T,), generator=generator, device=on)
    targets[:: 1 if case.options["all"] else 4] = IGNORED
    gain = torch.rand(T, generator=generator, device=on) if case.options["way"] == "again" else torch.ones(T, device=on)
    bias = draw(width) if case.options["bias"] else None
    return {"rows": draw(T, D), "weight": draw(width, D, scale=2 * D**-0.5), "bias": bias, "targets": targets} | {
        "gain": gain
    }


def loss_of(case: Case) -> Loss:
    V, options = case.sizes["V"], case.options
    return Loss(V, 0, V, IGNORED, options["smoothing"], options["z_loss"], options["softcap"])


def run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """Losses and the gradients of rows, weight and bias. The reference is the whole loss under torch's autograd.

    Losses are fp32, but of logits that were rounded to the operands' dtype, and are returned, to be judged, in that.
    """
    rows, weight, bias, targets, gain = (inputs[name] for name in ("rows", "weight", "bias", "targets", "gain"))
    loss, leaves = loss_of(case), {"drows": rows, "dweight": weight} | ({} if bias is None else {"dbias": bias})
    grads: Any
    if impl == "reference":
        losses = reference.linear_cross_entropy(rows, weight, bias, targets, loss)
        grads = torch.autograd.grad(losses, list(leaves.values()), gain.to(losses.dtype))
    else:
        operands = *(None if t is None else t.detach() for t in (rows, weight, bias)), targets
        chunk, want = case.options["chunk"] or None, [True, True, bias is not None]
        if case.options["way"] == "once":
            losses, *grads = schemas.once(*operands, *loss, chunk, want, "triton")
        else:
            stats = schemas.statistics(*operands, *loss, chunk, "triton")
            losses = reference.losses(stats, targets, loss)
            grads = schemas.again(*operands, stats, gain, *loss, chunk, want, "triton")
    found = {name: grad.to(rows.dtype) for name, grad in zip(leaves, grads)}
    return {"losses": losses.detach().to(rows.dtype)} | found


def _launched(target: str) -> Iterator[Build]:
    """What one chunk launches beside the products: those are the GEMM of ``kernels/linear``, compiled there."""
    from ...cross_entropy import launch

    for case in SPEC.tagged("codegen"):
        T, D, V = (case.sizes[letter] for letter in "TDV")
        loss, again = loss_of(case), case.options["way"] == "again"
        size = chunks.chunk_size(T, V, D, case.dtype.itemsize, summed=not again)
        logits = torch.empty(size, V, dtype=case.dtype, device="meta")
        targets = torch.empty(size, dtype=torch.int64, device="meta")
        stats, gain = logits.new_empty(1, 4, size, dtype=FP32), logits.new_empty(size, dtype=FP32)
        with device.capture(target) as launches:
            if again:
                launch.statistics(logits, targets, loss, stats[0])
                launch.gradient_(logits, targets, stats, gain, loss, None)
            else:
                launch.gradient_(logits, targets, None, None, loss, gain)
                launch.gradient_(logits, targets, stats, None, loss, gain)  # where other ranks have the other words
        yield from (_build(item, target) for item in launches)


def _build(item: device.Launch, target: str) -> Build:
    args = item.args
    name = item.fn.__name__.removeprefix("_").removesuffix("_kernel")
    steps = [name, str(item.config), NAMES[args["logits_ptr"].dtype]]
    steps += ["own"] if args.get("stats_ptr", 0) is None else []
    steps += ["gain"] if args.get("gain_ptr") is not None else []
    steps += [mark for mark, there in (("smooth", args["SMOOTH"]), ("cap", args["softcap"] is not None)) if there]
    steps += ["odd"] if args["ALIGN"] < 16 else []
    steps += ["loop"] if args.get("LOOP") else []
    return Build("linear_cross_entropy", "-".join(steps), target, item.fn, args, item.num_warps, item.num_stages)


SPEC = OpSpec(
    name="linear_cross_entropy",
    summary="the loss of a vocabulary projection and its gradients, chunk by chunk, without the logits",
    cases=CASES,
    make_inputs=make_inputs,
    run=run,
    launched=_launched,
    sums=lambda case, name: {"weights": FP32} if name == "losses" else {},
    sources=(
        *(f"cross_entropy/{name}.py" for name in ("triton", "launch", "schemas", "chunks", "op", "reference")),
        *SOURCES,  # of the products
    ),
)
