"""The results in documents, from committed files alone: ``make front`` writes them between two marks of each.

Which rows stand there is chosen by hand, missed targets among them; every figure, date and processor comes from the
record that holds it. The README has what is counted and, of each GPU, three rows; the tables are in docs/cpu.md and
docs/gpu.md.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..harness import places, provenance, stale
from ..harness.publish import Result, read_all
from ..harness.report import Row

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "kernels" / "dev" / "compiled"
COUNTED = ROOT / "tests" / "layers" / "counted.json"  # written by tests/support/counted.py
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
HEAD = ("what", "beside", "times as fast", "interval", "target", "measured on")
CHIPS = {"sm_90": "Hopper"}


class Chosen(NamedTuple):
    """A row of a table: where it is found, and what the document calls it."""

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
_AN_MLP, _ENGINE = "training step of an MLP, 512 x 1024 -> 4096", "engine, 32 requests, 21 M Llama"
CHOSEN = (
    Chosen("fuse", "llama", _STEP, "stock model", "training step of a fused Llama of transformers", "the stock model"),
    Chosen("onednn", _MLP, _STEP, "stock torch", _AN_MLP, "stock torch"),
    Chosen("onednn", _MLP, _STEP, "torch.compile", _AN_MLP, "torch.compile"),
    Chosen("onednn", _MLP, _STEP, _FORCED, _AN_MLP, _FORCED),
    Chosen("tp_dtensor", "mlp-d1024-t512", _STEP, _DTENSOR, "MLP over 2 ranks, width 1024, 512 tokens", "DTensor"),
    Chosen("tp_dtensor", "block-d256-t64", _STEP, _DTENSOR, "block over 2 ranks, width 256, 64 tokens", "DTensor"),
    Chosen("serve", _REQUESTS, _ALL, "transformers generate, left-padded", _ENGINE, "`generate`"),
    Chosen("serve", _REQUESTS, _ALL, "transformers generate_batch", _ENGINE, "`generate_batch`"),
    Chosen("serve", _REQUESTS, _ALL, "vLLM, offline LLM", _ENGINE, "vLLM, offline `LLM`"),
    Chosen("serve_http", "32-requests-at-once", _ALL, "vLLM's server", f"server, {_ENGINE[8:]}", "vLLM's server"),
)
_UP = "llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh-bfloat16"
_GATED = "llama3-8b-tp1-gate_up-t8192-d4096-f28672-silu-bfloat16"
_GPT = "gpt3-13b-tp1-up-t4096-d5120-f20480-gelu_tanh-bfloat16"
_NORM = "rms_norm-t8192-d4096-bf16"
_LOSS = "t8192-d4096-v128256-bfloat16"
_DECODE, _PREFILL = "s64-l{}-n32k8h128-page16-bf16", "s1-t8192-n32k8h128-page16-bf16"
_TRAINED, _TRAINING = "llama3-8b-2-layers-t4096-bf16", "forward + backward + AdamW"
_GELU = "product, bias and GeLU, 8192 x 4096 -> 14336"
_CUBLAS, _COPY = "cuBLAS x @ w.T", "copy of the bytes"
_FA2, _CUDNN = "SDPA FlashAttention, contiguous KV", "SDPA cuDNN, contiguous KV"
ON_A_GPU = (
    Chosen("linear_act", _UP, "forward", _CUBLAS, _GELU, "the product, cuBLAS"),
    Chosen("linear_act", _UP, "forward", "eager", _GELU, "eager"),
    Chosen("gated", _GATED, "forward", "eager", "SwiGLU, 8192 x 4096 -> 2 x 14336", "eager"),
    Chosen("linear_backward", _GPT, "wgrad into fp32", "eager", "weight gradient added in fp32", "eager"),
    Chosen("linear_backward", _GPT, "linear_act backward", "eager", "backward of product, bias and GeLU", "eager"),
    Chosen("norm", _NORM, "forward, us", _COPY, "RMSNorm, 8192 x 4096", "a copy of the bytes"),
    Chosen("norm", f"{_NORM}-residual_same", _STEP, "eager", "RMSNorm of a sum, both ways", "eager"),
    Chosen("rope", "llama8b-b1-s8192-n32-k8-h128-bf16", "forward, us", "eager", "RoPE, 8192 tokens", "eager"),
    Chosen("cross_entropy", _LOSS, _STEP, "eager", "vocabulary's loss, 8192 x 4096 -> 128256, both ways", "eager"),
    Chosen("cross_entropy", _LOSS, "peak bytes, weight", "eager", "its bytes (weight frozen)", "eager"),
    Chosen("paged_decode", _DECODE.format(8192), "decode", _COPY, "decode, 64 x 8k", "a copy of the bytes"),
    Chosen("paged_decode", _DECODE.format(8192), "decode", "vLLM", "decode, 64 x 8k", "vLLM's Triton kernel"),
    Chosen("paged_decode", _DECODE.format(1024), "decode", "vLLM", "decode, 64 x 1k", "vLLM's Triton kernel"),
    Chosen("paged_prefill", _PREFILL, "prefill", "vLLM", "prefill, 8k", "vLLM's Triton kernel"),
    Chosen("paged_prefill", _PREFILL, "prefill", _FA2, "prefill, 8k", "SDPA's FA2, keys not in pages"),
    Chosen("paged_prefill", _PREFILL, "prefill", _CUDNN, "prefill, 8k", "SDPA's cuDNN, keys not in pages"),
    Chosen("scaled_linear", _UP, "scales by tensor", "torch._scaled_mm", "fp8 product", "`torch._scaled_mm`"),
    Chosen("small_m", _UP.replace("t8192", "t1"), "forward", _CUBLAS, "product of 1 token", "cuBLAS"),
)


class Front(NamedTuple):
    """A row of the README, beside one or more peers."""

    what: str
    rows: Sequence[tuple[str, tuple[str, str, str, str]]]  # beside what, and the row, as Chosen begins


FRONT = (
    Front(
        "training step, 2 fused layers of Llama 3 8B",
        [
            (beside, ("train_step", _TRAINED, _TRAINING, peer))
            for beside, peer in (("stock", "stock torch"), ("`torch.compile`", "torch.compile"), ("Liger", "Liger"))
        ],
    ),
    Front(
        "decode, 64 x 8k tokens; prefill of 8k",
        [
            ("a plain copy of the same bytes, its bound", ("paged_decode", _DECODE.format(8192), "decode", _COPY)),
            ("FlashAttention 2", ("paged_prefill", _PREFILL, "prefill", _FA2)),
        ],
    ),
    Front(
        _GELU,
        [
            ("cuBLAS, which adds no bias or GeLU", ("linear_act", _UP, "forward, us", _CUBLAS)),
            ("eager torch", ("linear_act", _UP, "forward, us", "eager")),
        ],
    ),
)
NOT_YET = "not measured yet"


def first_screen(found: Sequence[Result], *, results: Path = stale.RESULTS) -> list[str]:
    """The README's results: what is counted, and what GPUs measured, or that none has."""
    gpus = {gpu: dates for gpu in dict.fromkeys(result.device for result in found) if (dates := _dates(found, gpu))}
    how = "[Counted](docs/fuse.md#what-it-gains-and-costs), not timed"
    if not gpus:
        return ["", *counted(), "", *_wrapped(f"{how}: no GPU has run this yet. {_emulated_cases()}"), ""]
    table = [_line(("in bf16", *(f"speed on one {gpu}, {' to '.join(dates)}" for gpu, dates in gpus.items())))]
    table += [_line("---" for _ in range(1 + len(gpus)))]
    table += [_line((row.what, *(_side_by_side(found, gpu, row) for gpu in gpus))) for row in FRONT]
    told = f"[More rows](docs/gpu.md#the-first-run), losses among them: device time{_since(found, gpus, results)}."
    return ["", *counted(), "", *_wrapped(f"{how}. {_emulated_cases()}"), "", *table, "", *_wrapped(told), ""]


