"""What the backward of a custom autograd Function has to do in the pass at hand.

A graph may be walked more than once: pipelines with a zero-bubble schedule ask for the inputs' gradients in one pass
and for the parameters' in a later one, ``torch.autograd.grad(loss, inputs)`` for some of the leaves. torch (2.13) sets
``ctx.needs_input_grad`` when forward runs, so by it every pass would form every gradient. :func:`needed_grads` asks the
engine instead, and :func:`save_for_next_pass` hands what a later pass needs again from one to the next, so that no
product and no collective runs twice.

Used like this, under :func:`first_order`, for gradients ``dys`` and saved intermediates of any kind::

    want = needed_grads(ctx)
    dz = load_saved(ctx, dys)
    if dz is None:
        dz = ...
    ...                           # what `want` asks for, nothing else
    save_for_next_pass(ctx, dys, dz, want)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from . import library

# Private, but what torch.autograd.graph.register_multi_grad_hook and AOTAutograd are built on. Without the first every
# pass computes everything, without the second nothing is remembered: slower in split backward, still right.
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)

_transforms = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)

_NO, _YES, _CAPTURED = range(3)


def transformed() -> str | None:
    """Why no kernel can take a call now: forward-mode differentiation and torch.func would have to see inside."""
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation has no kernel"
    if _transforms is not None and _transforms() is not None:
        return "torch.func's transforms have no kernel"
    return None


def refuse_transform(error: BaseException) -> None:
    """In place of ``error``, where torch asks for a change of our code because of a transform, raise one that helps."""
    if transformed() is not None and ("setup_context" in str(error) or "DTensor" in str(error)):
        raise RuntimeError(
            f"{transformed()} for layers that are split over ranks, quantise to fp8 or pack documents with sinks: "
            "apply them to the same model in one process, and without these options"
        ) from error


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its look for torch.func's transforms: no kernel runs under one (:func:`transformed`).

    Not for torch.compile.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


NO_SECOND = (
    "create_graph=True asks for second derivatives, which this layer's backward does not have: leave it out (a layer "
    "in one process has them with impl='reference')"
)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of a Function, which runs kernels: it has no derivative of its own, and says so.

    torch's ``once_differentiable`` refuses where the incoming gradients need one; a second derivative by what forward
    saved would be left out without a word.
    """
    inner = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *dys: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(NO_SECOND)
        if torch.compiler.is_compiling():
            run = inner
        elif not library.autocasts():
            return backward(ctx, *dys)  # gradients are off, as `inner` would have them
        else:
            run = backward
        kind = next((dy.device.type for dy in dys if dy is not None), "cpu")
        if kind != "meta" and torch.is_autocast_enabled(kind):  # around backward(): what forward cast stays as it is
            with torch.autocast(kind, enabled=False):
                return run(ctx, *dys)
        return run(ctx, *dys)

    return checked


def needed_grads(ctx: Any) -> tuple[bool, ...]:
    """For each argument of forward: does this pass of backward want its gradient?

    ``ctx.needs_input_grad`` under torch.compile, and where torch cannot be asked.
    """
    return ctx.needs_input_grad if _cannot_ask() else tuple([answer != _NO for answer in _answers(ctx)])


def whole(ctx: Any) -> bool:
    """Whether this pass of backward is the first over its graph and wants every gradient that forward was asked for,
    each on its way to a leaf's ``.grad`` or to another function.
    """
    if _cannot_ask() or getattr(ctx, "left", None) is not None or getattr(ctx, "released", False):
        return False
    wanted = 0
    for node, _ in ctx.next_functions:
        if node is not None:
            try:
                if not _will_execute(node):  # type: ignore[misc]  # None: cannot ask
                    return False
            except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
                return False
            wanted += 1
    return bool(wanted == ctx.needs_input_grad.count(True))


def captured(ctx: Any) -> tuple[bool, ...]:
    """For each argument of forward: is it a leaf whose gradient ``torch.autograd.grad`` will return to its caller?

    Such a gradient must be returned; one that is on its way to a leaf's ``.grad`` may be put elsewhere.
    """
    if _cannot_ask():
        return (False,) * len(ctx.needs_input_grad)
    return tuple([answer == _CAPTURED for answer in _answers(ctx)])


