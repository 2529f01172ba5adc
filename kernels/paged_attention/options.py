"""What a call of ``paged_attention`` asks beside its tensors, and what cannot be asked together."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..runtime.dtypes import QUANTISED

# Every combination that is refused, by name, and why. All others work together.
REFUSED = {
    "tree with window": "a window counts positions, and a tree's nodes stand at depths that no argument gives",
    "tree with alibi_slopes": "ALiBi counts positions, and a tree's nodes stand at depths that no argument gives",
    "tree with prefix_lens": "a tree sees all of its context already: leave prefix_lens out",
    "tree with causal=False": "tree_mask alone says which of this step's tokens are seen: leave causal=True",
    "prefix_lens with causal=False": "without causality every key is seen already: leave prefix_lens out",
    "int8 without scales": "whole numbers mean nothing without k_scale and v_scale",
    "scales without quantisation": "k_scale and v_scale belong to a cache in fp8 (e4m3) or int8",
}


class Bounds(NamedTuple):
    """What the host knows of a step's lengths, and None where it knows nothing."""

    min_query_len: int | None = None  # of the sequences that have queries
    max_query_len: int | None = None
    max_seq_len: int | None = None


class AttentionOptions(NamedTuple):
    """How scores are formed and which keys are seen; ``reference.py`` has the formulas.

    Letters: T tokens of this step, S sequences, N query heads, K KV heads, B block size.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [N]
    alibi_slopes: torch.Tensor | None = None  # [N] fp32
    prefix_lens: torch.Tensor | None = None  # [S] int32
    tree_mask: torch.Tensor | None = None  # [T, W] bool
    k_scale: torch.Tensor | None = None  # one element, or [blocks, K, B]; fp32
    v_scale: torch.Tensor | None = None  # likewise

    def refused(self, kv_dtype: torch.dtype) -> str | None:
        """The name in ``REFUSED`` of a combination that this is, or None."""
        tree, prefix = self.tree_mask is not None, self.prefix_lens is not None
        scales = self.k_scale is not None and self.v_scale is not None
        found = {
            "tree with window": tree and self.window is not None,
            "tree with alibi_slopes": tree and self.alibi_slopes is not None,
            "tree with prefix_lens": tree and prefix,
            "tree with causal=False": tree and not self.causal,
            "prefix_lens with causal=False": prefix and not self.causal,
            "int8 without scales": kv_dtype == torch.int8 and not scales,
            "scales without quantisation": kv_dtype not in QUANTISED
            and not (self.k_scale is None and self.v_scale is None),
        }
        return next((name for name, refused in found.items() if refused), None)
