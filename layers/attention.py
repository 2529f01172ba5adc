"""Causal self-attention with grouped queries, heads split over a tensor-parallel group."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.dispatch import Choice
from ..parallel.mesh import MeshLike, tp_group
from .config import check_heads, default_head_dim
from .linear import ColumnParallelLinear, RowParallelLinear, project
from .module import Runs, check_divides
from .rope import Rope, apply_rope, rope_tables


class AttentionCache(Protocol):
    """What attention asks of a cache when serving: store this step's keys and values, attend over all of them."""

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """q [T, N/R, H], k and v [T, K/R, H] -> [T, N/R, H]; k is already rotated."""
        ...


class ParallelAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions; N/R heads per rank.

    x and the result are [B, S, D] or, with ``batch_size=B``, [B*S, D] batch-major (with sequence parallelism
    [B*S/R, D]). q, k and v share one input collective; rank r holds query heads r*N/R and up and exactly the KV heads
    that these attend to. Parameters are called as in Llama and Starcoder2: ``q_proj``, ``k_proj``, ``v_proj``,
    ``o_proj``. ``fuse_wgrad_accumulation`` adds their gradients to their ``main_grad`` (see ``attach_main_grads``).

    Raises ValueError where heads or KV heads do not divide by the group's size, or ``head_dim`` is odd.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        bias: bool = True,
        layer_index: int = 0,
        mesh: MeshLike = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        params: str = "dtensor",
        impl: str = "auto",
        init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = tp_group(mesh)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(num_heads, num_kv_heads)
        check_divides("num_heads", num_heads, self.group)
        check_divides("num_kv_heads", num_kv_heads, self.group)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = default_head_dim(hidden_size, num_heads) if head_dim is None else head_dim
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary positions turn pairs of elements")
        self.scale = self.head_dim**-0.5
        self.rope_theta = rope_theta
        self.layer_index = layer_index
        common: dict[str, Any] = {
            "bias": bias,
            "mesh": self.group,
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params": params,
            "impl": impl,
            "site": "attention",
            "init_std": init_std,
            "dtype": dtype,
            "device": device,
        }
        self.q_proj = ColumnParallelLinear(hidden_size, num_heads * self.head_dim, **common)
        self.k_proj = ColumnParallelLinear(hidden_size, num_kv_heads * self.head_dim, **common)
        self.v_proj = ColumnParallelLinear(hidden_size, num_kv_heads * self.head_dim, **common)
        self.o_proj = RowParallelLinear(num_heads * self.head_dim, hidden_size, **common)

    def forward(
        self,
        x: torch.Tensor,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        cache: AttentionCache | None = None,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """Attend over each sequence of the batch, or, with ``cache``, over what the cache holds of it.

        ``positions`` are [S], shared by all sequences, or [B*S]; default 0..S-1. With a cache x is [T, D], tokens of
        any sequences, and positions are [T]. ``rope`` hands in ready tables (``rope_tables`` of the positions).
        """
        if cache is not None:
            out = self._attend_cached(x, positions, cache, rope)
        else:
            out = self._attend(x, batch_size, positions, rope)
        return self.o_proj(out)

    def _attend(
        self, x: torch.Tensor, batch_size: int | None, positions: torch.Tensor | None, rope: Rope | None
    ) -> torch.Tensor:
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)  # [T, heads/R * H] or [B, S, heads/R * H]
        batch = _batch_size(q, batch_size)
        q, k, v = (t.view(batch, -1, t.shape[-1] // self.head_dim, self.head_dim) for t in (q, k, v))
        if rope is None:
            rope = rope_tables(_batched_positions(positions, q), self.head_dim, self.rope_theta)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )  # [B, N/R, S, H]
        out = out.transpose(1, 2)
        return out.reshape(*x.shape[:2], -1) if x.dim() == 3 else out.reshape(batch * out.shape[1], -1)

    def _attend_cached(
        self, x: torch.Tensor, positions: torch.Tensor | None, cache: AttentionCache, rope: Rope | None
    ) -> torch.Tensor:
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (t.view(len(x), -1, self.head_dim) for t in (q, k, v))
        if rope is None:
            if positions is None:
                raise ValueError("attention over a cache wants positions [T]: where each token stands in its sequence")
            rope = rope_tables(positions, self.head_dim, self.rope_theta)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        return cache.attend(self.layer_index, q, k, v, self.scale).reshape(len(x), -1)

    def runs(self, device: torch.device) -> Runs:
        return [("attention", Choice("reference", "torch's scaled_dot_product_attention; a cache brings its own op"))]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def _batch_size(tokens: torch.Tensor, batch_size: int | None) -> int:
    """How many sequences ``tokens`` [B, S, ...] or [B*S, ...] holds."""
    if tokens.dim() == 3:
        return tokens.shape[0]
    if batch_size is None:
        raise ValueError("attention over x [B*S, D] wants batch_size=B, or x [B, S, D]")
    if batch_size < 1 or tokens.shape[0] % batch_size:
        raise ValueError(f"batch_size={batch_size} does not divide the {tokens.shape[0]} tokens of x")
    return batch_size


def _batched_positions(positions: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """Positions [S] or [B, S] for ``q`` [B, S, N/R, H]."""
    batch, length = q.shape[:2]
    if positions is None:
        return torch.arange(length, device=q.device)
    if positions.numel() == length:
        return positions.view(length)
    if positions.numel() == batch * length:
        return positions.view(batch, length)
    raise ValueError(f"positions {list(positions.shape)}: expected [{length}] or [{batch * length}]")