def destinations(ctx: Any, buffers: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The buffers of forward's last arguments, None in place of those whose gradient this pass has to return."""
    if not any(buffer is not None for buffer in buffers):
        return list(buffers)
    returned = captured(ctx)[-len(buffers) :]
    return [None if given else buffer for buffer, given in zip(buffers, returned)]


def load_saved(ctx: Any, dys: Sequence[torch.Tensor | None]) -> Any:
    """What an earlier pass left for this one, if it was given the very same ``dys``; else None.

    Raises RuntimeError where what would be read in its place was given up, against the promise of ``split_backward``.
    """
    left = _left(ctx, dys)
    if left is None and getattr(ctx, "released", False):
        raise RuntimeError(
            "within split_backward() a graph was walked a second time from other gradients, or once more after all of "
            "them were formed: its intermediates are gone; leave split_backward() out"
        )
    return None if left is None else left[1]


@contextlib.contextmanager
def split_backward(enabled: bool = True) -> Iterator[None]:
    """Within the block a graph that a pass keeps is walked again from the gradients of that pass, and no others.

    So a pipeline splits backward. Memory that only other gradients could want is then given back at once. The promise
    is the caller's, for all graphs made and walked within. Not for threads.
    """
    global _splitting
    outer, _splitting = _splitting, enabled
    try:
        yield
    finally:
        _splitting = outer


def splitting() -> bool:
    """Whether this is within :func:`split_backward`."""
    return _splitting


_splitting = False


def save_for_next_pass(
    ctx: Any,
    dys: Sequence[torch.Tensor | None],
    value: Any,
    want: Sequence[bool],
    *,
    released: Sequence[torch.Tensor | None] = (),
) -> None:
    """At the end of a pass that served ``want``: leave ``value`` for the next one, or drop what is there.

    It is kept only while the graph is, and while there is a gradient that no pass over ``dys`` has formed. ``released``
    are saved tensors of the function's own making that no pass will read that loads ``value``: within
    :func:`split_backward` they lose their memory.
    """
    if torch.compiler.is_compiling():
        return
    left = _left(ctx, dys)
    if left is not None:
        want = [now or before for now, before in zip(want, left[2])]
    unfinished = any(need and not done for need, done in zip(ctx.needs_input_grad, want))
    if unfinished and _keeps_graph is not None and _keeps_graph():
        ctx.left = [(dy, None if dy is None else dy._version) for dy in dys], value, want
        for tensor in released if _splitting else ():
            if tensor is not None:
                tensor.untyped_storage().resize_(0)
                ctx.released = True
    else:
        ctx.left = None


def keeps_graph() -> bool:
    """Whether the pass of backward that runs may be followed by another one over the same graph."""
    return _keeps_graph is None or torch.compiler.is_compiling() or _keeps_graph()


def main_grads(
    params: Sequence[torch.Tensor | None], plain: Sequence[torch.Tensor | None] | None = None
) -> list[torch.Tensor | None]:
    """The buffers ``param.main_grad`` to which a backward adds, None for parameters that want no gradient.

    ``plain`` are this rank's tensors of the parameters, where those are DTensors; a buffer has their shape, and fp32 or
    their dtype. Raises ValueError where it is missing or does not fit and under DistributedDataParallel, RuntimeError
    under torch.compile.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "fuse_wgrad_accumulation=True adds to param.main_grad in place, which a compiled backward does not do: "
            "leave this layer out of torch.compile, or pass fuse_wgrad_accumulation=False"
        )
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise ValueError(
            "fuse_wgrad_accumulation=True under DistributedDataParallel: it averages param.grad over the replicas and "
            "would never see param.main_grad; pass fuse_wgrad_accumulation=False, or call the module without DDP and "
            "reduce main_grad yourself"
        )
    return [
        _main_grad(param, local) if param is not None and local is not None and param.requires_grad else None
        for param, local in zip(params, params if plain is None else plain)
    ]


def _main_grad(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    buffer = getattr(param, "main_grad", None)
    if buffer is None:
        raise ValueError(
            f"fuse_wgrad_accumulation=True, but a parameter of shape {list(param.shape)} has no main_grad: call "
            "attach_main_grads(model) once before training, after model.to() and the like (it is of no use under FSDP, "
            "whose layers see parameters that were gathered a moment ago)"
        )
    if (
        buffer.shape != local.shape
        or buffer.device != local.device
        or buffer.dtype not in (torch.float32, local.dtype)
        or not buffer.is_contiguous()
    ):
        raise ValueError(
            f"main_grad is {buffer.dtype} {list(buffer.shape)} on {buffer.device}: expected torch.float32 or "
            f"{local.dtype}, contiguous, of this rank's {list(local.shape)} on {local.device}; "
            "attach_main_grads(model) makes one"
        )
    return buffer


def _cannot_ask() -> bool:
    return _will_execute is None or torch.compiler.is_compiling()


def _answers(ctx: Any) -> list[int]:
    needs = ctx.needs_input_grad
    # One entry for each argument that is a tensor, with a node where that wants a gradient. Other arguments have none.
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    if needs.count(True) != len(nodes):  # a torch that answers for the pass by itself
        return [_YES if need else _NO for need in needs]
    asked = iter(nodes)
    return [_answer(next(asked)) if need else _NO for need in needs]


def _answer(node: Any) -> int:
    assert _will_execute is not None
    try:
        return _YES if _will_execute(node) else _NO
    except RuntimeError as error:
        # It declines to answer for a leaf whose gradient is captured; it does so only where that is wanted.
        return _CAPTURED if "leaf node" in str(error) else _YES


def _left(ctx: Any, dys: Sequence[torch.Tensor | None]) -> Any:
    left = getattr(ctx, "left", None)
    if left is None or torch.compiler.is_compiling():
        return None
    # A kept graph may be walked again from other gradients.
    return left if all(_same(dy, *before) for dy, before in zip(dys, left[0])) else None


def _same(dy: torch.Tensor | None, seen: torch.Tensor | None, version: int | None) -> bool:
    """Whether a gradient is the one that was seen, or another view of all of it, and has not been written to since."""
    if dy is None or seen is None:
        return dy is seen
    # What was seen is kept alive, so nothing else can be where it is.
    return dy._version == version and (
        dy is seen
        or (dy.data_ptr(), dy.shape, dy.stride(), dy.dtype) == (seen.data_ptr(), seen.shape, seen.stride(), seen.dtype)
    )
