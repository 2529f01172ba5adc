"""``parallelize`` of fused foreign models: losses, gradients and parameters are those of one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfuse import explain, fuse, init_mesh, parallelize
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core.mesh import data_coordinate

pytest.importorskip("transformers")
from foreign import foreign, without_dropout
from fused_layout_case import LENGTH, STEPS, Layout, batches, compare, optimizer_of, whole
from layout_case import BUDGET

OFTEN = [
    *(Layout("llama", dp=2, zero=zero, microbatches=zero or None) for zero in range(4)),
    Layout("gpt2", dp=2, zero=3),
    Layout("llama", pp=2, schedule="1f1b", microbatches=3),
    Layout("gemma2", pp=2, schedule="interleaved_1f1b"),
    Layout("gpt2", pp=2, schedule="zbv"),
    Layout("llama", dp=2, tp=2, zero=3, sequence_parallel=True),
]
REST = [
    *(
        Layout(kind, dp=2, zero=zero, microbatches=2)
        for kind in ("gemma2", "gpt2", "opt", "falcon")
        for zero in range(4)
    ),
    *(
        Layout(kind, pp=2, schedule=schedule)
        for kind in ("llama", "gemma2", "gpt2", "opt", "falcon")
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev")
    ),
    *(Layout(kind, dp=2, pp=2, zero=zero, schedule="1f1b") for kind in ("llama", "gpt2") for zero in range(4)),
    Layout("gpt2", dp=2, pp=2, zero=3, schedule="interleaved_1f1b"),
    Layout("gemma2", dp=2, pp=2, zero=2, schedule="zbv"),
    Layout("llama", dp=2, tp=2, zero=3),
    *(
        Layout(kind, dp=2, tp=2, zero=3, microbatches=2, recompute=True, sequence_parallel=True)
        for kind in ("gpt2", "phi3", "olmo2")
    ),
    *(Layout(kind, dp=2, tp=2, zero=3, microbatches=2) for kind in ("gemma2", "gpt2", "opt", "falcon")),
    *(Layout(kind, pp=2, tp=2, schedule="1f1b") for kind in ("llama", "gemma2", "opt")),
    Layout("llama", dp=2, zero=3, recompute=True),
    Layout("gemma2", pp=2, schedule="1f1b", recompute=True),
    Layout("gpt2", pp=2, schedule="zbv", recompute=True),
    Layout("mixtral", dp=2, zero=3),
    Layout("mixtral", pp=2, schedule="1f1b"),
]


def _body(rank: int, world: int, fields: tuple[Any, ...]) -> list[str]:
    return compare(Layout(*fields))


@pytest.mark.parametrize(
    "layout", [*OFTEN, *(pytest.param(layout, marks=pytest.mark.nightly) for layout in REST)], ids=str
)
def test_what_is_spread_trains_as_one_process_does(ranks: Any, layout: Layout):
    assert ranks(layout.world, _body, tuple(layout)) == [[]] * layout.world


# ------------------------------------------------------------------------------------------------ positions, precision


def _positions(rank: int, world: int, kind: str, pp: int) -> float:
    """The error of a loss with positions that begin anew in the middle, to the stock model's."""
    mesh = init_mesh(dp=world // pp, pp=pp, device_type="cpu")
    stock, model = (without_dropout(foreign(kind, torch.float64)) for _ in range(2))
    spread = parallelize(fuse(model, mesh), mesh, zero=3 if pp == 1 else 0, schedule=None if pp == 1 else "1f1b")
    tokens, targets = batches()[0]
    positions = torch.arange(LENGTH) % 5
    logits = stock(tokens, position_ids=positions.expand(tokens.shape), use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    share, readers = data_coordinate(mesh)
    mine = (part.tensor_split(readers)[share] for part in (tokens, targets))
    return accuracy.relative_error(spread.step(*mine, positions=positions), expected)


@pytest.mark.parametrize(
    ("kind", "pp"),
    [("llama", 2), pytest.param("gpt2", 1, marks=pytest.mark.nightly)],  # OPT refuses positions that restart
)
def test_positions(ranks: Any, kind: str, pp: int):
    assert max(ranks(2, _positions, kind, pp)) <= accuracy.FACTOR * accuracy.rounding(torch.float32, terms=64)


def _bf16(rank: int, world: int, pp: int) -> tuple[float, float]:
    """The loss of a step in bf16 of fp32 parameters, and the next one, as a difference from fp32's."""
    found = []
    for precision in (None, "bf16"):
        mesh = init_mesh(dp=world // pp, pp=pp, device_type="cpu")
        model = fuse(without_dropout(foreign("llama")), mesh)
        spread = parallelize(model, mesh, precision=precision, schedule=None if pp == 1 else "1f1b")
        optimizer = torch.optim.SGD(spread.parameters(), lr=0.1)
        share, readers = data_coordinate(mesh)
        mine = [part.tensor_split(readers)[share] for part in batches()[0]]
        losses = []
        for _ in range(2):
            losses.append(float(spread.step(*mine)))
            optimizer.step()
            optimizer.zero_grad()
        assert {param.dtype for param in spread.parameters()} == {torch.float32}
        found.append(losses)
    (first, second), (ours, then) = found
    assert then < ours
    return abs(ours / first - 1), abs(then / second - 1)


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_bf16(ranks: Any, pp: int):
    budget = accuracy.FACTOR * accuracy.rounding(torch.bfloat16, roundings=24)
    assert max(map(max, ranks(2, _bf16, pp))) <= budget


def _masks(rank: int, world: int) -> list[torch.Tensor]:
    """What this stage's layer drops in two steps and an evaluation of a model whose stages are seeded alike."""
    mesh = init_mesh(pp=2, device_type="cpu")
    spread = parallelize(fuse(foreign("gpt2").train(), mesh), mesh, schedule="1f1b", microbatches=2)
    torch.manual_seed(0)
    found: list[torch.Tensor] = []
    dropout = spread.module.transformer.h[rank].mlp.dropout
    dropout.register_forward_hook(lambda module, args, out: found.append(out == 0))
    for _ in range(2):
        spread.step(*batches()[0])
    assert "mlp.c_fc" in str(explain(spread.module))
    spread.evaluate(*batches()[0])
    return [torch.cat(found[i : i + 2]) for i in (0, 2, 4)]


def test_stages_and_steps_drop_apart(ranks: Any):
    (first, second, none), (other, _, _) = ranks(2, _masks)
    assert 0.02 < first.double().mean() < 0.3
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not none.any()


# ------------------------------------------------------------------------------------------------ initial weights


def _on_meta(kind: str, mesh: Any, seed: int | None = 3, **options: Any) -> Any:
    return parallelize(fuse(without_dropout(foreign(kind, device="meta"))), mesh, seed=seed, **options)


def _drawn(rank: int, world: int, kind: str) -> list[str]:
    """What is not drawn as a process alone draws it, or not as transformers' own models are."""
    model = _on_meta(kind, None).module
    state, buffers = model.state_dict(), dict(model.named_buffers())
    stock = type(model)._stock(model.config)
    assert state.keys() == stock.state_dict().keys()
    found = [
        f"{name}: spread {float(value.std()):.1e} instead of {float(state[name].std()):.1e}"
        for name, value in stock.state_dict().items()
        if value.numel() > 500 and not 0.8 < float(value.std()) / max(float(state[name].std()), 1e-9) < 1.25
    ]
    found += [name for name, value in stock.named_buffers() if not torch.equal(value, buffers[name])]
    for layout in ({"dp": 2, "zero": 3}, {"pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": "zbv"}):
        mesh = init_mesh(dp=layout.get("dp", 1), pp=layout.get("pp", 1), device_type="cpu")
        spread = _on_meta(kind, mesh, zero=layout.get("zero", 0), schedule=layout.get("schedule"))
        for name, param in spread.module.named_parameters():
            if not torch.equal(whole(param.detach()), state[name]):
                found.append(f"{name} in {layout}")
        found += [
            f"{name} in {layout}" for name, each in spread.module.named_buffers() if not each.equal(buffers[name])
        ]
    seeds = [_on_meta(kind, init_mesh(dp=2, device_type="cpu"), seed=seed) for seed in (None, 4)]
    first, other = (whole(next(each.parameters()).detach()) for each in seeds)
    return found + (["every seed draws the same"] if torch.equal(first, other) else [])


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("gpt2", "opt"))]
)
def test_what_is_on_meta_is_drawn_alike_in_every_layout(ranks: Any, kind: str):
    assert ranks(2, _drawn, kind) == [[]] * 2


