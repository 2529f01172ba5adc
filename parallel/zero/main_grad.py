"""Gradients accumulated in separate buffers: ``param.main_grad``, the name that Megatron and TransformerEngine use.

Layers built with ``fuse_wgrad_accumulation=True`` form a weight's gradient and add it to its buffer in one product, in
fp32 where the parameters are bf16, so that rounding does not lose small gradients and no second pass over the weights
adds them up. ``param.grad`` stays empty until all micro-batches are done::

    attach_main_grads(model)                     # once, after model.to(...)
    for batch in batches:
        for micro in batch:
            model(...).backward()
        main_grads_to_grads(model)
        clip, optimizer.step()
        zero_main_grads(model)                   # and optimizer.zero_grad() for the other parameters

Other code may put gradients in the ``.grad`` of such a parameter: other parts of the model (an embedding that shares
its weight with the head), or torch.autograd.grad in a split backward. :func:`main_grads_to_grads` adds them. Code that
reads ``.grad`` during backward sees nothing: the layers refuse DistributedDataParallel and FSDP, and hooks on such
parameters (an optimizer step in backward) run without a gradient. To average over replicas, reduce the buffers before
:func:`main_grads_to_grads`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.sharding import local_tensors, unwrap, wrap_grads


def attach_main_grads(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Give the parameters of the layers built with ``fuse_wgrad_accumulation=True`` a zero ``main_grad``.

    A buffer has the shape of this rank's part. Frozen parameters get none. Call it again after anything that changes
    device or dtype, or creates new parameters (``to``, ``to_empty``, ``copy.deepcopy``).

    Raises ValueError if no layer was built so, for a dtype that is neither fp32 nor a parameter's, and for a model in
    DistributedDataParallel.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "attach_main_grads: DistributedDataParallel averages param.grad and would never see param.main_grad; build "
            "the layers with fuse_wgrad_accumulation=False, or leave DDP out and reduce main_grad yourself"
        )
    layers = [module for module in model.modules() if getattr(module, "fuse_wgrad_accumulation", False)]
    if not layers:
        raise ValueError(
            f"attach_main_grads: no layer of this {type(model).__name__} adds to main_grad; build it with "
            "fuse_wgrad_accumulation=True"
        )
    for layer in layers:
        for name, param in layer.named_parameters(recurse=False):
            if dtype not in (torch.float32, param.dtype):
                raise ValueError(f"dtype={dtype}: expected torch.float32 or {param.dtype}, that of {name}")
            if param.requires_grad:
                (local,) = local_tensors(param.detach())
                param.main_grad = torch.zeros_like(local, dtype=dtype, memory_format=torch.contiguous_format)  # type: ignore[attr-defined]


@torch.no_grad()
def main_grads_to_grads(model: nn.Module) -> None:
    """Put every ``main_grad`` in its parameter's ``.grad``, a DTensor where the parameter is one, for the optimizer.

    ``.grad`` shares the buffer's memory where dtypes agree; otherwise it is a copy in the parameter's dtype. The
    previous contents of ``.grad`` are added to the buffer first.
    """
    for param in _with_buffers(model):
        buffer: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
        (grad,) = local_tensors(param.grad)
        if grad is not None and not getattr(param.grad, "is_main_grad", False):
            buffer.add_(grad)
        _, specs = unwrap([param])
        (param.grad,) = wrap_grads([buffer.to(param.dtype)], specs)
        param.grad.is_main_grad = True  # type: ignore[union-attr]  # once is enough


@torch.no_grad()
def zero_main_grads(model: nn.Module) -> None:
    """Set every ``main_grad`` to zero and drop the ``.grad`` of its parameter, for the next step."""
    for param in _with_buffers(model):
        param.main_grad.zero_()  # type: ignore[attr-defined]
        param.grad = None


def _with_buffers(model: nn.Module) -> Iterator[nn.Parameter]:
    """The trainable parameters that have a buffer."""
    for param in model.parameters():
        if param.requires_grad and getattr(param, "main_grad", None) is not None:
            yield param
