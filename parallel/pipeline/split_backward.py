"""The two passes of a split backward: gradients of a stage's inputs first, of its weights later.

From torch 2.13 on, pipelines use torch's own passes (torch.distributed.pipelining). In older versions torch's pass for
the weights fails on autograd functions written in Python, such as our layers': it frees the graph of a function's node
too early, and adds up the gradients of several outputs as if they belonged to one. This file can go once torch 2.13 is
the oldest supported version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _backward

Groups = list[dict[str, Any]]


def torch_can() -> bool:
    """Whether torch's own passes work, which they do from 2.13 on."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def stage_backward_input(
    outputs: list[torch.Tensor],
    grads: list[torch.Tensor] | None,
    inputs: list[Any],
    weights: Iterator[nn.Parameter],
) -> tuple[tuple[torch.Tensor | None, ...], Groups]:
    """Add the gradients of ``inputs`` to their ``.grad``; returns them and the groups of parameters.

    ``grads`` are those of ``outputs``, which are detached; None for ones. Inputs that need no gradient get None.
    """
    if torch_can():
        return _backward.stage_backward_input(outputs, grads, inputs, weights)
    edges = [get_gradient_edge(output) for output in outputs]  # these references keep the nodes alive
    wanting = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    found, groups = _backward.stage_backward_input(outputs, grads, [inputs[i] for i in wanting], weights)
    for group in groups:
        group["edges"] = edges
    dinputs: list[torch.Tensor | None] = [None] * len(inputs)
    for i, dinput in zip(wanting, found):
        dinputs[i] = dinput
    return tuple(dinputs), groups


def stage_backward_weight(weights: Iterator[nn.Parameter], groups: Groups) -> None:
    """Add the gradients of ``weights`` to their ``.grad``; consumes the ``groups`` of the pass for the inputs."""
    if torch_can():
        _backward.stage_backward_weight(weights, groups)
        return
    by_node = {_backward._get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    for group in groups:
        accumulators = list(group["params"])
        for accumulator, grad in zip(accumulators, _grads(group, accumulators)):
            weight = by_node[accumulator]
            if weight.grad is None:
                weight.grad = grad
            else:
                weight.grad += grad
        group.clear()


def _grads(group: dict[str, Any], accumulators: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The gradients that reach ``accumulators`` from the nodes at which the pass for the inputs stopped."""
    nodes, kept = list(group["intermediates"]), group["grads"]
    roots = [
        (GradientEdge(node, i), grad)
        for node, grads in zip(nodes, kept)
        for i, grad in enumerate(grads)
        if grad is not None
    ]
    # Where one node leads to another, the latter starts from its saved gradient, which includes the former's share.
    handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in zip(nodes, kept)]
    try:
        return torch.autograd.grad(
            [edge for edge, _ in roots],
            [GradientEdge(accumulator, 0) for accumulator in accumulators],
            [grad for _, grad in roots],
        )
    finally:
        for handle in handles:
            handle.remove()


class SplitStage(PipelineStage):
    """A pipeline stage that splits backward with this module's functions; torch's stage calls torch's own by name."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if torch_can() or backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, FSDPModule):  # as in torch's: reduce gradients after the last micro-batch
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "input":
            outputs, grads, inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
            return stage_backward_input(outputs, grads, inputs, self.submod.parameters())
        stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"])
        return (), None
