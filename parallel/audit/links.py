"""Projects the time that a link would take for the counted collectives, from published rates.

Seconds of a call in rings (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005), as in :mod:`link_model`: ``start_s``
for the call, ``alpha_s`` for each step of the ring, and the bytes that a rank sends over ``bytes_per_s``. The
projection assumes that each rank has the link to itself and that no product hides anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..overlap.link_profile import Link, shipped
from .entries import Entry

CHIP = "sm_90"  # whose NVLink is listed
# Latencies of the other links come from NCCL's model of a ring with its Simple protocol (src/graph/tuning.cc: baseLat,
# and hwLat of PCI and of a network), in seconds.
_START_S, _PCI_S, _NETWORK_S = 8.4e-6, 5.7e-6, 14.0e-6


@dataclass(frozen=True)
class Wire:
    """A kind of link: its cost, and the source of the figures."""

    name: str
    link: Link
    source: str


def _wires() -> dict[str, Wire]:
    profile = shipped(CHIP)
    assert profile is not None, "its profile comes with the package"
    pcie = "PCI-SIG, PCI Express 5.0: 32 GT/s on 16 lanes, 128b/130b, each way"
    infiniband = "InfiniBand Trade Association: NDR, 4 lanes of 100 Gb/s"
    roce = "IEEE 802.3bs: 200 Gb/s, without headers"
    ethernet = "IEEE 802.3by: 25 Gb/s, without headers; a network's latency, though TCP's is more"
    wires = (
        Wire("NVLink", profile.links["node"]["all_reduce"], f"{profile.device}: {profile.sources[0]}"),
        Wire("PCIe", Link(_START_S, _PCI_S, 63.0e9), pcie),
        Wire("InfiniBand", Link(_START_S, _NETWORK_S, 50.0e9), infiniband),
        Wire("RoCE", Link(_START_S, _NETWORK_S, 25.0e9), roce),
        Wire("Ethernet", Link(_START_S, _NETWORK_S, 3.125e9), ethernet),
    )
    return {wire.name.lower(): wire for wire in wires}


WIRES = _wires()


def seconds(entry: Entry, link: Link) -> float:
    """The time that all calls of ``entry`` would take over ``link``, one after another."""
    steps = {"all_reduce": 2 * (entry.ranks - 1), "send": 1}.get(entry.kind, entry.ranks - 1)
    return entry.calls * (link.start_s + steps * link.alpha_s) + entry.sent / link.bytes_per_s
