"""torch's own tools on a model that ``fuse(model, mesh)`` split, against the same tools on one process's copy of it.

Each row of docs/tools.md's first table is a case here. TP: two ranks, which split the layers. TP x DP: four, and
FSDP2 shards what two of them hold.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from foreign import foreign, tokens, without_dropout
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

from shardfuse import fuse, init_mesh

pytest.importorskip("transformers")
from tool_rows import rows

# Sums of fp64 in another order, of fewer than 2^20 numbers.
CLOSE = 1e-10
HEADING = "A split model"


class _Case:
    """A split model in training with its gradients, and whole copies of its parameters with whole gradients."""

    def __init__(self, mesh: Any, kind: str = "opt") -> None:
        self.mesh, self.kind = mesh, kind
        self.model: Any = without_dropout(fuse(foreign(kind, torch.float64), mesh["tp"]))
        if mesh["dp"].size() > 1:
            fully_shard(self.model, mesh=mesh["dp"])
        self.backward()
        self.whole = nn.ParameterList([nn.Parameter(_whole(param).clone()) for param in self.model.parameters()])
        for ours, param in zip(self.whole, self.model.parameters()):
            ours.grad = None if param.grad is None else _whole(param.grad).clone()

    def backward(self) -> None:
        self.loss().backward()

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens(), labels=tokens(), use_cache=False).loss
        return loss

    def error(self) -> float:
        """The largest difference between parameters, or between gradients, relative to the largest element."""
        worst = 0.0
        for ours, param in zip(self.whole, self.model.parameters()):
            for a, b in ((param, ours), (param.grad, ours.grad)):
                if b is not None:
                    worst = max(worst, float((_whole(a) - b.detach()).abs().max() / b.detach().abs().max()))
        return worst

    def both(self, tool: Callable[[Any], Any]) -> float:
        """The worst difference after ``tool`` was given the parameters of each, and between what it returned."""
        ours, theirs = tool(self.model), tool(self.whole)
        differs = 0.0
        if isinstance(theirs, torch.Tensor) and theirs.any():
            differs = float((_whole(ours) - theirs.detach()).abs().max() / theirs.detach().abs().max())
        return max(differs, self.error())


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def _clipped(module: Any, limit: float, kind: float, foreach: bool | None) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(module.parameters(), limit, norm_type=kind, foreach=foreach)


def _clip(case: _Case) -> float:
    worst = 0.0
    stock = without_dropout(foreign(case.kind, torch.float64))
    stock(tokens(), labels=tokens(), use_cache=False).loss.backward()
    one = float(nn.utils.get_total_norm([p.grad for p in stock.parameters() if p.grad is not None]))
    options = [(10.0, 2.0, None), (0.5, 2.0, True), (0.3, 2.0, False), (0.1, 1.0, None), (0.01, float("inf"), None)]
    for given in options:
        worst = max(worst, case.both(lambda module, given=given: _clipped(module, *given)))
    case = _Case(case.mesh, case.kind)
    norm = float(_whole(nn.utils.clip_grad_norm_(case.model.parameters(), float("inf"))))
    assert abs(norm / one - 1) < 1e-6, (norm, one)  # the model's loss is in fp32
    return worst


def _step(kind: Any, **options: Any) -> Callable[[_Case], float]:
    def tool(module: Any) -> None:
        optimizer = kind(module.parameters(), lr=1e-2, **options)
        for _ in range(3):
            optimizer.step()

    return lambda case: case.both(tool)


def _every_foreach(case: _Case) -> float:
    kinds = ["Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"]
    return max(_step(getattr(torch.optim, kind), foreach=True)(_Case(case.mesh)) for kind in kinds)


def _lbfgs(case: _Case) -> float:
    return case.both(lambda module: torch.optim.LBFGS(module.parameters(), lr=1e-3).step(lambda: torch.zeros(())))


def _muon(case: _Case) -> float:
    """It multiplies in bf16: as far off as where its gradients differ by a bf16's rounding."""
    nearly = copy.deepcopy(case.whole)
    for near, ours in zip(nearly, case.whole):
        near.grad = None if ours.grad is None else ours.grad * (1 + 2**-8 * torch.rand_like(ours.grad).sub(0.5))
    start = [param.detach().clone() for param in case.whole]
    for module in (case.model, case.whole, nearly):
        torch.optim.Muon([param for param in module.parameters() if param.dim() == 2], lr=1e-2).step()
    for before, ours, near, param in zip(start, case.whole, nearly, case.model.parameters()):
        step = float((ours - before).norm().detach())
        apart = float((_whole(param) - ours).norm().detach()), float((near - ours).norm().detach())
        assert apart[0] <= 3 * apart[1] <= 1.5 * step or not step, (apart, step)
    return 0.0


