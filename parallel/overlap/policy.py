"""Selects how a linear layer's collective runs: inside the kernel, in chunks, or plainly before or after the product.

``select`` is a pure function of a profile (:mod:`link_profile`), an operation and its shape:

    overlap="none"      plain, as is any product without features
    overlap="chunked"   chunked
    overlap="kernel"    the kernel; where it is unavailable plain, with the reason (RuntimeError with ``strict``)
    overlap="auto"      the best plan by the profile's figures (:mod:`plan`)

Ranks that choose differently deadlock. So the first choice in a group is a collective of its own: rank 0 reads its
profile, all ranks use that one, and the other ranks' SHARDFUSE_LINKS is ignored.
"""

from __future__ import annotations

import pathlib
import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...kernels.comm.reduce_config import WIDEST
from ...kernels.comm.reduce_op import all_reduce_choice
from ...kernels.linear import linear_act_choice
from ...kernels.runtime import autograd, dispatch
from ...kernels.runtime.names import expected
from ..core import collectives
from ..core.mesh import Group
from ..core.options import TPOptions
from . import link_model
from .link_model import Call
from .link_profile import OPS, Profile, load, parse
from .memory.pool import SymmetricMemoryPool
from .plan import MODEL_TOKENS, NOTHING, OverlapPlan, best_pieces, exposed_time, measured_row, pure_selection
from .strategies import Plain, Strategy

OVERLAPS = ("auto", "kernel", "chunked", "none")
REMEMBERED = 4096  # cached choices per group: serving has as many shapes as numbers of tokens
Tensors = Sequence[torch.Tensor]


class LayerOverlap(NamedTuple):
    """How a linear layer's collectives run, in forward and in backward."""

    forward: Strategy
    backward: Strategy
    gathers_again: bool = False  # whether backward gathers a column layer's input again


class _Unasked:
    """The answer of kernel_unavailable() before its first call."""


@dataclass
class _Agreed:
    """What the ranks of a group agreed on for tensors on one device, and the choices made with it so far."""

    profile: Profile | None
    link: str  # "node", or "network" where the group spans machines
    device_type: str = "cpu"
    unavailable: str | type[_Unasked] | None = _Unasked
    plans: dict[Any, OverlapPlan] = field(default_factory=dict)


# Keyed by the process group's id and the device; an entry is removed with its group.
_agreed: dict[tuple[int, torch.device], _Agreed] = {}


def check_overlap(overlap: str) -> str:
    """``overlap`` itself; ValueError unless it is one of OVERLAPS."""
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap={overlap!r}: {expected(overlap, OVERLAPS)}")
    return overlap


def select(
    op: str,
    group: Group,
    *,
    tokens: int,
    features_in: int,
    features_out: int,
    dtype: torch.dtype,
    device: torch.device,
    overlap: str = "auto",
    strict: bool = False,
    impl: str = "auto",
    device_counted: bool = False,
) -> OverlapPlan:
    """The plan for ``op``, "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce" or "all_reduce_rmsnorm".

    ``tokens`` T counts the rows of the whole product [T, K] @ [K, N] that this rank forms, ``features_in`` K and
    ``features_out`` N are its own sizes (N sums over the weights where several share x). The first call in a group is a
    collective of all its ranks; each later one with the same arguments is a look-up. ``impl`` is the product's own, for
    "all_reduce_rmsnorm" the norm's. During a CUDA graph capture the plan is plain, except for an op with
    ``device_counted`` exchanges once the ranks have agreed.

    Raises ValueError for an unknown ``op`` or ``overlap`` and, on all ranks, for a profile that rank 0 cannot use;
    RuntimeError with ``strict`` where the requested ``overlap`` cannot run.
    """
    if group.size == 1:
        return OverlapPlan(reason="one rank")
    if torch.compiler.is_compiling():
        check_compiled(overlap, strict)
        return OverlapPlan(reason="under torch.compile only the plain composition runs")
    agreed = _agreed.get((id(group.pg), device))
    settled = device_counted and agreed is not None and agreed.unavailable is not _Unasked
    if not settled and (agreed is None or agreed.device_type == "cuda") and _capturing(device):
        return _captured(op, overlap, strict, device_counted)
    if agreed is None:
        agreed = _agree(group, device)
    invariant = dispatch.row_invariant()
    # torch.func and forward-mode differentiation also decide whether the kernel may take a call.
    key = op, tokens, features_in, features_out, dtype, overlap, strict, impl, invariant, autograd.transformed()
    plan = agreed.plans.get(key)
    if plan is None:
        call = _call(op, tokens, features_in, features_out, dtype, group, overlap)
        without = _without_kernel(call, device, impl)
        if agreed.unavailable is _Unasked and _kernel_matters(agreed, call, overlap):
            agreed.unavailable = kernel_unavailable(group, device)
        if len(agreed.plans) >= REMEMBERED:
            agreed.plans.clear()
        plan = agreed.plans[key] = _decide(agreed, call, overlap, strict, without)
    return plan


