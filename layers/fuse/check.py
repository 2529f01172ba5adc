"""The self-check of ``fuse``: it compares each module with its fused version on a batch that runs through the model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map

from ...kernels.dev.accuracy import Verdict, judge
from ..trial import trial
from .finding import named
from .matchers.head import Head
from .probing import Foreign, foreign
from .swap import become

# Some gradients consist of rounding errors alone: a key bias, for example, shifts all scores of a query equally. A
# gradient smaller than this share of the largest one is compared at that scale.
SMALL = 1e-2


def compare(model: nn.Module, found: Mapping[nn.Module, Any], batch: Any) -> Verdict | None:
    """The verdict on the module that uses the largest share of its error budget; None where none of ``found`` ran.

    ``batch`` runs through the stock ``model`` in evaluation mode. Beside each module of ``found`` this function runs
    its fused version and, for the budget, an fp64 copy of the module, forward and backward. Each gets its own copy of
    the arguments, since a cache among them is written to, and the model's buffers stay what they were. The head is left
    out: its fused version differs in training only, and takes the whole model. A terminal sees how many modules are
    compared.

    Raises ValueError for a model or a batch without values, for a batch that runs none of the modules, and where a
    fused version fails.
    """
    held = [*model.parameters(), *model.buffers(), *(x for x in tree_flatten(batch)[0] if isinstance(x, torch.Tensor))]
    if any(x.is_meta or isinstance(x, FakeTensor) for x in held):
        raise ValueError(
            "fuse: check: the model or the batch has no values (it is on the meta device, or fake): load the weights "
            "first, and pass a batch on their device; without check a model on the meta device fuses as it is"
        )
    verdicts: list[Verdict] = []
    ran: set[nn.Module] = set()
    names = {module: path for path, module in model.named_modules()}
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    given: dict[nn.Module, Any] = {}
    hooks: dict[nn.Module, list[Any]] = {}
    chosen = [module for module, each in found.items() if not isinstance(each[1], Head)]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given[module] = [copy.deepcopy((args, kwargs)) for _ in range(3)]

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        stock_given, ours_given, wide_given = given.pop(module)
        ours = copy.copy(module)  # shares parameters and children
        become(ours, *found[module][1:])
        oracle = _without_hooks(copy.deepcopy(module)).double()
        inside = [child for child in module.modules() if child in hooks]
        _unhook(hooks, inside)  # a fused module calls children that have hooks
        try:
            results = [_with_grads(ours, *ours_given)]
        except Exception as error:
            raise ValueError(
                f"fuse: check: {names[module] or type(module).__name__}, fused by {named(found[module][1])}, raises "
                f"{type(error).__name__}: {error}; nothing was changed"
            ) from error
        results.append(_with_grads(module, *stock_given))
        exact_given = _double(wide_given)
        try:
            with foreign("in fp64 its forward or backward"):
                results.append(_with_grads(oracle, *exact_given))
        except Foreign:
            pass
        wide = len(results) == 3 and not any(_lost(*pair) for pair in zip(results[1][0], results[2][0]))
        if not wide:  # some modules cannot compute in fp64: the stock result then counts as exact
            outs, grads = results[1]
            results[2:] = [([x.double() for x in outs], [x.double() for x in grads])]
        hook(inside)
        largest = max((float(grad.nan_to_num().norm()) for grad in results[2][1]), default=0.0)
        compared = [
            [*outs, *(F.pad(grad.flatten(), (0, 1), value=SMALL * largest) for grad in grads)]
            for outs, grads in results
        ]
        # Sums over features follow one another, and gradients of weights are sums over tokens.
        tokens = max((x.numel() // x.shape[-1] for x in results[2][0] if x.dim() and x.numel()), default=1)
        terms = tokens + sum(size for param in module.parameters() for size in param.shape)
        for got, stock, exact in zip(*compared, strict=True):
            missing = got.isnan() & stock.isnan()  # rows with every key masked
            got, stock, exact = (x.masked_fill(missing, 0.0) for x in (got, stock, exact))
            if got.dtype == torch.float64:  # many stock norms and rotations compute in fp32 even then
                got, stock = got.float(), stock.float()
            name = f"{names[module] or type(module).__name__}, fused by {named(found[module][1])}"
            verdicts.append(judge(name, got, stock, exact, terms=terms))
        ran.add(module)
        bar.advance(task)

    def hook(modules: Iterable[nn.Module]) -> None:
        for module in modules:
            hooks[module] = [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ]

    hook(chosen)
    task = bar.add_task("fuse: checking", total=len(chosen))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), trial(model), bar:
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, Sequence):
                model(*batch)
            else:
                model(batch)
    finally:
        _unhook(hooks, list(hooks))
        for module in training:
            module.training = True
    if chosen and not ran:
        raise ValueError(
            f"fuse: check: the batch ran none of the {len(chosen)} modules that would be fused: pass one that reaches "
            "them"
        )
    wrong = [verdict for verdict in verdicts if not verdict.ok]  # an error may be NaN
    return max(wrong or verdicts, key=lambda verdict: verdict.error / max(verdict.budget, 1e-300), default=None)


@torch.enable_grad()
def _with_grads(module: nn.Module, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The results of ``module``, and the gradients of its first input (others may be tables) and of its parameters."""
    inputs = [x.requires_grad_() for x in _tensors((args, kwargs))[:1]]
    inputs += [param for param in module.parameters() if param.requires_grad]
    outs = _tensors(module.forward(*args, **kwargs))
    outs = [x * 1 for x in outs]  # reading attention weights computes them
    reached = [x for x in outs if x.requires_grad]
    drawn = torch.Generator("cpu").manual_seed(0)
    weights = [
        torch.randn(x.shape, generator=drawn, dtype=torch.float64, device="cpu").to(x.device, x.dtype) for x in reached
    ]
    grads = torch.autograd.grad(reached, inputs, weights, allow_unused=True) if reached and inputs else ()
    return [x.detach() for x in outs], [torch.zeros(1, device="cpu") if grad is None else grad for grad in grads]


def _lost(stock: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((exact.isnan() & ~stock.isnan()).any())


def _unhook(hooks: dict[nn.Module, list[Any]], modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for handle in hooks.pop(module):
            handle.remove()


def _tensors(results: Any) -> list[torch.Tensor]:
    found = [each for each in tree_flatten(results)[0] if isinstance(each, torch.Tensor)]
    return [each for each in found if each.is_floating_point()]


def _double(values: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values)


def _without_hooks(module: nn.Module) -> nn.Module:
    for each in module.modules():
        each.__dict__ |= {"_forward_hooks": {}, "_forward_pre_hooks": {}}
    return module