def _scaler(case: _Case) -> float:
    def tool(module: Any) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        scaler.scale(torch.ones((), dtype=torch.float64))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return torch.tensor(scaler.get_scale())

    error = case.both(tool)
    case = _Case(case.mesh)
    before = [_whole(param).clone() for param in case.model.parameters()]
    if dist.get_rank() == dist.get_world_size() - 1:  # one rank overflows: all skip the step
        max((p.grad for p in case.model.parameters() if p.grad is not None), key=len)._local_tensor.fill_(torch.inf)
    assert float(tool(case.model)) == 2.0
    assert all(torch.equal(_whole(a), b) for a, b in zip(case.model.parameters(), before))
    return error


def _average(case: _Case) -> float:
    swa = torch.optim.swa_utils
    worst = 0.0
    for function in (swa.get_ema_multi_avg_fn(0.9), swa.get_swa_multi_avg_fn()):
        averages = [swa.AveragedModel(module, multi_avg_fn=function) for module in (case.model, case.whole)]
        for _ in range(3):
            for module, average in zip((case.model, case.whole), averages):
                with torch.no_grad():
                    for param in module.parameters():
                        param.mul_(1.1)
                average.update_parameters(module)
        found = [[_whole(param) for param in average.parameters()] for average in averages]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*found)))
        with torch.no_grad():
            averages[0](tokens(), use_cache=False)
    return worst


def _to_vector(case: _Case) -> float:
    return case.both(lambda module: nn.utils.parameters_to_vector(module.parameters()))


def _from_vector(case: _Case) -> float:
    """It leaves a DTensor as it was, and says nothing."""
    vector = nn.utils.parameters_to_vector(case.model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 2, case.model.parameters())
    return case.error()


def _state(case: _Case) -> float:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    optimizer.step()
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        model, states = get_state_dict(case.model, optimizer, options=options)
        assert {type(value) for value in model.values()} == {torch.Tensor if full else DTensor}
        other = _Case(case.mesh)
        other.model.zero_grad()  # torch makes no states for an optimizer whose parameters have gradients
        again = torch.optim.AdamW(other.model.parameters(), lr=1e-2)
        set_state_dict(other.model, again, model_state_dict=model, optim_state_dict=states, options=options)
        for a, b in zip(case.model.parameters(), other.model.parameters()):
            assert torch.equal(_whole(a), _whole(b))
            if a in optimizer.state:
                assert torch.equal(_whole(optimizer.state[a]["exp_avg"]), _whole(again.state[b]["exp_avg"]))
    assert model.keys() == foreign(case.kind).state_dict().keys()
    return 0.0


def _checkpoint(case: _Case) -> float:
    folder = [None if dist.get_rank() else str(_folder())]
    dist.broadcast_object_list(folder)
    dcp.save({"model": get_model_state_dict(case.model)}, checkpoint_id=folder[0])
    other = _Case(case.mesh)
    with torch.no_grad():
        for param in other.model.parameters():
            param.zero_()
    found = {"model": get_model_state_dict(other.model)}
    dcp.load(found, checkpoint_id=folder[0])
    set_model_state_dict(other.model, found["model"])
    assert all(torch.equal(_whole(a), _whole(b)) for a, b in zip(case.model.parameters(), other.model.parameters()))
    return 0.0


def _folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp())