def column_overlap(options: TPOptions, x: torch.Tensor, weights: Tensors) -> LayerOverlap:
    """The strategies of a column-parallel layer act(x @ W_i^T + b_i).

    x is [..., D], with sequence parallelism this rank's tokens. The caller has checked the operands: a product that
    fails after something was sent would leave the peers waiting.
    """
    plain = Plain(options.group)
    if options.overlap == "none" or options.group.size == 1:
        return LayerOverlap(plain, plain)
    tokens, sizes = x.shape[:-1].numel(), (x.shape[-1], sum(w.shape[0] for w in weights))
    asked = options.overlap != "auto"
    forward = backward = OverlapPlan()
    op = "linear_all_reduce"
    if options.sequence_parallel:
        tokens *= options.group.size
        forward = _layer_plan("all_gather_linear", options, tokens, *sizes, x)
        op = "linear_reduce_scatter"
    # Plain already hides the sum of dx under the products of the weights' gradients, and kept rows need no second
    # gather. "auto" changes neither, since neither was measured.
    if asked and options.grad:
        backward = _layer_plan(op, options, tokens, *sizes[::-1], x)
    group = options.group
    again = asked and forward.kind != "plain"
    return LayerOverlap(forward.strategy(group), backward.strategy(group), gathers_again=again)


def row_overlap(options: TPOptions, x: torch.Tensor, weight: torch.Tensor) -> LayerOverlap:
    """The strategies of a row-parallel layer x @ W^T + b, likewise. Backward's plan is made in forward, so ``strict``
    refuses it before anything has run."""
    plain = Plain(options.group)
    if options.overlap == "none" or options.group.size == 1:
        return LayerOverlap(plain, plain)
    tokens, sizes = x.shape[:-1].numel(), (x.shape[-1], weight.shape[0])
    backward = OverlapPlan()
    if options.sequence_parallel:
        forward = _layer_plan("linear_reduce_scatter", options, tokens, *sizes, x)
        if options.grad:
            backward = _layer_plan("all_gather_linear", options, tokens, *sizes[::-1], x)
    else:
        forward = _layer_plan("linear_all_reduce", options, tokens, *sizes, x)
    return LayerOverlap(forward.strategy(options.group), backward.strategy(options.group))


def _layer_plan(
    op: str, options: TPOptions, tokens: int, features_in: int, features_out: int, like: torch.Tensor
) -> OverlapPlan:
    """The plan for a product [tokens, features_in] -> [tokens, features_out] and its collective."""
    return select(
        op,
        options.group,
        tokens=tokens,
        features_in=features_in,
        features_out=features_out,
        dtype=like.dtype,
        device=like.device,
        overlap=options.overlap,
        strict=options.strict,
        impl=options.impl,
    )


