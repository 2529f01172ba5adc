"""A matrix product of a linear layer as a value: what is multiplied, and what rides in its epilogue.

Who makes a product need not be who runs it. A layer says what it multiplies; :meth:`Product.compute` multiplies rows
that are there; ``parallel/overlap/strategies.py`` gathers the rows first, or sums the results over the ranks
afterwards, in whatever way is fastest. ``op.py``, whose rows are always there, needs no such value: it calls the same
functions of :func:`functional.implementation`.

    layout  epilogue    rows          weights           results, [T, ...] each
    "nt"    act         x [T, D]      W_i [F_i, D]      y_i = act(z_i) [+ residual]; with save_preact the z_i as well
    "nt"    gated       x [T, D]      W_g, W_u [F, D]   h = act(g) * u; with save_preact g and u as well
    "nn"    act         dz_i [T, F_i] W_i [F_i, D]      dx = sum_i dz_i @ W_i
    "nn"    act_grad    dy [T, D]     W [D, F]          dz = (dy @ W) * act'(z); with recompute_act h = act(z) as well
    "nn"    gated_grad  dy [T, D]     W [D, F]          dg, du of h = act(g) * u; with recompute_act h as well

z_i = x @ W_i^T + b_i, g and u alike. All on this rank, outside autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import library
from ..runtime.dispatch import Choice
from ..runtime.signals import Gathered, Scattered
from . import functional, schemas

Tensors = Sequence[torch.Tensor]
Biases = Sequence["torch.Tensor | None"]


class Epilogue(NamedTuple):
    """What happens to a tile of the product before it is stored."""

    kind: str = "act"  # "act", "gated", "act_grad" or "gated_grad", as in triton.py
    activation: str = "identity"
    biases: Biases = ()
    residual: torch.Tensor | None = None  # [T, F]
    preacts: Tensors = ()  # z, or g and u, [T, F]: what the gradients read
    save_preact: bool = False
    recompute_act: bool = False


class Product(NamedTuple):
    """One launch of the GEMM, described. Operands are checked and of one dtype (``functional.prepare``)."""

    rows: Tensors
    weights: Tensors
    layout: str
    epilogue: Epilogue
    choice: Choice

    # --- the five kinds -----------------------------------------------------------------------------------------------

    @classmethod
    def linear_act(
        cls,
        x: torch.Tensor,
        weights: Tensors,
        biases: Biases,
        activation: str,
        choice: Choice,
        *,
        residual: torch.Tensor | None = None,
        save_preact: bool = False,
    ) -> Product:
        """Forward of a layer. No pre-activation is saved for the identity, whose backward needs none."""
        save_preact = save_preact and activation != "identity"
        epilogue = Epilogue("act", activation, biases, residual, save_preact=save_preact)
        return cls((x,), weights, "nt", epilogue, choice)

    @classmethod
    def gated_linear(
        cls,
        x: torch.Tensor,
        weights: Tensors,
        biases: Biases,
        activation: str,
        choice: Choice,
        *,
        save_preact: bool = False,
    ) -> Product:
        """Forward of a gated layer: gate and up."""
        return cls((x,), weights, "nt", Epilogue("gated", activation, biases, save_preact=save_preact), choice)

    @classmethod
    def input_grad(cls, dzs: Tensors, weights: Tensors, choice: Choice) -> Product:
        """Backward through layers that share x."""
        return cls(dzs, weights, "nn", Epilogue(), choice)

    @classmethod
    def input_grad_act(
        cls,
        dy: torch.Tensor,
        weight: torch.Tensor,
        preacts: Tensors,
        activation: str,
        choice: Choice,
        *,
        recompute_act: bool = False,
    ) -> Product:
        """Backward through a layer and the activation before it; with two ``preacts``, g and u, that of a gated one."""
        kind = "gated_grad" if len(preacts) == 2 else "act_grad"
        epilogue = Epilogue(kind, activation, preacts=preacts, recompute_act=recompute_act)
        return cls((dy,), [weight], "nn", epilogue, choice)

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """T, as far as the rows are there."""
        return self.rows[0].shape[0]

    @property
    def width(self) -> int:
        """The columns of its (first) result."""
        return self.weights[0].shape[0 if self.layout == "nt" else 1]

    def without_results(self) -> Product:
        """The same rows for no product: what gathers them gathers them all the same."""
        return self._replace(weights=())

    # --- running it ---------------------------------------------------------------------------------------------------

    def of(self, rows: torch.Tensor, part: slice | None = None) -> Product:
        """The same product of other rows, which are the rows ``part`` of all those that the epilogue reads."""
        if part is None or not self.epilogue.preacts:
            return self._replace(rows=(rows,))
        preacts = [preact[part] for preact in self.epilogue.preacts]
        return self._replace(rows=(rows,), epilogue=self.epilogue._replace(preacts=preacts))

    def part(self, part: slice) -> Product:
        """The product of its own rows ``part``, where the epilogue reads nothing of theirs."""
        assert not self.epilogue.preacts
        return self._replace(rows=[rows[part] for rows in self.rows])

    def compute(self, arriving: Gathered | None = None) -> list[torch.Tensor]:
        """The results, in the table's order.

        Launch, torch op and plain-torch twin of each kind have one name and signature. With ``arriving`` the rows are
        still on their way from other ranks, and the kernel's tiles wait for them.
        """
        x, weights = self.rows[0], self.weights
        if not weights:
            return []
        kind, activation, biases, residual, preacts, save_preact, recompute_act = self.epilogue
        options: tuple[Any, ...] = ()
        if arriving is not None:
            where, options = library.imported(schemas.LAUNCH), (arriving,)
        elif kind == "act" and self.layout == "nt" and self.choice.impl == "onednn":
            return functional.linear_act_fwd(self.choice, x, weights, biases, residual, activation, save_preact)
        else:
            where = functional.implementation(self.choice, *self.rows, *weights, *biases, *preacts, residual)
        if kind == "gated":
            return where.gated_linear_fwd(x, weights, biases, activation, save_preact, *options)
        if self.layout == "nt":
            return where.linear_act_fwd(x, weights, biases, residual, activation, save_preact, *options)
        if kind == "act_grad":
            return where.linear_dgrad_act(x, weights[0], *preacts, activation, recompute_act, *options)
        if kind == "gated_grad":
            return where.linear_dgrad_gated(x, weights[0], *preacts, activation, recompute_act, *options)
        return [where.linear_dgrad(self.rows, weights, *options)]

    def send(self, to: Scattered) -> None:
        """Have the kernel's tiles leave for the ranks that own their rows, each of which adds up what it gets."""
        from . import launch

        assert self.epilogue.kind == "act"
        assert not any(bias is not None for bias in self.epilogue.biases)
        launch.send_product(self.layout, tuple(self.rows), tuple(self.weights), to)
