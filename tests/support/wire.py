"""Record, slow down or omit the messages between the ranks of a test. CPUs and eager mode only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from products import PARAM_GRADS, around

from shardfuse.parallel.core import collectives, pieces
from shardfuse.parallel.overlap.strategies import Chunked, Plain

# ("start" or "end", kind, site, time.monotonic())
Event = tuple[str, str, str, float]


@contextmanager
def _flights(kind: type[collectives.Flight]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (collectives, pieces):
            patch.setattr(module, "Flight", kind)
        yield


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """The events in the block, in order: each collective, each piece of one, and each "product" that may overlap a
    collective, at its site. Pieces of a site end in the order in which they started.
    """
    events: list[Event] = []
    inside, summing = [""], ""  # the sites of the running strategy call, and of the last started sum

    class Recorded(collectives.Flight):
        def __init__(self, kind: str, site: str, post: Callable[[], Any]) -> None:
            events.append(("start", kind, site, time.monotonic()))
            super().__init__(kind, site, post)

        def wait(self) -> None:
            super().wait()
            events.append(("end", self.kind, self.site, time.monotonic()))

    def product(name: str, run: Callable[[], Any], of: Any) -> Any:
        # The weights' gradients are computed during the sum of the input's gradient.
        site = summing if name == PARAM_GRADS and summing.endswith(".grad") else inside[-1]
        if not site:
            return run()
        events.append(("start", "product", site, time.monotonic()))
        result = run()
        events.append(("end", "product", site, time.monotonic()))
        return result

    def of_site(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, site: str, **options: Any) -> Any:
            nonlocal summing
            summing = "" if name == "all_gather_linear" else site
            inside.append(site)
            try:
                return method(*args, site=site, **options)
            finally:
                inside.pop()

        return started

    with pytest.MonkeyPatch.context() as patch, _flights(Recorded), around(product):
        for strategy in (Plain, Chunked):
            for name in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"):
                patch.setattr(strategy, name, of_site(name, getattr(strategy, name)))
        yield events


@contextmanager
def slow_wire(seconds: float) -> Iterator[None]:
    """Every posted message arrives at least ``seconds`` later, and the process computes nothing meanwhile."""

    class Slow(collectives.Flight):
        def __init__(self, kind: str, site: str, post: Callable[[], Any]) -> None:
            self.due = time.monotonic() + seconds
            super().__init__(kind, site, post)

        def wait(self) -> None:
            super().wait()
            time.sleep(max(0.0, self.due - time.monotonic()))

    with _flights(Slow):
        yield


class _Stays:
    """Replaces pieces._Swap: it delivers this rank's own rows, or zeros for addends."""

    def __init__(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, group: Any, tag: int) -> None:
        if tag == pieces.GATHER_TAG:
            received.copy_(sent)
        else:
            received.zero_()

    def wait(self) -> None:
        pass


@contextmanager
def omit(site: str) -> Iterator[None]:
    """In the block, collectives at ``site`` use this rank's data alone; every rank must omit the same ones.

    Shapes stay right but values are wrong, which shows whether a check detects it. They are not counted.
    """

    def unless(owner: Any, name: str, alone: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            omitted = (collectives.posting() or ("", ""))[1] == site
            return (alone if omitted else real)(*args, **options)

        patch.setattr(owner, name, call)

    def count(kind: str, nbytes: int, at: str) -> None:
        if at != site:
            counted(kind, nbytes, at)

    counted = collectives.count

    def gathered(out: torch.Tensor, shard: torch.Tensor, group: Any, **options: Any) -> None:
        out.view(-1, *shard.shape).copy_(shard.expand(out.shape[0] // shard.shape[0], *shard.shape))

    def exchanged(out: torch.Tensor, slices: torch.Tensor, *, group: Any, **options: Any) -> None:
        rank = dist.get_rank(group)
        out.zero_()[rank] = slices[rank]

    with pytest.MonkeyPatch.context() as patch:
        unless(collectives, "_all_gather_single", gathered)
        unless(dist, "all_to_all_single", exchanged)
        unless(dist, "broadcast", lambda x, **options: None)
        for module in (collectives, pieces):
            unless(module, "sum_in_place", lambda x, *args, **options: None)
            patch.setattr(module, "count", count)
        unless(pieces, "_Swap", _Stays)
        yield


def sites_seen() -> list[str]:
    """The sites at which a collective ran since the last ``collectives.reset_counts()``."""
    return sorted({site for _, site in collectives.calls})
