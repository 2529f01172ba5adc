"""Linear layers with their collectives inside one autograd function.

Composed of :mod:`functional` and ``linear_act``, as they are under torch.compile, they would compute the same. Here
backward starts to reduce dx and forms dW while that is under way, sums land in the buffers that the products made, and
autograd sees one node for each layer, its sharded parameters included. A pass of backward forms what it is asked for,
and one that follows it over the same graph repeats no product and no collective (``kernels/runtime/autograd.py``).

    layer    weight     x                  y                  crosses ranks in forward, in backward
    column   [F/R, D]   [..., D]           [..., F/R]         nothing, all-reduce of dx
    row      [F, D/R]   [..., D/R]         [..., F]           all-reduce of y, nothing
    with sequence parallelism (tokens are dimension 0):
    column   [F/R, D]   [T/R, D]           [T, F/R]           all-gather of x, reduce-scatter of dx
    row      [F, D/R]   [T, D/R]           [T/R, F]           reduce-scatter of y, all-gather of dy

``overlap`` says how a collective meets the product beside it: "none", one after the other; "chunked" or "kernel", the
rows travelling while others are computed (:mod:`strategies`); or "auto", whichever :mod:`policy` expects to be fastest.
Where rows travel under the product because that was asked for, a column layer with sequence parallelism keeps the T/R
rows it was given instead of the T that it gathered, and gathers again in backward, for the weights' gradients, under
the product that forms dx's. With "auto" it keeps them, and dx is summed under the weights' gradients as plainly as
ever.

A collective in backward is counted at ``site + ".grad"``, the second all-gather at ``site + ".again"``. Sources: see
:mod:`functional`; to keep the shard and gather again is Korthikanti et al. (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.linear import linear_act, parts
from ..kernels.runtime import autograd
from ..kernels.runtime.dispatch import Choice
from .core import collectives, functional
from .core.mesh import Group
from .core.operands import Params, autocast, close_grads, open_params
from .core.sharding import local_tensors
from .overlap import strategies
from .overlap.policy import Path, check_compiled, choose


def column_linear(
    x: torch.Tensor,
    weights: Params,
    biases: Params,
    group: Group,
    *,
    activation: str = "identity",
    sequence_parallel: bool = False,
    fuse_wgrad_accumulation: bool = False,
    impl: str = "auto",
    overlap: str = "none",
    strict: bool = False,
    site: str,
) -> tuple[torch.Tensor, ...]:
    """act(x @ W_i^T + b_i) for up to three weights [F_i/R, D], which share x's one collective.

    ``fuse_wgrad_accumulation`` adds the parameters' gradients to their ``main_grad`` instead of returning them. With
    ``strict`` an ``overlap`` that cannot be had raises RuntimeError instead of being replaced; torch.compile, which
    orders the collectives itself, has none. Raises ValueError for operands that do not fit.
    """
    fused: dict[str, Any] = {"fuse_wgrad_accumulation": fuse_wgrad_accumulation, "impl": impl}
    if group.size == 1:
        return linear_act(x, weights, biases, activation=activation, **fused)
    if not torch.compiler.is_compiling():
        call = _Call.now(group, activation, sequence_parallel, overlap=overlap, strict=strict, site=site, **fused)
        return _Column.apply(call, x, *weights, *biases)
    check_compiled(overlap, strict)
    if sequence_parallel:
        x = functional.all_gather_from(x, group, dim=0, site=site)
    else:
        x = functional.copy_to(x, group, site=site)
    return linear_act(x, local_tensors(*weights), local_tensors(*biases), activation=activation, **fused)


def row_linear(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    group: Group,
    *,
    sequence_parallel: bool = False,
    fuse_wgrad_accumulation: bool = False,
    impl: str = "auto",
    overlap: str = "none",
    strict: bool = False,
    site: str,
) -> torch.Tensor:
    """x @ W^T summed over the ranks, plus b: weight [F, D/R], bias [F], whole on every rank, or None.

    The other options and what is raised are as in :func:`column_linear`.
    """
    fused: dict[str, Any] = {"fuse_wgrad_accumulation": fuse_wgrad_accumulation, "impl": impl}
    if group.size == 1:
        return linear_act(x, weight, bias, **fused)
    if not torch.compiler.is_compiling():
        call = _Call.now(group, "identity", sequence_parallel, overlap=overlap, strict=strict, site=site, **fused)
        return _Row.apply(call, x, weight, bias)
    check_compiled(overlap, strict)
    weight, bias = local_tensors(weight, bias)
    y = linear_act(x, weight, **fused)
    if sequence_parallel:
        y = functional.reduce_scatter_to(y, group, dim=0, site=site)
        (bias,) = functional.copy_all_to([bias], group, site=f"{site}.bias")
    else:
        y = functional.reduce_from(y, group, site=site)
    return y if bias is None else y + bias.to(y.dtype)


def partial_row_linear(x: torch.Tensor, weight: Any, *, impl: str = "auto") -> torch.Tensor:
    """This rank's addend to :func:`row_linear`'s sum, x @ W^T [..., F]: nothing is sent, and no bias added.

    Without gradients: what follows has to form the sum (:mod:`partial_sum`).
    """
    assert not torch.is_grad_enabled(), "a sum that waits has no gradient"
    (weight,) = local_tensors(weight)
    return linear_act(x, weight, impl=impl)


class _Call(NamedTuple):
    """The options of one call."""

    group: Group
    activation: str
    sequence_parallel: bool
    fuse_wgrad_accumulation: bool
    impl: str
    overlap: str
    strict: bool
    site: str
    grad: bool  # whether autograd is on: inside a function's forward it never is

    @classmethod
    def now(cls, group: Group, activation: str, sequence_parallel: bool, **options: Any) -> _Call:
        return cls(group, activation, sequence_parallel, grad=torch.is_grad_enabled(), **options)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: Any) -> tuple[torch.Tensor, ...]:
        n = len(params) // 2
        plain = open_params(ctx, x, params, call.fuse_wgrad_accumulation and call.grad)
        dtype, ctx.choice = parts.prepare(x, plain[:n], plain[n:], call.activation, call.impl)
        x, *operands = autocast((x, *plain), dtype)
        rows, weights, biases = parts.as_rows(x), operands[:n], operands[n:]
        ctx.paths = column_paths(call, x, weights, biases, call.activation)

        def product(rows: torch.Tensor, part: slice, remote: Any) -> tuple[torch.Tensor, ...]:
            ys, zs = parts.forward(rows, weights, biases, call.activation, ctx.choice, save=call.grad, remote=remote)
            return *ys, *zs

        lead: tuple[int, ...] = x.shape[:-1]
        kept = rows
        if call.sequence_parallel:
            keep = not ctx.paths.gathers_again
            outs, whole = strategies.gather(rows, call.group, product, ctx.paths.forward, site=call.site, keep=keep)
            lead, kept = (x.shape[0] * call.group.size, *x.shape[1:-1]), rows if ctx.paths.gathers_again else whole
        else:
            outs = list(product(rows, strategies.ALL, None))
        ctx.call, ctx.n, ctx.x_shape = call, n, x.shape
        ctx.save_for_backward(kept, *weights, *outs[n:])
        return tuple(shaped(y, lead) for y in outs[:n])

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        call, n, paths = ctx.call, ctx.n, ctx.paths
        rows, *rest = ctx.saved_tensors
        weights, zs = rest[:n], rest[n:]
        want = autograd.wanted(ctx)
        _, want_x, *want_params = want

        dzs, gathered = autograd.recall(ctx, dys) or (None, None)
        if dzs is None:
            dzs = [parts.as_rows(dy) for dy in dys]
            if zs:
                dzs = [parts.activation_grad(dz, z, call.activation, ctx.choice) for dz, z in zip(dzs, zs)]
        gather_again = paths.gathers_again and gathered is None and any(want_params[:n])
        with strategies.InFlight() as flights:
            if gather_again:
                again = collectives.start_all_gather(rows, call.group, site=f"{call.site}.again")
                finish_gather = flights.add(again)
            if want_x:
                finish = flights.add(start_input_grad(dzs, weights, ctx.choice, call, paths.backward, call.site))
            if gather_again:
                gathered = finish_gather()
            into = autograd.destinations(ctx, ctx.buffers)
            dws, dbs = strategies.product(
                f"{call.site}.grad",
                parts.param_grads,
                dzs,
                gathered if paths.gathers_again else rows,
                want_params[:n],
                want_params[n:],
                ctx.choice,
                into=into[:n],
                bias_into=into[n:],
            )
            dx = finish().view(ctx.x_shape) if want_x else None
        autograd.remember(ctx, dys, (dzs, gathered), want, spent=zs)
        return None, *close_grads(ctx, dx, [*dws, *dbs])


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: Any) -> torch.Tensor:
        plain = open_params(ctx, x, params, call.fuse_wgrad_accumulation and call.grad)
        dtype, ctx.choice = parts.prepare(x, plain[:1], plain[1:], "identity", call.impl)
        x, weight, bias = autocast((x, *plain), dtype)
        rows = parts.as_rows(x)
        ctx.call, ctx.paths, ctx.x_shape = call, row_paths(call, x, weight, bias), x.shape
        lead: tuple[int, ...] = x.shape[:-1]
        if call.sequence_parallel:
            collectives.check_divides((*lead, weight.shape[0]), 0, call.group, call.site)
            lead = (lead[0] // call.group.size, *lead[1:])
        y = sum_output(rows, weight, bias, ctx.choice, call, ctx.paths.forward, call.site)
        ctx.save_for_backward(rows, weight)
        return shaped(y, lead)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.call
        rows, weight = ctx.saved_tensors
        want = autograd.wanted(ctx)
        _, want_x, want_weight, want_bias = want

        def product(dys: torch.Tensor, part: slice, remote: Any) -> tuple[torch.Tensor, ...]:
            return (parts.input_grad([dys], [weight], ctx.choice, remote=remote),) if want_x else ()

        whole = autograd.recall(ctx, [dy])
        if whole is None:
            outs, whole = gather_output_grad(parts.as_rows(dy), product, call, ctx.paths.backward, call.site)
        else:
            outs = product(whole, strategies.ALL, None)
        into, bias_into = autograd.destinations(ctx, ctx.buffers)
        dws, dbs = parts.param_grads(
            [whole], rows, [want_weight], [want_bias], ctx.choice, into=[into], bias_into=[bias_into]
        )
        autograd.remember(ctx, [dy], whole, want)
        return None, *close_grads(ctx, outs[0].view(ctx.x_shape) if want_x else None, [*dws, *dbs])


class Paths(NamedTuple):
    """Which way a layer's rows go, forward and in backward."""

    forward: Path
    backward: Path
    gathers_again: bool = False  # whether backward gathers a column layer's input again


