"""A few tokens through a model before it is served: what its layers cache, and whether its logits are right.

``learn`` has every layer say what it would cache. ``compare`` serves two sequences in chunks and by single tokens,
over pages, and compares the logits with those of the stock forward on each sequence alone; a model that mixes tokens
anywhere outside of its attention comes to other numbers there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...layers.attention.paged import PagedBatch, PagedKVCache, Span
from ...parallel.core.mesh import Group

# How far logits may be from the stock ones, as a share of their norm: a thousand times what rounding comes to in fp32,
# and twice to four times in low precision, where routers of experts can make far more of it. There the budget is FACTOR
# times what the stock logits change by if attention alone is computed in fp32, where that is more.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
FACTOR = 2.0
_LENGTHS = (7, 5)
_BLOCK = 2  # tokens: every sequence has several blocks


class Heads(NamedTuple):
    """What a layer caches on this rank."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Recorder(PagedBatch):
    """A step whose layers attend to nothing and are noted."""

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
        """Of one sequence of three tokens."""
        cache = PagedKVCache(1, 1, num_kv_heads=1, head_dim=1, block_size=4, device=device)
        return cls.of(cache, [Span([0], 0, 3)])  # type: ignore[return-value]


def tokens_of(vocab_size: int, count: int, device: torch.device) -> torch.Tensor:
    """[count] int64, different ones where the vocabulary has as many."""
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
    """ValueError where served logits are not those of ``stock``, which maps tokens [T] to logits [T, V], and computes
    attention in fp32 where its second argument says so."""
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
    for at in range(3):  # a chunk of each, then another, then a token
        todo = [(which, cuts[which][at], cuts[which][at + 1]) for which in (0, 1)]
        todo = [(which, begin, end) for which, begin, end in todo if end > begin]
        if todo:
            batch = PagedBatch.of(cache, [Span(blocks[which], begin, end - begin) for which, begin, end in todo])
            given = torch.cat([sequences[which][begin:end] for which, begin, end in todo])
            logits = serve(given, batch.positions, batch)
            served += [(which, end - 1, row) for (which, _, end), row in zip(todo, logits, strict=True)]
    exact = heads.dtype in (torch.float32, torch.float64)

    def error_of(found: Sequence[torch.Tensor]) -> float:
        """The largest error of a token; in low precision, where a router may send one astray, that of most."""
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
    """The distance as a share of the norm; infinite for what is not finite."""
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")
