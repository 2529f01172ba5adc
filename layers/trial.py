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
    and running statistics that a forward updates, and so do the random states.

    The values of buffers of more than 2^20 elements are not looked at, nor are attributes that are no buffers.
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
            with torch.no_grad():
                for module, name, buffer, values in held:
                    module._buffers[name] = buffer
                    if values is not None and not _same_bits(buffer, values):
                        buffer.copy_(values)


def _copied(buffer: torch.Tensor) -> torch.Tensor | None:
    if buffer.is_meta or isinstance(buffer, FakeTensor) or buffer.numel() > _LARGEST:
        return None
    return buffer.detach().clone()


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Also where both are NaN."""
    return torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))


def _gpus(modules: Iterable[nn.Module]) -> set[int]:
    """The indices of the GPUs that hold parameters or buffers."""
    held = (each for module in modules for each in (*module._parameters.values(), *module._buffers.values()))
    return {each.device.index for each in held if each is not None and each.is_cuda}
