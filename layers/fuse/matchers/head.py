"""The matcher of head and loss of transformers' causal language models: in training, the loss needs no stored logits.

The stock forward runs on a view of the model. The view's head returns :class:`Logits`, a tensor not computed yet, and
its ``loss_function`` uses the hidden states and the weight that these logits refer to. Any other reader of the logits
makes them be computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from ....kernels.runtime import autograd
from ....parallel.core import collectives
from ....parallel.core.mesh import Group
from ....parallel.core.sharding import local_tensors
from ....parallel.cross_entropy import linear_cross_entropy
from .. import products
from ..ranks import shard
from ..ranks.table import Table
from ..stages.divisible import Staged
from ..swap import Match
from ..view import Stand, View, names_in

_STOCK_LOSS = "ForCausalLMLoss"  # in transformers.loss.loss_utils


class _Head(Match):
    def __init__(self, name: str, kind: type) -> None:
        super().__init__((f"linear_cross_entropy({name})",), {name: kind})
        self.name = name


class FusedHead(Staged):
    """Runs the stock forward; given labels in training, it computes the loss from hidden states."""

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        idle = kwargs.get("labels") is None or not self.training or not torch.is_grad_enabled()
        if idle or torch.compiler.is_compiling() or autograd.transformed() is not None:
            return self.stock_forward(*args, **kwargs)
        view = View(self, self.stand_ins(getattr(self, self._match.name), _loss))
        return self._stock.forward(view, *args, **kwargs)

    def stand_ins(self, head: Any, loss: Callable[..., torch.Tensor]) -> dict[str, Any]:
        return {self._match.name: Stand(head, partial(_logits, head)), "loss_function": loss}

    def total(self, logits: Any, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return _loss(logits, None, vocab_size, num_items_in_batch=1, shift_labels=targets)

    def why_stock(self) -> str | None:
        # This is how transformers' property loss_function chooses. Reading the property may log, which torch.compile
        # cannot trace.
        known = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
        kind = known.get(getattr(self, "loss_type", None), _stock_loss())
        if "_loss_function" in self.__dict__ or kind is not _stock_loss():
            return "its loss_function is not transformers' for causal language models"
        return super().why_stock()


class Head:
    """Matches a model whose forward calls its output embeddings, a linear layer, and its ``loss_function``."""

    fused = FusedHead

    def match(self, module: nn.Module) -> Match | None:
        outputs = getattr(module, "get_output_embeddings", lambda: None)()
        name = next((name for name, child in module._modules.items() if child is outputs), None)
        if outputs is None or name is None or not products.is_linear(outputs):
            return None
        return _Head(name, type(outputs)) if {name, "loss_function"} <= names_in(type(module).forward) else None

    def split(self, module: Any, match: Any, group: Group) -> str | None:
        """Split head and embedding over ``group`` along the vocabulary, or return the reason why they stay whole."""
        head, embedding = getattr(module, match.name), module.get_input_embeddings()
        if (why := shard.uneven([products.width_out(head)], group)) is not None:
            return why
        why = Table().split(embedding, group)
        if why is not None and embedding.weight is head.weight:
            return why
        shard.split_head(head, group)
        match.kinds = {match.name: type(head)}
        return None


def _stock_loss() -> Any:
    return getattr(sys.modules.get("transformers.loss.loss_utils"), _STOCK_LOSS, None)


# An operation on logits and its number: ("*", 0.5), ("tanh", 0.0).
Step = tuple[str, float]
_FLOAT = ("float", 0.0)
_TANH = ("tanh", 0.0)
_DO: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "*": lambda x, by: x * by,
    "/": lambda x, by: x / by,
    "tanh": lambda x, _: torch.tanh(x),
    "float": lambda x, _: x.float(),
}


class Logits(torch.Tensor):
    """``head(hidden)``, perhaps scaled and soft-capped: a tensor that is computed when something reads it."""

    head: Any
    hidden: torch.Tensor  # with its autograd graph
    steps: tuple[Step, ...]
    sample: torch.Tensor  # elements of the head's weight at that time
    low: torch.dtype  # the product's dtype: autocast's, or that of hidden
    _value: torch.Tensor | None

    @staticmethod
    def of(
        head: Any, hidden: torch.Tensor, steps: tuple[Step, ...], sample: torch.Tensor, dtype: torch.dtype
    ) -> Logits:
        size = (*hidden.shape[:-1], head.weight.shape[0])
        logits: Logits = torch.Tensor._make_wrapper_subclass(Logits, size, dtype=dtype, device=hidden.device)
        logits.head, logits.hidden, logits.steps, logits.sample, logits._value = head, hidden, steps, sample, None
        return logits

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """The logits [..., V], without an autograd graph, which the wrapper has.

        Raises RuntimeError if the head's weights have changed since, because the result would not be that forward's
        logits. Collective if the head is split over ranks.
        """
        if self._value is None:
            weight, bias = _local(self.head)
            if weight.shape[1] != self.hidden.shape[-1] or not torch.equal(_sample(weight), self.sample):
                raise RuntimeError(
                    "the loss of a fused model in training stores no logits, and the weights to compute them with have "
                    "changed since that forward: read out.logits before optimizer.step(), or fuse the model with "
                    "filter_fn=lambda module, path: path != ''"
                )
            with torch.autocast(self.hidden.device.type, enabled=False):
                low = self.low
                x = F.linear(self.hidden.to(low), weight.to(low), None if bias is None else bias.to(low))
                x = collectives.all_gather(x, products.group_of(self.head), dim=-1, site="head.logits")
                for step, by in self.steps:
                    x = _DO[step](x, by)
            self._value = x
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:  # by a caller that keeps them
            return args[0].value()
        step = _step(func, args, kwargs)
        if step is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return args[0] if step == _NOTHING else _Then.apply(args[0], step)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._again()
        args, kwargs = tree_map_only(Logits, Logits.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _again(self, *steps: Step) -> Logits:
        dtype = torch.float32 if _FLOAT in steps else self.dtype
        logits = Logits.of(self.head, self.hidden, (*self.steps, *steps), self.sample, dtype)
        logits.low = self.low
        logits._value = None if steps else self._value
        return logits

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.value())


def _logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """``head(hidden)``."""
    logits: torch.Tensor = _Product.apply(hidden, *_local(head), head)
    return logits


def _local(head: Any) -> tuple[Any, Any]:
    """This rank's weight and bias."""
    return local_tensors(head.weight, head.bias)


