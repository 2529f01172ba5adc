"""torch's own tools on a fused model in one process, against the same tools on the stock model.

Each row of docs/tools.md's second table is a case here.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign import foreign, tokens, without_dropout
from torch import nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn.utils import parametrizations, prune
from torch.utils import checkpoint

from shardfuse import fuse, linear_cross_entropy, stats
from shardfuse.kernels.dev import accuracy

pytest.importorskip("transformers")
from tool_rows import rows

HEADING = "A fused model in one process"
BUDGET = accuracy.FACTOR * accuracy.rounding(torch.float32, terms=64)  # norms and the loss compute in fp32
Found = list[torch.Tensor]


def _loss(model: Any, **options: Any) -> torch.Tensor:
    loss: torch.Tensor = model(tokens(), labels=tokens(), use_cache=False, **options).loss
    return loss


def _grads(model: Any, loss: torch.Tensor | None = None) -> Found:
    model.zero_grad()
    loss = _loss(model) if loss is None else loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


class _Logits(nn.Module):
    """What exports and traces take: tokens in, logits out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, use_cache=False).logits
        return logits


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][:6]


def _compiled(model: Any) -> Found:
    found = _grads(model, torch.compile(model, fullgraph=True, backend="aot_eager")(tokens(), labels=tokens()).loss)
    run = torch.compile(_Logits(model), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        return [*found, run(tokens())]


def _exported(model: Any) -> Found:
    found = []
    for strict in (False, True):
        program, file = torch.export.export(_Logits(model), (tokens(),), strict=strict), io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        found.append(torch.export.load(file).module()(tokens()).detach())
    return found


def _recomputed(model: Any, reentrant: bool) -> Found:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return _grads(model)


def _selective(model: Any) -> Found:
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        seen.append(kept)
        return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
    loss = checkpoint.checkpoint(_loss, model, use_reentrant=False, context_fn=contexts)
    found = _grads(model, loss)
    assert any(seen)
    return found


def _wrapped(model: Any) -> Found:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__.endswith("DecoderLayer"))
    return _grads(model)


def _params(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() * 1.1 for name, param in model.named_parameters()}


def _called(model: Any) -> Found:
    return [functional_call(model, _params(model), (tokens(),), {"labels": tokens()}).loss.detach()]


