"""One decoder layer: attention and MLP, each behind a norm and beside a residual connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..parallel.overlap import partial_sum
from ..parallel.overlap.partial_sum import PartialSum
from ..parallel.overlap.plan import OverlapPlan
from ..parallel.zero.recompute import recomputed
from . import dropout as masks
from .attention.attention import AttentionCache, ParallelAttention
from .attention.rope import Rope, Rotary
from .config import TransformerConfig
from .linear import RowParallelLinear
from .mlp import ParallelMLP
from .module import Layer, is_plain_module
from .norm import LayerNorm, RMSNorm
from .options import LayerOptions, ModelKwargs, NormKwargs, Unpack


class ParallelBlock(Layer):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, as in Starcoder2 (gelu style) and Llama (gated).

    x and the result are [B, S, D] or, with ``batch_size=B``, [B*S, D] (with sequence parallelism [B*S/R, D]). In
    training, a share ``config.residual_dropout`` of either branch is dropped before the branch joins x.

    ``layer_index`` is the block's place in the model, and in a serving cache. ``recompute`` keeps only x for backward
    and runs the layer again there; ``mlp_recompute`` is ParallelMLP's ``recompute``, for the MLP alone. The other
    keyword arguments are documented in :class:`~shardfuse.layers.options.LayerOptions`; ``init_std`` is ``config``'s.

    Residual adds are fused into the projection's epilogue, or into the norm that follows, unless the submodule is
    hooked, wrapped or replaced: the block then calls it as it would call the stock module. Over several ranks, in
    inference with few tokens, the norm that follows may form the sum over the ranks as well: attention and MLP then
    return a :class:`~shardfuse.parallel.overlap.partial_sum.PartialSum`.
    """

    attention: Callable[..., Any] = ParallelAttention
    feed_forward: Callable[..., Any] = ParallelMLP
    norms: tuple[Callable[..., Any], Callable[..., Any]] = (LayerNorm, RMSNorm)

    def __init__(
        self,
        config: TransformerConfig,
        layer_index: int = 0,
        *,
        recompute: bool = False,
        mlp_recompute: int = 0,
        **options: Unpack[ModelKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, ModelKwargs)
        super().__init__()
        self.group, self.sequence_parallel, self.impl = shared.group, shared.sequence_parallel, shared.impl
        self.recompute = recompute
        self.dropout_p = config.residual_dropout
        self.input_layernorm = make_norm(config, self.norms, **shared.kwargs(NormKwargs))
        self.self_attn = type(self).attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            head_dim=config.head_dim,
            rotary=Rotary.of(config),
            window=config.attention_window,
            softcap=config.attention_softcap,
            sinks=config.attention_sinks,
            dropout_p=config.attention_dropout,
            bias=config.bias,
            layer_index=layer_index,
            init_std=config.init_std,
            **shared.kwargs(ModelKwargs),
        )
        self.post_attention_layernorm = make_norm(config, self.norms, **shared.kwargs(NormKwargs))
        self.mlp = type(self).feed_forward(
            config.hidden_size,
            config.intermediate_size,
            gated=config.gated,
            bias=config.bias,
            recompute=mlp_recompute,
            init_std=config.init_std,
            **shared.kwargs(ModelKwargs),
        )

    def forward(
        self,
        x: ResidualStream,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        cache: AttentionCache | None = None,
        rope: Rope | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        rows: torch.Tensor | None = None,
        join: bool = True,
        then: nn.Module | None = None,
        place: masks.RngOffset | None = None,
    ) -> Any:
        """See :meth:`ParallelAttention.forward` for the arguments. ``place`` determines the dropout masks where x is a
        piece of the batch; None draws new ones. With ``rows`` [T_selected] the result holds these tokens alone:
        attention reads all of x [T, D], and the layers after it compute T_selected rows. Inference only.

        With ``join=False`` the result may be a triple (stream, branch, dropout) in which the MLP's branch has not
        joined the stream yet, and x may be such a triple: the next norm adds the two in its own kernel. Where ``then``
        is that norm, the branch may also be a :class:`~shardfuse.parallel.overlap.partial_sum.PartialSum`.
        """
        attention: dict[str, Any] = {
            "batch_size": batch_size,
            "positions": positions,
            "cache": cache,
            "rope": rope,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
        }
        if rows is not None:  # a replaced attention module does not take this argument
            attention["rows"] = rows
        if self.recompute and torch.is_grad_enabled():
            random = self.training and (self.dropout_p > 0 or getattr(self.self_attn, "dropout_p", 0) > 0)
            one = joined(x, impl=self.impl)  # autograd then keeps one tensor, not two
            return recomputed(self._forward, one, attention, join, None, place, random=random)
        return self._forward(x, attention, join, None if join else then, place)

    def deferred_sums(self, then: nn.Module | None = None) -> list[tuple[nn.Module, RowParallelLinear]]:
        """The norms that may form a sum over the ranks, each with the row-parallel layer whose sum it is."""
        pairs = (
            (self.post_attention_layernorm, deferrable(self.self_attn, "o_proj", norm=self.post_attention_layernorm)),
            (then, deferrable(self.mlp, "down_proj", "c_proj", norm=then)),
        )
        return [(norm, last) for norm, last in pairs if norm is not None and last is not None]

    def _forward(
        self,
        x: ResidualStream,
        attention: dict[str, Any],
        join: bool,
        then: nn.Module | None,
        place: masks.RngOffset | None = None,
    ) -> ResidualStream:
        y, stream = normed(self.input_layernorm, x, MLP, impl=self.impl)
        if "rows" in attention:
            stream = stream[attention["rows"]]
        dropout = masks.draw(
            self.dropout_p,
            stream,
            self.group,
            sequence_parallel=self.sequence_parallel,
            training=self.training,
            place=place,
        )
        # In one process the epilogue of each branch's last product forms the residual sum.
        alone = self.group.size == 1 and dropout is None
        inference = self.group.size > 1 and dropout is None and not torch.is_grad_enabled()
        self_attn, norm, mlp = self.self_attn, self.post_attention_layernorm, self.mlp
        if alone and last_layer(self_attn, "o_proj") is not None:
            after: ResidualStream = self_attn(y, residual=stream, **attention)
        elif inference and can_defer(deferrable(self_attn, "o_proj", norm=norm), norm, stream):
            after = stream, self_attn.partial_sum(y, **attention), None
        else:
            after = stream, self_attn(y, **attention), dropout
        y, stream = normed(norm, after, ATTENTION, impl=self.impl)
        if alone and last_layer(mlp, "down_proj", "c_proj") is not None:
            return mlp(y, residual=stream)
        if inference and can_defer(deferrable(mlp, "down_proj", "c_proj", norm=then), then, y):
            return stream, mlp.partial_sum(y), None
        out = stream, mlp(y), dropout
        return joined(out, impl=self.impl) if join else out