class _Product(torch.autograd.Function):
    """The autograd function of :class:`Logits`, for readers other than the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: Any) -> Logits:
        kind = hidden.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        logits = Logits.of(head, hidden, (), _sample(weight), low)
        logits.low = low
        ctx.save_for_backward(hidden, weight)
        ctx.low, ctx.group = low, products.group_of(head)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        grad = grad.to(ctx.low)
        grad = grad if ctx.group.size == 1 else collectives.local_slice(grad, ctx.group, -1)
        rows = grad.flatten(0, -2)
        dx = (grad @ weight.to(ctx.low)).to(hidden.dtype) if need_x else None
        if dx is not None:
            dx = collectives.all_reduce(dx, ctx.group, site="head.logits.grad", inplace=True)
        dw = (rows.mT @ hidden.flatten(0, -2).to(ctx.low)).to(weight.dtype) if need_w else None
        db = rows.sum(0).to(weight.dtype) if need_b else None
        return dx, dw, db, None


class _Then(torch.autograd.Function):
    """The autograd function of one more step on :class:`Logits`."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, step: Step) -> Logits:
        ctx.step, ctx.dtype = step, logits.dtype
        ctx.result = logits._again(step) if step == _TANH else None  # saving the output itself would make a cycle
        return logits._again(step)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        step, by = ctx.step
        if step == "tanh":
            grad = grad * (1 - ctx.result.value().square())
        elif step != "float":
            grad = _DO[step](grad, by)
        return grad.to(ctx.dtype), None


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """64 of the weight's elements; any optimizer step changes some of them."""
    rows = weight.detach()[:: max(1, weight.shape[0] // 8)]
    return rows[:8, :: max(1, weight.shape[1] // 8)].clone()


_NOTHING = ("", 0.0)
_TIMES = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__}
_OVER = {torch.div, torch.Tensor.div, torch.Tensor.__truediv__}


def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Step | None:
    """The step of ``func`` on its first argument, :class:`Logits`, if the step can be deferred; None otherwise."""
    if kwargs or not args or not isinstance(args[0], Logits) or args[0]._value is not None:
        return None
    rest = args[1:]
    if not rest and func in (torch.tanh, torch.Tensor.tanh):
        return _TANH
    if not rest and func is torch.Tensor.contiguous:
        return _NOTHING
    if not rest and func is torch.Tensor.float:
        return _FLOAT
    if len(rest) == 1 and type(rest[0]) in (int, float) and rest[0] > 0:
        if func in _TIMES:
            return ("*", float(rest[0]))
        if func in _OVER:
            return ("/", float(rest[0]))
    return None


def _scale_and_softcap(steps: tuple[Step, ...]) -> tuple[float, float | None] | None:
    """(s, c) if the steps compute c * tanh(s * x / c), or s * x with c None; None for other steps."""
    scale, softcap = 1.0, None
    steps = tuple(step for step in steps if step != _FLOAT)  # the loss is computed in fp32 anyway
    before = steps.index(_TANH) if _TANH in steps else len(steps)
    for step, by in steps[:before]:
        scale = scale * by if step == "*" else scale / by
    if before < len(steps):
        if len(steps) != before + 2 or steps[-1][0] != "*":
            return None
        softcap = steps[-1][1]
        scale *= softcap
    return scale, softcap


def _loss(
    logits: Any,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute transformers' ``ForCausalLMLoss``."""
    form = _scale_and_softcap(logits.steps) if isinstance(logits, Logits) and logits._value is None else None
    if form is None or logits.shape[-1] != vocab_size:
        loss: torch.Tensor = _stock_loss()(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
        return loss
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    scale, softcap = form
    hidden = logits.hidden if scale == 1.0 else logits.hidden * scale
    weight, bias = logits.head.weight, logits.head.bias
    bias = bias if bias is None or scale == 1.0 else bias * scale
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(
        hidden,
        weight,
        shift_labels.to(hidden.device),
        bias,
        ignore_index=ignore_index,
        softcap=softcap,
        reduction=reduction,
        group=products.group_of(logits.head),
        site="head",
    )
    if num_items_in_batch is not None:
        items = num_items_in_batch
        loss = loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)
    return loss
