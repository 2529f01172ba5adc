"""What a cluster is to the planner: GPUs, the links within a node, and the network between nodes.

Peaks are dense, from the vendors' data sheets. A link's rate is that of one direction, in bytes per second and GPU.
``step_time.py`` assumes the share of both that a step reaches; ``check.py`` compares the result with published runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...kernels.runtime.names import expected

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``flops`` by precision, without sparsity; ``memory`` in bytes, ``bandwidth`` in bytes per second.

    The host has ``host_memory`` bytes for it, which it reaches at ``host_link`` bytes per second, and whose own speed,
    shared by the node's GPUs, is ``host_bandwidth``.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    host_memory: float = 120 * GIB  # of the 1 TB of a DGX A100; other hosts have at least as much
    host_link: float = 25e9  # PCI Express 4
    host_bandwidth: float = 40e9  # an eighth of what 16 channels of DDR4-3200 give

    @property
    def peak(self) -> float:
        """The dense peak in 16 bits; in fp32 where it has no other."""
        return self.flops["bf16" if "bf16" in self.flops else "fp32"]


@dataclass(frozen=True)
class Network:
    """Links. ``node`` GPUs reach each other at ``inside`` bytes/s each; each has ``outside`` bytes/s to other nodes.

    ``oversubscription`` divides the rate of traffic that leaves a group of ``pod`` GPUs (0: there is one pod).
    ``latency`` is that of one message between nodes, in seconds.
    """

    name: str
    node: int
    inside: float
    outside: float
    latency: float = 5e-6
    pod: int = 0
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        for name in ("node", "inside", "outside", "oversubscription"):
            if not getattr(self, name) > 0:
                raise ValueError(f"network {self.name}: {name}={getattr(self, name)!r}: expected a number above 0")
        if self.oversubscription < 1 or self.latency < 0 or self.pod < 0:
            raise ValueError(f"network {self.name}: expected oversubscription >= 1, latency >= 0 and pod >= 0")
        if 0 < self.pod < self.node:
            raise ValueError(
                f"network {self.name}: pod={self.pod} is below node={self.node}: expected 0, or at least the GPUs of "
                "a node"
            )


def _gpu(name: str, gib: float, bf16: float, fp8: float, bandwidth: float) -> Gpu:
    rates = {"bf16": bf16 * 1e12, "fp16": bf16 * 1e12}
    return Gpu(name, gib * GIB, rates | ({"fp8": fp8 * 1e12} if fp8 else {}), bandwidth * 1e12)


# GiB that a process can allocate, dense TFLOP/s in bf16 and fp8, TB/s.
GPUS = {
    "a100-40": _gpu("a100-40", 39.4, 312, 0, 1.555),
    "a100": _gpu("a100", 79.3, 312, 0, 2.039),
    "h100": _gpu("h100", 79.1, 989, 1979, 3.35),
    # With 96 GB of HBM2e and a limit of 500 W: what torchtitan's papers used (arXiv:2410.06511, section 3).
    "h100-96": _gpu("h100-96", 95.0, 989, 1979, 2.4),
    "h800": _gpu("h800", 79.1, 989, 1979, 3.35),
    "h200": _gpu("h200", 139.8, 989, 1979, 4.8),
    "b200": _gpu("b200", 178.0, 2250, 4500, 8.0),
    "gb200": _gpu("gb200", 184.0, 2450, 4900, 8.0),
    "gb300": _gpu("gb300", 276.0, 2450, 4900, 8.0),
    "mi300x": _gpu("mi300x", 191.0, 1307, 2614, 5.3),
}
_NDR, _HDR = 50e9, 25e9  # 400 and 200 Gbit/s for each GPU
# The reference system of each GPU: NVIDIA's DGX and HGX, NVL72 racks, AMD's platform of eight.
NETWORKS = {
    "a100-40": Network("8 x A100, NVLink 3, 200 Gbit/s", 8, 300e9, _HDR),
    "a100": Network("8 x A100, NVLink 3, 200 Gbit/s", 8, 300e9, _HDR),
    "h100": Network("8 x H100, NVLink 4, 400 Gbit/s", 8, 450e9, _NDR),
    "h100-96": Network("8 x H100, NVLink 4, 400 Gbit/s", 8, 450e9, _NDR),
    "h800": Network("8 x H800, NVLink at 400 GB/s, 400 Gbit/s", 8, 200e9, _NDR),
    "h200": Network("8 x H200, NVLink 4, 400 Gbit/s", 8, 450e9, _NDR),
    "b200": Network("8 x B200, NVLink 5, 400 Gbit/s", 8, 900e9, _NDR),
    "gb200": Network("NVL72 of GB200, 400 Gbit/s", 72, 900e9, _NDR),
    "gb300": Network("NVL72 of GB300, 800 Gbit/s", 72, 900e9, 2 * _NDR),
    "mi300x": Network("8 x MI300X, Infinity Fabric, 400 Gbit/s", 8, 448e9, _NDR),
}


@dataclass(frozen=True)
class Cluster:
    """``gpus`` GPUs of one kind and what links them; ``one_machine`` if they are processes that share its memory."""

    gpu: Gpu
    network: Network
    gpus: int
    one_machine: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus}: expected at least 1")

    def of(self, gpus: int) -> Cluster:
        """The same with another number of GPUs, or of processes of the same machine."""
        gpu, share = self.gpu, self.gpus / gpus
        if self.one_machine:
            flops = {name: rate * share for name, rate in gpu.flops.items()}
            gpu = replace(gpu, memory=gpu.memory * share, flops=flops, bandwidth=gpu.bandwidth * share)
        return replace(self, gpu=gpu, gpus=gpus)

    def within_node(self, span: int) -> bool:
        """Whether every group of ``span`` neighbouring ranks lies within one node: they fill nodes in order."""
        return self._divides(self.network.node, span)

    def within_pod(self, span: int) -> bool:
        """The same of pods."""
        return not self.network.pod or self._divides(self.network.pod, span)

    def _divides(self, size: int, span: int) -> bool:
        return span <= size if self.gpus <= size else size % span == 0


# Links by name, as what they change: bytes/s in one direction, of each GPU; with "node" of all of a node's together.
LINKS: dict[str, dict[str, float]] = {
    "pcie-4": {"inside": 25e9},  # 16 lanes, between GPUs without NVLink
    "pcie-5": {"inside": 50e9},
    "infiniband-hdr": {"outside": 25e9},  # an adapter of 200 Gbit/s for each GPU, and so on
    "infiniband-ndr": {"outside": 50e9},
    "infiniband-xdr": {"outside": 100e9},
    "roce-200": {"outside": 25e9, "latency": 10e-6},
    "roce-400": {"outside": 50e9, "latency": 10e-6},
    "ethernet-25": {"node": 3.125e9, "latency": 30e-6},  # one adapter of 25 Gbit/s for a node, over TCP
    "ethernet-100": {"node": 12.5e9, "latency": 30e-6},
}


def cluster(kind: str, gpus: int, network: str | Path | None = None) -> Cluster:
    """A cluster of a known kind of GPU, over its reference system's links or others.

    ``network`` is one or more of :data:`LINKS`, separated by commas, or a TOML file, which changes what it names:
    ``node``, ``inside_gb_s``, ``outside_gb_s``, ``latency_us``, ``pod``, ``oversubscription``, and of the GPU
    ``memory_gib``. Raises ValueError for an unknown kind, name, file or key.
    """
    if kind not in GPUS:
        raise ValueError(f"gpu={kind!r}: {expected(kind, GPUS)}")
    found, links = GPUS[kind], NETWORKS[kind]
    names = [each.strip() for each in str(network).split(",")] if network is not None else []
    if names and set(names) <= LINKS.keys():
        links = _named(links, names)
    elif network is not None:
        found, links = _changed(found, links, Path(network))
    return Cluster(found, links, gpus)


def _named(links: Network, names: list[str]) -> Network:
    links = replace(links, name=f"nodes of {links.node} over {', '.join(names)}")
    for name in names:
        change = dict(LINKS[name])
        if "node" in change:
            change["outside"] = change.pop("node") / links.node
        links = replace(links, **change)  # type: ignore[arg-type]
    return links


_KEYS = {
    "name": ("name", 1.0),
    "node": ("node", 1.0),
    "inside_gb_s": ("inside", 1e9),
    "outside_gb_s": ("outside", 1e9),
    "latency_us": ("latency", 1e-6),
    "pod": ("pod", 1.0),
    "oversubscription": ("oversubscription", 1.0),
}


def _changed(gpu: Gpu, links: Network, path: Path) -> tuple[Gpu, Network]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"network {path}: it cannot be read ({error.strerror}); give a TOML file of a network, or some of "
            f"{', '.join(LINKS)}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: not TOML ({' '.join(str(error).split())})") from None
    gib = table.pop("memory_gib", None)
    if gib is not None:
        if type(gib) not in (int, float) or not 0 < gib < math.inf:
            raise ValueError(f"{path}: memory_gib = {gib!r}: expected a finite number above 0")
        gpu = replace(gpu, memory=float(gib) * GIB)
    changes: dict[str, Any] = {"name": f"{links.name}, changed by {path.name}"} if table else {}
    for key, value in table.items():
        if key not in _KEYS:
            raise ValueError(f"{path}: {key}: expected some of {', '.join((*_KEYS, 'memory_gib'))}")
        field, unit = _KEYS[key]
        kinds = (str,) if field == "name" else (int,) if field in ("node", "pod") else (int, float)
        if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
            what = {str: "a text", int: "a whole number", float: "a finite number"}[kinds[-1]]
            raise ValueError(f"{path}: {key} = {value!r}: expected {what}")
        changes[field] = value if field in ("name", "node", "pod") else value * unit
    return gpu, replace(links, **changes)
