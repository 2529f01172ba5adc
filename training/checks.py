"""Compare a sharded run with a single process, and an exported folder with its model.

The sharded and the unsharded run form the same sums in another order, so their losses differ by rounding. The budget is
measured: the unsharded steps run again in fp64, and the distance between the fp32 and fp64 losses shows the effect of
rounding on this model and machine. Both fp32 runs stray that far, each in its own direction, and the worst of eight
steps is a rough estimate: FACTOR allows for both. Leaving out a collective moves the losses further than the budget
(``tests/face/test_demo_collectives.py`` leaves out each).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from ..kernels.dev.accuracy import Verdict, judge
from ..kernels.runtime.dtypes import BY_NAME
from ..layers.hf.folders import WEIGHTS
from ..layers.transformer import ParallelTransformer
from ..parallel.checkpoint.entries import full_state_dict
from .settings import ParallelSettings, RunSettings
from .trainer import Trainer

FACTOR = 8.0


@dataclass(frozen=True)
class Agreement:
    """Losses of the same first steps, computed three times."""

    sharded: tuple[float, ...]
    unsharded: tuple[float, ...]
    exact: tuple[float, ...]  # unsharded, in fp64
    eps: float = float(torch.finfo(torch.float32).eps)  # the dtype of the products

    @property
    def rounding(self) -> float:
        """The unsharded losses' worst relative distance from the exact ones; at least one rounding of fp32."""
        return max(_distance(self.unsharded, self.exact), float(torch.finfo(torch.float32).eps))

    @property
    def budget(self) -> float:
        # Ranks also round partial sums, which one process never does: at least one rounding of the format.
        return max(FACTOR * self.rounding, self.eps)

    @property
    def difference(self) -> float:
        """The worst relative distance between sharded and unsharded losses; NaN if any loss is."""
        return _distance(self.sharded, self.unsharded)

    @property
    def ok(self) -> bool:
        return self.difference <= self.budget  # False for NaN


def compare_with_unsharded(sharded: Sequence[float], settings: RunSettings) -> Agreement:
    """Repeat the first steps of a run in this process alone, once in its own precision and once in fp64.

    ``settings`` are the run's, resolved; ``sharded`` are its losses.
    """
    precision = settings.parallel.precision
    alone = dataclasses.replace(settings, parallel=ParallelSettings(dp=1, precision=precision))
    exact = dataclasses.replace(settings, parallel=ParallelSettings(dp=1))
    single = _repeat(len(sharded), Trainer(alone, None))
    trainer = Trainer(exact, None)
    trainer.model.double()
    return Agreement(tuple(sharded), single, _repeat(len(sharded), trainer), float(torch.finfo(BY_NAME[precision]).eps))


def _repeat(steps: int, trainer: Trainer) -> tuple[float, ...]:
    losses = tuple(float(trainer.train_step().loss) for _ in range(steps))
    trainer.close()
    return losses


def _distance(losses: tuple[float, ...], reference: tuple[float, ...]) -> float:
    ours, theirs = np.asarray(losses), np.asarray(reference)
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs), initial=0.0))


def same_weights(folder: Path, model: ParallelTransformer) -> bool:
    """Whether the folder holds exactly ``model``'s tensors."""
    saved, ours = load_file(folder / WEIGHTS), full_state_dict(model)
    if model.config.tie_embeddings:
        ours.pop("lm_head.weight")
    return saved.keys() == ours.keys() and all(torch.equal(saved[name], ours[name]) for name in ours)


@torch.no_grad()
def compare_with_transformers(folder: Path, model: ParallelTransformer, tokens: torch.Tensor) -> Verdict:
    """Compare the logits of ``tokens`` [B, S] from transformers' model of the folder with ours.

    An fp64 run of ours is the oracle. ``model`` is whole, in one process. Raises ImportError without transformers.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    ours = copy.deepcopy(model).to("cpu").eval()
    low, out = ours(tokens), theirs(tokens, use_cache=False).logits
    terms = sum(size for param in model.parameters() for size in param.shape)
    return judge("logits", out, low, ours.double()(tokens), terms=terms)