def preview(
    op: str,
    group: Group,
    *,
    tokens: int,
    features_in: int,
    features_out: int,
    dtype: torch.dtype,
    device: torch.device,
    overlap: str = "auto",
    strict: bool = False,
    impl: str = "auto",
) -> OverlapPlan:
    """The plan that :func:`select` would return, without a collective: one rank may call it alone.

    Before the group's first choice it uses this rank's own profile and assumes that the kernel can run. Raises what
    :func:`select` raises.
    """
    if group.size == 1:
        return OverlapPlan(reason="one rank")
    call = _call(op, tokens, features_in, features_out, dtype, group, overlap)
    agreed = _agreed.get((id(group.pg), device)) or _Agreed(load(device), "node", device.type)
    unsure = agreed.unavailable is _Unasked
    if unsure:
        agreed = _Agreed(agreed.profile, agreed.link, device.type, lacking(device))
    plan = _decide(agreed, call, overlap, strict, _without_kernel(call, device, impl))
    if unsure and plan.kind == "kernel":
        return plan._replace(reason=f"{plan.reason}, if the first call finds that the ranks reach each other's memory")
    return plan


# --- availability of the kernel ---------------------------------------------------------------------------------------


def kernel_unavailable(group: Group, device: torch.device) -> str | None:
    """The reason why the kernel path cannot run in ``group``, or None. Collective; called once per group.

    Every rank gets the same answer: one rank's missing requirement, or the finding of the memory probe.
    """
    said = collectives.gather_objects((lacking(device), dispatch.default_impl()), group, site="links")
    missing = [reason for reason, _ in said]
    for rank, reason in enumerate(missing):
        if reason is not None:
            return reason if len(set(missing)) == 1 else f"on rank {rank} {reason}"
    defaults = [default for _, default in said]
    if len(set(defaults)) > 1:
        return f"SHARDFUSE_IMPL is not the same on all ranks ({', '.join(defaults)})"
    return SymmetricMemoryPool.of(group, device=device).probe()


def _without_kernel(call: Call, device: torch.device, impl: str) -> str | None:
    """The reason why the product, or the norm after it, does not run the kernel that exchanges rows; or None."""
    if call.op == link_model.NORM:
        what, choice = "norm", all_reduce_choice(device, call.N, impl, call.dtype)
    else:
        if call.op != link_model.GATHER and call.N > WIDEST:
            return f"no kernel sums rows of {call.N} columns (at most {WIDEST})"
        what, choice = "product", linear_act_choice(call.dtype, device, impl)
    runs = "the reference" if choice.impl == "reference" else "oneDNN"
    return None if choice.triton else f"the {what} runs {runs} ({choice.reason})"


def lacking(device: torch.device) -> str | None:
    """A requirement that this process lacks, found without asking the other ranks."""
    if dispatch.triton_version() is None:
        return "Triton is not installed (pip install triton; Linux only)"
    if device.type == "cpu" and not dispatch.interpreting():
        return "on a CPU the kernel runs only in Triton's interpreter (start Python with TRITON_INTERPRET=1)"
    if device.type == "cpu" and dispatch.interpreter_breaks() is not None:
        return dispatch.interpreter_breaks()
    if device.type not in ("cpu", "cuda"):
        return f"there is no symmetric memory on device {device.type!r}"
    return None


def _kernel_matters(agreed: _Agreed, call: Call, overlap: str) -> bool:
    """Whether :func:`kernel_unavailable`, which takes some time, can change this choice."""
    profile = agreed.profile
    if agreed.link == "network":
        return False
    if overlap != "auto":
        return overlap == "kernel"
    if profile is None or profile.dry:
        return False
    row = measured_row(profile, agreed.link, call)
    if row is not None:
        return row.kernel_s is not None
    return agreed.device_type != "cpu" and call.T >= MODEL_TOKENS and bool(profile.links)


# --- agreement --------------------------------------------------------------------------------------------------------


def _agree(group: Group, device: torch.device) -> _Agreed:
    """Have all ranks of ``group`` adopt rank 0's profile, and find out whether they share a machine. Collective."""
    content: Any = None
    if group.rank == 0:
        try:
            profile = load(device)
            content = None if profile is None else profile.record()
        except ValueError as error:  # every rank must get it: the others are about to wait for this one
            content = str(error)
    said = collectives.gather_objects((machine(), content), group, site="links")
    content = said[0][1]
    if isinstance(content, str):
        raise ValueError(content)
    link = link_of([host for host, _ in said])
    agreed = _Agreed(None if content is None else parse(content, "rank 0's profile"), link, device.type)
    key = id(group.pg), device
    _agreed[key] = agreed
    weakref.finalize(group.pg, _agreed.pop, key, None).atexit = False
    return agreed


