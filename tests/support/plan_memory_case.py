"""The bytes that a rank holds in a training step, beside the planner's, and the table of them in ``docs/plan.md``.

``PYTHONPATH=src python tests/support/plan_memory_case.py --write`` measures the table anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers import transformer
from shardfuse.layers.fuse.traffic import _off_meta
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import local_tensor
from shardfuse.parallel.parallel_model import ParallelModel
from shardfuse.parallel.parallelize import parallelize
from shardfuse.parallel.pipeline.schedules import find
from shardfuse.parallel.plan import memory
from shardfuse.parallel.plan.layout import Layout
from shardfuse.parallel.plan.shapes import ModelShape
from shardfuse.parallel.plan.software import PLAIN
from shardfuse.parallel.zero import zero

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plan.md"
KINDS = ("weights", "gradients", "optimizer", "activations")
Bytes = dict[str, float]

GATED = ModelShape("gated", hidden=64, layers=4, heads=8, kv_heads=4, ffn=160, vocab=128, gated=True)
GELU = ModelShape("gelu", hidden=64, layers=4, heads=8, kv_heads=8, ffn=256, vocab=128, biases=True)
# The head costs more than a block, so its pipeline rank gets fewer of them.
UNEVEN = dataclasses.replace(GATED, name="gated, large vocabulary", vocab=1024, tied=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its layout; with ``fused_loss`` the model never stores its logits."""

    shape: ModelShape
    layout: Layout
    fused_loss: bool = False

    def __str__(self) -> str:
        layout = self.layout
        several = [f"{layout.microbatches} of them"] if layout.microbatches > 1 else []
        precision = [layout.precision] if layout.precision != "fp32" else []
        loss = ["fused loss"] if self.fused_loss else []
        return ", ".join([self.shape.name, layout.described(), *several, *precision, *loss])

    @property
    def splits_backward(self) -> bool:
        return bool(self.layout.schedule) and find(self.layout.schedule).splits_backward


def case(shape: ModelShape, m: int = 1, *, fused_loss: bool = False, **fields: Any) -> Case:
    """A layout of ``m`` micro-batches."""
    batch = m * fields.get("micro", 1) * fields.get("dp", 1)
    return Case(shape, Layout(**{"precision": "fp32", "length": 64, "batch": batch, **fields}), fused_loss)


CASES = [
    case(GATED, micro=2),
    case(GELU, 2, mlp_recompute=1),
    case(GATED, micro=2, recompute="full"),
    case(GATED, tp=2, micro=2),
    case(GELU, tp=2, sequence_parallel=True),
    case(GATED, tp=2, sequence_parallel=True, mlp_recompute=2),
    case(GATED, tp=2, sequence_parallel=True, fused_loss=True),
    case(GATED, dp=2, zero=0),
    case(GATED, dp=2, zero=1, micro=2, precision="bf16"),
    case(GELU, 2, dp=2, zero=3),
    case(GATED, 4, pp=2),
    case(UNEVEN, 2, pp=2, micro=2),
    case(GELU, 4, pp=2, interleave=2),
    case(GATED, 4, pp=2, interleave=2, schedule="zbv"),
    case(GELU, 4, pp=2, interleave=2, schedule="interleaved_zb"),
    case(GATED, tp=4, sequence_parallel=True, micro=2),
    case(GATED, 2, tp=2, dp=2, zero=2, sequence_parallel=True, recompute="full"),
    case(GELU, 4, tp=2, pp=2, sequence_parallel=True),
    case(GATED, 4, pp=2, interleave=2, dp=2, zero=1),
    case(GATED, 4, pp=2, dp=2, zero=3, recompute="full"),
]


# ------------------------------------------------------------------------------------------------------------ predicted


