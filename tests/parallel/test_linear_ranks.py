"""The fused column- and row-parallel functions, apart from the sums that the layers' tests check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from products import PARAM_GRADS, around, order_of_backward

from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import functional
from shardfuse.kernels.runtime import dispatch
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.core.options import TPOptions
from shardfuse.parallel.core.sharding import ShardSpec, make_parameter, unwrap
from shardfuse.parallel.linear import column_linear, row_linear
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight

pytestmark = pytest.mark.ranks

T, D, FFN = 24, 16, 48
TERMS = 2 * (D + FFN)  # the chained sums of two products, forward and backward


def _whole(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """An MLP's logical operands."""
    shapes = {"x": (T, D), "w1": (FFN, D), "b1": (FFN,), "w2": (D, FFN), "b2": (D,), "dy": (T, D)}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


SHARD_DIMS = {"w1": 0, "b1": 0, "w2": 1, "b2": None}


def _params(whole: dict[str, torch.Tensor], params: str = "dtensor") -> dict[str, Any]:
    group = tp_group(dist.group.WORLD)
    made = {}
    for name, dim in SHARD_DIMS.items():
        spec = ShardSpec(name, whole[name].shape, dim, group)
        made[name] = make_parameter(whole[name][spec.index].clone(), spec, params)
    return made


def _mlp(x: torch.Tensor, p: dict[str, Any], group: Group | None = None, **options: Any) -> torch.Tensor:
    group = group or tp_group(dist.group.WORLD)
    into, out = (TPOptions(group, site=site, **options) for site in ("in", "out"))
    (h,) = column_linear(x, [p["w1"]], [p["b1"]], into, activation="gelu_tanh")
    return row_linear(h, p["w2"], p["b2"], out)


def _stock(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, p["w1"], p["b1"]), approximate="tanh"), p["w2"], p["b2"])


def _grads(y: torch.Tensor, dy: torch.Tensor, leaves: dict[str, Any]) -> dict[str, Any]:
    """The output and the leaves' gradients, as plain tensors."""
    for leaf in leaves.values():
        leaf.grad = None
    y.backward(dy.to(y.dtype))
    return {"y": y.detach()} | {name: unwrap([leaf.grad])[0][0] for name, leaf in leaves.items()}


def _reference(whole: dict[str, torch.Tensor], context: Callable[[], Any] | None = None) -> dict[str, torch.Tensor]:
    """This rank's parts of one process's output and gradients."""
    group = tp_group(dist.group.WORLD)
    leaves = {name: whole[name].clone().requires_grad_() for name in ("x", *SHARD_DIMS)}
    if context is None:
        y = _stock(leaves["x"], leaves)
    else:
        with context():
            y = _stock(leaves["x"], leaves)
    found = _grads(y, whole["dy"], leaves)
    for name, dim in SHARD_DIMS.items():
        found[name] = found[name][ShardSpec(name, whole[name].shape, dim, group).index]
    return found


def _verdicts(ours: dict[str, Any], low: dict[str, Any], oracle: dict[str, Any], **options: Any) -> list[str]:
    found = [
        accuracy.judge(name, out, low[name], oracle[name], terms=TERMS, roundings=4, **options)
        for name, out in ours.items()
    ]
    return [str(verdict) for verdict in found if not verdict.ok]


def _autocast_body(rank: int, world: int) -> list[str]:
    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    whole = _whole()
    x, p = whole["x"].clone().requires_grad_(), _params(whole)
    with autocast():
        y = _mlp(x, p)
    assert y.dtype == torch.bfloat16
    ours = _grads(y, whole["dy"], {"x": x, **p})
    assert all(ours[name].dtype == torch.float32 for name in ("x", *SHARD_DIMS))
    return _verdicts(ours, _reference(whole, autocast), _reference(_whole(torch.float64)), computed=torch.bfloat16)


def test_autocast_computes_in_bf16_and_returns_gradients_in_fp32(ranks: Any):
    assert ranks(2, _autocast_body) == [[], []]


def _triton_body(rank: int, world: int) -> list[str]:
    whole = _whole()
    x, p = whole["x"].clone().requires_grad_(), _params(whole)
    dispatch.counts.clear()
    ours = _grads(_mlp(x, p, impl="triton"), whole["dy"], {"x": x, **p})
    assert dispatch.counts == {("linear_act", "triton"): 2}
    return _verdicts(ours, _reference(whole), _reference(_whole(torch.float64)))


