"""What several GPUs would give, by the cost model: rows that say so, where there is no more than one to measure on."""

from __future__ import annotations

import torch

from ...parallel.overlap.link_model import Call, predict
from ...parallel.overlap.link_profile import COLLECTIVES, Profile, dtype_name, load, shipped
from .benchmark import Measurement
from .timing import Timing

PROJECTED, PROJECTED_EXPOSED = "projected, us", "projected, exposed, us"
SOURCES = (
    *(f"parallel/overlap/{name}.py" for name in ("link_model", "link_profile")),
    "parallel/overlap/profiles/",
    "kernels/runtime/cost.py",
)


def projection(case: str, call: Call, device: torch.device, *, exposed: bool = False) -> Measurement | None:
    """The kernel against the plain collective on as many GPUs of this kind: two outcomes of the link model.

    No measurement, so it has no target; the peer's name gives the model's inputs and whose they are. ``exposed``: what
    no product hides, instead of the whole with the product. None where nothing is known of this device's links. Where
    there is no GPU it is an H100's, so that a dry run proves the path.
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
    """What the model was given, and who says so."""
    link = profile.links["node"][COLLECTIVES[call.op]]
    said = {
        "start": f"{link.start_s * 1e6:.3g} us",
        "alpha": f"{link.alpha_s * 1e6:.3g} us",
        "beta": f"{link.bytes_per_s / 1e9:.4g} GB/s",
        "copies": f"{(profile.copy_bytes_per_s or 0) / 1e9:.4g} GB/s",
        "GEMM": f"{profile.gemm_flops.get(dtype_name(call.dtype), 0) / 1e12:.4g} TFLOP/s",
    }
    whose = "measured on" if profile.measured else "published or assumed for"
    return f"{', '.join(f'{name} {value}' for name, value in said.items())}, {whose} {profile.device}"
