"""Loss scaling: a factor that keeps fp16 gradients from vanishing, for models whose gradients end in fp32 shards.

Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740), section 3.2, with a dynamic factor: halved when a
gradient overflows, doubled after a while without overflow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..core import collectives
from ..core.mesh import Group
from ..core.sharding import local_tensors

FIRST = 2.0**16
GROWS_AFTER = 2000  # steps without an overflow


class LossScale:
    """The ``factor`` by which the loss is multiplied before backward; :meth:`unscale` undoes it afterwards."""

    def __init__(self, group: Group, factor: float = FIRST) -> None:
        self.factor = factor
        self._group = group  # all ranks of the model
        self._good = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Divide the gradients by the factor; if one is not finite on any rank, drop all gradients and halve it.

        An optimizer does not change parameters without gradients, so such a step has no effect. Returns whether the
        gradients are valid. Collective.
        """
        params = [param for param in parameters if param.grad is not None]
        grads = list(local_tensors(*(param.grad for param in params)))
        if not self._finite([grad for grad in grads if grad.numel()]):
            for param in params:
                param.grad = None
            self.factor, self._good = max(1.0, self.factor / 2), 0
            return False
        if grads:
            torch._foreach_mul_(grads, 1 / self.factor)
        self._good += 1
        if self._good == GROWS_AFTER:
            self.factor, self._good = self.factor * 2, 0
        return True

    def _finite(self, grads: list[torch.Tensor]) -> bool:
        device = grads[0].device if grads else torch.device("cpu")
        if device.type == "cpu" and torch.cuda.is_available() and self._group.size > 1:
            device = torch.device("cuda", torch.cuda.current_device())  # NCCL needs a tensor on the current GPU
        bad = torch.zeros((), device=device)
        if grads:
            largest = torch.stack(torch._foreach_norm(grads, float("inf")))
            bad += (~largest.isfinite()).any().to(device)
        return not collectives.all_reduce(bad, self._group, site="loss_scale", op="max", inplace=True)

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor, "good": self._good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor, self._good = state["factor"], int(state["good"])
