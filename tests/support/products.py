"""Watch a step's products: every ``Product.compute``, ``Product.send`` and ``functional.param_grads``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardfuse.kernels.linear import Product, functional
from shardfuse.parallel.core import collectives

# (layout, epilogue) -> the tests' name; a sent product has the prefix "send_".
NAMES = {
    ("nt", "act"): "forward",
    ("nt", "gated"): "gated_forward",
    ("nn", "act"): "input_grad",
    ("nn", "act_grad"): "input_grad_act",
    ("nn", "gated_grad"): "input_grad_gated",
}
PARAM_GRADS = "param_grads"

# (name, run, of): may call ``run``; ``of`` is the Product, or the arguments of param_grads.
Around = Callable[[str, Callable[[], Any], Any], Any]


@contextmanager
def around(each: Around) -> Iterator[None]:
    """Within the block, call ``each`` for every product; it returns the product's results."""
    compute, send, param_grads = Product.compute, Product.send, functional.param_grads

    def name(product: Product) -> str:
        return NAMES[product.layout, product.epilogue.kind]

    def computed(product: Product, *args: Any) -> Any:
        if not product.weights:  # it only gathers rows
            return compute(product, *args)
        return each(name(product), lambda: compute(product, *args), product)

    def sent(product: Product, *args: Any) -> Any:
        return each(f"send_{name(product)}", lambda: send(product, *args), product)

    def formed(*args: Any, **kwargs: Any) -> Any:
        return each(PARAM_GRADS, lambda: param_grads(*args, **kwargs), args)

    Product.compute, Product.send, functional.param_grads = computed, sent, formed  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Product.compute, Product.send, functional.param_grads = compute, send, param_grads  # type: ignore[method-assign]


def order_of_backward(run: Callable[[], Any]) -> list[str]:
    """The order of ``run``'s actions: starts of sums of an input's gradient, weight gradients, waits for the sums."""
    events: list[str] = []
    start = collectives.start_all_reduce

    def started(x: Any, group: Any, *, site: str) -> Callable[[], Any]:
        events.append("start")
        finish = start(x, group, site=site)

        def finished() -> Any:
            events.append("wait")
            return finish()

        return finished

    def noted(name: str, product: Callable[[], Any], of: Any) -> Any:
        events.extend(["weights"] if name == PARAM_GRADS else [])
        return product()

    collectives.start_all_reduce = started
    try:
        with around(noted):
            run()
    finally:
        collectives.start_all_reduce = start
    return events
