"""The order in which a layer over a grid sends and multiplies: what travels under which product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from products import around
from wire import recorded

from shardfuse.layers.grid.linear import GridLinear
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import gather

T, K, N = 16, 16, 32
FORWARD, BACKWARD = "forward", "backward"

ZERO_TP = {  # W and x travel together; dx's sum under the product of dW
    FORWARD: ["start weight", "start in", "end in", "end weight", "forward"],
    BACKWARD: [
        "start weight.again",
        "start in.again",
        "end weight.again",
        "input_grad",
        "start in.grad",
        "end in.again",
        "param_grads",
        "start weight.grad",
        "end weight.grad",
        "end in.grad",
    ],
}
TURNED = {  # W and dy travel together, and with overlap="none" dW under the product of dx
    FORWARD: ["start weight", "end weight", "forward", "start out", "end out"],
    BACKWARD: [
        "start weight.again",
        "start out.grad",
        "end out.grad",
        "param_grads",
        "start weight.grad",
        "end weight.again",
        "input_grad",
        "end weight.grad",
    ],
}
ZERO = {  # W under the product of dW, and dW under that of dx
    FORWARD: ["start weight", "end weight", "forward"],
    BACKWARD: [
        "start weight.again",
        "param_grads",
        "start weight.grad",
        "end weight.again",
        "input_grad",
        "end weight.grad",
    ],
}


def _part(whole: torch.Tensor, rows: list[Any], columns: Any) -> torch.Tensor:
    for axis in rows:
        whole = whole.chunk(axis.size)[axis.rank]
    return whole.chunk(columns.size, 1)[columns.rank].contiguous()


def _order_body(rank: int, world: int, grid: tuple[int, int, int], turned: bool, overlap: str) -> dict[str, list[str]]:
    """What happens in forward and in backward, after the gradients were compared with those of one process."""
    torch.manual_seed(0)
    layer = GridLinear(
        K, N, bias=False, turned=turned, mesh=init_mesh(grid=grid), overlap=overlap, dtype=torch.float64, site="it"
    )
    axes, weight = layer.axes, gather(layer.weight.detach())
    x, dy = torch.randn(T, K, dtype=torch.float64), torch.randn(T, N, dtype=torch.float64)
    x_here = _part(x, [axes.tokens, axes.outer], axes.inner).requires_grad_()
    dy_here = _part(dy, [axes.tokens, axes.inner], axes.outer)
    found = {}
    with recorded() as events:

        def note(name: str, product: Any, _: Any) -> Any:
            events.append(("run", "", name, 0.0))
            return product()

        def taken() -> list[str]:
            said = [
                site if what == "run" else f"{what} {site.removeprefix('it.')}"
                for what, kind, site, _ in events
                if what == "run" or (kind != "product" and site.startswith("it."))
            ]
            events.clear()
            return said

        with around(note):
            y = layer(x_here)
            found[FORWARD] = taken()
            y.backward(dy_here)
            found[BACKWARD] = taken()
    torch.testing.assert_close(y, _part(x @ weight.t(), [axes.tokens, axes.inner], axes.outer))
    torch.testing.assert_close(x_here.grad, _part(dy @ weight, [axes.tokens, axes.outer], axes.inner))
    torch.testing.assert_close(gather(layer.weight.grad), dy.t() @ x)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("grid", "turned", "overlap", "expected"),
    [
        ((2, 1, 2), False, "none", ZERO_TP),
        ((2, 1, 2), True, "none", TURNED),
        ((4, 1, 1), False, "auto", ZERO),
    ],
    ids=["zero-tp", "zero-tp-turned", "zero"],
)
def test_weights_travel_beside_rows_or_under_a_product(
    ranks: Any, grid: tuple[int, int, int], turned: bool, overlap: str, expected: dict[str, list[str]]
):
    assert ranks(4, _order_body, grid, turned, overlap) == [expected] * 4