def _dates(found: Sequence[Result], gpu: str) -> list[str]:
    """The first and the last day on which a GPU measured rows of the README: one if they are the same, [] if none."""
    keys = [key for row in FRONT for _, key in row.rows]
    days = sorted({result.origin["date"][:10] for key in keys for result, _ in _found(found, gpu, key)})
    return days if len(days) < 2 else [days[0], days[-1]]


def _side_by_side(found: Sequence[Result], gpu: str, front: Front) -> str:
    """The ratios of a row on one GPU, before the peer of each."""
    ratios = {beside: [row.ratio for _, row in _found(found, gpu, key)] for beside, key in front.rows}
    if not any(ratios.values()):
        return f"beside {'; '.join(ratios)}: {NOT_YET}"
    parts = (f"{ratio[0]:.3g} x {beside}" if ratio else f"{beside}: {NOT_YET}" for beside, ratio in ratios.items())
    return "; ".join(parts)


def _found(found: Sequence[Result], gpu: str, key: tuple[str, str, str, str]) -> list[tuple[Result, Row]]:
    """What a GPU measured of a row; [] for a CPU."""
    chosen = Chosen(*key, what="", beside="")
    own = (result for result in found if result.device == gpu and result.absolute)
    return [(result, row) for result in own for row in _rows(result, chosen)]