# The rng streams of a block's two dropout masks.
ATTENTION, MLP = 0, 1

# The activations between blocks: x, or (x, branch, dropout) with a branch not added to x yet and perhaps not yet summed
# over the ranks.
ResidualStream = torch.Tensor | tuple[torch.Tensor, torch.Tensor | PartialSum, masks.Dropout | None]


def normed(norm: nn.Module, x: ResidualStream, stream: int, *, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x), x). A branch that is not part of x yet is added first, with its mask from the rng stream ``stream``."""
    if not is_plain_module(norm):
        x = joined(x, stream, impl=impl)
        return norm(x), x
    if isinstance(x, torch.Tensor):
        return norm(x, carry=True)
    x, branch, dropout = x
    if isinstance(branch, PartialSum):
        return norm.after_sum(branch, x)  # type: ignore[operator]
    return norm(branch, residual=x, dropout=dropout, stream=stream)


def joined(x: ResidualStream, stream: int = MLP, *, impl: str) -> torch.Tensor:
    """x with its branch added; the branch's mask comes from the rng stream ``stream``."""
    if isinstance(x, torch.Tensor):
        return x
    x, branch, dropout = x
    if isinstance(branch, PartialSum):
        branch = branch.reduce()
    return x + branch if dropout is None else dropout.apply(branch, stream, x, impl=impl)


def make_norm(
    config: TransformerConfig, kinds: Sequence[Callable[..., Any]] = (LayerNorm, RMSNorm), **options: Unpack[NormKwargs]
) -> Any:
    """The norm of the config's style: of the two ``kinds`` the second where it is gated."""
    kind = kinds[config.gated]
    return kind(config.hidden_size, eps=config.norm_eps, weight_offset=config.norm_offset, **options)


# --- the all-reduce of a row-parallel layer, in the norm that follows -------------------------------------------------


def last_layer(module: nn.Module, *names: str) -> nn.Module | None:
    """The last layer of ``module``, found under one of ``names``; None unless both are plain."""
    children = module._modules
    last = next((children[name] for name in names if name in children), None)
    return last if last is not None and is_plain_module(module) and is_plain_module(last) else None


def deferrable(module: nn.Module, *names: str, norm: nn.Module | None) -> RowParallelLinear | None:
    """The last layer of ``module`` if ``norm`` can form its sum over several ranks, else None."""
    if not (isinstance(norm, RMSNorm) and is_plain_module(norm)):
        return None
    last = last_layer(module, *names)
    if not isinstance(last, RowParallelLinear) or last.group.size == 1 or last.sequence_parallel:
        return None
    return last


def can_defer(last: RowParallelLinear | None, norm: nn.Module | None, x: torch.Tensor) -> bool:
    """Whether ``norm`` forms the sum of ``last``, a :func:`deferrable` layer, for the tokens of x [..., D]."""
    if last is None or torch.is_grad_enabled():  # training pays for this check alone
        return False
    return partial_sum.can_defer_all_reduce(x, group=last.group, **_sizes(last, norm))


def preview_deferred(
    last: RowParallelLinear, norm: nn.Module | None, device: torch.device, tokens: int | None
) -> OverlapPlan | None:
    """How ``norm`` would form the sum of a :func:`deferrable` layer over the ranks; None where it would not."""
    return partial_sum.preview_deferred(tokens, group=last.group, device=device, **_sizes(last, norm))


def _sizes(last: RowParallelLinear, norm: Any) -> dict[str, Any]:
    return {
        "dtype": torch.promote_types(last.weight.dtype, norm.weight.dtype),
        "features_in": last.in_features // last.group.size,
        "features_out": last.out_features,
        "overlap": last.overlap,
        "impl": norm.impl,
    }