class _Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def _parametrized(case: _Case) -> float:
    """Before the model is split or after, of layers that are split and of others."""
    found = []
    for when in ("never", "before", "after"):
        model: Any = foreign(case.kind, torch.float64)
        model = model if when == "before" else fuse(model, case.mesh["tp"]) if when == "after" else model
        layer = model.model.decoder.layers[0]
        for module in (layer.fc1, model.model.decoder.embed_positions, layer.self_attn_layer_norm):
            parametrize.register_parametrization(module, "weight", _Twice())
        model = fuse(model, case.mesh["tp"]) if when == "before" else model
        without_dropout(model)(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append([_whole(param.grad) for param in model.parameters() if param.grad is not None])
    scale = max(float(grad.abs().max()) for grad in found[0])
    error = max(float((a - b).abs().max()) / scale for one in found[1:] for a, b in zip(one, found[0]))
    assert error < 1e-6  # the model's loss is in fp32
    return 0.0


def _pruned(case: _Case) -> float:
    model: Any = foreign(case.kind, torch.float64)
    layer = model.model.decoder.layers[0].fc1
    prune.l1_unstructured(layer, "weight", 0.3)
    with pytest.raises(ValueError, match=r"layers\.0\.fc1 from .* prune\.remove|layers\.0\.fc1 before each .*prune"):
        fuse(model, case.mesh["tp"])
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    prune.remove(layer, "weight")
    zeros = int((layer.weight == 0).sum())
    fuse(model, case.mesh["tp"])
    assert int((_whole(layer.weight) == 0).sum()) == zeros > 100
    prune.l1_unstructured(case.model.model.decoder.embed_positions, "weight", 0.3)
    case.loss()
    return 1.0


def _save_pretrained(case: _Case) -> float:
    from transformers import AutoModelForCausalLM

    folder = [None if dist.get_rank() else str(_folder())]
    dist.broadcast_object_list(folder)
    case.model.save_pretrained(folder[0])
    again = AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float64)
    named = dict(case.model.named_parameters())
    assert named.keys() == dict(again.named_parameters()).keys()
    assert all(torch.equal(_whole(named[name]), param) for name, param in again.named_parameters())
    wrong = "/proc/nowhere" if dist.get_rank() == 0 else folder[0]
    with pytest.raises(OSError, match="nowhere"):  # on every rank
        case.model.save_pretrained(wrong)
    return 0.0


def _accelerate(case: _Case) -> float:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    error = case.both(lambda module: accelerator.clip_grad_norm_(module.parameters(), 0.1))
    accelerator.clip_grad_value_(case.model.parameters(), 1e-3)
    nn.utils.clip_grad_value_(case.whole.parameters(), 1e-3)
    return max(error, case.error())


def _copied(case: _Case) -> float:
    twin = copy.deepcopy(case.model)
    twin.zero_grad()
    twin(tokens(), labels=tokens(), use_cache=False).loss.backward()
    case.model = twin
    return case.error()


def _functional(case: _Case) -> float:
    params = {name: param.detach() * 1.0 for name, param in case.model.named_parameters()}
    loss = functional_call(case.model, params, (tokens(),), {"labels": tokens(), "use_cache": False}).loss
    return abs(float(loss) / float(case.loss().detach()) - 1)


def _differentiated(case: _Case) -> Any:
    def loss(params: Any) -> torch.Tensor:
        found: torch.Tensor = functional_call(case.model, params, (tokens(),), {"labels": tokens()}).loss
        return found

    return torch.func.grad(loss)({name: param.detach() for name, param in case.model.named_parameters()})


