"""Runs of a model beside its real work, as a check or a warm-up: they leave its state as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_LARGEST = 1 << 20  # elements; larger buffers hold tables or weights, of which a copy would cost memory


@contextlib.contextmanager
def trial(*models: object) -> Iterator[None]:
    """After the block, the buffers of those ``models`` that are modules hold what they held before, such as counters
    and running statistics that a forward adds to, and so do the random states.

    A buffer that a forward replaced stays so, since plain attributes say what it holds, as in growing tables of
    positions; but a fake tensor does not stay. The values of buffers of more than 2^20 elements, or not of torch's
    plain dense kind, are not looked at.
    """
    modules = [each for model in models if isinstance(model, nn.Module) for each in model.modules()]
    held = [
        (module, name, buffer, _copied(buffer))
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with torch.random.fork_rng(devices=sorted(_gpus(modules))):
        try:
            yield
        finally:
            for module, name, buffer, values in held:
                now = module._buffers.get(name)
                if isinstance(now, FakeTensor):
                    module._buffers[name] = now = buffer
                if now is buffer and values is not None:
                    _restore(buffer, values)


def _copied(buffer: torch.Tensor) -> torch.Tensor | None:
    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_quantized
    if not plain or buffer.is_meta or buffer.is_conj() or buffer.is_inference() or buffer.numel() > _LARGEST:
        return None
    expanded = any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride()))
    return None if expanded else buffer.detach().clone()


@torch.no_grad()
def _restore(buffer: torch.Tensor, values: torch.Tensor) -> None:
    if (buffer.shape, buffer.dtype) == (values.shape, values.dtype) and not same_bits(buffer, values):
        buffer.copy_(values)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two dense tensors of one dtype and as many elements hold the same bits, NaN among them."""
    return torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))


def _gpus(modules: Iterable[nn.Module]) -> set[int]:
    """The indices of the GPUs that hold parameters or buffers."""
    held = (each for module in modules for each in (*module._parameters.values(), *module._buffers.values()))
    return {each.device.index for each in held if each is not None and each.is_cuda}
