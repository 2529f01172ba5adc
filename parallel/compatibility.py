"""Refuse combinations of engines that train incorrectly, often silently, and name an alternative for each.

:func:`check` runs before anything is wrapped. It refuses only combinations with a demonstrated failure: for each of
:data:`REFUSALS` a test (``test_compatibility.py``, ``test_deepspeed.py``) builds the combination without the check and
shows the failure. Everything else is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..kernels.runtime.names import expected
from .core.mesh import data_coordinate
from .core.sharding import spec_of

# "fsdp2" is the engine that zero.shard applies, including replicate; "model" is the module before wrapping.
ENGINES = ("fsdp2", "ddp", "zero_optimizer", "deepspeed")


@dataclass(frozen=True)
class Setup:
    """A combination to be checked."""

    engine: str
    zero: int
    wraps: bool  # the engine has work: several shares of data, or a precision or offloading of its own
    schedule: str | None
    splits_backward: bool
    dcp: bool  # torch's distributed checkpoint saves the model's own state_dict
    dtensor: bool  # parameters are DTensors over a tensor-parallel group
    local: bool  # parameters are plain tensors, parts of logical tensors
    fuses_wgrad: bool
    ddp: bool
    data_parallel: bool


@dataclass(frozen=True)
class Refusal:
    """A combination, its failure, and the alternative."""

    name: str
    applies: Callable[[Setup], bool]
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.fix}"


REFUSALS = (
    Refusal(
        "split backward + resharding",
        lambda s: s.engine == "fsdp2" and s.wraps and s.zero == 3 and s.splits_backward,
        "zero=3 under schedule={schedule!r}, which splits backward",
        "when the pass for the inputs runs, the stage's parameters are shards again and the pass for the weights finds "
        "none of them, so most gradients are silently missing or wrong",
        "Use zero=2, which keeps parameters whole from forward to backward, or a schedule that does not split backward",
    ),
    Refusal(
        "split backward + DDP",
        lambda s: s.ddp and s.splits_backward,
        "DistributedDataParallel under schedule={schedule!r}, which splits backward",
        "the pass for the weights puts gradients where its hooks do not look, so replicas silently train apart",
        "Pass the bare model with zero=0, which replicates by FSDP2's replicate",
    ),
    Refusal(
        "DDP + DTensor",
        lambda s: s.ddp and s.dtensor,
        "DistributedDataParallel around parameters that are DTensors",
        "it cannot broadcast them when it is made, nor reduce their gradients",
        "Pass the bare model with zero=0; DistributedDataParallel works at tp=1, or with params='local'",
    ),
    Refusal(
        "local parameters + FSDP2",
        lambda s: s.engine == "fsdp2" and s.wraps and s.local,
        "params='local' under zero={zero} with more than one tensor-parallel rank",
        "FSDP2 makes new parameters that do not know of which logical tensors they are a part: checkpoints silently "
        "keep one rank's part and norms count parts as copies",
        "Build the model with params='dtensor'",
    ),
    Refusal(
        "local parameters + DCP",
        lambda s: s.dcp and s.local,
        "torch.distributed.checkpoint of a model with params='local' and more than one tensor-parallel rank",
        "every rank saves its part under the same name, and the first one silently wins",
        "Use save_checkpoint, which saves logical tensors, or build the model with params='dtensor'",
    ),
    Refusal(
        "wgrad accumulation + a wrapper",
        lambda s: s.fuses_wgrad and (s.ddp or (s.engine == "fsdp2" and s.wraps)),
        "fuse_wgrad_accumulation=True under data parallelism",
        "layers add to param.main_grad, and what reduces param.grad over the replicas would never see it",
        "Build the model with fuse_wgrad_accumulation=False",
    ),
    Refusal(
        "ZeroRedundancyOptimizer + DTensor",
        lambda s: s.engine == "zero_optimizer" and s.dtensor,
        "ZeroRedundancyOptimizer over parameters that are DTensors",
        "it broadcasts every parameter after a step, which DTensor refuses",
        "Use zero=1, which moves less as well, or build the model with params='local'",
    ),
    Refusal(
        "DeepSpeed + DTensor",
        lambda s: s.engine == "deepspeed" and s.dtensor,
        "DeepSpeed around parameters that are DTensors",
        "it moves and flattens parameters, which DTensors do not let it",
        "Build the model with params='local' and hand DeepSpeed mpu(mesh)",
    ),
    Refusal(
        "DeepSpeed + split backward",
        lambda s: s.engine == "deepspeed" and s.splits_backward,
        "a DeepSpeed engine under schedule={schedule!r}, which splits backward",
        "the engine wants to run backward itself, and fails when a schedule does",
        "Use zero=0, 1 or 2 of this project, or a schedule that does not split backward",
    ),
    Refusal(
        "nn.DataParallel + tensor parallelism",
        lambda s: s.data_parallel and (s.dtensor or s.local),
        "nn.DataParallel around layers that are split over ranks",
        "its threads would run one rank's collectives side by side, in no order that the other ranks share",
        "Start one process per GPU (torchrun) and use zero=0",
    ),
)


def check(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    zero: int = 0,
    engine: str = "fsdp2",
    schedule: str | None = None,
    splits_backward: bool = False,
    offload: bool = False,
    precision: str | None = None,
    dcp: bool = False,
    shares: int | None = None,
) -> None:
    """Raise ValueError for a combination with ``module``, not wrapped yet, that would train incorrectly.

    ``engine`` is one of :data:`ENGINES`, ``zero`` its stage. ``splits_backward``: the pipeline's ``schedule`` computes
    the gradients of inputs and weights separately. ``dcp``: torch.distributed.checkpoint will save the model's own
    ``state_dict``. ``shares`` of the data defaults to the mesh's. Not collective: every rank reaches the same answer by
    itself.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: {expected(engine, ENGINES)}")
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: expected 0 (replicas), 1 or 2 (shards of state and gradients) or 3 (of all)")
    if mesh is not None:
        shares = data_coordinate(mesh)[1]
    params = list(module.parameters())
    specs = [spec_of(param) for param in params if not isinstance(param, DTensor)]
    modules = list(module.modules())
    setup = Setup(
        engine=engine,
        zero=zero,
        wraps=shares is not None and (shares > 1 or offload or precision is not None),
        schedule=schedule,
        splits_backward=splits_backward,
        dcp=dcp,
        dtensor=any(isinstance(param, DTensor) for param in params),
        local=any(spec.shard_dim is not None and spec.group.size > 1 for spec in specs),
        fuses_wgrad=any(getattr(each, "fuse_wgrad_accumulation", False) for each in modules),
        ddp=engine == "ddp" or any(isinstance(each, DistributedDataParallel) for each in modules),
        data_parallel=any(isinstance(each, DataParallel) for each in modules),
    )
    found = [refusal for refusal in REFUSALS if refusal.applies(setup)]
    if found:
        raise ValueError("; ".join(str(each) for each in found).format(zero=zero, schedule=schedule or "a split one"))
