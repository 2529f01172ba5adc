"""Causal self-attention with grouped queries, heads split over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...kernels.rope import apply_rope, rope_choice
from ...kernels.runtime.checks import whole_number
from ...parallel.core.first_calls import compare_call
from ...parallel.core.random import sharded_draws
from ...parallel.overlap.partial_sum import PartialSum
from ..config import check_heads, default_head_dim
from ..linear import ColumnParallelLinear, RowParallelLinear, project
from ..module import FusedGroup, Init, Runs, ShardedModule, check_divides
from ..options import LayerKwargs, LayerOptions, Unpack
from .rope import Rope, Rotary, rope_tables
from .sdpa import attend, choose_path

SITE = "attention"


class AttentionCache(Protocol):
    """The cache of a serving batch: it stores this step's keys and values, and attends over all of them."""

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        rope: Rope,
        interleaved: bool,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [T, N/R, H], k and v [T, K/R, H] -> [T, N/R, H]; this method rotates q and k by ``rope``."""
        ...


class ParallelAttention(ShardedModule):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions; N/R heads per rank.

    x and the result are [B, S, D] or, with ``batch_size=B``, [B*S, D] batch-major (with sequence parallelism
    [B*S/R, D]). q, k and v share one input collective; rank r holds query heads r*N/R and up and exactly the KV heads
    that these attend to. Parameters are called as in Llama and Starcoder2: ``q_proj``, ``k_proj``, ``v_proj``,
    ``o_proj``, with a ``bias`` or without.

    ``head_dim`` defaults to ``hidden_size / num_heads``. ``rotary`` defines how heads are rotated, in place of plain
    rotary positions of base ``rope_theta``. ``window``, ``softcap`` and the learned ``sinks`` [N/R] change the scores
    by the formulas of ``layers/attention/sdpa.py``. In training a share ``dropout_p`` of the attention weights is
    dropped; each rank draws its own mask. ``layer_index`` is the layer's place in a serving cache. The other keyword
    arguments are documented in :class:`~shardfuse.layers.options.LayerOptions`.

    Raises ValueError where heads or KV heads do not divide by the group's size, or heads cannot be rotated.
    """

    sinks: torch.Tensor | None
    column: Callable[..., Any] = ColumnParallelLinear
    row: Callable[..., Any] = RowParallelLinear

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        rotary: Rotary | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout_p: float = 0.0,
        bias: bool = True,
        layer_index: int = 0,
        **options: Unpack[LayerKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, LayerKwargs)
        super().__init__(shared)
        self.window, self.softcap, self.dropout_p = window, softcap, dropout_p
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        whole_number("hidden_size", hidden_size)
        check_heads(num_heads, num_kv_heads)
        self.check_sizes(num_heads, num_kv_heads)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = default_head_dim(hidden_size, num_heads) if head_dim is None else head_dim
        whole_number("head_dim", self.head_dim)
        self.check_widths(hidden_size, num_heads * self.head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary positions turn pairs of elements")
        self.scale = self.head_dim**-0.5
        self.rotary = Rotary(self.head_dim, rope_theta) if rotary is None else rotary
        self.impl = shared.impl
        self.layer_index = layer_index
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        kwargs = shared.kwargs(LayerKwargs)
        column, row = type(self).column, type(self).row
        self.q_proj = column(hidden_size, width, bias, site=SITE, **kwargs)
        self.k_proj = column(hidden_size, kv_width, bias, site=SITE, **kwargs)
        self.v_proj = column(hidden_size, kv_width, bias, site=SITE, **kwargs)
        self.o_proj = row(width, hidden_size, bias, site=SITE, **kwargs)
        self.add_parameter("sinks", (num_heads,) if sinks else None, 0, Init(constant=0.0))
        self.reset_parameters()

    def check_sizes(self, num_heads: int, num_kv_heads: int) -> None:
        """ValueError for heads that the ranks cannot divide."""
        check_divides("num_heads", num_heads, self.group)
        check_divides("num_kv_heads", num_kv_heads, self.group)

    def check_widths(self, hidden_size: int, width: int) -> None:
        """ValueError for numbers of features, of x and of all heads together, that the ranks cannot divide."""

    def forward(
        self,
        x: torch.Tensor,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        cache: AttentionCache | None = None,
        rope: Rope | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        rows: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over each sequence of the batch; with ``cache``, also over the sequence's cached keys and values.

        ``positions`` are [S], shared by all sequences, or [B*S]; default 0..S-1. With ``cu_seqlens`` x is [T, D], a
        packed batch (see :func:`shardfuse.layers.attention.sdpa.attend`), and positions are [T], by default from 0 in
        each sequence. With a cache x is [T, D], tokens of any sequences, and positions are [T]. ``rope`` are the tables
        (``rope_tables``) of the positions; without them this method computes the tables. With ``rows`` [T_selected],
        indices of tokens, the result holds these tokens alone. The output projection's epilogue adds ``residual``, of
        the result's shape; only a group of one rank accepts it.
        """
        out = self.core_attention(
            x,
            batch_size=batch_size,
            positions=positions,
            cache=cache,
            rope=rope,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        out = out if rows is None else out[rows]
        return self.o_proj(out) if residual is None else self.o_proj(out, residual=residual)

    def partial_sum(self, x: torch.Tensor, *, rows: torch.Tensor | None = None, **attention: Any) -> PartialSum:
        """This rank's part of :meth:`forward`, still to be summed over the ranks. Inference only."""
        out = self.core_attention(x, **attention)
        return self.o_proj.partial_sum(out if rows is None else out[rows])

    def core_attention(
        self,
        x: torch.Tensor,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        cache: AttentionCache | None = None,
        rope: Rope | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """:meth:`forward` up to its output projection: this rank's heads side by side, [..., N/R * H]."""
        compare_call(self, self.group, x=x)
        if cu_seqlens is not None and not (batch_size is cache is None):
            raise ValueError("cu_seqlens says what the sequences are: leave out batch_size, and a cache knows its own")
        if cu_seqlens is None and max_seqlen is not None:
            raise ValueError(
                "max_seqlen bounds the lengths of a packed batch: pass cu_seqlens as well, or leave it out"
            )
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)  # [T, heads/R * H] or [B, S, heads/R * H]
        if cache is not None:
            return self._attend_cached(q, k, v, positions, cache, rope)
        if cu_seqlens is not None:
            return self._attend_packed(q, k, v, positions, rope, cu_seqlens, max_seqlen)
        return self._attend(q, k, v, batch_size, positions, rope)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch_size: int | None,
        positions: torch.Tensor | None,
        rope: Rope | None,
    ) -> torch.Tensor:
        shape, batch = q.shape, _batch_size(q, batch_size)
        length = shape[1] if len(shape) == 3 else shape[0] // batch
        q, k, v = (self._heads(t).unflatten(0, (batch, length)) for t in (q, k, v))
        if rope is None:
            rope = rope_tables(_batched_positions(positions, q), self.rotary, length=length)
        return self._mix(*self._rotated(q, k, rope), v).reshape(shape)

    def _attend_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor | None,
        rope: Rope | None,
        cu_seqlens: torch.Tensor,
        max_seqlen: int | None,
    ) -> torch.Tensor:
        shape = q.shape
        if len(shape) != 2:
            raise ValueError(f"a packed batch wants x [T, D], not {len(shape)} dimensions: flatten batch and sequence")
        q, k, v = (self._heads(t) for t in (q, k, v))
        if rope is None:
            positions = packed_positions(cu_seqlens, shape[0]) if positions is None else positions
            rope = rope_tables(positions, self.rotary, length=shape[0] if max_seqlen is None else max_seqlen)
        q, k = self._rotated(q, k, rope)
        return self._mix(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).reshape(shape)

    def _attend_cached(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor | None,
        cache: AttentionCache,
        rope: Rope | None,
    ) -> torch.Tensor:
        shape = q.shape
        q, k, v = (self._heads(t) for t in (q, k, v))
        if rope is None:
            if positions is None:
                raise ValueError("attention over a cache wants positions [T]: where each token stands in its sequence")
            rope = rope_tables(positions, self.rotary)
        (sinks,) = self.local("sinks")
        out = cache.attend(
            *(self.layer_index, q, k, v),
            scale=self.scale,
            rope=rope,
            interleaved=self.rotary.interleaved,
            window=self.window,
            softcap=self.softcap,
            sinks=sinks,
        )
        return out.reshape(shape)

    def local_sinks(self) -> Any:
        """This rank's sinks [N/R], or None."""
        return self.local("sinks")[0]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads * H] -> [T, heads, H]."""
        return x.view(x.shape[:-1].numel(), x.shape[-1] // self.head_dim, self.head_dim)

    def _rotated(self, q: torch.Tensor, k: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = apply_rope(q, k, rope.cos, rope.sin, interleaved=self.rotary.interleaved, impl=self.impl)  # type: ignore[assignment]
        return q, k

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **packed: Any) -> torch.Tensor:
        sinks = self.local_sinks()
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": sinks, **packed}
        if not (self.training and self.dropout_p):
            return attend(q, k, v, **options)
        with sharded_draws(self.group, q.device):
            return attend(q, k, v, dropout_p=self.dropout_p, **options)

    def fused_groups(self) -> list[FusedGroup]:
        """The layers that share a product and its collectives."""
        return [FusedGroup((self.q_proj, self.k_proj, self.v_proj))]

    def runs(self, device: torch.device) -> Runs:
        path = choose_path(
            device,
            self.q_proj.weight.dtype,
            self.head_dim,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks is not None,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        return [("attention", path), ("apply_rope", rope_choice(device, self.impl))]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def packed_positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The position of each of ``tokens`` in its sequence of a packed batch: [T] int64, computed on the device."""
    index = torch.arange(tokens, device=cu_seqlens.device)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, index, right=True) - 1]
    return index - starts


def _batch_size(tokens: torch.Tensor, batch_size: int | None) -> int:
    """The number of sequences in ``tokens`` [B, S, ...] or [B*S, ...]."""
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
