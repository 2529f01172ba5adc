"""One call that spreads a model over a mesh: pipeline stages first, then ZeRO inside each stage.

ZeRO comes second because it must know the schedule. Each part also works alone: ``pipeline.split`` and
``pipeline.Pipeline``, ``zero.shard``, ``clip``. Tensor parallelism belongs to the layers: build the model with the same
mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.names import expected
from . import compatibility
from .core import collectives
from .core.agreement import agree_on, checksum
from .core.first_calls import agree_on_processors, leave_to_caller
from .core.mesh import (
    GRID_DIMS,
    Group,
    along,
    check_dims,
    data_coordinate,
    degree,
    everyone,
    ranks_of,
    whole_group,
)
from .core.rendezvous import init_mesh
from .core.sharding import GridSpec, local_tensors, spec_of
from .grid.grid import Grid, sharing_group
from .materialize import allocate, device_of, place
from .parallel_model import ParallelModel, group_of
from .zero import zero as zeros
from .zero.zero import PRECISIONS

if TYPE_CHECKING:
    from .pipeline.timeline import Costs

__all__ = ["ParallelModel", "parallelize"]

# The options of a model's layers that must be equal on all ranks.
_LAYER_OPTIONS = ("sequence_parallel", "fuse_wgrad_accumulation", "overlap", "strict", "impl")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    zero: int = 0,
    schedule: str | None = None,
    microbatches: int | None = None,
    costs: Sequence[float | Costs] | None = None,
    offload: bool = False,
    precision: str | None = None,
    recompute: bool | None = None,
    overlap: str | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> ParallelModel:
    """Spread ``model`` over ``mesh`` (``init_mesh``; None: one process, or the model's tensor-parallel group alone).

    The result trains by ``step(tokens, targets)``; make the optimizer from its ``parameters()``.

    Args:
        model: a ParallelTransformer (over a grid a GridTransformer) built with the same mesh, best with
            ``device="meta"``, so that a rank allocates memory for its own part only. Or a causal language model of
            transformers after ``fuse(model, mesh)``. Or any module that returns the mean loss of its valid targets
            (all but -100) when called as ``model(*inputs, targets)``; a pipeline requires the methods that
            :class:`pipeline.Divisible` lists. Parameters on meta are materialised, and ``model.init_weights(seed)``
            draws them; those of ``load_pretrained(..., device="meta")`` are read from its folder, each rank's share.
        zero: 0 replicas, 1 and 2 shards of optimizer state and gradients, 3 of parameters as well (``zero.py``).
        schedule: of the pipeline, where the mesh has ``pp`` > 1: one of ``pipeline.SCHEDULES``.
        microbatches: the number of parts in which a rank's batch is processed; gradients travel once. None: 1, with a
            pipeline twice its stages.
        costs: of the model's parts, in any unit, for an even cut of the pipeline; the same on all ranks, for example
            from ``layers.stage_costs.measured_costs(..., mesh=mesh)``. None: the model's own estimate.
        offload: parameters, gradients and optimizer state stay in the host's memory. For a single process this makes a
            mesh of one, for which it initialises torch.distributed.
        precision: "bf16" or "fp16" for forward and backward; the optimizer's tensors stay fp32. With fp16 the loss is
            scaled, and a step whose gradients overflow leaves none.
        recompute: keep only each block's input for backward; None leaves the model's setting.
        overlap: "auto", "kernel", "chunked" or "none" (``ParallelTransformer``); None leaves the model's setting.
        seed: of the initial weights of a model on meta; None: rank 0 draws one from torch's global generator. A model
            that already has weights takes those of the first data-parallel rank on all ranks.
        device: where parameters on meta are materialised; None: the mesh's device, without a mesh the GPU if there is
            one.

    Raises ValueError for combinations that train incorrectly (``compatibility.py`` lists them with alternatives), for
    arguments that do not fit the mesh or the model, and for ranks that differ in arguments, config, shapes of
    parameters or given weights; the message names rank, field and both values. An error on one rank is raised on all.
    """
    options: dict[str, Any] = {
        "zero": zero,
        "schedule": schedule,
        "microbatches": microbatches,
        "offload": offload,
        "precision": precision,
        "recompute": recompute,
        "overlap": overlap,
        "seed": seed,
    }
    check_dims(mesh)
    settled = agree_on(
        whole_group(group_of(model) if mesh is None else mesh),
        lambda: _settle(model, mesh, device, **options),
        lambda _: _facts(model, options),
        what="parallelize",
    )
    mesh, schedule, microbatches = settled.mesh, settled.schedule, settled.microbatches
    splits_backward, divisible = settled.splits_backward, hasattr(model, "pipeline_parts")
    sharding: dict[str, Any] = {"offload": offload, "precision": precision if mesh is not None else None}
    if not any(param.is_meta for param in model.parameters()):
        _check_values(model, mesh)
    if schedule is not None:
        from .pipeline.pipeline import Pipeline, split  # torch's pipelining takes seconds to import

        assert mesh is not None
        cut = split(model, mesh, schedule, costs=None if costs is None else _agreed(costs, mesh))  # type: ignore[arg-type]
    host = offload or (zero > 0 and data_coordinate(mesh)[1] > 1)  # sharding then moves it to the GPU block by block
    unread = getattr(model, "read_weights", None)  # a model of load_pretrained(..., device="meta")
    if unread is None:
        place(model, mesh, torch.device("cpu") if host else device_of(mesh, device), seed)
    if schedule is not None:
        modules = [(stage.index, model.stage(stage.parts)) for stage in cut]  # type: ignore[operator]
    elif divisible:
        modules = [(0, model.stage(range(len(model.pipeline_parts()))))]  # type: ignore[operator]
    else:
        modules = [(0, model)]
    for _, module in modules:
        zeros.shard(module, mesh, splits_backward=splits_backward, zero=zero, schedule=schedule, **sharding)
    if unread is not None:
        for _, module in modules:
            allocate(module, torch.device("cpu") if offload else device_of(mesh, device))
        unread(whole_group(group_of(model) if mesh is None else mesh))

    count = microbatches or 1
    pipeline = None
    if schedule is not None:
        assert mesh is not None
        dtype = None if precision is None else PRECISIONS[precision]
        pipeline = Pipeline(model, modules, mesh, schedule, count, dtype=dtype)  # type: ignore[arg-type]
    agree_on_processors(whole_group(group_of(model) if mesh is None else mesh))
    for _, module in modules:
        leave_to_caller(module)
    return ParallelModel(model, [module for _, module in modules], mesh, pipeline, count, precision)


class _Settled(NamedTuple):
    """The arguments of :func:`parallelize`, checked and with defaults filled in."""

    mesh: DeviceMesh | None
    schedule: str | None
    microbatches: int | None
    splits_backward: bool


def _settle(
    model: nn.Module,
    mesh: DeviceMesh | None,
    device: torch.device | str | None,
    *,
    zero: int,
    schedule: str | None,
    microbatches: int | None,
    offload: bool,
    precision: str | None,
    recompute: bool | None,
    overlap: str | None,
    seed: int | None,
) -> _Settled:
    """All checks that one rank can make by itself. No collectives."""
    stages = degree(mesh, "pp")
    if stages > 1 and schedule is None:
        raise ValueError(
            f"the mesh has pp={stages} pipeline stages and schedule=None: pass one, such as schedule='1f1b'"
        )
    splits_backward = False
    if schedule is not None:
        from .pipeline.schedules import check_microbatches, default_microbatches, find

        found = find(schedule)
        splits_backward = stages > 1 and found.splits_backward
    if microbatches is not None and microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: expected at least 1")
    if schedule is not None and stages > 1:
        microbatches = microbatches or default_microbatches(schedule, stages)
        check_microbatches(schedule, microbatches, stages)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: {expected(precision, PRECISIONS, 'expected None or one of')}")
    if precision == "fp16" and any(getattr(each, "fuse_wgrad_accumulation", False) for each in model.modules()):
        raise ValueError(
            "precision='fp16' with fuse_wgrad_accumulation=True: main_grad would keep the factor that the loss is "
            "scaled by; build the model without it, or use precision='bf16'"
        )
    _check_divisible(model, stages)
    _check_built_for(model, mesh)
    if degree(mesh, "grid_depth") > 1 and (offload or precision is not None):
        raise ValueError(
            f"{'offload=True' if offload else f'precision={precision!r}'} over a grid with a depth of "
            f"{degree(mesh, 'grid_depth')}: FSDP2 does this, and cannot place parameters over a depth; dp in place of "
            "depth over the same grid makes as many copies of the weights"
        )
    if stages == 1:
        schedule = None
    if mesh is None and offload and group_of(model).size == 1 and everyone().size == 1:
        mesh = _mesh_of_one(device_of(None, device))
    compatibility.check(
        model,
        mesh,
        zero=zero,
        schedule=schedule,
        splits_backward=splits_backward,
        offload=offload,
        precision=precision if mesh is not None else None,
    )
    zeros.check_whole(model)
    _configure(model, recompute=recompute, overlap=overlap)
    return _Settled(mesh, schedule, microbatches, splits_backward)


def _facts(model: nn.Module, options: dict[str, Any]) -> dict[str, str]:
    """The facts that must be equal on all ranks of a model: options, config and settings, shapes of parameters."""
    facts = {"the model's class": type(model).__name__}
    config = getattr(model, "config", None)
    if dataclasses.is_dataclass(config):
        facts |= {f"config.{each.name}": repr(getattr(config, each.name)) for each in dataclasses.fields(config)}
    facts |= {name: repr(value) for name, value in options.items()}
    facts |= {f"the model's {name}": repr(getattr(model, name)) for name in _LAYER_OPTIONS if hasattr(model, name)}
    for name, param in model.named_parameters():
        frozen = "" if param.requires_grad else ", frozen"
        meta = ", on meta" if param.is_meta else ""
        facts[f"parameter {name}"] = f"{list(spec_of(param).logical_shape)} {param.dtype}{frozen}{meta}"
    return facts


def _check_values(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """ValueError on every rank if ranks that hold the same tensors of ``model`` got different values."""
    named = dict(model.named_parameters())

    def values(params: dict[str, torch.Tensor]) -> dict[str, str]:
        return {f"the checksum of {name}": str(checksum(local_tensors(param)[0])) for name, param in params.items()}

    specs = {name: spec_of(param) for name, param in named.items()}
    repeated = {name: named[name] for name, spec in specs.items() if spec.shard_dim is None}
    sharing = group_of(model) if mesh is None else sharing_group(mesh)
    compared = [(sharing, repeated), (along(mesh, "pp"), named)]
    for dim in GRID_DIMS:  # those that do not split a parameter hold copies of it
        copied = {name: spec for name, spec in specs.items() if isinstance(spec, GridSpec) and dim in spec.copied_over}
        if copied:
            group = along(next(iter(copied.values())).group.mesh, dim)
            compared.append((group, {name: named[name] for name in copied}))
    for group, held in compared:
        if group.size > 1:
            agree_on(group, lambda held=held: held, values, what="parallelize")  # type: ignore[misc]


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_mesh(device_type=device.type, alone=True)
    assert mesh is not None
    return mesh


def _agreed(costs: Sequence[float | Costs], mesh: DeviceMesh) -> list[float]:
    """``costs`` as numbers. ValueError on every rank if they differ: parts would run twice, or not at all."""
    mine = [float(getattr(each, "step", each)) for each in costs]  # type: ignore[arg-type]
    if any(theirs != mine for theirs in collectives.gather_objects(mine, whole_group(mesh), site="parallelize.costs")):
        raise ValueError(
            "costs differ between ranks, which would cut the model differently: measure them together "
            "(measured_costs(..., mesh=mesh)), or pass what one rank has found"
        )
    return mine


def _check_divisible(model: nn.Module, stages: int) -> None:
    if hasattr(model, "pipeline_parts"):
        return
    if hasattr(model, "get_output_embeddings"):  # of transformers
        raise ValueError(
            f"{type(model).__name__} returns an output object, where a mean loss is expected: fuse(model, mesh) first; "
            "where explain(model) then shows a stock head, wrap it in a module that returns the mean loss"
        )
    if stages > 1:
        raise ValueError(
            f"a pipeline needs a model that can be cut into stages: {type(model).__name__} lacks pipeline_parts() and "
            "the other methods that shardfuse.parallel.pipeline.partition.Divisible lists"
        )


def _check_built_for(model: nn.Module, mesh: DeviceMesh | None) -> None:
    group = getattr(model, "group", None)
    if mesh is None or not isinstance(group, Group):
        return
    names, grid = mesh.mesh_dim_names or (), getattr(model, "grid", None)
    wanted = {name: degree(mesh, name) for name in GRID_DIMS if name in names}
    theirs = grid.dims if isinstance(grid, Grid) else {}
    if wanted != theirs:
        built, given = (
            ", ".join(f"{name}={size}" for name, size in dims.items()) or "no grid" for dims in (theirs, wanted)
        )
        kind = "GridTransformer" if wanted else "ParallelTransformer"
        raise ValueError(f"the model was built for {built} and the mesh has {given}: build a {kind} with mesh=mesh")
    if wanted:
        return
    if group.size != degree(mesh, "tp"):
        raise ValueError(
            f"the model was built for {group.size} tensor-parallel rank(s) and the mesh has tp={degree(mesh, 'tp')}: "
            "build it with mesh=mesh, or fuse(model, mesh)"
        )
    built_ranks, given_ranks = ranks_of(group), ranks_of(along(mesh, "tp"))
    if built_ranks != given_ranks:
        raise ValueError(
            f"the model was built for tensor-parallel ranks {built_ranks} and the mesh has {given_ranks} along tp: "
            "build it with this mesh, or fuse(model, mesh)"
        )


def _configure(model: nn.Module, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return
    if not hasattr(model, "configure"):
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"{said}: {type(model).__name__} has no configure() to set this; build it so, and leave it out"
        )
    model.configure(**given)  # type: ignore[operator]
