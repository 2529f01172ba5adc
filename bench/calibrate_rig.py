"""The operations that ``calibrate`` times: operands of a shape, the shapes at a bucket's ends, and the shares found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from ..kernels.dev.accuracy import Verdict, judge
from ..kernels.linear import Product, functional
from ..kernels.norm import rms_norm
from ..parallel.core.mesh import Group
from ..parallel.overlap import partial_sum
from ..parallel.overlap.link_model import GATHER, NORM, SCATTER, Call
from ..parallel.overlap.link_profile import Row, RowKey, bucket_ends
from ..parallel.overlap.plan import MARGIN, OverlapPlan

SITE = "calibrate"
STEPS = 32  # for each power of two: the features at a bucket's ends are multiples of that part of it


@dataclass(frozen=True)
class Rig:
    """One operation with its operands: x [T, K], for a gather this rank's rows [T/R, K]; the weight is [N, K].

    ``stream`` [T, N], the same on every rank, is the norm's residual; row 0 serves as its weight, too.
    """

    call: Call
    group: Group
    x: torch.Tensor
    weight: torch.Tensor
    stream: torch.Tensor

    @classmethod
    def of(cls, call: Call, group: Group, device: torch.device) -> Rig:
        generator = torch.Generator().manual_seed(group.rank)
        rows = call.T // call.R if call.op == GATHER else call.T
        x, weight = (torch.randn(n, call.K, generator=generator) for n in (rows, call.N))
        stream = torch.randn(call.T, call.N, generator=generator.manual_seed(0)) if call.op == NORM else torch.empty(0)
        operands = (x, weight * call.K**-0.5, stream)
        return cls(call, group, *[t.to(device, call.dtype) for t in operands])

    def result(self, plan: OverlapPlan) -> torch.Tensor:
        """The result of the operation by one plan: [T, N], for a reduce-scatter [T/R, N].

        Outside of the kernel it uses the product that a layer would run: stock torch if a table of measurements
        finds that faster. It asks once, as layers do, with the rows of this rank.
        """
        _, choice = functional.prepare(self.x, [self.weight], [None], "identity", "auto")
        product = Product.linear_act(self.x, [self.weight], [None], "identity", choice)
        strategy = plan.strategy(self.group)
        if self.call.op == GATHER:
            (y,), _ = strategy.all_gather_linear(product, site=SITE)
            return y
        if self.call.op == NORM:
            return self._normed(product, plan)
        if self.call.op == SCATTER:
            return strategy.linear_reduce_scatter(product, site=SITE).wait()
        return strategy.linear_all_reduce(product, site=SITE).wait()

    def _normed(self, product: Product, plan: OverlapPlan) -> torch.Tensor:
        if plan.kind == "kernel":
            (rows,) = product.compute()
            unsummed = partial_sum.PartialSum(rows, None, self.group, SITE)
            y, _ = partial_sum.fused_allreduce_norm(
                unsummed, self.stream, self.stream[0], eps=1e-6, weight_offset=0.0, impl="triton"
            )
            return y
        y = plan.strategy(self.group).linear_all_reduce(product, site=SITE, async_op=False).wait()
        return rms_norm(y, self.stream[0], residual=self.stream)[0]

    def verdicts(self, plan: OverlapPlan) -> Iterator[Verdict]:
        """Compare the plan with plain in fp64; it may have twice the error of plain in its own precision."""
        doubled = {name: getattr(self, name).double() for name in ("x", "weight", "stream")}
        exact = replace(self, **doubled).result(OverlapPlan())
        name = f"{self.call.op} {plan.kind} in {plan.pieces}"
        yield judge(name, self.result(plan), self.result(OverlapPlan()), exact, terms=max(self.x.shape))


def ends_of(call: Call) -> list[Call]:
    """The smallest and the largest shape of the call's bucket: all three sizes at their lower and at their upper ends.

    A plan's gain over plain depends on how long collective and product take relative to each other, which N (of a
    gather) and K (of a sum) decide, and on the calls' fixed costs: these shapes are the extremes of both. Tokens are a
    multiple of the ranks, except for a norm's sum; features are a multiple of a 32nd of their power of two.
    """
    each = 1 if call.op == NORM else call.R
    features = [_ends(size, max(1, bucket_ends(size).middle // STEPS)) for size in (call.K, call.N)]
    shapes = zip(_ends(call.T, each), *features)
    return [end for T, K, N in shapes if (end := call._replace(T=T, K=K, N=N)) != call]


def _ends(size: int, step: int) -> tuple[int, int]:
    """The first and the last multiple of ``step`` in the bucket of ``size``."""
    low, _, high = bucket_ends(size)
    return -(-low // step) * step, high // step * step


@dataclass
class Shares:
    """One clock's timings of a bucket so far: plain's time on the first shape, each plan's worst share of plain's."""

    plain_s: float = 0.0
    noise: float = 0.0  # the largest so far
    worst: dict[OverlapPlan, float] = field(default_factory=dict)

    def add(self, plan: OverlapPlan, share: float, plain_s: float, noise: float) -> None:
        self.plain_s = self.plain_s or plain_s
        self.noise = max(self.noise, noise)
        self.worst[plan] = max(self.worst.get(plan, 0.0), share)

    def fastest(self) -> OverlapPlan:
        return min(self.worst, key=self.worst.__getitem__)

    def winners(self) -> list[OverlapPlan]:
        """The plans that still beat plain: no other plan can be chosen, whatever its time on other shapes."""
        return [plan for plan, share in self.worst.items() if share < 1 - MARGIN]

    def row(self, key: RowKey) -> Row:
        seconds = {plan: share * self.plain_s for plan, share in self.worst.items()}
        chunked = {plan.pieces: of for plan, of in seconds.items() if plan.kind == "chunked"}
        kernel = next((of for plan, of in seconds.items() if plan.kind == "kernel"), None)
        return Row(*key[:-1], self.plain_s, chunked, kernel, self.noise, key[-1])
