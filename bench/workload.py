"""Single launches of the GEMM, extracted from the ops that make them, for the tuner to compile, check and time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..kernels.dev import codegen, registry, workers
from ..kernels.dev.candidates import candidates, predicted_us
from ..kernels.dev.registry import Build, Case, OpSpec
from ..kernels.linear import config as gemms
from ..kernels.linear import functional, reference
from ..kernels.linear.gemm import Gemm, GemmConfig
from ..kernels.linear.tuned import OP, SOURCES, bucket
from ..kernels.runtime import device
from ..kernels.runtime.chips import CHIPS
from ..kernels.runtime.dispatch import Choice

_REFERENCE = Choice("reference", "the launch is compared with it")
_SAVING = ("linear_act_fwd", "gated_linear_fwd")  # their last argument: whether to store what only backward reads


def _wgrad(dzs: Any, x: Any, want_bias: Any) -> list[torch.Tensor | None]:
    dws, dbs = functional.param_grads(dzs, x, [True] * len(dzs), want_bias, _REFERENCE)
    return [*dws, *dbs]


def _wgrad_(dzs: Any, x: Any, dws: Any, dbs: Any) -> list[torch.Tensor | None]:
    wanted = [db is not None for db in dbs]
    functional.param_grads(dzs, x, [True] * len(dzs), wanted, _REFERENCE, into=dws, bias_into=dbs)
    return []


# For every op of schemas.py that launches a GEMM, its plain-torch twin with its arguments; results in its order.
REFERENCES: dict[str, Callable[..., Sequence[torch.Tensor | None]]] = {
    "linear_act_fwd": reference.linear_act_fwd,
    "gated_linear_fwd": reference.gated_linear_fwd,
    "linear_dgrad": lambda dzs, weights: [reference.linear_dgrad(dzs, weights)],
    "linear_dgrad_act": reference.linear_dgrad_act,
    "linear_dgrad_gated": reference.linear_dgrad_gated,
    "linear_wgrad": _wgrad,
    "linear_wgrad_": _wgrad_,
}
_IN_PLACE = {"linear_wgrad_": slice(2, 4)}  # the arguments that are written


@dataclass(frozen=True)
class Call:
    """One call of an op of ``kernels/linear/schemas.py``: ``torch.ops.shardfuse.<op>``, tensors on the meta device."""

    op: str
    args: tuple[Any, ...]
    gemm: Gemm
    bucket: str

    table_op, stock = OP, True

    @property
    def terms(self) -> int:
        return self.gemm.K

    def __call__(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Run the kernel. Results by position, or the arguments that an in-place op has written."""
        return self._named(getattr(torch.ops.shardfuse, self.op)(*args), args)

    def reference(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Run plain torch: the stock path in the operands' own precision, the oracle in fp64."""
        return self._named(REFERENCES[self.op](*args), args)

    def draw(self, on: torch.device, seed: int) -> list[Any]:
        """Random operands with the call's strides, whose products are of order 1."""
        generator = torch.Generator(on).manual_seed(seed)
        scale = self.gemm.K**-0.25

        def real(meta: torch.Tensor) -> torch.Tensor:
            drawn = torch.randn(meta.shape, generator=generator, device=on, dtype=torch.float32).mul_(scale)
            out = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=on)
            return out.copy_(drawn)

        return list(tree_map_only(torch.Tensor, real, self.args))

    def now(self, arch: str) -> GemmConfig:
        return gemms.pick_config(arch, self.gemm)

    def candidates(self, arch: str) -> list[GemmConfig]:
        return candidates(arch, self.gemm)

    def forced(self, config: GemmConfig) -> contextlib.AbstractContextManager[None]:
        return gemms.forced(config)

    def predicted_us(self, arch: str, config: GemmConfig) -> float | None:
        return predicted_us(arch, self.gemm, config) if arch in CHIPS else None

    def request(self, config: GemmConfig, arch: str) -> dict[str, Any]:
        asked = {"op": self.op, "args": _to_json(self.args), "config": dataclasses.asdict(config)}
        return asked | {"arch": arch, "tf32": device.allow_tf32()}

    def _named(self, results: Any, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        if self.op in _IN_PLACE:
            results = [tensor for written in args[_IN_PLACE[self.op]] for tensor in written]
        elif isinstance(results, torch.Tensor):
            results = [results]
        return {str(i): value for i, value in enumerate(t for t in results if t is not None)}


def ops() -> list[str]:
    """The registry's ops that launch GEMMs of ``kernels/linear``, except those whose GEMMs exchange rows."""
    return [
        name
        for name, spec in registry.ops().items()
        if set(SOURCES) & set(spec.sources) and "comm/op.py" not in spec.sources
    ]


def calls(spec: OpSpec, case: Case, on: torch.device, arch: str) -> list[Call]:
    """The GEMM launches of one case, forward and backward, and of forward alone without gradients.

    Nothing is computed: the op runs on fake tensors, and its calls of torch ops are recorded.
    """
    with FakeTensorMode(), _Watch() as watch:
        spec.run(spec.make_inputs(case, on, 0), case, "triton")
    found = {}
    for op, args in watch.seen:
        for variant in (args, (*args[:-1], False)) if op in _SAVING else (args,):
            gemm = gemm_of(op, variant, arch)
            key = bucket(gemm) if gemm is not None else None
            if gemm is not None and gemm.K and key is not None:
                found[key] = Call(op, variant, gemm, key)
    return list(found.values())


class _Watch(TorchDispatchMode):
    """Records every call of a torch op that launches a GEMM, with empty tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "shardfuse" and op in REFERENCES:
            self.seen.append((op, tree_map_only(torch.Tensor, _on_meta, args)))
        return func(*args, **(kwargs or {}))


def gemm_of(op: str, args: Sequence[Any], arch: str) -> Gemm | None:
    """The launcher's GEMM for a call, or None if there is nothing to multiply."""
    return next((item.gemm for item in _launches(op, args, arch) if item.gemm is not None), None)


def _launches(op: str, args: Sequence[Any], arch: str, *, tf32: bool | None = None) -> list[device.Launch]:
    """The launches of a call on tensors of the meta device."""
    from ..kernels.linear import launch

    with device.capture(arch, tf32=device.allow_tf32() if tf32 is None else tf32) as launches:
        getattr(launch, op)(*(tuple(arg) if isinstance(arg, list) else arg for arg in args))
    return launches


# --- compiling --------------------------------------------------------------------------------------------------------


def compile_all(
    pairs: Sequence[tuple[Any, Any]], arch: str, jobs: int | None = None
) -> Iterator[tuple[int, str | None]]:
    """Compile calls in configurations, in several processes: yields (index, error or None) as they finish.

    Triton's cache on disk keeps the kernels for the process that runs them.
    """
    requests = [call.request(config, arch) for call, config in pairs]
    command = [sys.executable, "-m", f"{__package__}.tune", "--worker"]
    for index, answer in workers.ask_all(requests, command, dict(os.environ), jobs or workers.cores()):
        yield index, answer.get("error") or answer.get("problem")


def faults_of(request: Mapping[str, Any]) -> list[str]:
    """Compile what :meth:`Call.request` asks for, in this process; returns what keeps it from being used."""
    with gemms.forced(GemmConfig(**request["config"])):
        launches = _launches(request["op"], _from_json(request["args"]), request["arch"], tf32=request["tf32"])
    return problems_of(
        Build(OP, str(item.config), request["arch"], item.fn, item.args, item.num_warps, item.num_stages)
        for item in launches
    )


def problems_of(builds: Iterable[Build]) -> list[str]:
    """Those of the first build that has any."""
    return next(filter(None, (codegen.problems(codegen.compile_build(build)) for build in builds)), [])


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}
    return [_to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
    return tuple(_from_json(item) for item in value) if isinstance(value, list) else value


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the same kind on the meta device itself, where a fake tensor mode would make a fake one."""
    with unset_fake_temporarily():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
