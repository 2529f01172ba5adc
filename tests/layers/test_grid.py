"""Layers and a decoder over a grid: every number of one process, and refusals that name what would fit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from grid_case import BUDGET, SEED, VOCAB, alone, batches, config, differences, logits, train, whole
from oracle import assert_same_model
from torch import nn
from wire import omit, sites_seen

from shardfuse import ParallelMLP, ParallelTransformer
from shardfuse.explanation import explain
from shardfuse.layers.grid.attention import GridAttention
from shardfuse.layers.grid.linear import GridLinear
from shardfuse.layers.grid.mlp import GridMLP
from shardfuse.layers.grid.transformer import GridTransformer
from shardfuse.layers.hf.folders import export_hf, load_hf
from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize
from shardfuse.parallel.zero.clip import GradientClipper
from shardfuse.serving.engine import Engine

PLAIN = config("gated", attention_sinks=False, attention_window=None)  # a folder of Llama's has neither


class Case(NamedTuple):
    """A grid, and how it trains."""

    grid: tuple[int, ...]
    depth: int = 1
    style: str = "gated"
    overlap: str = "auto"
    dp: int = 1
    zero: int = 0
    pp: int = 1
    schedule: str = "1f1b"  # where there are stages
    recompute: bool = False

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.depth * torch.Size(self.grid).numel()

    def __str__(self) -> str:
        said = ["x".join(map(str, self.grid)), self.style]
        said += [
            f"{name}{value}" for name, value in self._asdict().items() if name in ("depth", "dp", "pp") and value > 1
        ]
        said += [f"zero{self.zero}"] * (self.dp > 1) + [self.overlap] * (self.overlap != "auto")
        said += [self.schedule] * (self.pp > 1)
        return "-".join(said + ["recompute"] * self.recompute)


def _train_body(rank: int, world: int, fields: tuple[Any, ...]) -> list[str]:
    case = Case(*fields)
    mesh = init_mesh(dp=case.dp, pp=case.pp, grid=case.grid, depth=case.depth)
    with torch.device("meta"):
        model = GridTransformer(config(case.style), mesh=mesh, dtype=torch.float64, overlap=case.overlap)
    schedule = {"schedule": case.schedule, "microbatches": 2} if case.pp > 1 else {}
    spread = parallelize(model, mesh, seed=SEED, zero=case.zero, recompute=case.recompute, **schedule)
    share, shares = data_coordinate(mesh)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return spread.step(tokens.chunk(shares)[share], targets.chunk(shares)[share])

    ours = train(spread.module, step, lambda: spread.clip_grad_norm_(float("inf")), 3)
    theirs = alone(case.style)
    if case.pp == 1:
        ours |= logits(spread, model.gather_logits)
    else:
        theirs = {name: value for name, value in theirs.items() if name in ours}
    return differences(ours, theirs)


CHOSEN = [
    Case((2, 2), recompute=True),
    Case((2, 2), style="gelu", overlap="summa"),
    Case((1, 2, 2), style="gelu"),
    Case((2, 1, 2), overlap="chunked"),
    Case((2, 2, 2), style="gelu"),
    Case((2, 2), depth=2, overlap="summa"),
    Case((1, 2, 1), dp=2, zero=3, style="gelu"),
]
BESIDE = [
    Case((1, 1, 2), style="gelu"),
    Case((2, 2, 1), style="gelu", recompute=True),
    Case((4, 1), style="gelu"),
    Case((1, 2), dp=2, zero=2),
    Case((2, 1, 1), dp=2),
    Case((2, 1, 1), pp=2, style="gelu"),
    Case((1, 2, 1), pp=2, schedule="interleaved_zb"),
    Case((2, 2), dp=2, zero=3, style="gelu"),
    Case((1, 2, 2), dp=2, zero=1),
    Case((1, 2, 2), pp=2, style="gelu"),
    Case((2, 2, 2), overlap="chunked"),
    Case((4, 1, 2)),
    Case((2, 2), depth=2, style="gelu"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [*CHOSEN, *(pytest.param(case, marks=pytest.mark.nightly) for case in BESIDE)], ids=str
)
def test_a_grid_trains_as_one_process_does(ranks: Any, case: Case):
    """The same fresh bits from a seed; then losses, gradients, their norm, logits, and parameters after three steps."""
    assert ranks(case.world, _train_body, tuple(case)) == [[]] * case.world


# --- checkpoints ------------------------------------------------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"grid": (1, 2, 2)},
    {"dp": 2, "tp": 2},
    {"grid": (2, 2)},
    {"dp": 2, "grid": (1, 2, 1)},
    {},
]


def _hop(rank: int, world: int, layout: dict[str, Any], folder: Path, step: int) -> tuple[float, dict[str, Any]]:
    """Load the last checkpoint, train a step, save; returns the loss and the parameters."""
    mesh = init_mesh(**layout)
    kind = GridTransformer if "grid" in layout else ParallelTransformer
    with torch.device("meta"):
        model = kind(config("gelu"), mesh=mesh, dtype=torch.float64)
    spread = parallelize(model, mesh, seed=SEED, zero=2 if "dp" in layout else 0)
    optimizer = torch.optim.AdamW(spread.parameters(), lr=0.01)
    if step:
        load_checkpoint(folder, spread.module, optimizer)
    share, shares = data_coordinate(mesh)
    loss = spread.step(*(rows.chunk(shares)[share] for rows in batches(len(LAYOUTS))[step]))
    optimizer.step()
    save_checkpoint(folder, spread.module, optimizer)
    return loss.item(), {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.ranks
def test_checkpoints_pass_between_grids_one_axis_and_one_process(ranks: Any, tmp_path: Path):
    expected = alone("gelu", len(LAYOUTS))
    for step, layout in enumerate(LAYOUTS):
        world = layout.get("dp", 1) * layout.get("tp", 1) * torch.Size(layout.get("grid", ())).numel()
        (loss, params), *_ = ranks(world, _hop, layout, tmp_path / "run", step)
        assert loss == pytest.approx(float(expected[f"loss {step}"]), rel=BUDGET), layout
    assert not differences(params, {name: expected[name] for name in params})


# --- each collective is needed ----------------------------------------------------------------------------------------


def _omit_body(rank: int, world: int, grid: tuple[int, ...], depth: int) -> dict[str, list[str]]:
    """Site -> what is wrong on this rank when the collectives there are left out; "" leaves none out."""
    generator = torch.Generator().manual_seed(0)
    one = ParallelTransformer(config("gelu"), dtype=torch.float64)
    with torch.no_grad():
        for param in one.parameters():  # fresh biases are zeros and norms ones, whose parts are all alike
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.3)
    model = GridTransformer(config("gelu"), mesh=init_mesh(grid=grid, depth=depth), dtype=torch.float64)
    model.load_state_dict(one.state_dict())

    def results(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss = model(*batches(1)[0])
        loss.backward()
        grads = {f"gradient of {name}": whole(param.grad) for name, param in model.named_parameters()}
        return {"loss": loss.detach(), **grads}

    expected = results(one)

    def step() -> list[str]:
        return differences(results(model), expected)

    step()
    collectives.reset_counts()
    step()
    found = {}
    for site in ["", *sites_seen()]:
        with omit(site) if site else contextlib.nullcontext():
            found[site] = step()
    return found


LINEAR = {"in", "in.again", "in.grad", "weight", "weight.again", "weight.grad", "bias.grad"}
CUBE = LINEAR | {"out", "out.grad", "bias"}  # a turned layer gathers its bias


def _sites(linear: set[str], *others: str) -> set[str]:
    """Those of the layers, of which the head has no bias, and ``others``."""
    layers = {f"{layer}.{site}" for layer in ("attention", "mlp", "head") for site in linear}
    both = {"norm.numbers", "norm.numbers.grad", "embedding.weight", "embedding.weight.grad", "loss.tokens"}
    return (layers | both | set(others)) - {"head.bias", "head.bias.grad"}


OVER_K = ("loss.max", "loss.sum", "embedding", "embedding.grad", "norm.grad")


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "depth", "sites"),
    [
        ((2, 2, 2), 1, _sites(CUBE, *OVER_K, "norm.weight", "norm.weight.grad")),
        ((2, 2), 2, _sites(LINEAR | {"depth.grad"}, *OVER_K, "embedding.depth.grad")),
    ],
    ids=["2x2x2", "2x2-depth2"],
)
def test_every_collective_is_needed(ranks: Any, grid: tuple[int, ...], depth: int, sites: set[str]):
    found = ranks(8, _omit_body, grid, depth)
    assert found[0].keys() == sites | {""}
    assert not found[0][""]
    for site in sites:
        assert any(wrong[site] for wrong in found), f"no rank notices that {site} is missing"


# --- what else reads a model over a grid ------------------------------------------------------------------------------


def _readers(rank: int, world: int, folder: Path) -> list[str]:
    whole_model = ParallelTransformer(PLAIN)
    whole_model.init_weights(SEED)
    mesh = init_mesh(grid=(1, 2, 2))
    model = GridTransformer(PLAIN, mesh=mesh, params="local" if folder.name == "local" else "dtensor")
    model.load_state_dict(whole_model.state_dict())  # each rank keeps its part of whole tensors
    found = full_state_dict(model)
    wrong = [name for name, value in whole_model.state_dict().items() if not torch.equal(value, found[name])]
    export_hf(model, folder)
    said = str(explain(model))
    for line in ("weight [24/2, 16/2]", "weight [16/2, 32/2]", "rms_norm: reference"):
        wrong += [line] * (line not in said)
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("params", ["dtensor", pytest.param("local", marks=pytest.mark.nightly)])
def test_whole_tensors_go_in_and_out(ranks: Any, tmp_path: Path, params: str):
    assert ranks(4, _readers, tmp_path / params) == [[]] * 4
    tokens, targets = batches(1)[0]
    expected = ParallelTransformer(PLAIN)
    expected.init_weights(SEED)
    assert_same_model(expected, load_hf(tmp_path / params), tokens, targets)


def _own_loss(rank: int, world: int) -> list[str]:
    """What differs in the gradients of a loss that each rank forms from gathered logits."""
    tokens, targets = batches(1)[0]
    one = ParallelTransformer(config("gelu"), dtype=torch.float64)
    found: list[dict[str, torch.Tensor]] = []
    meshes = init_mesh(grid=(1, 2, 2)), init_mesh(grid=(2, 2))
    for model in (one, *(GridTransformer(config("gelu"), mesh=mesh, dtype=torch.float64) for mesh in meshes)):
        model.init_weights(SEED)
        F.cross_entropy(model.gather_logits(model(tokens)).flatten(0, 1), targets.flatten()).backward()
        found.append({f"gradient of {name}": whole(param.grad) for name, param in model.named_parameters()})
    return [each for ours in found[1:] for each in differences(ours, found[0])]


@pytest.mark.ranks
def test_a_loss_of_gathered_logits_is_counted_once(ranks: Any):
    assert ranks(4, _own_loss) == [[]] * 4


def _norms(rank: int, world: int) -> list[float]:
    """Norms of the gradients of plain parameters, of which some axes hold copies."""
    found = []
    for grid, depth in (((1, 2, 2), 1), ((1, 2), 2)):
        mesh = init_mesh(grid=grid, depth=depth)
        model = GridTransformer(config("gelu"), mesh=mesh, params="local", dtype=torch.float64)
        model.init_weights(SEED)
        model(*batches(1)[0]).backward()
        found.append(GradientClipper(model.parameters(), float("inf"), mesh).clip().item())
    return found


@pytest.mark.ranks
def test_the_norm_counts_copies_of_plain_parameters_once(ranks: Any):
    expected = pytest.approx([float(alone("gelu", 1)["norm"])] * 2, rel=BUDGET)
    assert all(found == expected for found in ranks(4, _norms))


def _unequal(rank: int, world: int) -> dict[str, str]:
    """What is said of layers and weights that differ between ranks."""
    cube, deep = init_mesh(grid=(2, 2, 1)), init_mesh(grid=(1, 2), depth=2)
    mlp = GridMLP(8, 16, gated=True, activation="silu" if rank else "relu", mesh=cube)
    attention = GridAttention(16, 4, window=3 if rank else None, mesh=cube)
    model = GridTransformer(PLAIN, mesh=deep)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1 + rank // 2)  # one copy of the two
    found = {}
    for name, call in {
        "activation": lambda: mlp(torch.zeros(4, 4)),
        "window": lambda: attention(torch.zeros(8, 8), batch_size=4),
        "copies": lambda: parallelize(model, deep),
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        found[name] = str(caught.value)
    return found


@pytest.mark.ranks
def test_ranks_that_differ_are_told_so(ranks: Any):
    for said in ranks(4, _unequal):
        assert "GridMLP: activation is 'relu' on rank 0 and 'silu' on rank 1" in said["activation"]
        assert "GridAttention: window is None on rank 0 and 3 on rank 1" in said["window"]
        assert "the checksum of model.layers.0.mlp.up_proj.weight is" in said["copies"]


class _Scaled(nn.Module):
    """A layer over a grid beside a parameter that every rank holds whole, and sees by its own features alone."""

    def __init__(self, mesh: Any, scale: float) -> None:
        super().__init__()
        self.up = GridLinear(8, 8, mesh=mesh, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * self.scale).square().mean() + 0 * targets.sum()


def _whole_parameters(rank: int, world: int) -> dict[str, str]:
    """What is said of whole parameters beside a grid: of other values, of other gradients, and of other batches."""
    mesh = init_mesh(grid=(1, 2, 2))
    x = torch.ones(4, 4, dtype=torch.float64)
    spread = parallelize(_Scaled(mesh, 1.0), mesh)
    found = {}
    for name, call in {
        "values": lambda: parallelize(_Scaled(mesh, 1.0 + rank), mesh),
        "batches": lambda: spread.step(x + rank, torch.zeros(4)),
        "gradients": lambda: spread.step(x, torch.zeros(4)),
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        found[name] = str(caught.value)
    return found


@pytest.mark.ranks
def test_parameters_that_a_grid_leaves_whole_are_compared(ranks: Any):
    for said in ranks(4, _whole_parameters):
        assert "the checksum of scale is" in said["values"]
        assert said["batches"].startswith("ranks 0 and 1 differ along a grid or pp alone")
        assert said["gradients"].startswith("step: the gradients of scale differ between tensor-parallel ranks")


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refusals(rank: int, world: int) -> dict[str, str]:
    found = {}

    def refused(name: str, call: Any) -> None:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        found[name] = str(caught.value)

    cube, flat = init_mesh(grid=(2, 2, 1)), init_mesh(grid=(2, 2))
    tp = init_mesh(tp=4)
    make = lambda mesh, **sizes: GridTransformer(config("gated", **sizes), mesh=mesh, device="meta")
    refused("hidden", lambda: make(cube, hidden_size=18, head_dim=4))
    refused("intermediate", lambda: make(flat, intermediate_size=33))
    refused("heads", lambda: make(flat, num_heads=3, num_kv_heads=3, head_dim=4))
    refused("vocabulary", lambda: make(flat, vocab_size=25))
    refused("features", lambda: GridLinear(6, 8, mesh=cube, device="meta"))
    refused("dropout", lambda: make(flat, residual_dropout=0.1))
    refused("summa", lambda: GridTransformer(config("gated"), mesh=cube, overlap="summa"))
    refused("sequence", lambda: GridTransformer(config("gated"), mesh=cube, sequence_parallel=True))
    refused("layer", lambda: ParallelMLP(8, 16, mesh=cube))
    refused("no grid", lambda: GridLinear(8, 16, mesh=tp))
    model = GridTransformer(config("gated"), mesh=cube, dtype=torch.float64)
    tokens, targets = batches(1)[0]
    refused("batch", lambda: model(tokens[:3], targets[:3]))
    refused("no sequences", lambda: model(tokens[:0], targets[:0]))
    refused("target", lambda: model(tokens, targets.index_fill(0, torch.tensor(3), VOCAB)))  # of the last rank alone
    gathered = GridTransformer(config("gated"), mesh=flat, dtype=torch.float64)
    gathered.lm_head.register_forward_hook(lambda *given: gathered.gather_logits(given[2]))
    refused("gathered logits", lambda: gathered(tokens, targets))
    refused("attention dropout", lambda: GridAttention(16, 4, dropout_p=0.1, mesh=flat))
    refused("served", lambda: Engine(model, num_blocks=8))
    refused("strict", lambda: GridLinear(8, 16, mesh=flat, overlap="chunked", strict=True))
    refused("packed", lambda: model(tokens[0], cu_seqlens=torch.tensor([0, 4])))
    thin = GridTransformer(config("gated"), mesh=init_mesh(dp=2, grid=(1, 1, 2)), dtype=torch.float64)
    refused("tokens", lambda: thin(tokens[:1, :3], targets[:1, :3]))
    refused("other mesh", lambda: parallelize(model, flat))
    refused("no grid in it", lambda: parallelize(model, tp))
    refused("micro-batch", lambda: parallelize(model, cube, microbatches=2).step(tokens, targets))
    deep = init_mesh(grid=(1, 2), depth=2)
    over = lambda **how: parallelize(GridTransformer(config("gated"), mesh=deep, device="meta"), deep, **how)
    refused("cast copies", lambda: over(precision="bf16"))
    refused("offloaded copies", lambda: over(offload=True))
    refused("other kind", lambda: parallelize(ParallelTransformer(config("gated", num_kv_heads=4), mesh=tp), cube))
    refused("folder", lambda: load_hf("nowhere", mesh=cube))
    refused("compiled", lambda: torch.compile(GridLinear(8, 16, mesh=flat), fullgraph=True)(torch.zeros(2, 4)))
    refused("both", lambda: init_mesh(grid=(2, 2), tp=2))
    refused("one size", lambda: init_mesh(grid=4))
    refused("four axes", lambda: init_mesh(grid=(2, 2, 1, 1)))
    refused("copies", lambda: init_mesh(dp=2, grid=(1, 1), depth=2))
    refused("depth", lambda: init_mesh(depth=2))
    refused("world", lambda: init_mesh(grid=(2, 2, 2)))
    return found


@pytest.mark.ranks
def test_what_a_grid_cannot_divide_is_refused_with_what_would_fit(ranks: Any):
    said = ranks(4, _refusals)[0]
    expected = {
        "hidden": "hidden_size=18 does not divide by the 4 parts that a grid of (i=2, j=2, k=1) stores weights in: "
        "make it a multiple, such as 16 or 20,",
        "intermediate": "intermediate_size=33 does not divide by the 2 parts that a grid of (i=2, k=2, depth "
        "1) stores weights in",
        "heads": "num_heads=3 does not divide by the 2 ranks along k",
        "vocabulary": "vocab_size=25 does not divide by the 2 ranks along k of a grid of (i=2, k=2, depth 1): make "
        "it a multiple, such as 24 or 26,",
        "features": "in_features=6 does not divide by the 4 parts",
        "dropout": "residual_dropout: a grid has no dropout; set it to 0",
        "summa": "GridTransformer: overlap='summa' over a grid of (i=2, j=2, k=1): panels want features that both axes "
        "split, so make the mesh by init_mesh(grid=(rows, columns))",
        "sequence": "GridTransformer: sequence_parallel=True over a grid",
        "layer": "ParallelMLP: mesh: a grid, over which this layer cannot be split: build GridLinear, GridMLP,",
        "no grid": "GridLinear: mesh: it holds no grid, but 4 ranks: make it by init_mesh(grid=(i, j, k))",
        "batch": "a batch of 3 sequences does not divide by 4: a grid of (i=2, j=2, k=1) attends over whole sequences, "
        "each on the ranks of one k; pass a multiple, such as 4",
        "no sequences": "a batch of 0 sequences does not divide by 4",
        "target": f"target {VOCAB} is neither in the vocabulary of {VOCAB} nor ignore_index=-100",
        "gathered logits": "on each of 2 ranks for vocab_size=24: expected",
        "attention dropout": "dropout_p=0.1: attention over a grid has no dropout; leave it at 0",
        "served": "Engine: a model over a grid: load its checkpoint or its state_dict into a ParallelTransformer",
        "strict": "overlap='chunked' was asked for with strict=True, but over a grid of (i=2, k=2, depth 1) no axis",
        "packed": "cu_seqlens: a grid divides a batch into whole sequences",
        "tokens": "1 sequences of 3 tokens do not divide by the 2 ranks over which a grid of (i=1, j=1, k=2) splits "
        "tokens: pass sequences of a multiple of 2 tokens, or a multiple of 2 sequences",
        "other mesh": "the model was built for grid_k=1, grid_j=2, grid_i=2 and the mesh has grid_k=2, grid_i=2: build "
        "a GridTransformer with mesh=mesh",
        "no grid in it": "and the mesh has no grid: build a ParallelTransformer with mesh=mesh",
        "micro-batch": "a micro-batch of 2 sequences does not divide by 4",
        "cast copies": "precision='bf16' over a grid with a depth of 2: FSDP2 does this, and cannot place parameters",
        "offloaded copies": "offload=True over a grid with a depth of 2",
        "one size": "init_mesh: grid=4: expected the sizes of its axes, (i, j, k) or (rows, columns)",
        "other kind": "the model was built for no grid and the mesh has grid_k=1, grid_j=2, grid_i=2: build a "
        "GridTransformer",
        "folder": "hold a grid and no 'tp': only GridTransformer and its layers are split over one",
        "compiled": "a layer over a grid runs eagerly",
        "both": "init_mesh: tp=2 and grid=(2, 2): a grid takes the place of tp",
        "four axes": "init_mesh: grid=(2, 2, 1, 1) with depth=1: expected (i, j, k) without a depth, or (rows, "
        "columns)",
        "copies": "init_mesh: depth=2 and dp=2: FSDP2 cannot place parameters over a depth; dp=4 over the same grid",
        "depth": "init_mesh: depth=2 without a grid",
        "world": "init_mesh: dp=1 * pp=1 * grid=(2, 2, 2) = 8, but 4 processes were started",
    }
    assert said.keys() == expected.keys()
    for name, part in expected.items():
        assert part in said[name], name
