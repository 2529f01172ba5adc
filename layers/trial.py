"""Runs of a model beside its real work, as a check or a warm-up: they leave its state as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

_LARGEST = 1 << 20  # elements; larger buffers hold tables or weights, of which a copy would cost memory


@contextlib.contextmanager
def trial(*models: object) -> Iterator[None]:
    """After the block, the buffers of those ``models`` that are modules hold what they held before, such as counters
    and running statistics that a forward updates, and so do the random states.

    Buffers of more than 2^20 elements are not looked at, nor are attributes that are no buffers.
    """
    modules = [each for model in models if isinstance(model, nn.Module) for each in model.modules()]
    held = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and buffer.numel() <= _LARGEST
    ]
    devices = {buffer.device.index for _, _, buffer, _ in held if buffer.is_cuda}
    with torch.random.fork_rng(devices=sorted(each for each in devices if each is not None)):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, values in held:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer.view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)):
                        buffer.copy_(values)
