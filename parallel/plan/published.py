"""Published runs of dense decoders, as the planner's inputs and the time or memory that was reported.

``published.csv`` holds one run a line with its source. ``_micro``, ``_interleave`` and ``_software`` add what a line
leaves open and its source says elsewhere. A speed is turned into a step's seconds by the source's own count of FLOPs,
so the count cancels.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from . import shapes, software
from .hardware import Cluster, cluster
from .layout import Layout
from .shapes import ModelShape
from .software import Software

TABLE = Path(__file__).with_name("published.csv")
GPUS = {
    "A100-80": "a100",
    "a100_80gb": "a100",
    "a100_40gb": "a100-40",
    "H100": "h100",
    "h100_80gb": "h100",
    "H100-96": "h100-96",
    "H800": "h800",
    "B200": "b200",
    "GB200": "gb200",
    "GB300": "gb300",
}
_RECOMPUTE = {"full": "full", "sel": "selective", "sac": "ops", "none": "none", "": "none"}


@dataclass(frozen=True)
class Run:
    """A published run. ``seconds`` of a step and ``gib`` of memory are None where they were not reported."""

    source: str
    shape: ModelShape
    layout: Layout
    cluster: Cluster
    software: Software
    seconds: float | None
    gib: tuple[float, ...]
    informative: bool  # unchecked, or with unknowns: shown, and not judged

    @property
    def name(self) -> str:
        return f"{self.shape.name} on {self.cluster.gpus} {self.cluster.gpu.name}"


@functools.cache
def runs() -> tuple[Run, ...]:
    """All dense runs of the table, in its order."""
    with TABLE.open(newline="", encoding="utf-8") as lines:
        found = [_run(line) for line in csv.DictReader(lines)]
    return tuple(run for run in found if run is not None)


def _run(line: dict[str, str]) -> Run | None:
    shape = _shape(line)
    if shape is None:
        return None
    number = {
        name: int(line[name]) if line[name] else 0
        for name in ("gpus", "tp", "pp", "vp", "cp", "dp", "zero", "mbs", "gbs", "seq")
    }
    pp, dp = number["pp"], number["dp"]
    micro = number["mbs"] or _micro(line, number)
    layout = Layout(
        tp=number["tp"],
        pp=pp,
        cp=number["cp"] or 1,
        dp=dp,
        interleave=_interleave(line, number) if pp > 1 else 1,
        zero=number["zero"],
        micro=micro,
        batch=number["gbs"] // (dp * micro) * dp * micro,
        length=number["seq"],
        sequence_parallel=line["sp"] == "1" and number["tp"] > 1,
        recompute=_RECOMPUTE[line["recomp"]],
        precision="fp8" if "fp8" in line["prec"] else "fp16" if line["prec"] == "fp16" else "bf16",
    )
    where = cluster(GPUS[line["gpu"]], number["gpus"])
    gib = tuple(float(part) for part in line["mem_gib"].split("+")) if line["mem_gib"] else ()
    return Run(
        line["src"], shape, layout, where, _software(line), _seconds(line, shape), gib,
        informative="unchecked" in line["src"] or "?" in line["src"],
    )  # fmt: skip


def _shape(line: dict[str, str]) -> ModelShape | None:
    """The line's model; None for one with experts, or cut to a few blocks of one."""
    name = line["model"]
    if line["ep"] not in ("", "1"):
        return None
    if line["src"].startswith("mcore"):
        name = name.replace("gpt", "mcore-")
    elif name.startswith("gpt") and not name.startswith("gpt3-"):
        name = name.replace("gpt", "gpt-")
    name = {"mtnlg530b": "gpt-530b"}.get(name, name)
    if name.startswith("llama3_"):
        base, _, layers = name.replace("_", "-").rpartition("-l")
        whole = shapes.find(base)
        return ModelShape(
            **{**{f: getattr(whole, f) for f in whole.__dataclass_fields__}, "name": name, "layers": int(layers)}
        )
    return shapes.known().get(name)


def _micro(line: dict[str, str], number: dict[str, int]) -> int:
    """Sequences of a micro-batch where the line has none: torchtitan cuts a rank's batch into as many as stages."""
    if line["src"].startswith("torchtitan") and number["pp"] > 1:
        return max(1, number["gbs"] // number["dp"] // number["pp"])
    return 1


def _interleave(line: dict[str, str], number: dict[str, int]) -> int:
    """Stages on a rank. Llama 3 has one block in each (arXiv:2407.21783, section 3.3.2).

    Megatron-Core's README says that the pipeline's communication overlapped, which only its interleaved schedule does,
    and not how many stages a rank had: two are assumed.
    """
    if line["src"].startswith("2407.21783"):
        return 8
    return number["vp"] or (2 if "int1f1b" in line["prec"] or line["src"].startswith("mcore") else 1)


def _software(line: dict[str, str]) -> Software:
    source = line["src"]
    if source.startswith("torchtitan"):
        if "async" in line["prec"] or "1f1b" in line["prec"]:  # its tables 5 and 6 have async TP throughout
            return software.TITAN_ASYNC
        return software.TITAN_EAGER if "eager" in line["prec"] else software.TITAN
    if source == "llm-foundry":
        return software.FOUNDRY
    if source == "bigscience":
        return software.BLOOM
    return (
        software.MEGATRON_2021 if source.startswith(("megatron2021", "2205.05198", "2201.11990")) else software.MEGATRON
    )


def _seconds(line: dict[str, str], shape: ModelShape) -> float | None:
    """Seconds of a step: reported, or from tokens per second, or from FLOP/s by the source's count."""
    batch, length, gpus = int(line["gbs"]), int(line["seq"]), int(line["gpus"])
    if line["step_s"]:
        return float(line["step_s"])
    if line["tok_s_gpu"]:
        return batch * length / (float(line["tok_s_gpu"]) * gpus)
    if not line["tflops_gpu"]:
        return None
    return _counted(line, shape, batch, length) / (float(line["tflops_gpu"]) * 1e12 * gpus)


def _counted(line: dict[str, str], shape: ModelShape, batch: int, length: int) -> float:
    """The FLOPs of a step as the source counts them."""
    h, layers, vocab = shape.hidden, shape.layers, shape.vocab
    if line["src"].startswith(("2407.21783",)):
        return shape.flops(batch * length, length)
    passes = 4 if line["kind"] == "H" else 3  # with or without the recomputed forward
    per_token = 24 * layers * h * h * (1 + length / (6 * h)) * passes + 6 * h * vocab
    return float(batch) * length * per_token