def _since(found: Sequence[Result], gpus: Iterable[str], results: Path) -> str:
    """Half a sentence on the rows whose sources have changed since they were measured."""
    shown = {(gpu, key[0]) for gpu in gpus for row in FRONT for _, key in row.rows if _found(found, gpu, key)}
    stale_ones = {(item.gpu, item.name) for item in stale.survey(results) if item.state == "stale"}
    changed = {(gpu, name) for gpu, name in shown if (provenance.slug(gpu), name) in stale_ones}
    if changed == shown:
        return ", before later changes to this code"
    return f", before later changes to {', '.join(sorted({name for _, name in changed}))}" if changed else ""


def counted(file: Path = COUNTED) -> list[str]:
    """The table of what a training forward's layers keep, launch and move.

    Without embedding, head and loss: our loss counts as one op, and does backward's work, too.
    """
    record = json.loads(file.read_text(encoding="utf-8"))
    layers = [sides for path, sides in record["moved"].items() if path.startswith("model.")]
    what = f"{record['model']}'s layers, a training forward of {record['batch'][1]:,} tokens in {record['dtype']}"
    lines = [_line((f"{what}, on {CHIPS[record['chip']]}", "stock", "fused")), _line(("---", "---:", "---:"))]
    for name, field, show in (
        ("activations kept for backward", "kept", lambda count: f"{count / 1e9:.1f} GB"),
        ("ops that touch memory", "ops", lambda count: f"{count:,}"),
        ("bytes that they move", "moved", lambda count: f"{count / 1e9:.1f} GB"),
    ):
        lines.append(_line((name, *(show(sum(each[side][field] for each in layers)) for side in ("stock", "fused")))))
    return lines


def on_cpus(found: Sequence[Result]) -> list[str]:
    """The tables of docs/cpu.md: of everything that was measured, then of oneDNN's products on each processor."""
    lines = ["", *table(found), ""]
    for result in found:
        if result.bench == "onednn" and not result.complaint:
            lines += [f"oneDNN's products on an {_processor(result)}, {result.origin['date'][:10]}:", ""]
            lines += [*_products(result), ""]
    return lines


def _products(result: Result) -> Iterator[str]:
    """A row for each case, its peers side by side: T tokens, D the model's width, F the hidden width."""
    cases: dict[str, dict[str, Row]] = {}
    for row in result.rows:
        cases.setdefault(row.case, {})[row.peer_name] = row
    yield _line(("", "T", "D", "F", "runs", "stock torch", "interval", "fast path forced", "torch.compile"))
    yield _line("---" for _ in range(9))
    for case, peers in cases.items():
        *what, tokens, width, hidden = case.split("-")
        stock = peers["stock torch"]
        sizes = (size[1:] for size in (tokens, width, hidden))
        runs = ", ".join(sorted({op.partition("=")[2] for op in stock.ran.split()}))
        ratios = (f"{peers[peer].ratio:.2f}" if peer in peers else "" for peer in (_FORCED, "torch.compile"))
        yield _line((" ".join(what), *sizes, runs, f"{stock.ratio:.2f}", _between(stock), *ratios))


def on_gpus(found: Sequence[Result]) -> list[str]:
    """The table of docs/gpu.md, training steps once they are measured, and what was seen without a GPU."""
    awaited = [Chosen(*key, FRONT[0].what, beside) for beside, key in FRONT[0].rows]
    steps = [chosen for chosen in awaited if any(True for result in found for _ in _rows(result, chosen))]
    return ["", *table(found, (*ON_A_GPU, *steps)), "", *_wrapped(f"{compiled()} {emulated()}"), ""]


