"""Probe a model with a few tokens before serving: find what its layers cache, and check its logits.

``learn`` records the shapes that every layer would cache. ``compare`` serves two sequences in chunks and by single
tokens, over pages, and compares the logits with those of the stock forward on each sequence alone. A model that mixes
tokens outside of its attention fails this comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...layers.attention.paged import PagedBatch, PagedKVCache, Span
from ...parallel.core.mesh import Group

# The largest allowed distance from the stock logits, as a share of their norm: a thousand times the rounding error in
# fp32, and two to four times the rounding error in low precision. There, routers of experts can amplify roundings far
# more, so the budget is at least FACTOR times the change of the stock logits under fp32 attention.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
FACTOR = 2.0
_LENGTHS = (7, 5)
_BLOCK = 2  # block size in tokens, small enough that every sequence has several blocks


class Heads(NamedTuple):
    """The sizes that a layer caches on this rank."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Recorder(PagedBatch):
    """A step that records its layers; their attention returns zeros."""

    layers: list[tuple[int, Heads]] = field(default_factory=list, init=False)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """Zeros [T, N/R, Hv].

        Raises ValueError for heads that do not go together.
        """
        tokens = q.shape[0]
        fit = k.shape[0] == v.shape[0] == tokens and k.shape[1] == v.shape[1] and k.shape[2] == q.shape[2]
        if q.dim() != 3 or not fit or q.shape[1] % k.shape[1]:
            raise ValueError(
                f"attend: layer {layer_index} gave q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}: "
                "expected [tokens, heads, head size] of each, with as many heads of keys as of values"
            )
        self.layers.append((layer_index, Heads(k.shape[1], k.shape[2], v.shape[2], v.dtype)))
        return q.new_zeros(tokens, q.shape[1], v.shape[2])

    @classmethod
    def over(cls, device: torch.device) -> Recorder:
        """Record one sequence of three tokens."""
        cache = PagedKVCache(1, 1, num_kv_heads=1, head_dim=1, block_size=4, device=device)
        return cls.of(cache, [Span([0], 0, 3)])  # type: ignore[return-value]


def tokens_of(vocab_size: int, count: int, device: torch.device) -> torch.Tensor:
    """Tokens [count] int64, all different if the vocabulary is large enough."""
    step = next(step for step in (7, 5, 3, 1) if vocab_size % step or step == 1)
    return (torch.arange(count, dtype=torch.int64, device=device) * step + 3) % vocab_size


Serve = Callable[[torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]  # tokens, positions [T], batch -> logits


@torch.no_grad()
def compare(
    what: str,
    serve: Serve,
    stock: Callable[[torch.Tensor, bool], torch.Tensor],
    layers: Sequence[Heads],
    *,
    vocab_size: int,
    max_positions: int,
    group: Group,
    device: torch.device,
) -> None:
    """Raise ValueError unless served logits equal those of ``stock`` (tokens [T], whether to compute attention in fp32)
    -> logits [T, V], within the budget."""
    heads = layers[0]
    cache = PagedKVCache(
        *(len(layers), 8),
        num_kv_heads=heads.kv_heads * group.size,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        block_size=_BLOCK,
        dtype=heads.dtype,
        mesh=group,
        device=device,
    )
    lengths = [min(length, max_positions) for length in _LENGTHS]
    ids = tokens_of(vocab_size, sum(lengths), device)
    first, second = ids[: lengths[0]], ids[lengths[0] :]
    cuts = [(0, min(3, n), n - 1, n) for n in lengths]
    blocks = ([5, 0, 7, 2], [1, 6, 3])
    sequences = (first, second)
    wanted = [stock(each, False) for each in sequences]
    served: list[tuple[int, int, torch.Tensor]] = []  # sequence, token, logits
    for at in range(3):  # two chunks of each sequence, then single tokens
        todo = [(which, cuts[which][at], cuts[which][at + 1]) for which in (0, 1)]
        todo = [(which, begin, end) for which, begin, end in todo if end > begin]
        if todo:
            batch = PagedBatch.of(cache, [Span(blocks[which], begin, end - begin) for which, begin, end in todo])
            given = torch.cat([sequences[which][begin:end] for which, begin, end in todo])
            logits = serve(given, batch.positions, batch)
            served += [(which, end - 1, row) for (which, _, end), row in zip(todo, logits, strict=True)]
    exact = heads.dtype in (torch.float32, torch.float64)

    def error_of(found: Sequence[torch.Tensor]) -> float:
        """The largest error of a token; in low precision, where a router may misroute one, the error of most tokens."""
        errors = sorted(_error(row, wanted[which][token]) for (which, token, _), row in zip(served, found, strict=True))
        return errors[-1 if exact else len(errors) // 2]

    error, budget = error_of([row for _, _, row in served]), TOLERANCE.get(heads.dtype, 0.04)
    if not error <= budget and not exact:
        wide = [stock(each, True) for each in sequences]
        budget = max(budget, FACTOR * error_of([wide[which][token] for which, token, _ in served]))
    if not error <= budget:
        raise ValueError(
            f"Engine: served over pages, this {what} comes to other logits than its own forward: they differ by "
            f"{error:.1e} of their norm, and at most {budget:.1e} is expected in {heads.dtype}; it does more with its "
            "tokens than the engine sees: use model.generate, and please report it"
        )


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The distance as a share of the norm; infinite for logits that are not finite."""
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")