def _refused(rank: int, world: int) -> None:
    mesh = init_mesh(tp=2, device_type="cpu")
    with pytest.raises(ValueError, match="LlamaForCausalLM is on meta and split over tensor-parallel ranks"):
        parallelize(fuse(foreign("llama", device="meta"), mesh), mesh, seed=0)
    with pytest.raises(ValueError, match=r"built for 1 tensor-parallel rank.*the mesh has tp=2.*fuse\(model, mesh\)"):
        parallelize(fuse(foreign("llama")), mesh)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returns an output object.*fuse\(model, mesh\) first"):
        parallelize(foreign("llama"), mesh)
    mesh = init_mesh(tp=2, device_type="cpu")
    divided = fuse(foreign("llama"), mesh, sequence_parallel=True)
    with pytest.raises(ValueError, match="sequence_parallel=True and pipeline stages"):
        divided.tied_parameters()
    mesh = init_mesh(pp=2, device_type="cpu")
    model = fuse(foreign("mixtral", output_router_logits=True))
    with pytest.raises(ValueError, match="output_router_logits=True adds a loss"):
        parallelize(model, mesh, schedule="1f1b")
    model = fuse(foreign("opt", layerdrop=0.5))
    with pytest.raises(
        ValueError, match="OPTForCausalLM cannot be cut into pipeline stages: its layers do not run once"
    ):
        parallelize(model, mesh, schedule="1f1b")
    with pytest.raises(ValueError, match="costs: 3 for a model of 4 parts"):
        parallelize(fuse(foreign("llama")), mesh, schedule="1f1b", costs=[1.0, 2.0, 1.0])


