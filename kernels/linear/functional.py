"""The steps of a linear layer outside autograd: checks, the choice of implementation, gradients of its parameters.

Plain functions on rows: x [T, D], W_i [F_i, D], b_i [F_i] or None, z_i and dz_i [T, F_i]. ``choice`` comes from
:func:`prepare`, once for all steps of a call. ``product.py`` has the layer's other products.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..runtime import autograd, dispatch, library
from ..runtime import device as target
from ..runtime import onednn as packing
from ..runtime.dispatch import Choice, OneDNN
from ..runtime.dtypes import no_kernel
from ..runtime.names import expected
from ..runtime.onednn import drop, pack
from . import cpu, onednn, onednn_schemas, reference, schemas, tuned
from .gemm import Gemm
from .reference import ACTIVATIONS

Tensors = Sequence[torch.Tensor]

MAX_WEIGHTS = 3
FEW_TOKENS = 64  # up to which a product is bound by its weights' bytes
_ASK_ONEDNN = ("auto", "onednn")  # the values of `impl` that may mean oneDNN


def linear_act_choice(
    dtype: torch.dtype,
    device: torch.device,
    impl: str = "auto",
    *,
    op: str = "linear_act",
    stock_wins: str | None = None,
    unsupported: str | None = None,
    offer: OneDNN | None = None,
) -> Choice:
    """Which implementation ``linear_act`` (or ``op``) takes for operands of ``dtype`` on ``device``, and why.

    ``stock_wins`` is what :func:`measured` says of the sizes, ``offer`` what :func:`cpu.offer` says, where they are
    known; ``unsupported``, what else keeps the kernel from this call.
    """
    impl = dispatch.default_impl() if impl == "auto" else impl
    if offer is None and impl in _ASK_ONEDNN and device.type != "cuda":
        offer = cpu.offer(None, (), dtype, "identity", False)
    unsupported = autograd.transformed() or no_kernel(dtype) or unsupported
    return dispatch.choose(op, device, impl, unsupported=unsupported, stock_wins=stock_wins, onednn=offer)


def layer_choice(
    weight: torch.Tensor, device: torch.device, impl: str, activation: str, training: bool, op: str = "linear_act"
) -> Choice:
    """What a layer with ``weight`` [F, D] will run, of as many tokens as it takes."""
    offer = None if device.type == "cuda" else cpu.offer(None, (weight,), weight.dtype, activation, not training)
    stock_wins = None
    if device.type == "cuda" and impl == dispatch.default_impl() == "auto":
        stock_wins = _beaten(target.architecture(device), op, weight.dtype, tokens=sys.maxsize)
    return linear_act_choice(weight.dtype, device, impl, op=op, stock_wins=stock_wins, offer=offer)


def measured(
    x: torch.Tensor,
    weights: Tensors,
    biases: Sequence[torch.Tensor | None],
    activation: str,
    dtype: torch.dtype,
    op: str,
) -> str | None:
    """The committed measurement by which the stock calls beat this forward launch, or None."""
    device = dispatch.stand_in()
    if not x.is_cuda if device is None else device.type != "cuda":
        return None
    device = device or x.device
    arch = target.architecture(device)
    if beaten := _beaten(arch, op, dtype, x.shape[:-1].numel()):
        return beaten

    def bucket() -> str | None:
        steps = (("bias",) if biases[0] is not None else ()) + ((activation,) if activation != "identity" else ())
        gated = op == "gated_linear"
        tokens, features = x.shape[:-1].numel(), sum(w.shape[0] for w in weights[: 1 if gated else None])
        combine = "gated" if gated else "grouped"
        precision = "tf32" if dtype == torch.float32 and target.allow_tf32() else "ieee"
        gemm = Gemm(
            "nt", tokens, features, x.shape[-1], dtype, dtype, combine, len(weights), steps, precision=precision
        )
        return tuned.bucket(gemm)

    return dispatch.stock_wins(arch, tuned.OP, bucket)


def _beaten(arch: str, op: str, dtype: torch.dtype, tokens: int) -> str | None:
    """Why the stock calls win whatever the sizes: they did at every size of the kind that was measured."""
    if dtype == torch.float32 and arch.startswith("sm_") and not target.allow_tf32():
        return (
            "in fp32 without tf32 cuBLAS takes a tenth of the kernel's time (bench/results/nvidia-h200/candidates.json)"
        )
    few = isinstance(tokens, int) and tokens <= FEW_TOKENS
    if op == "gated_linear" and arch == "sm_90" and dtype.itemsize == 2 and not few:
        return (
            f"above {FEW_TOKENS} tokens cuBLAS and a pass after it take 0.76 to 0.79 of the kernel's time "
            "(bench/results/nvidia-h200/gated.json)"
        )
    return None


def check(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activation: str,
    residual: torch.Tensor | None = None,
    *,
    op: str = "linear_act",
) -> None:
    """ValueError for operands that do not fit each other. Python overhead is measurable here."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r}: {expected(activation, ACTIVATIONS)}")
    n = len(weights)
    if not 0 < n <= MAX_WEIGHTS:
        raise ValueError(f"{op}: {n} weights given: expected 1 to {MAX_WEIGHTS} in one call")
    if len(biases) != n:
        raise ValueError(f"{op}: {len(biases)} biases for {n} weights: pass a bias or None for each")
    shape, dtype, device = x.shape, x.dtype, x.device
    if not shape:
        raise ValueError(f"{op}: x is a scalar: expected [..., D]")
    features, alike = shape[-1], dtype.is_floating_point
    for i, (w, b) in enumerate(zip(weights, biases)):
        w_shape = w.shape
        if len(w_shape) != 2 or w_shape[1] != features:
            raise ValueError(
                f"{op}: weight {i} has shape {tuple(w_shape)} but x has {tuple(shape)}: "
                f"expected [F, {features}] (as nn.Linear stores it)"
            )
        elsewhere = w.device != device
        if w.dtype is not dtype:
            alike = False
        if b is not None:
            if b.shape != (w_shape[0],):
                raise ValueError(f"{op}: bias {i} has shape {tuple(b.shape)}: expected [{w_shape[0]}]")
            elsewhere = elsewhere or b.device != device
            if b.dtype is not dtype:
                alike = False
        if elsewhere:
            raise ValueError(f"{op}: x is on {device} but weight or bias {i} is elsewhere; move them together")
    if op == "gated_linear" and weights[0].shape != weights[1].shape:
        raise ValueError(
            f"{op}: the gate weight has shape {tuple(weights[0].shape)} but the up weight {tuple(weights[1].shape)}: "
            "expected [F, D] for both"
        )
    if residual is not None:
        check_residual(op, x, weights, residual)
        if residual.dtype is not dtype:
            alike = False
    if not alike:
        _check_dtypes(op, x, [t for t in (*weights, *biases, residual) if t is not None])


