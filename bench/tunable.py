"""What ``tune.py`` can tune: GEMMs (``workload.py``) and tiles of paged attention (``attention_workload.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..kernels.dev.registry import Case, op
from ..kernels.linear import tuned as gemms
from ..kernels.linear.gemm import GemmConfig
from ..kernels.paged_attention import tuned as attention
from ..kernels.paged_attention.config import AttentionConfig
from . import attention_workload, workload
from .harness.gate import Outputs

# What entries are filed under: the class of their configurations, and the files that they were measured with.
KINDS = {gemms.OP: (GemmConfig, gemms.SOURCES), attention.OP: (AttentionConfig, attention.SOURCES)}


class Call(Protocol):
    """A call to tune. Those with equal buckets are tuned once; no bucket is one of two ops of KINDS."""

    @property
    def table_op(self) -> str: ...

    @property
    def bucket(self) -> str: ...

    @property
    def terms(self) -> int:
        """The length of the longest sum behind any number of the results."""

    @property
    def stock(self) -> bool:
        """Whether plain torch could take its place."""

    def __call__(self, args: Any) -> Outputs:
        """Run the kernels."""

    def reference(self, args: Any) -> Outputs:
        """Run plain torch: the stock path in the operands' own precision, the oracle in fp64."""

    def draw(self, on: torch.device, seed: int) -> Any:
        """Random arguments."""

    def now(self, arch: str) -> Any:
        """The configuration that runs today."""

    def candidates(self, arch: str) -> Sequence[Any]:
        """Configurations that fit by arithmetic, the most promising first; today's is among them."""

    def forced(self, config: Any) -> AbstractContextManager[None]:
        """Within the block calls run with ``config``."""

    def predicted_us(self, arch: str, config: Any) -> float | None:
        """The cost model's time, where there is a model."""

    def request(self, config: Any, arch: str) -> dict[str, Any]:
        """What :func:`faults_of` is asked, as JSON."""


def ops() -> list[str]:
    """The registry's ops that can be tuned."""
    return [*workload.ops(), attention_workload.NAME]


def calls_of(name: str, case: Case, on: torch.device, arch: str) -> Iterable[Call]:
    """What can be tuned of one case of the op called ``name``."""
    if name == attention_workload.NAME:
        return attention_workload.calls(case, arch)
    return workload.calls(op(name), case, on, arch)


def faults_of(request: Mapping[str, Any]) -> list[str]:
    """Compile what :meth:`Call.request` asks for, in this process; returns what keeps it from being used."""
    return (attention_workload if "case" in request else workload).faults_of(request)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The work of a compiling process."""
    faults = faults_of(request)
    return {"problem": "; ".join(faults)} if faults else {}