@pytest.mark.interpret
@pytest.mark.skipif(not dispatch.interpreting(), reason="CPU tensors: the kernels must be interpreted")
def test_the_kernels_run_between_the_collectives(ranks: Any):
    assert ranks(2, _triton_body) == [[], []]


def _frozen_body(rank: int, world: int) -> list[tuple[str, bool]]:
    """The result for each operand when only that one needs a gradient."""
    whole = _whole(torch.float64)
    expected = _reference(whole)
    low = _reference(_whole())
    found = []
    for wanted in ("x", *SHARD_DIMS):
        p = _params(whole)
        leaves = {"x": whole["x"].clone(), **p}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == wanted)
        collectives.reset_counts()
        _mlp(leaves["x"], p).backward(whole["dy"])
        assert (collectives.calls["all_reduce", "in.grad"] == 1) == (wanted == "x")  # no sum without a request
        for name, leaf in leaves.items():
            assert (leaf.grad is not None) == (name == wanted), (wanted, name)
        verdict = accuracy.judge(
            wanted, unwrap([leaves[wanted].grad])[0][0], low[wanted], expected[wanted], terms=TERMS
        )
        found.append((str(verdict), verdict.ok))
    return found


def test_only_what_wants_a_gradient_gets_one(ranks: Any):
    for found in ranks(2, _frozen_body):
        assert all(ok for _, ok in found), found