def _check_dtypes(op: str, x: torch.Tensor, others: Tensors) -> None:
    given = ", ".join(str(t.dtype) for t in others)
    if autocast_dtype(x) is not None:
        if not all(t.is_floating_point() and t.dtype != torch.float64 for t in (x, *others)):
            raise ValueError(
                f"{op}: x is {x.dtype} and the other operands are {given}: autocast leaves fp64 and integers as they "
                "are; cast them to one dtype that it takes"
            )
    elif any(t.dtype != x.dtype for t in others):
        raise ValueError(f"{op}: x is {x.dtype} but the other operands are {given}; cast them to one dtype")


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast would cast x to, None where it is off or leaves x alone."""
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type  # the last one makes a string
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def check_residual(op: str, x: torch.Tensor, weights: Tensors, residual: torch.Tensor) -> None:
    """ValueError unless ``residual`` has the shape and device of the layer's result."""
    expected = (*x.shape[:-1], weights[0].shape[0])
    if len(weights) > 1:
        raise ValueError(f"{op}: a residual goes with one weight, {len(weights)} were given; add it to the result")
    if residual.shape != expected:
        raise ValueError(f"{op}: residual has shape {tuple(residual.shape)}: expected {expected}, that of the result")
    if residual.device != x.device:
        raise ValueError(f"{op}: x is on {x.device} but residual on {residual.device}; move them together")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [T, D]; itself, not a view, where it is that already."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x[None]  # no size is looked at: it may be symbolic


def shaped(rows: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    """``rows`` [T, F] as [*lead, F], in their own memory. The caller gives ``rows`` up.

    No view as autograd sees it, which would refuse that a Function's result is changed in place.
    """
    return rows if len(lead) == 1 else torch.ops.aten._unsafe_view.default(rows, (*lead, rows.shape[-1]))


def cast(tensors: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Any]:
    """Each tensor in its dtype; None stays None."""
    return [
        tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)
        for tensor, dtype in zip(tensors, dtypes)
    ]


def prepare(
    x: torch.Tensor,
    weights: Tensors,
    biases: Sequence[torch.Tensor | None],
    activation: str,
    impl: str,
    residual: torch.Tensor | None = None,
    *,
    op: str = "linear_act",
    pack_weight: bool = False,
) -> tuple[torch.dtype, Choice]:
    """Check and count one call as ``linear_act`` does: the dtype to cast its operands to, and what runs."""
    check(x, weights, biases, activation, residual, op=op)
    dtype = autocast_dtype(x) or x.dtype
    impl = dispatch.default_impl() if impl == "auto" else impl
    stock_wins = measured(x, weights, biases, activation, dtype, op) if impl == "auto" else None
    offer = None
    if impl in _ASK_ONEDNN and (x.is_cpu or impl == "onednn"):
        offer = cpu.offer(x, weights, dtype, activation, pack_weight)
    choice = linear_act_choice(dtype, x.device, impl, op=op, stock_wins=stock_wins, offer=offer)
    if choice.impl == "onednn":
        together = [weights] if op == "linear_act" else [(weight,) for weight in weights]
        _keep_packed(together, x, dtype, pack_weight)
    dispatch.count(op, choice.impl)
    return dtype, choice


