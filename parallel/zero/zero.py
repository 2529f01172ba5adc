"""ZeRO and data parallelism on torch's FSDP2: parameters, gradients and optimizer state sharded over ranks.

    zero   engine                                   this rank holds of dp ranks          payload of a step
    0      replicate                                everything                           2 Psi  (an all-reduce)
    1, 2   fully_shard(reshard_after_forward=False) 1/dp of state, and of gradients      2 Psi
                                                    after backward
    3      fully_shard(reshard_after_forward=True)  1/dp of everything, and whole blocks 3 Psi
                                                    while they run

(Rajbhandari et al., arXiv:1910.02054.) Psi is the size of the parameters; an all-reduce moves as much as a
reduce-scatter and an all-gather. Stages 1 and 2 are the same: FSDP2 does not keep whole gradients after it has
scattered their sum. With the dimension "dp_replicate" in the mesh, shards are spread over dp and replicated over
dp_replicate (hybrid sharding), which adds one all-reduce of the gradients' shards. Gradients are means over all
data-parallel ranks.

Parameters are sharded in groups, block by block, so that a block's gradients travel during the previous block's
backward. They become DTensors over the data-parallel dimensions, in front of the tensor-parallel one; create the
optimizer afterwards. If only one rank reads data, nothing is wrapped.

Over plain parameters (tp=1, or ``params="local"``) two other engines of torch's work without changes.
DistributedDataParallel is equivalent to stage 0. ZeroRedundancyOptimizer beside it shards the optimizer state alone: it
keeps DDP's all-reduce and broadcasts every parameter after a step, 3 Psi where stage 1 moves 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ...kernels.runtime.dtypes import BY_NAME
from ...kernels.runtime.names import expected
from .. import compatibility
from ..core.mesh import DATA_DIMS, check_dims, data_coordinate, data_group, degree, everyone

PRECISIONS = {name: BY_NAME[name] for name in ("bf16", "fp16")}

# The modules that shard() has wrapped, and their stages.
_stages: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def shard(
    module: nn.Module,
    mesh: DeviceMesh | None,
    *,
    zero: int,
    offload: bool = False,
    precision: str | None = None,
    blocks: Iterable[nn.Module] | None = None,
    splits_backward: bool = False,
    schedule: str | None = None,
) -> None:
    """Shard ``module``, a model or a pipeline stage, over all of ``mesh``'s data-parallel ranks; in place.

    Args:
        zero: 0 to 3, see above.
        offload: keep parameters, gradients and optimizer state in the host's memory; the optimizer runs there.
        precision: "bf16" or "fp16": the dtype of forward, backward and gathered parameters; the optimizer's parameters
            and sums of gradients stay as they are (fp32). With fp16 the loss has to be scaled.
        blocks: modules that are gathered and reduced as one group each; the rest makes another group. None: the
            members of ``module``'s outermost nn.ModuleLists, or its children if it is an nn.Sequential.
        splits_backward: the pipeline's ``schedule`` computes the gradients of inputs and weights separately.

    Raises ValueError for combinations that train incorrectly (:mod:`compatibility`), for an unknown ``precision``, for
    ``offload`` or ``precision`` without data-parallel ranks, and for a module that is already sharded.
    """
    options = {"zero": zero, "offload": offload, "precision": precision}
    compatibility.check(module, mesh, splits_backward=splits_backward, schedule=schedule, **options)  # type: ignore[arg-type]
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: {expected(precision, PRECISIONS, 'expected None or one of')}")
    check_whole(module)
    check_dims(mesh)
    if not _spans_data(mesh):
        if offload or precision is not None:
            what, alone = (
                ("offload=True", "init_mesh(alone=True) makes one of a single process")
                if offload
                else (f"precision={precision!r}", "a single process may use torch.autocast")
            )
            raise ValueError(f"{what}: FSDP2 does this, which needs a mesh with a dimension 'dp'; {alone}")
        if zero and mesh is None and everyone().size > 1:
            raise ValueError(
                f"zero={zero} without a mesh shards nothing over the {everyone().size} processes: pass init_mesh()"
            )
        return
    assert mesh is not None
    if data_coordinate(mesh)[1] == 1 and not offload and precision is None:
        return
    _wrap(module, mesh, list(_blocks(module) if blocks is None else blocks), zero, offload, precision)


def check_whole(module: nn.Module) -> None:
    """ValueError for a module that FSDP2 has already wrapped."""
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        raise ValueError(f"this {type(module).__name__} is already sharded: shard it once, or build it anew")


def _spans_data(mesh: DeviceMesh | None) -> bool:
    return mesh is not None and "dp" in (mesh.mesh_dim_names or ())


def _wrap(
    module: nn.Module, mesh: DeviceMesh, blocks: list[nn.Module], zero: int, offload: bool, precision: str | None
) -> None:
    how: dict[str, Any] = {}
    if precision is not None:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=PRECISIONS[precision], reduce_dtype=torch.float32)
    if offload:
        # Pinning requires an accelerator to copy to; without one it gains nothing.
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    for part in [*blocks, module]:
        if zero == 0:
            replicate(part, mesh=data_group(mesh).mesh or mesh["dp"], **how)
        else:
            # The root, too: torch would keep it whole, but stage 3 would then move less than its formula and hold more.
            fully_shard(part, mesh=_shard_mesh(mesh), reshard_after_forward=zero == 3, **how)
        _stages[part] = zero


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """[dp], or [dp_replicate, dp] if shards are replicated."""
    return mesh[DATA_DIMS] if degree(mesh, "dp_replicate") > 1 else mesh["dp"]


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost module lists that hold parameters."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return [child for child in module if next(child.parameters(), None) is not None]
    found: list[nn.Module] = []
    for child in module.children():
        if not isinstance(child, nn.Sequential):  # inside a model it is often a single layer
            found += _blocks(child)
    return found


def accumulate(module: nn.Module, last: bool) -> None:
    """Declare, before a micro-batch's backward (under DDP its forward), whether it is the step's ``last``.

    Every rank accumulates gradients, which travel with the last micro-batch alone. Stages 1 and 2 also keep their
    parameters whole until then, gathered once for all micro-batches; stage 3 gathers them for each, to limit memory.
    Pipelines do this by themselves. A module that :func:`shard` did not wrap does not change.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_requires_gradient_sync(last, recurse=False)
            if _stages.get(each, 3) != 3:
                each.set_reshard_after_backward(last, recurse=False)
        elif isinstance(each, DistributedDataParallel):
            each.require_backward_grad_sync = last


def settle(module: nn.Module) -> None:
    """After a forward without backward: free whole parameters, which FSDP2 keeps for a backward at stages 0 to 2.

    Until then ``module.parameters()`` are the gathered ones, which no optimizer and no norm should see.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _param_groups(module: FSDPModule) -> list[Any]:
    """The groups in which FSDP2 gathers the parameters of ``module`` itself: at most one in torch 2.11."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def abandon(module: nn.Module) -> None:
    """After a failed step: drop the gradients of its first micro-batches, which FSDP2 keeps beyond ``zero_grad``."""
    for each in module.modules():
        if not isinstance(each, FSDPModule):
            continue
        for group in _param_groups(each):
            for param in group.fsdp_params:
                if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):  # torch 2.15
                    param.unsharded_accumulated_grad = None
                whole = getattr(param, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None
        each.reshard()
    accumulate(module, last=True)