def predicted(case: Case, rank: int) -> Bytes:
    """The planner's bytes of a rank of the mesh (dp, pp, tp)."""
    layout = case.layout
    software = dataclasses.replace(PLAIN, fused_loss=1) if case.fused_loss else PLAIN
    held = memory.of_rank(case.shape, layout, software, rank // layout.tp % layout.pp)
    found = {name: getattr(held, name) for name in (*KINDS, "gathered", "buffers")}
    return found | {"activations": held.activations + held.logits}


# ------------------------------------------------------------------------------------------------------------- measured


class Saved:
    """The distinct storages that autograd's graphs hold within :meth:`watching`, and their most bytes at a time.

    ``gathered`` is what FSDP2 holds beside its shards at that time, ``buffers`` what the stages of a pipeline hold
    beside what counts already, both in ``model``.
    """

    def __init__(self, model: ParallelModel, apart: Iterable[torch.Tensor]) -> None:
        self.model = model
        self.apart = [each.untyped_storage() for each in apart]  # held, so that no address is used again
        self.uncounted = {storage._cdata for storage in self.apart}
        self.held: Counter[int] = Counter()
        self.now = self.most = self.gathered = self.buffers = 0

    def watching(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: Reference(self, tensor), lambda reference: reference.tensor)

    def count(self, size: int) -> None:
        self.now += size
        if self.now >= self.most:
            self.most = self.now
            self.gathered = sum(tensor.untyped_storage().nbytes() for tensor in whole(self.model))
            storages = [tensor.untyped_storage() for tensor in received(self.model)]
            self.buffers = sum(storage.nbytes() for storage in storages if not self.held[storage._cdata])


class Reference:
    """A tensor that a node of a graph holds, or a pipeline's stage.

    It is detached: a node that torch is about to free would otherwise hold others of its graph.
    """

    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self.saved, self.tensor = saved, tensor.detach()
        storage = local_tensor(tensor.detach()).untyped_storage()
        self.key = storage._cdata
        self.bytes = 0 if self.key in saved.uncounted else storage.nbytes()
        if not saved.held[self.key]:
            saved.count(self.bytes)
        saved.held[self.key] += 1

    def __del__(self) -> None:
        self.saved.held[self.key] -= 1
        if not self.saved.held[self.key]:
            self.saved.now -= self.bytes


class Results(dict[int, Any]):
    """The results and inputs of a pipeline stage's micro-batches, which torch keeps until their backward."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self.saved = saved
        self.references: dict[int, list[Reference]] = {}

    def __setitem__(self, index: int, value: Any) -> None:
        super().__setitem__(index, value)
        self.references[index] = [Reference(self.saved, result) for result in value[0]]

    def pop(self, index: int) -> Any:  # type: ignore[override]
        del self.references[index]
        return super().pop(index)


def measured(rank: int, world: int, shape: ModelShape, layout: Layout, fused_loss: bool) -> dict[str, int]:
    """The bytes of each kind on this rank, in the second of two steps."""
    mesh = init_mesh(dp=layout.dp, pp=layout.pp, tp=layout.tp)
    model = ParallelTransformer(
        config_of(shape, layout),
        mesh=mesh,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute == "full",
        mlp_recompute=layout.mlp_recompute,
        impl="reference",
        dtype=torch.float32,
        device="meta",
    )
    spread = parallelize(
        model,
        mesh,
        zero=layout.zero,
        schedule=layout.schedule or None,
        microbatches=layout.microbatches,
        precision=None if layout.precision == "fp32" else layout.precision,
        seed=0,
    )
    optimizer = torch.optim.AdamW(spread.parameters())
    share, _ = data_coordinate(mesh)
    size = layout.batch // layout.shares, layout.length
    tokens = torch.randint(shape.vocab, size, generator=torch.Generator().manual_seed(share))
    targets = tokens.roll(-1, 1)
    limit, transformer.FUSED_LOSS_BYTES = transformer.FUSED_LOSS_BYTES, 0 if fused_loss else 1 << 30
    try:
        spread.step(tokens, targets)  # makes the optimizer's state, and the tensors into which FSDP2 gathers
        optimizer.step()
        optimizer.zero_grad()
        saved = Saved(spread, [tokens, targets, *whole(spread), *map(local_tensor, spread.parameters())])
        for stage in pipeline_stages(spread):
            stage.fwd_cache = Results(saved)
        with saved.watching():
            spread.step(tokens, targets)
    finally:
        transformer.FUSED_LOSS_BYTES = limit
    params = list(spread.parameters())
    state = [value for each in optimizer.state.values() for name, value in each.items() if name != "step"]
    return {
        "weights": nbytes(params),
        "gradients": nbytes(param.grad for param in params if param.grad is not None),
        "optimizer": nbytes(state),
        "activations": saved.most,
        "gathered": saved.gathered,
        "buffers": saved.buffers,
    }


def config_of(shape: ModelShape, layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        style="gated" if shape.gated else "gelu",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        max_positions=layout.length,
        tie_embeddings=shape.tied,
    )


def pipeline_stages(model: ParallelModel) -> list[Any]:
    """Torch's stages on this rank."""
    if model.pipeline is None:
        return []
    assert model.pipeline._built is not None
    schedule = model.pipeline._built.schedule
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def received(model: ParallelModel) -> Iterator[torch.Tensor]:
    """The tensors into which torch's stages receive inputs and gradients, and the gradients of the inputs."""
    for stage in pipeline_stages(model):
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            for buffer in (getattr(info, "buffer", None) for info in infos):
                if buffer is not None:
                    yield from (each for each in (buffer, buffer.grad) if each is not None)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's parts."""
    return sum(local_tensor(tensor.detach()).nbytes for tensor in tensors)


def whole(model: ParallelModel) -> Iterator[torch.Tensor]:
    """The tensors into which FSDP2 gathers parameters, and the gradients of these."""
    for module in itertools.chain.from_iterable(stage.modules() for stage in model.stages):
        for group in zero._param_groups(module) if isinstance(module, FSDPModule) else ():
            for param in group.fsdp_params:
                given = [param._unsharded_param, param._unsharded_param.grad]
                if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):  # torch 2.15
                    given.append(param.unsharded_accumulated_grad)
                yield from (local_tensor(tensor.detach()) for tensor in given if tensor is not None)


