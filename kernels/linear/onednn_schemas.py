"""The functions of ``onednn.py`` as torch ops ``shardfuse::onednn_…``, with the schemas and shapes of ``schemas.py``.

torch.compile and modes see these; the op inside, which has no derivative and no shape function, they do not.
"""

from __future__ import annotations

from ..runtime import library
from . import schemas

LAUNCH = f"{__package__}.onednn"

linear_act_fwd = library.register_twin(schemas.linear_act_fwd, "onednn", LAUNCH)
gated_linear_fwd = library.register_twin(schemas.gated_linear_fwd, "onednn", LAUNCH)
linear_dgrad = library.register_twin(schemas.linear_dgrad, "onednn", LAUNCH)
linear_dgrad_act = library.register_twin(schemas.linear_dgrad_act, "onednn", LAUNCH)
linear_dgrad_gated = library.register_twin(schemas.linear_dgrad_gated, "onednn", LAUNCH)
linear_wgrad = library.register_twin(schemas.linear_wgrad, "onednn", LAUNCH)
linear_wgrad_ = library.register_twin(schemas.linear_wgrad_, "onednn", LAUNCH)
act_grad = library.register_twin(schemas.act_grad, "onednn", LAUNCH)
gated_act_grad = library.register_twin(schemas.gated_act_grad, "onednn", LAUNCH)