def beside_vllm(found: Sequence[Result]) -> str:
    """How fast the engine and the server are beside vLLM's, on each processor; LookupError where that is not known."""
    engine, server = (_of(found, chosen) for chosen in CHOSEN if "vLLM" in chosen.peer)
    target = engine[0][1].target
    aim = f" (target {target:.3g}, {'met' if all(row.met for _, row in engine) else 'missed'})" if target else ""
    first, second = (" and ".join(f"{row.ratio:.3g}" for _, row in rows) for rows in (engine, server))
    of_first, of_second = (" and ".join(f"an {_processor(result)}" for result, _ in rows) for rows in (engine, server))
    on = ("", f", both on {of_first}") if of_first == of_second else (f" on {of_first}", f" on {of_second}")
    return f"{first} of the speed of vLLM's offline `LLM`{aim}{on[0]} and, over HTTP, {second} of its server's{on[1]}"


def _of(results: Sequence[Result], chosen: Chosen) -> list[tuple[Result, Row]]:
    """The rows that ``chosen`` names; LookupError where no result holds one, or none that may be shown."""
    found = [(result, row) for result in results for row in _rows(result, chosen)]
    if not found:
        raise LookupError(f"no result that may be shown holds {chosen[:4]}: run the benchmark, or change CHOSEN")
    return found


def table(results: Sequence[Result], rows: Sequence[Chosen] = CHOSEN) -> list[str]:
    """The lines of a table; LookupError for a row that no result holds, or that may not be shown."""
    lines = [_line(HEAD), _line("---" for _ in HEAD)]
    for chosen in rows:
        lines += [_line(_cells(chosen, result, row)) for result, row in _of(results, chosen)]
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
    yield _between(row)
    yield "" if row.target is None else f"{row.target:.3g}, {'met' if row.met else '**missed**'}"
    yield f"{result.device if result.absolute else _processor(result)}, {result.origin['date'][:10]}"


def _between(row: Row) -> str:
    return "" if row.between is None else "{:.3g} to {:.3g}".format(*row.between)


def _processor(result: Result) -> str:
    """A CPU by name and core: "AMD EPYC (Zen 4)"; ValueError where the record does not tell it."""
    told = result.origin["cpu"] or ""
    name = told.partition(", ")[2].partition(", family")[0]
    if not name:
        raise ValueError(f"{result.path} does not name its processor ({told!r}): file one that does, or remove it")
    core = (places.cpu_kind(told) or "").partition("-")[2].replace("-", " ")
    return f"{name} ({core.replace('zen', 'Zen ')})" if core else name


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
    records = _counts(folder)
    names = [name.split() for record in records for name in record["cases"]]
    kernels = {kernel for record in records for _, *rows in record["cases"].values() for kernel, *_ in rows}
    count = {arch: sum(name[0] == arch for name in names) for arch in sorted({name[0] for name in names})}
    cases = " and ".join(f"{number} cases for {arch}" for arch, number in count.items())
    return (
        f"Emulated from their PTX on a CPU, with every access checked and counted: {cases}, which launch "
        f"{len(kernels)} kernels in each of their configurations."
    )


def _counts(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("counts-*.json"))]
    if not records:
        raise LookupError(f"no record of what kernels do in {folder}: run make codegen")
    return records


def _emulated_cases() -> str:
    cases = {tuple(name.split()[1:]) for record in _counts(RECORDS) for name in record["cases"]}
    return f"Compiled kernels were run in an emulator: {len(cases):,} cases."


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def renewed(document: str, lines: Sequence[str]) -> str:
    """``document`` with ``lines`` between its two marks; ValueError where it lacks one."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"expected one {BEGIN!r} and one {END!r} in the document")
    before, rest = document.split(BEGIN)
    return "\n".join((before + BEGIN, *lines, END + rest.split(END)[1]))


DOCUMENTS: Mapping[str, Callable[[Sequence[Result]], list[str]]] = {
    "README.md": first_screen,
    "docs/cpu.md": on_cpus,
    "docs/gpu.md": on_gpus,
}


def main(root: Path) -> None:
    """Write the results of every document below ``root``, or of none where one cannot be written."""
    found = read_all([])
    texts = {
        root / name: renewed((root / name).read_text(encoding="utf-8"), lines(found))
        for name, lines in DOCUMENTS.items()
    }
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote the results of {file.relative_to(root)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