def _keep_packed(together: Sequence[Tensors], x: torch.Tensor, dtype: torch.dtype, pack_weight: bool) -> None:
    """Pack the weights for inference, those that share a product side by side, or see to it that a call of training
    finds none packed.
    """
    if library.watched():
        return
    for weights in together:
        if pack_weight and dtype is torch.float32 and all(weight.dtype is dtype for weight in weights):
            pack(weights, x.shape[:-1].numel())
        else:
            for weight in weights:
                drop(weight)


def packs(asked: bool) -> bool:
    """Whether a call may keep packed copies of its weights: without gradients, if ``asked`` to or inside an engine."""
    serves = (asked or packing.here.serving) and packing.PACKS and not torch.is_grad_enabled()
    # The first call, which packs, and later ones would multiply in different layouts.
    return serves and not dispatch.row_invariant()


def settled(impl: str, x: torch.Tensor, weight: Any, activation: str, pack: bool) -> str | None:
    """Which implementation a call on a CPU takes, where neither operands nor environment can change that; else None."""
    if impl == "auto":
        impl = dispatch.default_impl()
        if impl == "auto":
            if not dispatch.uses_reference(impl, x):
                return None
            return "onednn" if cpu.wins(x, weight, activation, packs(pack)) else "reference"
    return impl if impl == "reference" else None


def plain_forward(
    x: torch.Tensor,
    weights: Tensors,
    biases: Sequence[torch.Tensor | None],
    activation: str,
    residual: torch.Tensor | None = None,
    *,
    op: str = "linear_act",
) -> torch.Tensor:
    """One layer, or the gate and up layers of ``op="gated_linear"``, where the reference is settled on: stock calls,
    and between them little else.

    :func:`check` before them would make a small call slower on the host. It is asked where torch refuses the operands,
    and beforehand where torch might take what it refuses: vectors, operands to broadcast, a residual.
    """
    for w, b in zip(weights, biases):
        if (
            w.dim() != 2
            or w.device != x.device
            or (b is not None and (b.dim() != 1 or b.shape[0] != w.shape[0] or b.dtype != w.dtype))
        ):
            check(x, weights, biases, activation, op=op)
    if residual is not None or (op == "gated_linear" and weights[0].shape != weights[1].shape):
        check(x, weights, biases, activation, residual, op=op)
    dispatch.count(op, "reference")
    try:
        y = F.linear(x, weights[0], biases[0])
        if activation != "identity":
            y = ACTIVATIONS[activation](y)
        if op == "gated_linear":
            return y * F.linear(x, weights[1], biases[1])
        return y if residual is None else y + residual
    except (RuntimeError, KeyError):
        check(x, weights, biases, activation, op=op)
        raise


def stays_plain(impl: str, x: torch.Tensor, weight: torch.Tensor, asked: bool) -> bool:
    """Whether all layers of a feed-forward layer run torch's own calls: ``weight`` is the first layer's, and the others
    have as many elements and rows to multiply. ``asked``: to keep packed weights.
    """
    if impl == "auto":
        impl = dispatch.default_impl()
    if impl != "auto":
        return impl == "reference"
    return dispatch.uses_reference(impl, x) and not cpu.wins(x, weight, "any", packs(asked))


def plain_mlp(x: torch.Tensor, layers: Sequence[tuple[Any, Any]], activation: str) -> torch.Tensor:
    """A feed-forward layer of modules' own weights and biases, two or, gated, three, where the reference is settled on
    for all of them.

    A product of a few tokens takes no longer than :func:`check` and the calls around it.
    """
    (weight, bias), (out_weight, out_bias) = layers[0], layers[-1]
    gated = len(layers) == 3
    if not torch.compiler.is_compiling():
        dispatch.counts["gated_linear" if gated else "linear_act", "reference"] += 1
        dispatch.counts["linear_act", "reference"] += 1
    try:
        h = ACTIVATIONS[activation](F.linear(x, weight, bias))
        if gated:
            h = h * F.linear(x, *layers[1])
        return F.linear(h, out_weight, out_bias)
    except (RuntimeError, TypeError):
        weights, biases = zip(*layers[:-1])
        check(x, weights, biases, activation, op="gated_linear" if gated else "linear_act")
        raise