def test_what_cannot_be_spread_is_refused_on_every_rank(ranks: Any):
    ranks(2, _refused)


# ------------------------------------------------------------------------------------------------ checkpoints

CHAIN: list[dict[str, Any]] = [  # over two processes
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2, "schedule": "1f1b"},
    {"dp": 2, "zero": 1},
    {"pp": 2, "schedule": "zbv"},
    {"dp": 2, "zero": 0},
]


def _resumed(rank: int, world: int, folder: Path, number: int) -> tuple[float, float]:
    """A step in one layout of the chain, from the checkpoint of the one before: the loss, and that of one process."""
    options = dict(CHAIN[number])
    mesh = init_mesh(**{name: options.pop(name, 1) for name in ("dp", "pp", "tp")}, device_type="cpu")
    model = without_dropout(foreign("llama", torch.float64, tie_word_embeddings=True))
    names, first = list(model.state_dict()), next(model.parameters()).detach().clone()
    if number:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    spread = parallelize(fuse(model, mesh), mesh, **options)
    optimizer = optimizer_of(spread)
    if number:
        load_checkpoint(folder / str(number - 1), spread, optimizer, group=mesh)
    share, readers = data_coordinate(mesh)
    loss = spread.step(*(part.tensor_split(readers)[share] for part in batches()[number % STEPS]))
    optimizer.step()
    save_checkpoint(folder / str(number), spread, optimizer, group=mesh)
    state = full_state_dict(spread)
    assert set(state) <= set(names)
    if "pp" not in CHAIN[number]:
        assert [name for name in names if name in state] == names
        assert number or not torch.equal(state[names[0]], first)
    return float(loss), _alone_for(number + 1)[number]


@functools.cache
def _alone_for(steps: int) -> list[float]:
    model = fuse(without_dropout(foreign("llama", torch.float64, tie_word_embeddings=True)))
    optimizer, losses = optimizer_of(model), []
    for number in range(steps):
        tokens, targets = batches()[number % STEPS]
        loss = F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_each_layout_resumes_the_one_before(ranks: Any, tmp_path: Path):
    for number in range(len(CHAIN)):
        for loss, expected in ranks(2, _resumed, tmp_path, number):
            assert abs(loss - expected) <= BUDGET * expected, CHAIN[number]
