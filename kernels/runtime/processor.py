"""The processor that CPU kernels run on, as far as tables of measurements tell processors apart, and its threads."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch


@functools.cache
def architecture() -> str:
    """Machine, vendor, widest vectors and the library of stock products: "x86_64-amd-avx512-mkl".

    AMD's family 25 runs AVX-512 at half the width of its successors: "x86_64-amd-avx512-mkl-zen4". oneDNN's limit
    ``ONEDNN_MAX_CPU_ISA`` counts: below it, it is another processor to oneDNN.
    """
    facts = _facts()
    vendor = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(facts.get("vendor_id", ""), "other")
    flags = set(facts.get("flags", "").split())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").strip().upper()
    narrow = limit.startswith(("AVX2", "SSE")) or limit == "AVX"
    vectors = "avx512" if "avx512f" in flags and not narrow else "avx2" if "avx2" in flags else "other"
    parts = [platform.machine() or "unknown", vendor, vectors, "mkl" if torch.backends.mkl.is_available() else "other"]
    if (vendor, vectors, facts.get("cpu family")) == ("amd", "avx512", "25"):
        parts.append("zen4")
    return "-".join(parts)


def description() -> str:
    """For a reader: "x86_64, AMD EPYC, family 25, model 17"."""
    facts = _facts()
    told = [facts["model name"]] if "model name" in facts else []
    told += [f"{name} {facts[each]}" for name, each in (("family", "cpu family"), ("model", "model")) if each in facts]
    return ", ".join([platform.machine() or "unknown", *told])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within the block torch computes what this thread asks for in this thread alone: no sum is cut among several."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def model() -> str:
    """The processor's own name, with family and model where those are told."""
    facts = _facts()
    name = facts.get("model name", platform.processor() or platform.machine())
    known = [
        f"{label} {facts[field]}" for label, field in (("family", "cpu family"), ("model", "model")) if field in facts
    ]
    return f"{name} ({', '.join(known)})" if known else name


CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def _facts() -> dict[str, str]:
    """What Linux tells of the first core; elsewhere nothing."""
    try:
        first = CPUINFO.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
