"""Projects times on several GPUs by the cost model, as rows marked as projections, where only one GPU can measure."""

from __future__ import annotations

import torch

from ...kernels.runtime.dtypes import short_name
from ...parallel.overlap.link_model import Call, predict
from ...parallel.overlap.link_profile import COLLECTIVES, Profile, load, shipped
from .benchmark import Measurement
from .timing import Timing

PROJECTED, PROJECTED_EXPOSED = "projected, us", "projected, exposed, us"
SOURCES = (
    *(f"parallel/overlap/{name}.py" for name in ("link_model", "link_profile")),
    "parallel/overlap/profiles/",
    "kernels/runtime/cost.py",
)


def projection(case: str, call: Call, device: torch.device, *, exposed: bool = False) -> Measurement | None:
    """The kernel against the plain collective on as many GPUs of this kind: two predictions of the link model.

    It is no measurement, so it has no target; the peer's name lists the model's inputs and their source. ``exposed``:
    only the communication that no product hides, instead of the total. None if the figures of this device's links are
    unknown. Without a GPU it uses an H100's, so that a dry run tests the path.
    """
    profile = load(device) if device.type == "cuda" else shipped("sm_90")
    if profile is None:
        return None
    kernel, plain = (predict(profile, "node", call, kind) for kind in ("kernel", "plain"))
    if kernel is None or plain is None:
        return None
    seconds = [each.exposed_s if exposed else each.total_s for each in (kernel, plain)]
    times = Timing(seconds[0] * 1e6), Timing(seconds[1] * 1e6)
    metric = PROJECTED_EXPOSED if exposed else PROJECTED
    return Measurement(case, metric, f"projected plain collective: {_inputs(profile, call)}", None, lambda: times)


def _inputs(profile: Profile, call: Call) -> str:
    """The model's inputs and their source."""
    link = profile.links["node"][COLLECTIVES[call.op]]
    said = {
        "start": f"{link.start_s * 1e6:.3g} us",
        "alpha": f"{link.alpha_s * 1e6:.3g} us",
        "beta": f"{link.bytes_per_s / 1e9:.4g} GB/s",
        "copies": f"{(profile.copy_bytes_per_s or 0) / 1e9:.4g} GB/s",
        "GEMM": f"{profile.gemm_flops.get(short_name(call.dtype), 0) / 1e12:.4g} TFLOP/s",
    }
    whose = "measured on" if profile.measured else "published or assumed for"
    return f"{', '.join(f'{name} {value}' for name, value in said.items())}, {whose} {profile.device}"