def kept_by_kernels(case: Case) -> int:
    """The bytes that autograd saves in a forward of one process where kernels run; nothing is computed."""
    layout, dtype = case.layout, torch.float32 if case.layout.precision == "fp32" else torch.bfloat16
    options: dict[str, Any] = {"recompute": layout.recompute == "full", "mlp_recompute": layout.mlp_recompute}
    model = ParallelTransformer(config_of(case.shape, layout), dtype=dtype, device="meta", **options)
    stage = model.stage(range(case.shape.layers + 2))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    _off_meta(model, fake)
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def keep(tensor: torch.Tensor, counts: bool = True) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (storage, storage.nbytes() if counts else 0))
        return tensor

    with fake:
        tokens, targets = torch.zeros(2, layout.micro, layout.length, dtype=torch.int64).unbind()
    for tensor in (*model.parameters(), tokens):
        keep(tensor, counts=False)
    with fake, saved_tensors_hooks(keep, lambda tensor: tensor), dispatch.choosing_for(torch.device("cuda")):
        stage(tokens, targets)
    return sum(size for _, size in found.values())


# ------------------------------------------------------------------------------------------------------------ the table


def fullest(found: list[dict[str, int]]) -> int:
    """The rank that keeps the most activations."""
    return max(range(len(found)), key=lambda rank: found[rank]["activations"])


def row(case: Case, found: list[dict[str, int]]) -> str:
    """The table's line of a case: each kind predicted and measured on the fullest rank, in KiB."""
    rank = fullest(found)
    planned, held = predicted(case, rank), found[rank]
    cells = [f"{planned[kind] / 1024:.1f} / {held[kind] / 1024:.1f}" for kind in KINDS]
    worst = max((planned[kind] / held[kind] - 1 for kind in KINDS), key=abs)
    return f"| {case} | {rank} | {' | '.join(cells)} | {100 * abs(worst):.2f} % |"


def rows() -> dict[str, str]:
    """The page's lines by their first cell."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def run(ranks: Any, case: Case) -> list[dict[str, int]]:
    """What every rank of the case holds; ``ranks`` is the tests' pool."""
    return ranks(case.layout.gpus, measured, case.shape, case.layout, case.fused_loss)


def write() -> None:
    """Measure all cases, and replace the page's table."""
    from ranks import Pool

    pool = Pool()
    try:
        lines = [
            row(each, pool(each.layout.gpus, measured, each.shape, each.layout, each.fused_loss)) for each in CASES
        ]
    finally:
        pool.close()
    text = PAGE.read_text(encoding="utf-8")
    head, _, tail = re.split(r"(?<=\| error \|\n\|---\|---\|---\|---\|---\|---\|---\|\n)((?:\| .*\n)*)", text)
    PAGE.write_text(head + "".join(f"{line}\n" for line in lines) + tail, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # Python may have been told to leave it out
    if sys.argv[1:] != ["--write"]:
        sys.exit("expected --write")
    write()
