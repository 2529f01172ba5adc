"""Count the calls of our ops by implementation and fused module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ...kernels.runtime import dispatch
from ...kernels.runtime.printing import Sheet, figure, text_of, unbroken
from .swap import observers

Call = tuple[str, str, str]  # (path of the module, "" outside of fused ones; op; implementation)


class Stats(Counter[Call]):
    """The counted calls; print them, or look one up: ``stats["model.layers.0.mlp", "linear_act", "triton"]``."""

    def total_of(self, op: str, impl: str | None = None) -> int:
        """The number of calls of ``op``, in one implementation or in all."""
        return sum(n for (_, name, ran), n in self.items() if name == op and impl in (None, ran))

    def __rich__(self) -> Sheet:
        table = Sheet(unbroken("module"), unbroken("op"), unbroken("ran"), figure("calls"))
        for (path, op, impl), calls in sorted(self.items()):
            table.add(path or "(elsewhere)", op, impl, f"{calls:,}")
        return table

    def __str__(self) -> str:
        return text_of(self)


@contextmanager
def stats(model: nn.Module | None = None) -> Iterator[Stats]:
    """Count the calls of our ops in forward within the block, by module if ``model`` is given.

        with sf.stats(model) as ran:
            model(**batch)
        print(ran)

    Calls that torch.compile captured and the steps of backward are not counted. Not thread-safe.
    """
    ran = Stats()
    paths = {} if model is None else {module: path for path, module in model.named_modules()}
    within: list[Counter[tuple[str, str]]] = [Counter()]  # for each running module, the calls inside its submodules

    @contextmanager
    def watch(module: nn.Module) -> Iterator[None]:
        if module not in paths:
            yield
            return
        before = dispatch.counts.copy()
        within.append(Counter())
        try:
            yield
        finally:
            calls = dispatch.counts - before
            for (op, impl), times in (calls - within.pop()).items():
                ran[paths[module], op, impl] += times
            within[-1] += calls

    before = dispatch.counts.copy()
    observers.append(watch)
    try:
        yield ran
    finally:
        observers.remove(watch)
        for (op, impl), times in (dispatch.counts - before - within[0]).items():
            ran["", op, impl] += times
