"""The README's results, from committed files alone: ``make front`` writes them between two marks.

Which rows stand there is chosen by hand (``CHOSEN``), missed targets among them; every figure, date and processor comes
from the record that holds it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..harness.publish import Result, read_all
from ..harness.report import Row

RECORDS = Path(__file__).resolve().parents[2] / "kernels" / "dev" / "compiled"
BEGIN, END = "<!-- results: make front -->", "<!-- end of results -->"
HEAD = ("what", "beside", "times as fast", "interval", "target", "measured on")


class Chosen(NamedTuple):
    """A row of the table: where it is found, and what the README calls it."""

    bench: str
    case: str
    metric: str  # how it begins
    peer: str
    what: str
    beside: str


_STEP, _ALL = "forward + backward", "all requests"
_MLP, _REQUESTS = "mlp-step-t512-d1024-f4096", "llama-21m-32-requests"
_FORCED = "stock torch, MKL's fast path forced"
_DTENSOR = "torch parallelize_module (DTensor)"
CHOSEN = (
    Chosen("fuse", "llama", _STEP, "stock model", "training step of a fused Llama of transformers", "the stock model"),
    Chosen("onednn", _MLP, _STEP, "stock torch", "training step of an MLP, 512 x 1024 -> 4096", "stock torch"),
    Chosen("onednn", _MLP, _STEP, "torch.compile", "the same", "torch.compile"),
    Chosen("onednn", _MLP, _STEP, _FORCED, "the same", _FORCED),
    Chosen("tp_dtensor", "mlp-d1024-t512", _STEP, _DTENSOR, "MLP over 2 ranks, width 1024, 512 tokens", "DTensor"),
    Chosen("tp_dtensor", "block-d256-t64", _STEP, _DTENSOR, "block over 2 ranks, width 256, 64 tokens", "DTensor"),
    Chosen(
        "serve", _REQUESTS, _ALL, "transformers generate, left-padded", "engine, 32 requests, 21 M Llama", "`generate`"
    ),
    Chosen("serve", _REQUESTS, _ALL, "transformers generate_batch", "the same", "`generate_batch`"),
    Chosen("serve", _REQUESTS, _ALL, "vLLM, offline LLM", "the same", "vLLM, offline `LLM`"),
    Chosen("serve_http", "32-requests-at-once", _ALL, "vLLM's server", "the same over HTTP", "vLLM's server"),
)
_UP = "llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh-bfloat16"
_GATED = "llama3-8b-tp1-gate_up-t8192-d4096-f28672-silu-bfloat16"
_GPT = "gpt3-13b-tp1-up-t4096-d5120-f20480-gelu_tanh-bfloat16"
_NORM = "rms_norm-t8192-d4096-bf16"
_LOSS = "t8192-d4096-v128256-bfloat16"
_DECODE, _PREFILL = "s64-l{}-n32k8h128-page16-bf16", "s1-t8192-n32k8h128-page16-bf16"
_CUBLAS, _COPY = "cuBLAS x @ w.T", "copy of the bytes"
_SDPA, _CONTIGUOUS = "SDPA {}, contiguous KV", "SDPA's {}, keys not in pages"
ON_A_GPU = (
    Chosen(
        "linear_act", _UP, "forward", _CUBLAS, "product, bias and GeLU, 8192 x 4096 -> 14336", "the product, cuBLAS"
    ),
    Chosen("linear_act", _UP, "forward", "eager", "the same", "eager"),
    Chosen("gated", _GATED, "forward", "eager", "SwiGLU, 8192 x 4096 -> 2 x 14336", "eager"),
    Chosen("linear_backward", _GPT, "wgrad into fp32", "eager", "weight gradient added in fp32", "eager"),
    Chosen("linear_backward", _GPT, "linear_act backward", "eager", "backward of product, bias and GeLU", "eager"),
    Chosen("norm", _NORM, "forward, us", _COPY, "RMSNorm, 8192 x 4096", "a copy of the bytes"),
    Chosen("norm", f"{_NORM}-residual_same", _STEP, "eager", "RMSNorm of a sum, both ways", "eager"),
    Chosen("rope", "llama8b-b1-s8192-n32-k8-h128-bf16", "forward, us", "eager", "RoPE, 8192 tokens", "eager"),
    Chosen("cross_entropy", _LOSS, _STEP, "eager", "vocabulary's loss, 8192 x 4096 -> 128256, both ways", "eager"),
    Chosen("cross_entropy", _LOSS, "peak bytes, weight", "eager", "the same, bytes (weight frozen)", "eager"),
    Chosen("paged_decode", _DECODE.format(8192), "decode", _COPY, "decode, 64 x 8k", "a copy of the bytes"),
    Chosen("paged_decode", _DECODE.format(8192), "decode", "vLLM", "the same", "vLLM's Triton kernel"),
    Chosen("paged_decode", _DECODE.format(1024), "decode", "vLLM", "decode, 64 x 1k", "vLLM's Triton kernel"),
    Chosen("paged_prefill", _PREFILL, "prefill", "vLLM", "prefill, 8k", "vLLM's Triton kernel"),
    Chosen("paged_prefill", _PREFILL, "prefill", _SDPA.format("FlashAttention"), "the same", _CONTIGUOUS.format("FA2")),
    Chosen("paged_prefill", _PREFILL, "prefill", _SDPA.format("cuDNN"), "the same", _CONTIGUOUS.format("cuDNN")),
    Chosen("scaled_linear", _UP, "scales by tensor", "torch._scaled_mm", "fp8 product", "`torch._scaled_mm`"),
    Chosen("small_m", _UP.replace("t8192", "t1"), "forward", _CUBLAS, "product of 1 token", "cuBLAS"),
)


def results(found: Sequence[Result]) -> list[str]:
    """What stands between the marks."""
    on_a_gpu = "On one GPU, bf16 but for the fp8 product, device time beside each peer in one run:"
    without = textwrap.wrap(f"{compiled()} {emulated()}", 120, break_long_words=False, break_on_hyphens=False)
    return ["", *table(found), "", on_a_gpu, "", *table(found, ON_A_GPU), "", *without, ""]


def table(results: Sequence[Result], rows: Sequence[Chosen] = CHOSEN) -> list[str]:
    """The lines of a table; LookupError for a row that no result holds, or that may not be shown."""
    lines = [_line(HEAD), _line("---" for _ in HEAD)]
    for chosen in rows:
        found = [(result, row) for result in results for row in _rows(result, chosen)]
        if not found:
            raise LookupError(f"no result that may be shown holds {chosen[:4]}: run the benchmark, or change CHOSEN")
        lines += [_line(_cells(chosen, result, row)) for result, row in found]
    return lines


def _rows(result: Result, chosen: Chosen) -> Iterator[Row]:
    if result.bench == chosen.bench and not result.complaint:
        for row in result.rows:
            if (row.case, row.peer_name) == (chosen.case, chosen.peer) and row.metric.startswith(chosen.metric):
                yield row


def _cells(chosen: Chosen, result: Result, row: Row) -> Iterator[str]:
    yield chosen.what
    yield chosen.beside
    yield f"{row.ratio:.3g}"
    yield "" if row.between is None else "{:.3g} to {:.3g}".format(*row.between)
    yield "" if row.target is None else f"{row.target:.3g}, {'met' if row.met else '**missed**'}"
    device = result.origin["cpu"].removeprefix("x86_64, ") if result.device == "cpu" else result.device
    yield f"{device}, {result.origin['date'][:10]}"


def compiled(folder: Path = RECORDS) -> str:
    """A sentence on the kernels that were compiled without a GPU, from the records of ``make codegen``."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("triton-*.json"))]
    if not records:
        raise LookupError(f"no record of compiled kernels in {folder}: run make codegen")
    builds = [
        (name, dict(zip(record["columns"], build))) for record in records for name, build in record["builds"].items()
    ]
    targets = sorted({name.split()[1] for name, _ in builds})
    spilling = sum(build["spills"] > 0 for _, build in builds)
    tritons = " and ".join(record["triton"] for record in records)
    return (
        f"Compiled for {', '.join(targets)} under Triton {tritons}: {len(builds):,} builds of kernels, of which "
        f"{spilling or 'none'} {'spills' if spilling < 2 else 'spill'} registers."
    )


def emulated(folder: Path = RECORDS) -> str:
    """A sentence on the kernels that were run from their PTX on a CPU, from the record of what they did there."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("counts-*.json"))]
    if not records:
        raise LookupError(f"no record of what kernels do in {folder}: run make codegen")
    names = [name.split() for record in records for name in record["cases"]]
    kernels = {kernel for record in records for _, *rows in record["cases"].values() for kernel, *_ in rows}
    count = {arch: sum(name[0] == arch for name in names) for arch in sorted({name[0] for name in names})}
    cases = " and ".join(f"{number} cases for {arch}" for arch, number in count.items())
    return (
        f"Emulated from their PTX on a CPU, with every access checked and counted: {cases}, which launch "
        f"{len(kernels)} kernels in each of their configurations."
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def renewed(document: str, lines: Sequence[str]) -> str:
    """``document`` with ``lines`` between its two marks; ValueError where it lacks one."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"expected one {BEGIN!r} and one {END!r} in the document")
    before, rest = document.split(BEGIN)
    return "\n".join((before + BEGIN, *lines, END + rest.split(END)[1]))


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(renewed(readme.read_text(encoding="utf-8"), results(read_all([]))), encoding="utf-8")
    print(f"wrote the results of {readme.name}")
