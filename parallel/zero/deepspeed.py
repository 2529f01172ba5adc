"""Train a model under DeepSpeed's ZeRO, for programs whose training loop uses DeepSpeed.

    mesh = init_mesh(dp=2, tp=2)
    model = ParallelTransformer(config, mesh=mesh, params="local")       # DeepSpeed flattens and moves plain tensors
    engine = initialize(model, torch.optim.AdamW(model.parameters()), mesh, deepspeed_config(zero=2, micro_batch=4))
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()

:class:`Mpu` tells DeepSpeed which ranks share tensors and which share data; over a grid all its ranks share tensors.
``tensor_model_parallel`` of local parameters marks the parts, so that DeepSpeed clips by the norm of the whole model.
Gradients are means over data-parallel ranks. Stages 1 and 2 all-reduce whole gradients and then gather the parameters
(DeepSpeed 0.19): 3 Psi, where zero=1 of this project moves 2. Save and load through the engine, which owns the
optimizer's state.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...kernels.runtime.names import expected
from .. import compatibility
from ..core.mesh import Group, data_group, degree, tp_group
from ..grid.grid import Grid

PRECISIONS = ("bf16", "fp16")


def deepspeed_config(
    *,
    zero: int,
    micro_batch: int,
    accumulate: int = 1,
    max_norm: float | None = None,
    precision: str | None = None,
    offload: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """DeepSpeed's configuration, for an optimizer of torch's that the caller creates.

    Args:
        zero: the stage, 0 to 3.
        micro_batch: sequences per rank and forward.
        accumulate: forwards and backwards per step; ``engine.step()`` is called after each.
        max_norm: of the gradients; None clips nothing.
        precision: None for the parameters' own, "bf16" or "fp16".
        offload: keep the optimizer's state, and at stage 3 the parameters, in the host's memory.
        others: further entries, which override these.

    Raises ValueError for values that DeepSpeed does not know.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: expected 0, 1, 2 or 3")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: {expected(precision, PRECISIONS, 'expected None or one of')}")
    if micro_batch < 1 or accumulate < 1:
        raise ValueError(f"micro_batch={micro_batch}, accumulate={accumulate}: expected at least 1 of each")
    stage: dict[str, Any] = {"stage": zero}
    if offload:
        stage["offload_optimizer"] = {"device": "cpu"}
        if zero == 3:
            stage["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": max_norm or 0.0,
        "zero_optimization": stage,
        # Keep torch's optimizer, which DeepSpeed otherwise refuses or replaces by its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({precision: {"enabled": True}} if precision else {}),
        **others,
    }


class Mpu:
    """Megatron's "model parallel unit" of a mesh: the methods that DeepSpeed asks for groups, ranks and sizes.

    Raises ValueError for a mesh with pipeline stages, and for one that lacks the dimensions of ``init_mesh``.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if mesh is None or "dp" not in names or not {"tp", "grid_i"} & set(names):
            given = "None" if mesh is None else f"of the dimensions {names}"
            raise ValueError(
                f"mpu: mesh is {given}: expected dp with tp or a grid: make it by init_mesh(), for a single process by "
                "init_mesh(alone=True)"
            )
        if degree(mesh, "pp") > 1:
            raise ValueError(
                f"mpu: the mesh has {degree(mesh, 'pp')} pipeline stages, whose schedules run backward themselves, and "
                "a DeepSpeed engine needs to; use zero=0 to 3 of this project, or pp=1"
            )
        self._tensor = tp_group(mesh["tp"]) if "tp" in names else Grid.of(mesh).whole
        data = data_group(mesh)
        self._data: Group = data if data.pg is not None else tp_group(mesh["dp"])

    def get_data_parallel_group(self) -> Any:
        return self._data.pg

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._data.pg)

    def get_data_parallel_rank(self) -> int:
        return self._data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._data.size

    def get_tensor_model_parallel_group(self) -> Any:
        return self._tensor.pg

    def get_tensor_model_parallel_rank(self) -> int:
        return self._tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._tensor.size

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_process_group_ranks(self._tensor.pg)[0]

    # Older names, from when model parallelism meant tensor parallelism alone.
    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size


def mpu(mesh: DeviceMesh | None) -> Mpu:
    """The argument ``mpu`` of ``deepspeed.initialize``. Every rank calls it: it may create a process group."""
    return Mpu(mesh)


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, config: dict[str, Any], **others: Any
) -> Any:
    """DeepSpeed's engine around ``model``, trained by ``optimizer`` over ``mesh``; ``others`` go to DeepSpeed.

    Raises RuntimeError if DeepSpeed is not installed, ValueError for combinations that :mod:`compatibility` refuses.
    """
    compatibility.check(model, mesh, engine="deepspeed", zero=config.get("zero_optimization", {}).get("stage", 0))
    try:
        package = importlib.import_module("deepspeed")
    except ImportError as error:
        raise RuntimeError(
            f"DeepSpeed cannot be imported ({error}): pip install deepspeed, or use zero=0 to 3 of this project"
        ) from error
    engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu(mesh), **others)
    return engine
