"""Launches of products for operands of one kind: their plans are made, so that a call allocates and launches.

``op.py`` and ``feed_forward.py`` make them after the first call of a kind (``runtime/repeated.py``). A matrix [T, F]
may have any number of dimensions if its rows lie as those of [T, F] do: kernels get addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import alloc, dispatch, repeated
from .config import forced
from .feed_forward import Saved
from .launch import Matrices, Optional, _sizes, grid_of, launched, planned

Targets = tuple[Matrices, ...]


class Settled:
    """``run_gemm`` for operands of one kind. Those that it is made of may be on the meta device."""

    def __init__(
        self,
        where: torch.device,
        layout: str,
        a: Matrices,
        b: Matrices,
        targets: Targets,
        *,
        combine: str = "grouped",
        epilogue: str = "act",
        activation: str = "identity",
        biases: Optional | None = None,
        sources: Targets | None = None,
        row_sums: Optional | None = None,
    ) -> None:
        self._combine, self._no_biases, self._nothing = combine, (None,) * len(a), (None,) * len(targets)
        around = self._around(targets, biases, sources, row_sums)
        self._plan = planned(where, layout, a, b, around, combine, epilogue, activation)
        self._grid = grid_of(self._plan, where)
        self._launch = None if self._plan.split_sum else self._plan.product.launch

    def __call__(
        self,
        a: Matrices,
        b: Matrices,
        targets: Targets,
        biases: Optional | None = None,
        sources: Targets | None = None,
        row_sums: Optional | None = None,
    ) -> None:
        if self._launch is None:
            launched(self._plan, self._grid, a, b, self._around(targets, biases, sources, row_sums), self._combine)
            return
        nothing = self._nothing  # what follows is `_around`, without a call
        around = biases or self._no_biases, None, sources or nothing, targets, row_sums or nothing
        self._launch(self._grid, (a, b, *around, None, None, 0), on=targets[0][0])

    def _around(self, targets: Targets, biases: Any, sources: Any, row_sums: Any) -> tuple[Any, ...]:
        return biases or self._no_biases, None, sources or self._nothing, targets, row_sums or self._nothing


class Forward:
    """y_i = act(z_i) + residual, or gated h = act(g) * u, and with ``save_preact`` the z_i, or g and u.

    The y_i, or h, get the leading dimensions of x; what backward reads is [T, F].
    """

    def __init__(
        self,
        x: torch.Tensor,
        weights: Matrices,
        biases: Optional,
        residual: torch.Tensor | None,
        activation: str,
        save_preact: bool,
        gated: bool,
        where: torch.device,
    ) -> None:
        T, Fs = _sizes(_rows(x), weights)
        self._gated = gated
        self._sizes = [(*x.shape[:-1], F) for F in (Fs[:1] if gated else Fs)]
        self._saved = [(T, F) for F in Fs] if save_preact else []
        outs, preacts = self._outputs(_meta(x))
        self._product = Settled(
            where,
            "nt",
            (_rows(x),) * len(Fs),
            weights,
            self._targets(list(map(_rows, outs)), preacts),
            combine="gated" if gated else "grouped",
            epilogue="gated" if gated else "act",
            activation=activation,
            biases=biases,
            sources=None if residual is None else ((_rows(residual),),),
        )

    def __call__(
        self, x: torch.Tensor, weights: Matrices, biases: Optional, residual: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results, and what backward reads."""
        outs, preacts = self._outputs(x)
        sources = None if residual is None else ((residual,),)
        self._product((x,) * len(weights), weights, self._targets(outs, preacts), biases, sources)
        return outs, preacts

    def _outputs(self, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outs = [alloc.new_empty(x, *size) for size in self._sizes]
        return outs, [alloc.new_empty(x, *size) for size in self._saved] if self._saved else []

    def _targets(self, outs: list[torch.Tensor], preacts: list[torch.Tensor]) -> Targets:
        if self._gated:
            return ((*outs, *preacts),)
        return tuple(zip(outs, preacts)) if preacts else tuple([(out,) for out in outs])


class FeedForward:
    """A feed-forward layer in one process, as in ``parallel/mlp.py``: two products, and up to four in backward.

    ``params`` are the weights, the biases, the output layer's weight and its bias.
    """

    def __init__(
        self, x: torch.Tensor, params: Sequence[Any], residual: torch.Tensor | None, activation: str, save_preact: bool
    ) -> None:
        n = self._n = len(params) // 2 - 1
        self._activation, self._counted = activation, ("gated_linear" if n == 2 else "linear_act", "triton")
        out_weight = params[2 * n]
        weights, biases, where = tuple(params[:n]), tuple(params[n : 2 * n]), x.device
        self._first = Forward(x, weights, biases, None, activation, save_preact, n == 2, where)
        h = _meta(x).new_empty(*x.shape[:-1], out_weight.shape[1])
        self._second = Forward(h, (out_weight,), (params[-1],), residual, "identity", False, False, where)
        self._backwards: dict[Any, _Backward] = {}

    def forward(
        self, x: torch.Tensor, params: tuple[Any, ...], residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """y, h [..., F], and what backward reads of the first product."""
        n = self._n
        dispatch.counts[self._counted] += 1
        dispatch.counts["linear_act", "triton"] += 1
        (h,), zs = self._first(x, params[:n], params[n : 2 * n])
        (y,), _ = self._second(h, params[2 * n : -1], params[-1:], residual)
        return y, h, zs

    def backward(self, dy: torch.Tensor, want: Sequence[bool], saved: Saved) -> list[torch.Tensor | None] | None:
        """The gradients of x and ``params``, None where ``want`` has False; None altogether where other launches than
        these four are needed.
        """
        x, h, weights, out_weight, zs = saved
        read = (dy, x, h, *weights, out_weight, *zs)
        if forced.config is not None or dispatch.row_invariant() or not aligned(*read):
            return None
        strides = [None if t is None else t.stride() for t in read]
        key = repeated.settings(dy.dtype), dy.shape, dy.dtype, tuple(want), *strides
        steps = self._backwards.get(key)
        if steps is None:
            if not _Backward.forms(dy, want, saved):
                return None
            steps = self._backwards[key] = _Backward(dy, want, saved, self._activation)
        return steps(dy, saved)


class Gradients:
    """dx = sum_i dz_i @ W_i and dW_i = dz_i^T @ x, with the biases' sums; those of them that are wanted."""

    def __init__(
        self,
        dzs: Matrices,
        x: torch.Tensor | None,
        weights: Sequence[torch.Tensor | None],
        want_x: bool,
        want_biases: Sequence[bool],
        where: torch.device,
    ) -> None:
        """``x``: None where the weights' gradients are not wanted. ``weights`` are read where ``want_x``."""
        n = len(dzs)
        rows = tuple(map(_rows, dzs))
        self._dx = self._dw = None
        if want_x:
            known: Any = tuple(weights)
            self._columns = known[0].shape[1]
            dx = _meta(rows[0]).new_empty(rows[0].shape[0], self._columns)
            self._dx = Settled(where, "nn", rows, known, ((dx,),), combine="chained" if n > 1 else "grouped")
        if x is not None:
            self._sizes = [(dz.shape[1], x.shape[-1]) for dz in rows]
            self._sums: Any = tuple([dz.shape[1] if want else None for dz, want in zip(rows, want_biases)])
            self._summed = any(want_biases)
            dws, dbs = self._outputs(_meta(dzs[0]))
            self._dw = Settled(where, "tn", rows, (_rows(x),) * n, tuple([(dw,) for dw in dws]), row_sums=dbs)

    def __call__(
        self, dzs: Matrices, x: torch.Tensor | None, weights: Any, like: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None], Sequence[torch.Tensor | None]]:
        """dx with the leading dimensions of ``like``, or of the dz_i, the dW_i, and the sums."""
        n = len(dzs)
        dx: torch.Tensor | None = None
        dws: list[Any] = [None] * n
        dbs: Sequence[torch.Tensor | None] = dws
        if self._dx is not None:
            dx = alloc.new_empty(dzs[0], *(dzs[0] if like is None else like).shape[:-1], self._columns)
            self._dx(dzs, tuple(weights), ((dx,),))
        if self._dw is not None:
            dws, dbs = self._outputs(dzs[0])
            self._dw(dzs, (x,) * n, tuple([(dw,) for dw in dws]), row_sums=dbs)  # type: ignore[arg-type]
        return dx, dws, dbs

    def _outputs(self, like: torch.Tensor) -> tuple[list[torch.Tensor], Optional]:
        dws = [alloc.new_empty(like, *size) for size in self._sizes]
        if not self._summed:
            return dws, self._sums  # None of each
        return dws, tuple([None if size is None else alloc.new_empty(like, size) for size in self._sums])


def rides(of_weights: Sequence[bool], of_biases: Sequence[bool]) -> bool:
    """Whether one launch forms the wanted gradients of some weights and biases."""
    return all(of_weights) or not any((*of_weights, *of_biases))


def aligned(*tensors: torch.Tensor | None) -> bool:
    """What forward's launches were promised; hooks on saved tensors may bring others."""
    return not any([t is not None and t.data_ptr() & 15 for t in tensors])  # noqa: C419 - a generator takes longer


class _Backward:
    """dzs = (dy @ W2) * act'(zs), and with it h where it was not kept; dW2 = dy^T @ h; and :class:`Gradients`."""

    @staticmethod
    def forms(dy: torch.Tensor, want: Sequence[bool], saved: Saved) -> bool:
        """Whether these launches form all that is wanted."""
        n = len(saved.weights)
        of_weights, of_biases = want[1 : 1 + n], want[1 + n : 1 + 2 * n]
        some = want[0] or any(of_weights)
        lie = all(repeated.rows_lie(t) for t in (dy, saved.x, saved.h) if t is not None)
        lie = lie and all(z.is_contiguous() for z in saved.zs)
        return lie and some and rides(of_weights, of_biases) and rides(want[-2:-1], want[-1:])

    def __init__(self, dy: torch.Tensor, want: Sequence[bool], saved: Saved, activation: str) -> None:
        n = self._n = len(saved.weights)
        self._recomputes = saved.h is None and want[-2]
        where = dy.device
        outs = self._like(_meta(dy), saved.zs)
        dzs, h = outs[:n], outs[n] if self._recomputes else saved.h
        self._dz = Settled(
            *(where, "nn", (_rows(dy),), (saved.out_weight,), (outs,)),
            epilogue="gated_grad" if n == 2 else "act_grad",
            activation=activation,
            sources=(tuple(saved.zs),),
        )
        self._out = Gradients((dy,), h, (None,), False, want[-1:], where) if want[-2] else None
        x = saved.x if want[1] else None
        self._first = Gradients(dzs, x, saved.weights, want[0], want[1 + n : 1 + 2 * n], where)
        self._reads_x = want[1]

    def __call__(self, dy: torch.Tensor, saved: Saved) -> list[torch.Tensor | None]:
        x, h, weights, out_weight, zs = saved
        n = self._n
        outs = self._like(dy, zs)
        self._dz((dy,), (out_weight,), (outs,), sources=(tuple(zs),))
        dx, dws, dbs = self._first(outs[:n], x if self._reads_x else None, weights, dy)
        dout: list[Any] = [None, None]
        if self._out is not None:
            _, (dout[0],), (dout[1],) = self._out((dy,), outs[n] if self._recomputes else h, (None,))
        return [dx, *dws, *dbs, *dout]

    def _like(self, dy: torch.Tensor, zs: Sequence[torch.Tensor]) -> Matrices:
        return tuple([alloc.new_empty(dy, *zs[0].shape) for _ in range(len(zs) + self._recomputes)])


class LinearBackward:
    """The backward of a call of ``linear_act`` or ``gated_linear``, from its dz_i on."""

    def __init__(self) -> None:
        self._kinds: dict[Any, Gradients] = {}

    def __call__(self, dzs: Matrices, x: Any, weights: Sequence[Any], want: Sequence[bool]) -> Any:
        """dx, the dW_i and the db_i that are wanted, None for others; None altogether where the launches are others.

        ``want`` are x's, the weights' and the biases'.
        """
        n = len(dzs)
        of_weights, of_biases = want[1 : 1 + n], want[1 + n :]
        if forced.config is not None or dispatch.row_invariant():
            return None
        if not rides(of_weights, of_biases) or not aligned(*dzs, x, *weights):
            return None
        kinds = [None if t is None else (t.shape, t.stride(), t.dtype) for t in (*dzs, x, *weights)]
        key = repeated.settings(dzs[0].dtype), tuple(want), *kinds
        steps = self._kinds.get(key)
        x = x if want[1] else None
        if steps is None:
            if not all(repeated.rows_lie(t) for t in (*dzs, x) if t is not None):
                return None
            steps = self._kinds[key] = Gradients(dzs, x, weights, want[0], of_biases, dzs[0].device)
        return steps(dzs, x, weights)


def _meta(x: torch.Tensor) -> torch.Tensor:
    """A tensor of x's dtype without memory: what plans are made of would otherwise double what a call needs."""
    return torch.empty(0, dtype=x.dtype, device="meta")


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2)
