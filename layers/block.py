"""One decoder layer: attention and MLP, each behind a norm and beside a residual connection."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..parallel.mesh import MeshLike, tp_group
from .attention import AttentionCache, ParallelAttention
from .config import TransformerConfig
from .mlp import ParallelMLP
from .norm import LayerNorm, RMSNorm
from .rope import Rope


class ParallelBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, as in Starcoder2 (gelu style) and Llama (gated).

    x and the result are [B, S, D] or, with ``batch_size=B``, [B*S, D] (with sequence parallelism [B*S/R, D]).
    ``recompute`` keeps only x for backward and runs the layer again there; ``mlp_recompute`` is ParallelMLP's
    ``recompute``, for the MLP alone. ``fuse_wgrad_accumulation`` adds the linear layers' gradients to their parameters'
    ``main_grad`` (see ``attach_main_grads``).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_index: int = 0,
        *,
        mesh: MeshLike = None,
        sequence_parallel: bool = False,
        recompute: bool = False,
        mlp_recompute: int = 0,
        fuse_wgrad_accumulation: bool = False,
        params: str = "dtensor",
        impl: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = tp_group(mesh)
        self.recompute = recompute
        place: dict[str, Any] = {
            "mesh": self.group,
            "sequence_parallel": sequence_parallel,
            "params": params,
            "dtype": dtype,
            "device": device,
        }
        self.input_layernorm = make_norm(config, **place)
        self.self_attn = ParallelAttention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            bias=config.bias,
            layer_index=layer_index,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            impl=impl,
            init_std=config.init_std,
            **place,
        )
        self.post_attention_layernorm = make_norm(config, **place)
        self.mlp = ParallelMLP(
            config.hidden_size,
            config.intermediate_size,
            gated=config.gated,
            bias=config.bias,
            recompute=mlp_recompute,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            impl=impl,
            init_std=config.init_std,
            **place,
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        cache: AttentionCache | None = None,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """See :meth:`ParallelAttention.forward` for what the arguments mean."""
        if self.recompute and torch.is_grad_enabled():
            # Nothing here draws random numbers, so their state need not be kept.
            return checkpoint(
                self._forward, x, batch_size, positions, cache, rope, use_reentrant=False, preserve_rng_state=False
            )
        return self._forward(x, batch_size, positions, cache, rope)

    def _forward(
        self,
        x: torch.Tensor,
        batch_size: int | None,
        positions: torch.Tensor | None,
        cache: AttentionCache | None,
        rope: Rope | None,
    ) -> torch.Tensor:
        attended = self.self_attn(
            self.input_layernorm(x), batch_size=batch_size, positions=positions, cache=cache, rope=rope
        )
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def make_norm(config: TransformerConfig, **place: Any) -> LayerNorm | RMSNorm:
    """The norm of the config's style."""
    kind = RMSNorm if config.gated else LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps, **place)
