"""The folder below bench/results of a record: a GPU's by its name, a CPU's by the kind of processor.

Ratios on a CPU depend on the processor: on the width of its vectors, and on which library multiplies well on it. So
``cpu/amd-zen4/serve.json`` and ``cpu/intel-sapphire-rapids/serve.json`` are results of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import provenance

CPU = "cpu"
# The models of a family by core: Linux's arch/x86/kernel/cpu/amd.c (bsp_init_amd) and arch/x86/include/asm/
# intel-family.h, whose names these are. Skylake-X is also Cascade Lake and Cooper Lake, which share its model number.
_AMD = {
    (0x17, "zen2"): (range(0x30, 0x50), range(0x60, 0x80), range(0x90, 0x92), range(0xA0, 0xB0)),
    (0x17, "zen"): (range(0x00, 0x30), range(0x50, 0x60)),
    (0x19, "zen3"): (range(0x00, 0x10), range(0x20, 0x60)),
    (0x19, "zen4"): (range(0x10, 0x20), range(0x60, 0xB0)),
    (0x1A, "zen5"): (range(0x00, 0x30), range(0x40, 0x50), range(0x60, 0x80)),
}
_INTEL = {
    0x55: "skylake-x",
    0x6A: "ice-lake-x",
    0x8F: "sapphire-rapids",
    0xCF: "emerald-rapids",
    0xAD: "granite-rapids",
}
_VENDORS = {"AMD": "amd", "Intel": "intel"}


def folder(record: Mapping[str, Any]) -> str | None:
    """The folder of a benchmark's record, or None for a CPU whose record does not tell its kind."""
    if record["device"] != CPU:
        return provenance.slug(record["device"])
    kind = cpu_kind(record["origin"].get("cpu") or "")
    return None if kind is None else f"{CPU}/{kind}"


def cpu_kind(description: str) -> str | None:
    """Vendor and core of a processor as ``processor.description`` tells it: "amd-zen4", "intel-sapphire-rapids".

    A core that is not listed goes by its numbers: "amd-family-26-model-112". None where vendor, family or model is
    missing, as in a virtual machine that hides them.
    """
    vendor = next((short for name, short in _VENDORS.items() if name in description), None)
    numbers = re.search(r"family (\d+), model (\d+)", description)
    if vendor is None or numbers is None:
        return None
    family, model = map(int, numbers.groups())
    return f"{vendor}-{_core(vendor, family, model) or f'family-{family}-model-{model}'}"


def _core(vendor: str, family: int, model: int) -> str | None:
    if vendor == "intel":
        return _INTEL.get(model) if family == 6 else None
    for (of, core), models in _AMD.items():
        if of == family and any(model in each for each in models):
            return core
    return None
