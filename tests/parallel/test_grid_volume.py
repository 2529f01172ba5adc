"""What a layer over a grid moves: each rank's recorded bytes equal the closed forms of ``parallel/grid/volume.py``, and
SUMMA's panels hold less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_case import VOCAB, batches, config
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse.layers.grid.linear import GridLinear
from shardfuse.layers.grid.transformer import GridTransformer
from shardfuse.parallel.audit.audit import Audit
from shardfuse.parallel.audit.entries import Entry
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.grid import volume
from shardfuse.parallel.grid.grid import size_of
from shardfuse.parallel.grid.volume import Moved, Split

T, K, N = 32, 48, 64
FOUR = [((2, 2), 1), ((1, 2, 2), 1), ((2, 1, 2), 1)]
EIGHT = [((2, 2, 2), 1), ((2, 2), 2)]
MORE = [((4, 1), 1), ((2, 2, 1), 1), ((1, 1, 4), 1), ((4, 1, 1), 1)]
MORE_OF_EIGHT = [((1, 2, 4), 1), ((4, 2), 1), ((2, 4), 1), ((4, 1, 2), 1)]


def _split(grid: tuple[int, ...], depth: int) -> Split:
    return Split(grid[0], 1, grid[1], depth, flat=True) if len(grid) == 2 else Split(*grid)


def _moved(entries: Iterable[Entry], itemsize: int = 8) -> Counter[str]:
    """Elements that a rank sends, by the first two parts of a site. Of the panels of a broadcast (or a sum) each rank
    owns as many, and receives (sends) none of those."""
    found: Counter[str] = Counter()
    for entry in entries:
        share = (entry.ranks - 1) / entry.ranks
        nbytes = entry.payload * share if entry.kind in ("broadcast", "reduce") else entry.sent
        found[".".join(entry.site.split(".")[:2])] += nbytes / itemsize
    return found


def _same(found: Counter[str], site: str, expected: Moved) -> list[str]:
    names = {"in": expected.inputs, "weight": expected.weights, "out": expected.outputs, "depth": expected.copies}
    wanted = {f"{site}.{name}": amount for name, amount in names.items() if amount}
    return [
        f"{name}: {found.get(name)} instead of {wanted.get(name)}"
        for name in sorted(found.keys() | wanted.keys())
        if not isclose(found.get(name, 0), wanted.get(name, 0))
    ]


def _linear_body(rank: int, world: int, grids: list[tuple[tuple[int, ...], int]]) -> list[str]:
    wrong = []
    for grid, depth in grids:
        mesh, split = init_mesh(grid=grid, depth=depth), _split(grid, depth)
        for turned in (False, True):
            for overlap in ("none", "summa") if split.flat else ("none", "chunked"):
                layer = GridLinear(
                    K, N, bias=False, turned=turned, mesh=mesh, overlap=overlap, dtype=torch.float64, site="it"
                )
                axes = layer.axes
                rows = T // (split.i * split.depth) // (1 if split.flat else axes.outer.size)
                features = K // (axes.outer.size if split.flat else axes.inner.size)
                x = torch.randn(rows, features, dtype=torch.float64, requires_grad=True)
                with Audit(mesh) as audit:
                    y = layer(x)
                    audit.next_step()
                    y.sum().backward()
                steps = [[entry for entry in audit.entries if entry.step == step] for step in (0, 1)]
                forward = volume.forward(T, K, N, split, turned=turned)
                both = volume.step(T, K, N, split, turned=turned)
                backward = Moved(*(whole - once for whole, once in zip(both, forward)))
                for when, entries, expected in (("forward", steps[0], forward), ("backward", steps[1], backward)):
                    said = f"{grid} depth {depth} {overlap} {'turned ' * turned}{when}"
                    wrong += [f"{said}: {each}" for each in _same(_moved(entries), "it", expected)]
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "grids"),
    [
        (4, FOUR),
        (8, EIGHT),
        pytest.param(4, MORE, marks=pytest.mark.nightly),
        pytest.param(8, MORE_OF_EIGHT, marks=pytest.mark.nightly),
    ],
    ids=["4", "8", "more-4", "more-8"],
)
def test_a_layer_moves_what_the_closed_forms_say(ranks: Any, world: int, grids: list[Any]):
    assert ranks(world, _linear_body, grids) == [[]] * world


def _two_passes_body(rank: int, world: int) -> dict[str, int]:
    mesh = init_mesh(grid=(1, 2, 2))
    layer = GridLinear(K, N, mesh=mesh, params="local", dtype=torch.float64, site="it")
    x = torch.randn(T // 2, K // 2, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    dy, params = torch.randn_like(y), list(layer.parameters())
    together = torch.autograd.grad(y, [x, *params], dy, retain_graph=True)
    collectives.reset_counts()
    first = torch.autograd.grad(y, x, dy, retain_graph=True)
    then = torch.autograd.grad(y, params, dy)
    assert all(map(torch.equal, together, (*first, *then)))
    return {site: count for (_, site), count in collectives.calls.items()}


@pytest.mark.ranks
def test_a_split_backward_repeats_no_collective(ranks: Any):
    sites = ("it.in.again", "it.out.grad", "it.in.grad")  # i has one rank, so no weight travels
    assert ranks(4, _two_passes_body) == [dict.fromkeys(sites, 1)] * 4


@pytest.mark.parametrize("q", [2, 3, 8])
def test_the_closed_forms_of_the_papers(q: int):
    flat, cube = Split(q, 1, q, flat=True), Split(q, q, q)
    assert isclose(sum(volume.step(T, K, N, flat)), 3 * (q - 1) / q**2 * (T * K + K * N))
    again = (q - 1) / q**3 * (T * K + K * N)
    for turned in (False, True):
        expected = 2 * (q - 1) / q**3 * (T * K + K * N + T * N) + again
        assert isclose(sum(volume.step(T, K, N, cube, turned=turned)), expected)
    one = volume.step(T, K, N, Split(k=q))  # Megatron's, with sequence parallelism and x gathered again
    assert one == Moved(3 * (q - 1) / q * T * K, 0, 0)
    zero = volume.step(T, K, N, Split(i=q))  # ZeRO-3: two gathers and one reduce-scatter of the weight
    assert zero == Moved(0, 3 * (q - 1) / q * K * N, 0)


def _decoder_body(rank: int, world: int, grid: tuple[int, ...], depth: int, style: str) -> list[str]:
    sizes = config(style)
    mesh, split = init_mesh(grid=grid, depth=depth), _split(grid, depth)
    model = GridTransformer(sizes, mesh=mesh, dtype=torch.float64)
    (batch,) = batches(1)
    model(*batch).backward()  # the first call compares the ranks' arguments
    with Audit(mesh) as audit:
        model(*batch).backward()
    found: Counter[str] = Counter()
    for site, amount in _moved(audit.entries).items():
        found["norm.grad" if site == "norm.weight" else site if site.startswith("norm") else site.split(".")[0]] += (
            amount
        )
    tokens, width, kv = batch[0].numel(), sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim
    ffn = sizes.intermediate_size * (2 if sizes.gated else 1)
    step = lambda K, N, turned=False: sum(volume.step(tokens, K, N, split, turned=turned))
    layers, norms = sizes.num_layers, 2 * sizes.num_layers + 1
    half = lambda ranks: (ranks - 1) / ranks
    shared, rows = model.grid.hidden.size, tokens // size_of(model.grid.rows)
    mine = tokens // size_of(model.grid.sequences)
    heads = sizes.num_heads / split.k if sizes.attention_sinks else 0
    biases = lambda K, outer: 2 * half(split.i) * K / outer + 2 * half(split.depth) * K / outer if sizes.bias else 0.0
    back = split.k if split.flat else split.j
    # Norms' parameters are stored in parts of i and j, or over two axes of k.
    within = half(split.i) / split.j + half(split.k) / split.j / split.i
    if split.flat:
        within = (half(split.i) + half(split.depth)) / split.k
    table = VOCAB * width / split.j / split.k
    expected = {
        "attention": layers
        * (
            step(width, width + 2 * kv)
            + step(width, width, True)
            + biases(width + 2 * kv, split.k)
            + biases(width, back)
            + 2 * heads * sum(half(axis.size) for axis in model.grid.sequences)
        ),
        "mlp": layers
        * (step(width, ffn) + step(sizes.intermediate_size, width, True) + biases(ffn, split.k) + biases(width, back)),
        "head": step(width, VOCAB),
        "embedding": 2 * half(split.i) * table
        + 2 * half(split.k) * tokens * width / (split.i * split.depth * split.j)
        + 2 * half(split.depth) * table / split.i,
        "norm.numbers": norms * (1 if sizes.gated else 2) * rows * ((shared - 1) + 2 * half(shared)),
        "norm.grad": norms * (1 if sizes.gated else 2) * 2 * width * within,
        "loss": 3 * 2 * half(split.k) * mine + 2 * sum(half(axis.size) for axis in model.grid.sequences),
    }
    return [
        f"{name}: {found[name]} instead of {expected.get(name)}"
        for name in sorted(found.keys() | expected.keys())
        if not isclose(found[name], expected.get(name, 0.0), abs_tol=1e-9)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "depth", "style"),
    [
        ((1, 2, 2), 1, "gelu"),
        ((2, 2), 1, "gated"),
        pytest.param((2, 2, 2), 1, "gated", marks=pytest.mark.nightly),
        pytest.param((2, 2), 2, "gelu", marks=pytest.mark.nightly),
    ],
)
def test_a_decoder_moves_what_its_layers_do(ranks: Any, grid: tuple[int, ...], depth: int, style: str):
    world = depth * torch.Size(grid).numel()
    assert ranks(world, _decoder_body, grid, depth, style) == [[]] * world


def test_the_page_shows_the_table_of_the_closed_forms():
    page = (Path(__file__).parents[2] / "docs" / "grid.md").read_text()
    assert page.partition("<!-- volumes -->\n")[2].partition("\n<!-- /volumes -->")[0] == volume.table()
    for said in (f"width {volume.WIDTH:,} with {volume.HEADS} heads", f"sequences of {volume.LENGTH:,} tokens"):
        assert said in page


def test_what_the_page_says_of_the_rivals():
    """Of every row: a square and a cube never move less than ZeRO-3 x tensor parallelism, the best grid never more."""
    gains = {}
    for ranks in volume.RANKS:
        for sequences in volume.SEQUENCES:
            tokens = sequences * volume.LENGTH
            found = volume.layouts(tokens, volume.WIDTH, ranks, sequences=sequences, heads=volume.HEADS)
            moved = {
                name: volume.block(tokens, volume.WIDTH, s) for name, s in found._asdict().items() if s is not None
            }
            if "zero_tp" not in moved:
                continue
            assert all(moved[name] > moved["zero_tp"] for name in ("flat", "cube") if name in moved)
            gains[ranks, sequences] = 1 - moved["best"] / moved["zero_tp"]
    assert all(gain >= 0 for gain in gains.values())
    assert max(gains, key=lambda row: gains[row]) == (512, 32)  # many ranks, few tokens
    assert gains[8, 128] == gains[64, 512] == 0


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returned."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.found = max(self.found, tensor.untyped_storage().nbytes() // 8)
        return out


def _memory_body(rank: int, world: int, overlap: str) -> int:
    layer = GridLinear(K, 8, bias=False, mesh=init_mesh(grid=(2, 2)), overlap=overlap, dtype=torch.float64)
    x = torch.randn(T // 2, K // 2, dtype=torch.float64, requires_grad=True)
    with _Largest() as largest:
        layer(x).sum().backward()
    return largest.found


@pytest.mark.ranks
def test_panels_hold_half_of_what_a_gather_holds(ranks: Any):
    block = T // 2 * K  # of x
    assert ranks(4, _memory_body, "none") == [block] * 4
    assert ranks(4, _memory_body, "summa") == [block // 2] * 4