WORKS = None
NO_RULE = r"does not have a sharding strategy registered|in-place operations that require placement changes"
NO_COPY = "FSDP does not support deepcopy"
# Row of the table -> what does it, what it says where it cannot under TP, and under TP x DP.
CASES: dict[str, tuple[Callable[[_Case], Any], str | None, str | None]] = {
    "torch.nn.utils.clip_grad_norm_, get_total_norm": (_clip, WORKS, WORKS),
    "torch.nn.utils.clip_grad_value_": (
        lambda case: case.both(lambda module: nn.utils.clip_grad_value_(module.parameters(), 1e-3)), WORKS, WORKS,
    ),
    "torch.amp.GradScaler (torch.cuda.amp)": (_scaler, WORKS, WORKS),
    "torch.optim.AdamW(foreach=True)": (_step(torch.optim.AdamW, foreach=True, eps=1e-3), WORKS, WORKS),
    "torch.optim.AdamW(fused=True)": (_step(torch.optim.AdamW, fused=True, eps=1e-3), WORKS, WORKS),
    "Adadelta, Adagrad, Adam, Adamax, ASGD, NAdam, RAdam, RMSprop, SGD (foreach=True)": (_every_foreach, WORKS, WORKS),
    "torch.optim.Muon": (_muon, WORKS, WORKS),
    "torch.optim.LBFGS": (_lbfgs, WORKS, WORKS),
    "SGD(fused=True), Adagrad(fused=True)": (_step(torch.optim.SGD, fused=True), NO_RULE, NO_RULE),
    "torch.optim.Rprop": (_step(torch.optim.Rprop), NO_RULE, NO_RULE),
    "torch.optim.Adafactor": (_step(torch.optim.Adafactor), NO_RULE, NO_RULE),
    "torch.optim.swa_utils.AveragedModel": (_average, WORKS, NO_COPY),
    "torch.nn.utils.parameters_to_vector": (_to_vector, WORKS, WORKS),
    "torch.nn.utils.vector_to_parameters": (_from_vector, WORKS, WORKS),
    "torch.distributed.checkpoint.state_dict": (_state, WORKS, WORKS),
    "torch.distributed.checkpoint.save, load": (_checkpoint, WORKS, WORKS),
    "torch.nn.utils.parametrize": (_parametrized, WORKS, WORKS),
    "torch.nn.utils.prune": (_pruned, f"since fuse split the model over 2 ranks|{NO_RULE}", f"FSDP|DTensor|{NO_RULE}"),
    "transformers' save_pretrained": (_save_pretrained, WORKS, WORKS),
    "accelerate's clip_grad_norm_, clip_grad_value_": (_accelerate, WORKS, WORKS),
    "copy.deepcopy": (_copied, WORKS, NO_COPY),
    "pickle, torch.save of the module": (
        lambda case: pickle.dumps(case.model), "is split over 2 ranks and cannot be pickled", "cannot",
    ),
    "share_memory": (lambda case: case.model.share_memory(), "parameters .* are spread over ranks", "are spread over"),
    "torch.func.functional_call": (_functional, WORKS, "is a DTensor, since fuse split"),
    "torch.func.grad, vmap, jvp": (
        _differentiated, "transforms have no kernel for layers that are split", "transforms have no kernel for layers",
    ),
}  # fmt: skip


# torch 2.11 does not flatten a DTensor that is split by columns.
FLATTENS = {"torch.optim.LBFGS", "torch.nn.utils.parameters_to_vector", "torch.nn.utils.vector_to_parameters"}


def _cannot_flatten(mesh: Any) -> str:
    try:
        distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(1)]).view(-1)
    except RuntimeError as error:
        return f"this torch cannot: {error}"
    return ""


def _outcomes(rank: int, world: int, dp: int, name: str) -> Any:
    mesh = init_mesh(dp=dp, tp=world // dp, device_type="cpu")
    if name in FLATTENS and (why := _cannot_flatten(mesh)):
        return why
    case = _Case(mesh)
    try:
        return CASES[name][0](case)
    except pytest.skip.Exception as skipped:
        return skipped.msg
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_every_row_of_the_page_has_a_case() -> None:
    assert rows(HEADING) == list(CASES)


EVERY_DAY = ("torch.nn.utils.clip_grad_norm_, get_total_norm", "torch.distributed.checkpoint.state_dict")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "dp"),
    [
        *(pytest.param(name, 1, id=f"{name}, TP") for name in CASES),
        *(
            pytest.param(name, 2, id=f"{name}, TP x DP", marks=[] if name in EVERY_DAY else [pytest.mark.nightly])
            for name in CASES
        ),
    ],
)
def test_the_tool_does_what_the_page_says(ranks: Any, name: str, dp: int) -> None:
    says = CASES[name][dp]
    for found in ranks(2 * dp, _outcomes, dp, name):
        if isinstance(found, str) and found.startswith(("could not import", "this torch cannot")):
            pytest.skip(found)
        if says is None:
            assert isinstance(found, float), found
            assert found < CLOSE
        else:
            assert isinstance(found, str), found
            assert re.search(says, found), found