def machine() -> str:
    """An identifier of this machine; containers on one machine share it, as they share its memory."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def link_of(machines: Sequence[str]) -> str:
    """The link that joins ranks on these machines: "node" or "network"."""
    return "node" if len(set(machines)) == 1 else "network"


# --- decisions --------------------------------------------------------------------------------------------------------


def _call(op: str, tokens: int, K: int, N: int, dtype: torch.dtype, group: Group, overlap: str) -> Call:
    if op not in OPS:
        raise ValueError(f"op={op!r}: {expected(op, OPS)}")
    check_overlap(overlap)
    return Call(op, tokens, K, N, dtype, group.size)


def _decide(agreed: _Agreed, call: Call, overlap: str, strict: bool, without_kernel: str | None) -> OverlapPlan:
    profile, link = agreed.profile, agreed.link
    unavailable = without_kernel
    if unavailable is None and isinstance(agreed.unavailable, str):
        unavailable = agreed.unavailable
    if link == "network":
        unavailable = "the group spans machines"
    if overlap == "auto" and dispatch.row_invariant():
        why = "row_invariance: plans add up differently, and which one is best depends on the number of tokens"
        return OverlapPlan("plain", 1, why, exposed_time(profile, link, call, "plain"))
    if overlap == "auto":
        return pure_selection(profile, link, call, unavailable=unavailable, device_type=agreed.device_type)
    if overlap == "none":
        return OverlapPlan("plain", 1, "overlap='none'", exposed_time(profile, link, call, "plain"))
    if min(call.K, call.N) < 1:
        return OverlapPlan(reason=NOTHING)
    if overlap == "chunked" and call.op == link_model.NORM:
        return OverlapPlan(
            "plain", 1, f"{call.op} is one launch: there is nothing to cut", exposed_time(profile, link, call, "plain")
        )
    if overlap == "chunked":
        pieces = best_pieces(profile, link, call)
        return OverlapPlan("chunked", pieces, "overlap='chunked'", exposed_time(profile, link, call, "chunked", pieces))
    if unavailable:
        return _refused(call.op, overlap, strict, unavailable, exposed_time(profile, link, call, "plain"))
    return OverlapPlan("kernel", 1, "overlap='kernel'", exposed_time(profile, link, call, "kernel"))


def _refused(op: str, overlap: str, strict: bool, why: str, exposed_s: float | None = None) -> OverlapPlan:
    """Plain in place of an unavailable path; with ``strict`` RuntimeError."""
    if strict:
        raise RuntimeError(
            f"{op}: overlap={overlap!r} was asked for with strict=True, but {why}; pass overlap='auto', or "
            "strict=False to let the plain path take over"
        )
    return OverlapPlan("plain", 1, why, exposed_s)


def check_compiled(overlap: str, strict: bool) -> None:
    """Under torch.compile: RuntimeError where ``strict`` requires an ``overlap`` that only eager layers support.

    The compiler sees functional collectives and orders them itself.
    """
    if strict and overlap not in ("auto", "none"):
        _refuse_compiled(overlap)


def _refuse_compiled(overlap: str) -> None:
    raise RuntimeError(
        f"overlap={overlap!r} was asked for with strict=True, but under torch.compile only the plain composition runs: "
        "leave this layer out of torch.compile (torch.compiler.disable), or pass overlap='auto' or strict=False"
    )


# Equals torch.compiler.assume_constant_result, without importing the compiler: Dynamo calls the function while it
# traces. An error in a traced function would only make the layer run in Python, unless fullgraph=True.
_refuse_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _captured(op: str, overlap: str, strict: bool, device_counted: bool) -> OverlapPlan:
    """The plan during a graph capture, in which ranks can neither wait for a peer nor agree nor count exchanges."""
    why = "a CUDA graph is being captured"
    if device_counted:  # the kernel counts, so only the agreement is missing
        why += ", and the ranks have not agreed before: run the same step once outside of it"
    return OverlapPlan(reason=why) if overlap in ("auto", "none") else _refused(op, overlap, strict, why)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
