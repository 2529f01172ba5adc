"""Is an exported folder the model that it came from? The weights bit for bit, the logits by transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..kernels.dev.accuracy import Verdict, judge
from ..layers.hf.folders import WEIGHTS
from ..layers.transformer import ParallelTransformer
from ..parallel.checkpoint.checkpoint import full_state_dict


def same_weights(folder: Path, model: ParallelTransformer) -> bool:
    """Whether the folder holds exactly ``model``'s tensors."""
    saved, ours = load_file(folder / WEIGHTS), full_state_dict(model)
    if model.config.tie_embeddings:
        ours.pop("lm_head.weight")
    return saved.keys() == ours.keys() and all(torch.equal(saved[name], ours[name]) for name in ours)


@torch.no_grad()
def compare_with_transformers(folder: Path, model: ParallelTransformer, tokens: torch.Tensor) -> Verdict:
    """Logits of transformers' own model of the folder against ours of ``tokens`` [B, S], judged by an fp64 run of ours.

    ``model`` is whole, in one process. Raises ImportError without transformers.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    ours = copy.deepcopy(model).to("cpu").eval()
    low, out = ours(tokens), theirs(tokens, use_cache=False).logits
    return judge("logits", out, low, ours.double()(tokens))
