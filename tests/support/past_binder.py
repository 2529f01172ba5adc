"""Compare launches that bypass Triton's binder with the binder's own. Run as a program; it prints JSON.

A mock driver of an sm_90 GPU, which compiles nothing, takes every launch of the ops' test cases, forward and backward,
on CPU tensors: newly drawn, at odd addresses, and in exchanges with other numbers. The launches of ``device.Prepared``
also go through the binder, and both must reach the same kernel with the same arguments. All launches show that the
binder accepts the kernels' arguments, which neither the interpreter nor ahead-of-time compilation tests. It is a
separate program because the tests' process interprets its kernels.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.cases import all_reduce_norm as reduce_cases
from shardfuse.kernels.dev.cases import comm as cases
from shardfuse.kernels.linear import linear_act, schemas
from shardfuse.kernels.runtime import device, dispatch, signals


class Driver:
    """The part of a driver that a launch needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A mock compiled kernel that records its launch arguments."""

    last: tuple[Any, ...] = ()

    def run(self, x: int, y: int, z: int, stream: int, function: Any, meta: Any, more: Any, enter: Any, leave: Any,
            *args: Any) -> None:  # fmt: skip
        Compiled.last = (self, (x, y, z), args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.run(*grid, 0, None, None, None, None, None, *args)

    def launch_metadata(self, *args: Any) -> None:
        return None

    function = packed_metadata = None


def compile_nothing(self: Any, key: Any, signature: Any, device: int, *others: Any) -> Compiled:
    kernel_cache = self.device_caches[device][0]
    return kernel_cache.setdefault(key, Compiled())


def same(ours: Any, theirs: Any) -> bool:
    """Whether both are equal; tensors must be the same objects."""
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours is theirs or (not isinstance(ours, torch.Tensor) and type(ours) is type(theirs) and ours == theirs)


counts: Counter[str] = Counter()
faults: list[str] = []
now = ""


def launch_both_ways(self: Any, grid: tuple[int, int, int], tensors: tuple[Any, ...], *, on: torch.Tensor) -> None:
    known = bool(self._compiled)
    prepared_launch(self, grid, tensors, on=on)
    ours = Compiled.last
    device.launch(self._fn, grid, dict(zip(self._names, tensors)) | self._rest, on=on, **self._launched)
    if not same(ours, Compiled.last):
        faults.append(f"{now}: {self._fn.__name__}, {'another kernel' if ours[0] is not Compiled.last[0] else 'args'}")
    counts["past the binder" if known else "first"] += 1


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose address is one element past a multiple of 16 bytes."""
    if tensor.dim() == 0 or not tensor.is_floating_point():
        return tensor
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


epochs = itertools.cycle((1, 2, 16, -3, 2**31 - 1))  # a binder may specialise on 1 and multiples of 16


def other_exchanges(peers: list[torch.Tensor], *, epoch: int | None = 1, **options: Any) -> list[signals.Signals]:
    """``in_one_process`` for the next of ``epochs``. No kernel runs here, so nothing waits for flags."""
    return signals.in_one_process(peers, epoch=None if epoch is None else next(epochs), **options)


driver.set_active(Driver())
cases.in_one_process = reduce_cases.in_one_process = other_exchanges
JITFunction._do_compile = compile_nothing
device.architecture = lambda on: "sm_90"
device.program_slots = lambda on: 132
dispatch._INTERPRETING = True  # makes impl="triton" acceptable on CPU tensors
prepared_launch = device.Prepared.launch
device.Prepared.launch = launch_both_ways

for op, spec in registry.ops().items():
    for case in spec.tagged("test"):
        now = f"{op} {case.name}"
        for seed in (1, 2):
            inputs = spec.make_inputs(case, torch.device("cpu"), seed=seed)
            names = list(inputs)
            # All operands aligned, then each one alone at an odd address, then all of them.
            for odd in ([], *([name] for name in names), names):
                moved = {
                    name: shifted(value) if name in odd and isinstance(value, torch.Tensor) else value
                    for name, value in inputs.items()
                }
                spec.run(moved, case, "triton")

# Not in those cases: gradient buffers at odd addresses, and operands that differ only in strides.
now = "main_grad"
x, dz, dw, db = torch.randn(32, 48), torch.randn(32, 64), torch.zeros(64, 48), torch.zeros(64)
for buffers in ((dw, db), (shifted(dw), db), (dw, shifted(db)), (dw, db), (dw.bfloat16(), db.bfloat16())):
    schemas.linear_wgrad_([dz], x, [buffers[0]], [buffers[1]])
now = "strides"
w = torch.randn(64, 48)
for rows in (x, torch.randn(48, 32).t(), torch.randn(32, 64)[:, :48], torch.randn(32, 49)[:, :48], torch.randn(32, 48)):
    linear_act(rows, w, impl="triton")
    linear_act(rows, torch.randn(48, 64).t(), impl="triton")
    linear_act(rows[:1], w, residual=dz[:1], impl="triton")
print(json.dumps({"counts": counts, "faults": faults}))