NO_OVERLAP = Paths(strategies.PLAIN, strategies.PLAIN)


def column_paths(
    call: Any, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], activation: str
) -> Paths:
    """For a layer act(x @ W_i^T + b_i). ``call`` has the options of :func:`column_linear`, and ``grad``."""
    if call.overlap == "none" or call.group.size == 1:
        return NO_OVERLAP
    rows, sizes = x.shape[:-1].numel(), (x.shape[-1], sum(w.shape[0] for w in weights))
    asked = call.overlap != "auto"
    if call.sequence_parallel:
        rows *= call.group.size
        forward = _choose("all_gather_linear", call, rows, *sizes, x)
        op = "linear_reduce_scatter"
    else:
        forward, op = strategies.PLAIN, "linear_all_reduce"
    # The plain sum of dx travels under the products of the weights' gradients as it is, and rows that are kept need no
    # second gather: "auto" does neither, since neither was measured.
    backward = _choose(op, call, rows, *sizes[::-1], x, backward=True) if asked else strategies.PLAIN
    if forward.kind != "plain" or backward.kind != "plain":  # before anything is sent that a failure would strand
        parts.check(x, weights, biases, activation)
    return Paths(forward, backward, gathers_again=asked and forward.kind != "plain")


def row_paths(call: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Paths:
    """For a layer x @ W^T + b, likewise."""
    if call.overlap == "none" or call.group.size == 1:
        return NO_OVERLAP
    rows, sizes = x.shape[:-1].numel(), (x.shape[-1], weight.shape[0])
    if call.sequence_parallel:
        forward = _choose("linear_reduce_scatter", call, rows, *sizes, x)
        backward = _choose("all_gather_linear", call, rows, *sizes[::-1], x, backward=True)
    else:
        forward, backward = _choose("linear_all_reduce", call, rows, *sizes, x), strategies.PLAIN
    if forward.kind != "plain" or backward.kind != "plain":
        parts.check(x, [weight], [bias], "identity")
    return Paths(forward, backward)


def _choose(
    op: str, call: Any, tokens: int, features_in: int, features_out: int, like: torch.Tensor, *, backward: bool = False
) -> Path:
    """The path of a product [tokens, features_in] -> [tokens, features_out] and its collective.

    Backward's is settled in forward, so that what ``strict`` refuses is refused before anything has run.
    """
    if backward and not call.grad:
        return strategies.PLAIN
    return choose(
        op,
        call.group,
        tokens=tokens,
        features_in=features_in,
        features_out=features_out,
        dtype=like.dtype,
        device=like.device,
        overlap=call.overlap,
        strict=call.strict,
        impl=call.impl,
    )


def shaped(rows: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    """``rows`` [T, F] as [*lead, F], for autograd no view (see ``parts.shaped``). The caller gives ``rows`` up."""
    return rows if len(lead) == 1 else torch.ops.aten._unsafe_view.default(rows, (*lead, rows.shape[-1]))


def row_addend(rows: torch.Tensor, weight: torch.Tensor, choice: Choice) -> torch.Tensor:
    """This rank's addend to a row-parallel layer's sum: x @ W^T [T, F] of ``rows`` [T, D/R]."""
    return parts.forward(rows, [weight], [None], "identity", choice)[0][0]


def sum_output(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    choice: Choice,
    call: Any,
    path: Path,
    site: str,
) -> torch.Tensor:
    """A row-parallel layer: x @ W^T of ``rows`` [T, D/R], summed over the ranks, plus the bias: [T, F] or [T/R, F]."""

    def addend(part: slice, remote: Any) -> Any:
        if remote is not None:
            return parts.send_forward(rows, weight, remote)
        return row_addend(strategies.cut(rows, part), weight, choice)

    options: dict[str, Any] = {"like": rows, "width": weight.shape[0], "bias": bias, "site": site}
    if call.sequence_parallel:
        return strategies.start_scatter(rows.shape[0], call.group, addend, path, **options)()
    return strategies.reduce(rows.shape[0], call.group, addend, path, **options)


def gather_output_grad(
    dys: torch.Tensor, product: strategies.ComputeGathered, call: Any, path: Path, site: str
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    """``product`` of every token's output gradient, and that: with it the bias needs no collective of its own."""
    if call.sequence_parallel:
        keep = autograd.keeps_graph()  # a later pass may ask for the rows again
        return strategies.gather(dys, call.group, product, path, site=f"{site}.grad", keep=keep)
    return product(dys, strategies.ALL, None), dys


def start_input_grad(
    dzs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    choice: Choice,
    call: Any,
    path: Path,
    site: str,
) -> strategies.Finish:
    """Begin a column-parallel layer's dx = sum_i dz_i @ W_i, summed over the ranks: its rows [T, D] or [T/R, D]."""

    def addend(part: slice, remote: Any) -> Any:
        if remote is not None:
            return parts.send_input_grad(dzs, weights, remote)
        return parts.input_grad([strategies.cut(dz, part) for dz in dzs], weights, choice)

    start = strategies.start_scatter if call.sequence_parallel else strategies.start_reduce
    width = weights[0].shape[1]
    return start(dzs[0].shape[0], call.group, addend, path, like=dzs[0], width=width, site=f"{site}.grad")


def reduce_input_grad(dx: torch.Tensor, group: Group, sequence_parallel: bool, site: str) -> Callable[[], torch.Tensor]:
    """Begin to sum a column-parallel layer's ``dx`` over the ranks; what is returned waits and gives the sum."""
    start = collectives.start_reduce_scatter if sequence_parallel else collectives.start_all_reduce
    return start(dx, group, site=f"{site}.grad")
