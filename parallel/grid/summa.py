"""SUMMA: the products of a layer over two axes, panel by panel (van de Geijn and Watts, 1997; arXiv:2104.05343).

K is cut into panels. Those of x belong to the ranks along k, those of W to the ranks along i, and a panel's owner
broadcasts it when its turn comes, while the panel before is multiplied. So a rank holds two panels of each where the
all-gathers of :mod:`linear` hold all of them; what travels is the same.

    forward     y    = sum_p x_p @ w_p^T
    backward    dx_p = dy @ w_p, summed at x_p's owner;  dw_p = dy^T @ x_p, summed at w_p's owner

The sum over panels is formed in the operands' dtype, so in bf16 it is rounded once for each panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from ...kernels.linear import Product
from ...kernels.runtime.dispatch import Choice
from ..core import collectives
from ..core.mesh import Group
from .grads import bias_grad, weight_grad
from .grid import Axes, GridOptions


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: GridOptions, choice: Choice
) -> torch.Tensor:
    """x [T/i, K/k] @ W [N/k, K/i]^T + b: [T/i, N/k]."""
    axes, site = options.axes, options.site
    count, y = _count(axes), None
    for x_panel, w_panel in zip(
        _panels(x, axes.outer, count, f"{site}.in"), _panels(weight, axes.tokens, count, f"{site}.weight")
    ):
        (y,) = Product.linear_act(x_panel, [w_panel], [bias], "identity", choice, residual=y).compute()
        bias = None  # the first panel's epilogue has added it
    assert y is not None
    return y


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    options: GridOptions,
    choice: Choice,
    want: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The gradients of x, the weight and the bias, None where ``want`` is False, and dy."""
    axes, site = options.axes, options.site
    want_x, want_weight, want_bias = want
    count, dx, dw = _count(axes), None, None
    if want_x:
        sums = _Sums(count, axes.outer, f"{site}.in.grad")
        for p, w_panel in enumerate(_panels(weight, axes.tokens, count, f"{site}.weight.again")):
            sums.add(p, Product.input_grad([dy], [w_panel], choice).compute()[0])
        dx = sums.mine()
    if want_weight:
        sums = _Sums(count, axes.tokens, f"{site}.weight.grad")
        for p, x_panel in enumerate(_panels(x, axes.outer, count, f"{site}.in.again")):
            sums.add(p, weight_grad(dy, x_panel, choice))
        dw = collectives.all_reduce(sums.mine(), axes.depth, site=f"{site}.depth.grad", inplace=True)
    return dx, dw, bias_grad(dy, axes, site) if want_bias else None, dy


def _count(axes: Axes) -> int:
    return math.lcm(axes.outer.size, axes.tokens.size)


def _panels(shard: torch.Tensor, group: Group, count: int, site: str) -> Iterator[torch.Tensor]:
    """The ``count`` panels of a matrix whose columns ``group`` splits; the next one travels while one is used."""
    each = count // group.size
    width = shard.shape[1] // each

    def start(p: int) -> Callable[[], torch.Tensor]:
        owner, place = divmod(p, each)
        panel = shard.narrow(1, place * width, width)  # on other ranks than the owner only its shape counts
        return collectives.start_broadcast(panel, group, src=owner, site=site)

    ahead = start(0)
    for p in range(count):
        panel = ahead()
        if p + 1 < count:
            ahead = start(p + 1)
        yield panel.contiguous()


class _Sums:
    """Sums of panels, each at the rank that owns it; one sum travels while the next is formed."""

    def __init__(self, count: int, group: Group, site: str) -> None:
        self._each, self._group, self._site = count // group.size, group, site
        self._ahead: Callable[[], torch.Tensor | None] = lambda: None
        self._panels: list[torch.Tensor] = []

    def add(self, p: int, partial: torch.Tensor) -> None:
        self._take()
        self._ahead = collectives.start_reduce(partial, self._group, dst=p // self._each, site=self._site)

    def mine(self) -> torch.Tensor:
        """This rank's panels, side by side."""
        self._take()
        return torch.cat(self._panels, 1)

    def _take(self) -> None:
        panel = self._ahead()
        if panel is not None:
            self._panels.append(panel)
        self._ahead = lambda: None