def implementation(choice: Choice, *operands: torch.Tensor | None) -> Any:
    """The module whose functions run the steps of a call on ``operands``: ``launch.py`` or ``onednn.py``, or the module
    of their ops where something has to see them, or ``reference.py``. All have functions of the same names.
    """
    if choice.triton:
        return library.launches(schemas, *operands)
    if choice.impl == "reference":
        return reference
    return onednn_schemas if library.watched() else onednn


def linear_act_fwd(
    choice: Choice,
    x: torch.Tensor,
    weights: Tensors,
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
    activation: str,
    save_preact: bool = False,
) -> list[torch.Tensor]:
    """y_i = act(z_i) [+ residual], then with ``save_preact`` the z_i. Of weights that oneDNN packed together the y_i
    are columns of one matrix.
    """
    where = implementation(choice, x, *weights, *biases, residual)
    if where is onednn and len(weights) > 1 and not save_preact:
        columns = onednn.columns(x, weights, biases, activation)
        if columns is not None:
            return columns
    ys: list[torch.Tensor] = where.linear_act_fwd(x, weights, biases, residual, activation, save_preact)
    return ys


def act_grad(dy: torch.Tensor, z: torch.Tensor, activation: str, choice: Choice) -> torch.Tensor:
    """dz = dy * act'(z)."""
    dz: torch.Tensor = implementation(choice, dy, z).act_grad(dy, z, activation)
    return dz


def gated_act_grad(
    dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """dg = dh * u * act'(g) and du = dh * act(g)."""
    dg, du = implementation(choice, dh, g, u).gated_act_grad(dh, g, u, activation)
    return dg, du


def param_grads(
    dzs: Tensors,
    x: torch.Tensor | None,
    want_weight: Sequence[bool],
    want_bias: Sequence[bool],
    choice: Choice,
    *,
    into: Sequence[torch.Tensor | None] | None = None,
    bias_into: Sequence[torch.Tensor | None] | None = None,
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """dW_i = dz_i^T @ x and db_i = sum_T dz_i, None where not wanted.

    ``into`` and ``bias_into`` hold buffers, or None: where there is one, the gradient is added to it in place, in its
    own precision (fp32 or that of x), and the entry returned for it is None. x may be None where no weight's is wanted.
    """
    n = len(dzs)
    into = into or [None] * n
    bias_into = bias_into or [None] * n
    dws: list[torch.Tensor | None] = [None] * n
    dbs: list[torch.Tensor | None] = [None] * n
    bias_done = [False] * n
    fresh = [i for i in range(n) if want_weight[i] and into[i] is None]
    added = [i for i in range(n) if want_weight[i] and into[i] is not None]
    assert x is not None or not any(want_weight)
    if choice.triton and x is not None:  # one launch for each kind, in which a bias rides along with its weight
        if fresh:
            rides = [bool(x.shape[1]) and want_bias[i] and bias_into[i] is None for i in fresh]
            grads = implementation(choice, x, *dzs).linear_wgrad([dzs[i] for i in fresh], x, rides)
            sums = iter(grads[len(fresh) :])
            for i, dw, ride in zip(fresh, grads, rides):
                bias_done[i] = ride
                dws[i], dbs[i] = dw, next(sums) if bias_done[i] else None
        for together in _launches(added, into, bias_into) if added else ():
            buffers = [bias_into[i] if want_bias[i] and x.shape[1] else None for i in together]
            schemas.linear_wgrad_([dzs[i] for i in together], x, [into[i] for i in together], buffers)
            for i, bias_buffer in zip(together, buffers):
                bias_done[i] = bias_buffer is not None
    elif x is not None:
        where = implementation(choice, x, *dzs)
        for i in fresh:
            (dws[i],) = where.linear_wgrad([dzs[i]], x, [False])
        for i in added:
            if choice.impl == "onednn":
                where.linear_wgrad_([dzs[i]], x, [into[i]], [None])
            else:
                _add_product_(into[i], dzs[i].t(), x)  # type: ignore[arg-type]  # None is not in `added`
    for i, buffer in enumerate(bias_into):
        if want_bias[i] and not bias_done[i]:
            if buffer is None:
                dbs[i] = dzs[i].sum(0)
            else:
                buffer.add_(dzs[i].sum(0, dtype=buffer.dtype))
    return dws, dbs


def _launches(
    added: list[int], into: Sequence[torch.Tensor | None], bias_into: Sequence[torch.Tensor | None]
) -> list[list[int]]:
    """Which products may share a launch: programs do not wait for each other, so no two may add to one buffer."""
    buffers = [_place(t) for i in added for t in (into[i], bias_into[i]) if t is not None and t.numel()]
    if len(set(buffers)) < len(buffers):
        return [[i] for i in added]
    return [added]


def _place(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Where a tensor begins, also of fake ones, which have no address."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _add_product_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a @ b, added in out's precision."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)