def _transformed(model: Any) -> Found:
    def loss(params: Any, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(model, params, (ids,), {"labels": ids, "use_cache": False}).loss
        return found

    params = _params(model)
    one = grad(loss)(params, tokens())
    value, back = vjp(lambda params: loss(params, tokens()), params)
    each = vmap(grad(loss), in_dims=(None, 0))(params, tokens().unsqueeze(1))  # a gradient for each sample
    return [value, *one.values(), *back(torch.ones_like(value))[0].values(), *each.values()]


def _pushed_forward(model: Any) -> Found:
    params = _params(model)
    with pytest.raises(NotImplementedError, match="forward AD with _scaled_dot_product"):
        torch.func.jvp(lambda p: functional_call(model, p, (tokens(),)).logits, (params,), (params,))
    return []


def _copied(model: Any) -> Found:
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    _loss(model).backward()
    optimizer.step()
    within = copy.deepcopy(model)
    after = copy.deepcopy(model.eval())
    assert type(after.model.norm) is type(model.model.norm)
    return [*_grads(before), *_grads(within), *_grads(after)]


def _pickled(model: Any) -> Found:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = [pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    assert {type(each.model.norm) for each in again} == {type(model.model.norm)}
    return [x for each in again for x in _grads(each)]


def _scripted(model: Any) -> Found:
    if "fused" in repr(model.model.norm):
        with pytest.raises(TypeError, match=r"torch\.jit\.script does not read .*shardfuse\.unfuse"):
            torch.jit.script(_Logits(model))
    return []


def _traced(model: Any) -> Found:
    run = torch.jit.trace(_Logits(model), tokens(), check_trace=False)
    return [run(tokens()).detach(), run(tokens() + 1).detach()]


def _hooked(model: Any) -> Found:
    seen = []
    for path, module in model.named_modules():
        module.register_forward_hook(lambda *_, path=path: seen.append(path))
        module.register_full_backward_hook(lambda *_, path=path: seen.append(path))
    found = _grads(model)
    return [*found, torch.tensor([len(seen), sum(map(len, seen))])]


def _hooked_everywhere(model: Any) -> Found:
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        found = _grads(model)
    finally:
        handle.remove()
    return [*found, torch.tensor([len(seen), sum(map(len, seen))])]


def _parallel(model: Any) -> Found:
    if "fused" in repr(model.model.norm):
        with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
            model._replicate_for_data_parallel()  # what it calls first, on several GPUs
    return []


def _autocast(model: Any) -> Found:
    model.float()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(model)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return [loss.detach().double(), *(param.detach().double() for param in model.parameters())]


def _each(tool: Callable[[nn.Linear], Any], undo: Callable[[nn.Linear], Any] | None = None) -> Callable[[Any], Found]:
    def case(model: Any) -> Found:
        found = []
        for function in (tool, undo):
            if function is not None:
                torch.manual_seed(0)
                for layer in _linears(model):
                    function(layer)
                found += _grads(model)
        return found

    return case


def _parametrized(layer: nn.Linear) -> None:
    parametrizations.weight_norm(layer)
    parametrizations.spectral_norm(layer)


def _quantised(model: Any) -> Found:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model.float().eval(), torchao.Int8WeightOnlyConfig())
    with torch.no_grad():
        return [model(tokens()).logits.double()]


def _quantised_dynamically(model: Any) -> Found:
    quantised = torch.ao.quantization.quantize_dynamic(model.float().eval(), {nn.Linear}, torch.qint8)
    with torch.no_grad():
        return [quantised(tokens()).logits.double()]


def _averaged(model: Any) -> Found:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return _grads(average.module)


def _debugged(model: Any) -> Found:
    with torch.autograd.graph.save_on_cpu(), torch.autograd.detect_anomaly(check_nan=True):
        return _grads(model)


CASES: dict[str, Callable[[Any], Found]] = {
    "torch.compile(fullgraph=True)": _compiled,
    "torch.export": _exported,
    "torch.utils.checkpoint, use_reentrant=False": functools.partial(_recomputed, reentrant=False),
    "torch.utils.checkpoint, use_reentrant=True": functools.partial(_recomputed, reentrant=True),
    "create_selective_checkpoint_contexts": _selective,
    "checkpoint_wrapper, apply_activation_checkpointing": _wrapped,
    "torch.func.functional_call": _called,
    "torch.func.grad, vjp, vmap(grad)": _transformed,
    "torch.func.jvp": _pushed_forward,
    "copy.deepcopy before, in and after training": _copied,
    "share_memory": lambda model: _grads(model.share_memory()),
    "pickle, torch.save of the module": _pickled,
    "torch.jit.script": _scripted,
    "torch.jit.trace": _traced,
    "hooks of modules": _hooked,
    "hooks of all modules": _hooked_everywhere,
    "nn.DataParallel": _parallel,
    "torch.autocast, torch.amp.GradScaler (torch.cuda.amp)": _autocast,
    "torch.nn.utils.parametrizations (weight norm, spectral norm)": _each(_parametrized),
    "torch.nn.utils.weight_norm": _each(nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "torch.nn.utils.prune": _each(
        functools.partial(prune.l1_unstructured, name="weight", amount=0.3),
        functools.partial(prune.remove, name="weight"),
    ),
    "torchao.quantization.quantize_": _quantised,
    "torch.ao.quantization.quantize_dynamic": _quantised_dynamically,
    "torch.optim.swa_utils.AveragedModel": _averaged,
    "torch.autograd.graph.save_on_cpu, detect_anomaly": _debugged,
}
ELSEWHERE = {"CUDA graphs"}  # tests/kernels/test_launcher.py
UNCOUNTED = {"torch.compile(fullgraph=True)", "torch.export", "torch.jit.script", "nn.DataParallel"}  # no eager call
LOOSE = {"torch.autocast, torch.amp.GradScaler (torch.cuda.amp)": 2e-2}  # steps of bf16


def test_every_row_of_the_page_has_a_case() -> None:
    assert set(rows(HEADING)) == {*CASES, *ELSEWHERE}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_tool_does_to_a_fused_model_what_it_does_to_a_stock_one(name: str) -> None:
    stock, fused = (without_dropout(foreign("llama", torch.float64)) for _ in range(2))
    with stats(fuse(fused)) as ran:
        got = CASES[name](fused)
    want = CASES[name](stock)
    assert len(got) == len(want)
    for ours, theirs in zip(got, want):
        assert ours.shape == theirs.shape
        error = float((ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-2))
        assert error <= LOOSE.get(name, BUDGET), (error, ours.shape)
    assert bool(ran.total_of("rms_norm")) != (name in UNCOUNTED)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_torch_func_differentiates_a_chunked_loss(chunk: int | None, reduction: str) -> None:
    hidden, weight, bias = torch.randn(12, 8).double(), torch.randn(37, 8).double(), torch.randn(37).double()
    targets = torch.randint(37, (12,))

    def ours(weight: torch.Tensor, bias: torch.Tensor, hidden: torch.Tensor = hidden) -> torch.Tensor:
        loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=chunk, reduction=reduction)
        return loss.square().sum()

    leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    want = torch.autograd.grad(ours(*leaves), leaves)
    for found, expected in zip(grad(ours, argnums=(0, 1))(weight, bias), want):
        torch.testing.assert_close(found, expected)
    each = vmap(grad(ours), in_dims=(None, None, 0))(weight, bias, torch.stack([hidden, 2 * hidden]))
    torch.testing.assert_close(each[0], want[0])
    _, tangent = torch.func.jvp(lambda w: ours(w, bias), (weight,), (torch.ones_like(weight),))
    torch.testing.assert_close(tangent, want[0].sum())
