"""``overlap`` and ``strict`` on the layers: every value gives the same results, unavailable modes are refused, and
``explain`` shows each collective's mode.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfuse
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import tp_group
from shardfuse.parallel.core.sharding import local_tensors
from shardfuse.parallel.overlap import link_profile, policy
from shardfuse.parallel.overlap.link_profile import OPS, Link, Profile, Row, bucket
from shardfuse.parallel.overlap.plan import OverlapPlan, clock_for

T, D, FFN = 8, 16, 24
CONFIG = shardfuse.TransformerConfig(
    style="gated", vocab_size=40, hidden_size=D, intermediate_size=FFN, num_layers=2, num_heads=4, num_kv_heads=2
)
CPU = torch.device("cpu")

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "column": lambda **options: shardfuse.ColumnParallelLinear(D, FFN, **options),
    "row": lambda **options: shardfuse.RowParallelLinear(D, FFN, **options),
    "mlp": lambda **options: shardfuse.ParallelMLP(D, FFN, **options),
    "gated": lambda **options: shardfuse.ParallelMLP(D, FFN, gated=True, **options),
    "attention": lambda **options: shardfuse.ParallelAttention(D, 4, 2, **options),
    "block": lambda **options: shardfuse.ParallelBlock(CONFIG, **options),
    "model": lambda **options: shardfuse.ParallelTransformer(CONFIG, **options),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_unknown_overlap_is_refused_where_the_layer_is_made(name: str):
    with pytest.raises(ValueError, match=r"overlap='always': expected one of auto, kernel, chunked, none"):
        LAYERS[name](overlap="always")


@pytest.mark.parametrize("name", LAYERS)
def test_one_process_has_nothing_to_overlap(name: str):
    model = LAYERS[name](overlap="kernel", strict=True)
    x, options = _input(name, 1, False)
    assert torch.isfinite(_forward(model, x, options)).all()
    assert not any(row.collectives for row in shardfuse.explain(model, x).rows)


def _input(name: str, world: int, sequence_parallel: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """This rank's part of one input, and the layer's other arguments."""
    generator = torch.Generator().manual_seed(3)
    if name == "model":
        return torch.randint(0, 40, (2, T // 2), generator=generator), {}
    rank = dist.get_rank() if world > 1 else 0
    x = torch.randn(T, D, generator=generator).to(dtype)
    if name == "row":
        x = x[:, rank * D // world : (rank + 1) * D // world].contiguous()
    elif sequence_parallel:
        x = x[rank * T // world : (rank + 1) * T // world]
    return x, {"batch_size": 2} if name in ("attention", "block") else {}


def _forward(model: nn.Module, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    return model(x, **options)


def _outputs(name: str, world: int, dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    """The output and all gradients on this rank."""
    torch.manual_seed(0)
    model = LAYERS[name](mesh=tp_group(dist.group.WORLD), **options).to(dtype)
    x, more = _input(name, world, options["sequence_parallel"], dtype)
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    y = _forward(model, x, more)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).cos().to(y.dtype)
    y.backward(dy)
    found = {"y": y.detach()} | ({"x": x.grad} if x.is_floating_point() else {})
    return found | {path: local_tensors(param.grad)[0] for path, param in model.named_parameters()}


def _same(rank: int, world: int, sequence_parallel: bool) -> list[str]:
    """The differences between two values of overlap."""
    wrong = []
    for name in LAYERS:
        common: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        exact = _outputs(name, world, torch.float64, **common, overlap="none")
        low = _outputs(name, world, torch.float32, **common, overlap="none")
        for overlap in policy.OVERLAPS:
            collectives.reset_counts()
            ours = _outputs(name, world, torch.float32, **common, overlap=overlap)
            assert ours.keys() == low.keys()
            verdicts = [
                accuracy.judge(path, value, low[path], exact[path], terms=8 * (D + FFN)) for path, value in ours.items()
            ]
            if name in ("attention", "block"):  # the key bias's gradient is only rounding error
                verdicts = [verdict for verdict in verdicts if not verdict.name.endswith("k_proj.bias")]
            wrong += [f"{name}, {overlap}: {verdict}" for verdict in verdicts if not verdict.ok]
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_every_overlap_computes_the_same(ranks: Any, sequence_parallel: bool):
    assert ranks(2, _same, sequence_parallel) == [[], []]


def _reached(rank: int, world: int, sequence_parallel: bool) -> dict[str, set[tuple[str, str, bool]]]:
    """The (operation, overlap, strict) arguments of each kind of layer."""
    asked: set[tuple[str, str, bool]] = set()
    choose = policy.select

    def noted(op: str, group: Any, *, overlap: str, strict: bool, **shape: Any) -> OverlapPlan:
        asked.add((op, overlap, strict))
        return choose(op, group, overlap=overlap, strict=strict, **shape)

    policy.select = noted  # type: ignore[assignment]
    found = {}
    try:
        for name in LAYERS:
            asked.clear()
            _outputs(name, world, torch.float32, sequence_parallel=sequence_parallel, overlap="chunked", strict=True)
            found[name] = set(asked)
    finally:
        policy.select = choose  # type: ignore[assignment]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_the_options_reach_every_layer(ranks: Any, sequence_parallel: bool):
    gathered, reduced = {OPS[0], OPS[1]}, {OPS[2]}
    for found in ranks(2, _reached, sequence_parallel):
        for name, asked in found.items():
            assert {op for op, *_ in asked} == (gathered if sequence_parallel else reduced), name
            assert {(overlap, strict) for _, overlap, strict in asked} == {("chunked", True)}


def _strict(rank: int, world: int) -> list[str]:
    group, messages = tp_group(dist.group.WORLD), []
    for name in ("row", "mlp", "model"):
        model = LAYERS[name](mesh=group, overlap="kernel", strict=True)
        x, options = _input(name, world, False)
        with pytest.raises(RuntimeError) as caught:
            _forward(model, x, options)
        messages.append(str(caught.value))
        shown = [info for row in shardfuse.explain(model, x).rows for info in row.collectives]
        assert {info.plan.kind for info in shown} == {"refused"}
        assert {info.plan.reason for info in shown} == {messages[-1]}
    return messages


@pytest.mark.ranks
def test_strict_refuses_a_kernel_that_cannot_run(ranks: Any):
    for messages in ranks(2, _strict):
        assert all("overlap='kernel' was asked for with strict=True, but" in message for message in messages)


def _compiled(rank: int, world: int, overlap: str, fullgraph: bool) -> tuple[bool, list[str]]:
    """Whether a compiled layer with ``overlap`` computes like the plain one, and the error of ``strict``."""
    group, said = tp_group(dist.group.WORLD), []
    torch.manual_seed(0)
    layer = LAYERS["mlp"](mesh=group, params="local", overlap=overlap)
    x, _ = _input("mlp", world, False)
    compiled = torch.compile(layer, fullgraph=fullgraph, backend="eager")
    same = accuracy.within("y", compiled(x), layer(x), accuracy.rounding(x.dtype, D + FFN)).ok  # chunks, or whole
    for name in ("mlp", "row"):  # an MLP runs its layers one after another
        layer = LAYERS[name](mesh=group, params="local", overlap=overlap, strict=True)
        x, _ = _input(name, world, False)
        with pytest.raises(RuntimeError) as caught:
            torch.compile(layer, fullgraph=fullgraph, backend="eager")(x)
        said.append(str(caught.value))
    torch._dynamo.reset()
    return same, said


@pytest.mark.ranks
@pytest.mark.parametrize(("overlap", "fullgraph"), [("kernel", False), ("chunked", False), ("kernel", True)])
def test_torch_compile_goes_its_own_way_and_strict_says_so(ranks: Any, overlap: str, fullgraph: bool):
    for same, said in ranks(2, _compiled, overlap, fullgraph):
        assert same
        for message in said:
            assert (
                f"overlap='{overlap}' was asked for with strict=True, but under torch.compile only the plain" in message
            )
            assert "leave this layer out of torch.compile (torch.compiler.disable), or pass overlap='auto'" in message


# --- explain ----------------------------------------------------------------------------------------------------------

LINK = Link(0.0, 1e-6, 1e9)


def _explained(rank: int, world: int, path: str, sequence_parallel: bool) -> tuple[dict[str, list[Any]], str, str]:
    """The collectives in explain by module, the table, and the number of collectives that explain itself ran."""
    group = tp_group(dist.group.WORLD)
    model = LAYERS["model"](mesh=group, sequence_parallel=sequence_parallel)
    x, _ = _input("model", world, sequence_parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(link_profile.VARIABLE, path)
        patch.setenv("COLUMNS", "200")
        patch.setattr(collectives, "gather_objects", lambda *args, **kwargs: pytest.fail("asked other ranks"))
        explanation = shardfuse.explain(model, x)
        return (
            {row.path: list(row.collectives) for row in explanation.rows},
            str(explanation),
            str(shardfuse.explain(model)),
        )


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_explain_tells_way_reason_and_what_is_exposed(ranks: Any, tmp_path: Path, sequence_parallel: bool):
    # One shape was measured: gate and up on one gather, or the down projection and its all-reduce.
    op, shape = (OPS[0], (T, D, FFN)) if sequence_parallel else (OPS[2], (T, FFN // 2, D))
    name = "gate_proj" if sequence_parallel else "down_proj"
    row = Row(op, "fp32", 2, "node", bucket(*shape), 1.0, {2: 0.5}, clock=clock_for(T))
    figures = {"node": dict.fromkeys(link_profile.COLLECTIVES.values(), LINK)}
    profile = Profile("cpu", "cpu", measured=True, links=figures, gemm_flops={"fp32": 1e9}, rows=(row,))
    path = tmp_path / "links.json"
    path.write_text(json.dumps(profile.record()))
    for infos, text, without_input in ranks(2, _explained, str(path), sequence_parallel):
        found = {info.op: info for info in infos[f"model.layers.*.mlp.{name}"]}
        assert found[op].when == "forward"
        assert found[op].plan[:2] == ("chunked", 2)
        assert found[op].plan.exposed_s > 0
        (forward, *rest) = infos["model.layers.*.self_attn.o_proj"]
        assert (forward.when, forward.op) == ("forward", OPS[1] if sequence_parallel else OPS[2])
        assert forward.plan.kind == "plain"
        assert [info.op for info in rest] == ([OPS[0]] if sequence_parallel else [])
        assert infos["lm_head"]
        assert not infos["model.norm"]
        (line,) = [line for line in text.splitlines() if f"mlp.{name}" in line and "chunked in 2" in line]
        exposed_us = found[op].plan.exposed_s * 1e6
        told = rf"model\.layers\.0-1\.mlp\.{name} forward {op} chunked in 2 \[(\d+)\] {exposed_us:,.0f}"
        marked = re.fullmatch(told, " ".join(line.split()))
        assert marked
        said = " ".join(text.split())
        assert f" [{marked[1]}] measured" in said
        assert "\n  with k_proj, v_proj" in text
        assert not infos["model.layers.*.mlp.up_proj"]  # listed with the first
        assert not infos["model.layers.*.self_attn.v_proj"]
        assert "dx's sum travels under the weights' gradients as it is" in said
        assert "gloo works on the cores that form the products" in said
        assert "it depends on the number of tokens: pass an input" in " ".join(without_input.split())


def _agrees(rank: int, world: int, sequence_parallel: bool) -> list[str]:
    """The differences between explain and a step, in requests to the policy and in collectives, with counts."""
    group, differing = tp_group(dist.group.WORLD), []
    choose = policy.select
    for name, more in EXPLAINED:
        model = LAYERS[name](mesh=group, sequence_parallel=sequence_parallel, **{"overlap": "chunked", **more})
        x, options = _input(name, world, sequence_parallel)
        if x.is_floating_point():
            x.requires_grad_()
        for dtype in (torch.float32, torch.bfloat16):
            told, ran = _noting(choose), _noting(choose)
            collectives.reset_counts()
            with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                patch.setattr(policy, "select", ran)
                patch.setattr("shardfuse.layers.linear.preview", told)
                explanation = shardfuse.explain(model, x)
                _forward(model, x, options).sum().backward()
            if told.asked != ran.asked and more.get("overlap") != "auto":  # "auto" decides some without the policy
                differing.append(f"{name} {more} {dtype}: told {told.asked}, ran {ran.asked}")
            if (crossed := _crossed()) != _told(explanation):
                differing.append(f"{name} {more} {dtype}: told {_told(explanation)}, crossed {crossed}")
    return differing


EXPLAINED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LAYERS),
    *((name, {"recompute": level}) for name in ("mlp", "gated") for level in (1, 2)),
    *((name, {"overlap": overlap}) for name in ("gated", "model") for overlap in ("none", "auto")),
    ("gated", {"recompute": 2, "overlap": "auto"}),
]


class _noting:
    """Record the calls of ``choose`` with their counts."""

    def __init__(self, choose: Callable[..., OverlapPlan]) -> None:
        self.choose, self.asked = choose, Counter[Any]()

    def __call__(self, op: str, group: Any, **options: Any) -> OverlapPlan:
        if options["overlap"] != "none":  # layers do not call the policy then
            self.asked[(op, *(options[each] for each in ("tokens", "features_in", "features_out", "dtype")))] += 1
        return self.choose(op, group, **options)


def _told(explanation: Any) -> Counter[tuple[str, str]]:
    """The (collective, "forward" or "backward") entries of explain."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in explanation.rows:
        for info in row.collectives:
            counts[link_profile.COLLECTIVES.get(info.op, info.op), info.when] += row.layers
    return counts


def _crossed() -> Counter[tuple[str, str]]:
    """The same for the linear layers' collectives: at ".in", ".out", and their ".grad" and ".again" in backward."""
    counts: Counter[tuple[str, str]] = Counter()
    for (kind, site), calls in collectives.calls.items():
        found = re.search(r"\.(in|out)(\.grad|\.again)?$", site)
        if found:
            counts[kind, "backward" if found[2] else "forward"] += calls
    return counts


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_explain_tells_what_then_crosses_ranks(ranks: Any, sequence_parallel: bool):
    assert ranks(2, _agrees, sequence_parallel) == [[], []]


def test_layers_that_somebody_looks_at_share_nothing():
    mlp = shardfuse.ParallelMLP(D, FFN, gated=True, recompute=2)
    (fused_group,) = mlp.fused_groups()
    assert (fused_group.layers, fused_group.runs_again) == ((mlp.gate_proj, mlp.up_proj), True)
    mlp.down_proj.register_forward_hook(lambda *args: None)
    assert mlp.fused_groups() == [(fused_group.layers, False)]
    mlp.up_proj.register_forward_hook(lambda *args: None)
    assert mlp.fused_groups() == []