def _split_body(rank: int, world: int, sequence_parallel: bool) -> list[Any]:
    """Both layers in the two passes of a pipeline's split backward: each pass's products, and the errors."""
    whole, group = _whole(), tp_group(dist.group.WORLD)
    cut = slice(rank * T // world, (rank + 1) * T // world) if sequence_parallel else slice(None)
    x, p = whole["x"][cut].clone().requires_grad_(), _params(whole)
    y = _mlp(x, p, group, sequence_parallel=sequence_parallel)
    ours, ran = {"y": y.detach().clone()}, []
    with _noted() as calls:
        _, groups = stage_backward_input([y], [whole["dy"][cut]], [x], iter(p.values()))
        ran.append(list(calls))
        calls.clear()
        stage_backward_weight(iter(p.values()), groups)
        ran.append(list(calls))
    ours |= {name: unwrap([leaf.grad])[0][0] for name, leaf in {"x": x, **p}.items()}
    oracle, low = _reference(_whole(torch.float64)), _reference(whole)
    for name in ("x", "y"):
        oracle[name], low[name] = oracle[name][cut], low[name][cut]
    assert _verdicts(ours, low, oracle) == []
    return ran


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Record the products and collectives of a backward in the block."""
    calls: list[str] = []
    places = [(functional, "act_grad")]
    places += [(collectives, name) for name in ("all_gather", "start_all_reduce", "start_reduce_scatter")]
    originals = [getattr(*place) for place in places]

    def noting(name: str, original: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return note

    def noted(name: str, run: Any, of: Any) -> Any:
        calls.extend([name] * (sum(of[2]) if name == PARAM_GRADS else 1))
        return run()

    for (module, name), original in zip(places, originals):
        setattr(module, name, noting(name, original))
    try:
        with around(noted):
            yield calls
    finally:
        for (module, name), original in zip(places, originals):
            setattr(module, name, original)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_split_backward_runs_each_product_and_collective_once(ranks: Any, sequence_parallel: bool):
    inputs = ["input_grad", "act_grad", "input_grad", "start_all_reduce"]
    if sequence_parallel:
        inputs = ["all_gather", *inputs[:-1], "start_reduce_scatter"]
    for ran in ranks(2, _split_body, sequence_parallel):
        assert ran == [inputs, ["param_grads", "param_grads"]]


def _accumulated_body(rank: int, world: int, sequence_parallel: bool) -> list[str]:
    """Two micro-batches accumulated in fp32 buffers, and the sum of their gradients."""
    whole, group = _whole(), tp_group(dist.group.WORLD)
    cut = slice(rank * T // world, (rank + 1) * T // world) if sequence_parallel else slice(None)
    x, p = whole["x"][cut].clone().requires_grad_(), _params(whole)
    for param in p.values():
        param.main_grad = torch.zeros_like(unwrap([param])[0][0], dtype=torch.float32, requires_grad=False)
    options = {"sequence_parallel": sequence_parallel, "fuse_wgrad_accumulation": True}
    for _ in range(2):
        _mlp(x, p, group, **options).backward(whole["dy"][cut])
    assert all(param.grad is None for param in p.values())
    low, oracle = _reference(whole), _reference(_whole(torch.float64))
    names = list(SHARD_DIMS)
    return _verdicts(
        {name: p[name].main_grad for name in names},
        {name: 2 * low[name] for name in names},
        {name: 2 * oracle[name] for name in names},
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_gradients_are_added_to_buffers(ranks: Any, sequence_parallel: bool):
    assert ranks(2, _accumulated_body, sequence_parallel) == [[], []]


def _saving_body(rank: int, world: int) -> list[bool]:
    """Whether forward saves the pre-activation, with autograd and without."""
    saving: list[bool] = []

    def noted(name: str, run: Any, of: Any) -> Any:
        saving.append(of.epilogue.save_preact)
        return run()

    whole, options = _whole(), TPOptions(tp_group(dist.group.WORLD))
    p = _params(whole)
    with around(noted):
        column_linear(whole["x"], [p["w1"]], [p["b1"]], options, activation="gelu_tanh")
        with torch.no_grad():
            column_linear(whole["x"], [p["w1"]], [p["b1"]], options, activation="gelu_tanh")
    return saving


def test_nothing_is_saved_without_autograd(ranks: Any):
    assert ranks(2, _saving_body) == [[True, False]] * 2


def _compiled_body(rank: int, world: int, sequence_parallel: bool) -> list[str]:
    whole, group = _whole(), tp_group(dist.group.WORLD)
    cut = slice(rank * T // world, (rank + 1) * T // world) if sequence_parallel else slice(None)
    x, p = whole["x"][cut].clone().requires_grad_(), _params(whole, "local")
    fused = _grads(_mlp(x, p, group, sequence_parallel=sequence_parallel), whole["dy"][cut], {"x": x, **p})
    fused = {name: value.clone() for name, value in fused.items()}
    compiled = torch.compile(_mlp, fullgraph=True, backend="aot_eager")
    composed = _grads(compiled(x, p, group, sequence_parallel=sequence_parallel), whole["dy"][cut], {"x": x, **p})
    oracle, low = _reference(_whole(torch.float64)), _reference(whole)
    for name in ("x", "y"):
        oracle[name], low[name] = oracle[name][cut], low[name][cut]
    return _verdicts(fused, low, oracle) + _verdicts(composed, low, oracle)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_torch_compile_traces_computes_the_same(ranks: Any, sequence_parallel: bool):
    assert ranks(2, _compiled_body, sequence_parallel) == [[], []]


def _empty_body(rank: int, world: int) -> None:
    whole = _whole()
    for shape in ((0, D), (2, 0, D), (D,)):
        x, p = torch.randn(shape).requires_grad_(), _params(whole)
        y = _mlp(x, p)
        assert y.shape == shape
        y.sum().backward()
        assert x.grad.shape == shape
        assert unwrap([p["w1"].grad])[0][0].shape == (FFN // world, D)


def test_no_token_and_a_single_one(ranks: Any):
    ranks(2, _empty_body)


def _order_body(rank: int, world: int) -> list[str]:
    whole = _whole()
    x, p = whole["x"].clone().requires_grad_(), _params(whole)
    return order_of_backward(lambda: _mlp(x, p).backward(whole["dy"]))


def test_the_input_gradient_travels_while_weights_get_theirs(ranks: Any):
    for events in ranks(2, _order_body):
        assert events == ["weights", "start", "weights", "wait"]  # the row layer's weights come first


def _errors_body(rank: int, world: int) -> list[str]:
    whole = _whole()
    p, messages = _params(whole), []
    for x in (whole["x"][:, :-1], whole["x"].double()):
        with pytest.raises(ValueError) as caught:
            _mlp(x, p)
        messages.append(str(caught.value))
    return messages


def test_operands_that_do_not_fit_are_named(ranks: Any):
    for shape, dtype in ranks(2, _errors_body):
        assert "weight 0 has shape (24, 16) but x has (24, 15)" in shape
        assert "x is torch.float64 but the other operands are torch.float32" in dtype


def _twice_body(rank: int, world: int) -> str:
    whole = _whole()
    x = whole["x"].clone().requires_grad_()
    y = _mlp(x, _params(whole, "local"))
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(y, x, whole["dy"], create_graph=True)
    return str(caught.value)


def test_a_second_derivative_is_refused(ranks: Any):
    for message in ranks(2, _twice_body):
        assert "create_graph=True asks for second derivatives" in message
