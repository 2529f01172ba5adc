"""The command line: ``shardfuse demo | train | plan | serve | generate | chat | audit | schedule | env | inspect |
bench | conformance``.

This module parses arguments and reports errors. The modules ``bench``, ``conformance``, ``plan`` and ``serving`` of
``commands/`` parse those of their own commands. A command imports the code that does its work when it runs, so that
``shardfuse --help`` is fast.
"""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from .commands import bench, conformance, errors, plan, serving
from .commands.options import Debug, Json

app = typer.Typer(
    help="Fused, sharded transformer layers in Triton.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(conformance.app, name="conformance")

# Errors that carry an explanation; anything else is a defect and keeps its traceback.
_EXPLAINED = (ValueError, RuntimeError, OSError, ImportError)


def main() -> None:
    """The console script. An explained error is one line on standard error and exit code 1."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    atexit.register(gc.freeze)  # at its end Python would search for garbage, and with torch that takes 0.3 s
    try:
        app(prog_name="shardfuse")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt the exit
        sys.exit(130)
    except _EXPLAINED as error:
        sys.exit(errors.report(error))


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"shardfuse {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
]


@app.callback()
def _root(version: Version = False, debug: Debug = False) -> None:
    """Fused, sharded transformer layers in Triton."""


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(help="Text to learn: a file, or a folder of them. Default: Python's standard library."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the output. Default: shardfuse-demo.")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel processes. Default: 2, or 1 with a single GPU.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Limit of the training steps.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Time limit of the training, in seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and batches. Default: 0.")] = None,
    port: Annotated[int | None, typer.Option(help="Port where the processes meet. Default: any free one.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, or bf16 or fp16 products over fp32 parameters. Default: fp32.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Share of activations that training drops. Default: 0.")] = None,
    debug: Debug = False,
) -> None:
    """Train a small decoder on real text over two processes, check it against one, save it, load it, serve it."""
    from .commands.demo import DemoOptions, run_demo

    given = {
        "data": data,
        "out": out,
        "tp": tp,
        "steps": steps,
        "seconds": seconds,
        "seed": seed,
        "port": port,
        "device": device,
        "precision": precision,
        "dropout": dropout,
    }
    options = DemoOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    raise typer.Exit(run_demo(options))


@app.command()
def train(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="TOML file of settings; see docs/training.md.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run (or --set epochs=N).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the weights, the data's order and dropout.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run. Default: run.")] = None,
    start: Annotated[str | None, typer.Option(help="Hugging Face folder to start from.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Texts or chats (a file, a folder or a glob), or a .npy file of token ids.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate after the warm-up.")] = None,
    dp_replicate: Annotated[
        int | None, typer.Option(help="Replicas of the data-parallel shards (hybrid sharding).")
    ] = None,
    dp: Annotated[
        int | None, typer.Option(help="Data-parallel degree. Default: the processes that the other degrees leave.")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.")] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Pipeline schedule, such as 1f1b or zbv.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches per batch.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, or bf16 or fp16 products over fp32 parameters.")] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Keep only each block's input for backward.")
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="Keep parameters and optimizer state in host memory.")
    ] = None,
    overlap: Annotated[
        str | None, typer.Option(help="How collectives overlap with products; see docs/reference.md.")
    ] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="Shard tensors between layers.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="SETTING=VALUE", help="Any other setting; may be repeated.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes to start. Default: the product of the degrees.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port where the processes meet. Default: any free one.")] = None,
    restarts: Annotated[int, typer.Option(help="Limit of restarts after a process was killed.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder, if there is one.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a transformer over processes in any layout; flags override the file."""
    from .commands.train import FLAGS, TrainOptions, run_train

    flags = {name: context.params[name] for name in FLAGS if context.params[name] is not None}
    options = TrainOptions(
        file, flags, tuple(assignments or ()), processes, port, restarts=restarts, resume=resume, json=json
    )
    raise typer.Exit(run_train(options))


app.command()(plan.plan)


@app.command()
def audit(
    dp: Annotated[
        int | None, typer.Option(help="Data-parallel degree. Default: 2 without other degrees, else 1.")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks. Default: 1.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree. Default: 1.")] = None,
    dp_replicate: Annotated[
        int | None, typer.Option(help="Replicas of the data-parallel shards (hybrid sharding). Default: 1.")
    ] = None,
    zero: Annotated[int, typer.Option(help="ZeRO stage, 0 to 3.")] = 0,
    schedule: Annotated[str | None, typer.Option(help="Pipeline schedule, such as 1f1b or zbv.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Micro-batches per batch. Default: the schedule's own number.")
    ] = None,
    style: Annotated[str, typer.Option(help="gelu or gated.")] = "gated",
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Shard tensors between layers.")
    ] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Keep only each block's input for backward.")] = False,
    precision: Annotated[str | None, typer.Option(help="bf16 or fp16 over fp32 parameters. Default: fp32.")] = None,
    overlap: Annotated[
        str | None, typer.Option(help="auto, kernel, chunked or none: how collectives overlap with products.")
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep parameters and gradients in host memory.")] = False,
    tie_embeddings: Annotated[
        bool, typer.Option("--tie-embeddings", help="The head shares the embedding's weight.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Count the bytes that a small model's training step sends and compare them with the closed form.

    Exit code 1: they differ.
    """
    from .commands.audit import Options
    from .commands.audit import audit as run_audit

    given = {"dp": dp, "pp": pp, "tp": tp, "dp_replicate": dp_replicate}
    degrees = {name: degree for name, degree in given.items() if degree is not None}
    options = Options(
        **(degrees or {"dp": 2}),
        zero=zero,
        schedule=schedule,
        microbatches=microbatches,
        style=style,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        precision=precision,
        overlap=overlap,
        offload=offload,
        tie_embeddings=tie_embeddings,
    )
    raise typer.Exit(run_audit(options, json=json))


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(help="A schedule, such as 1f1b, interleaved_zb or zbv.")],
    stages: Annotated[int, typer.Option(help="Pipeline ranks; some schedules put two stages on each.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches per step.")] = 8,
    forward_cost: Annotated[
        float | None,
        typer.Option(help="Forward cost of a micro-batch in one stage, in any unit. Default of each cost: 1."),
    ] = None,
    backward_cost: Annotated[float | None, typer.Option(help="Cost of the gradient of a stage's input.")] = None,
    weight_cost: Annotated[float | None, typer.Option(help="Cost of the gradients of a stage's weights.")] = None,
    held: Annotated[
        float | None,
        typer.Option(help="Memory kept between these two passes, as a share of what forward keeps. Default: 1."),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Backward runs forward again first.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Instead: modelled costs, in us, of a block of this model, such as llama3-8b.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="With --model: tokens per micro-batch. Default: 8192.")] = None,
    length: Annotated[int | None, typer.Option(help="With --model: tokens per sequence. Default: 8192.")] = None,
    tp: Annotated[int | None, typer.Option(help="With --model: tensor-parallel degree. Default: 1.")] = None,
    target: Annotated[str | None, typer.Option(help="With --model: a GPU architecture. Default: sm_90.")] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Instead: costs measured on this machine, in ms, for the run that this TOML file of shardfuse train "
            "describes. A dp that the file leaves open counts as 1."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="SETTING=VALUE", help="With --measure: overrides the file.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Draw the timeline into this file (.png, .svg, .pdf).")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the timeline of a pipeline schedule, its idle share and its peak of activations."""
    from .commands.schedule import schedule as show_schedule
    from .commands.schedule_costs import price

    given = {"forward": forward_cost, "backward": backward_cost, "weight": weight_cost, "held": held}
    shape = {"tokens": tokens, "length": length, "tp": tp, "target": target}
    priced = price(
        name,
        stages,
        microbatches,
        given={name: cost for name, cost in given.items() if cost is not None},
        recompute=recompute,
        model=model,
        shape={name: value for name, value in shape.items() if value is not None},
        measure=measure,
        assignments=tuple(assignments or ()),
    )
    raise typer.Exit(show_schedule(name, stages, microbatches, priced, draw=draw, json=json))


app.command()(serving.serve)
app.command()(serving.generate)
app.command()(serving.chat)


@app.command()
def env(json: Json = False, debug: Debug = False) -> None:
    """Print versions, devices and the chosen implementations, for a bug report."""
    from .commands.env import show

    show(json=json)


@app.command()
def inspect(
    op: Annotated[str | None, typer.Argument(help="An op, such as linear_act.")] = None,
    target: Annotated[str | None, typer.Option(help="A GPU architecture, such as sm_90; default: all.")] = None,
    all_ops: Annotated[bool, typer.Option("--all", help="Inspect every op.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print a row for each kernel; with --run: for each line.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="Run a case on this CPU and count what its kernels do.")] = False,
    case: Annotated[str | None, typer.Option(help="With --run: cases whose name holds this; default: one.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile an op's kernels ahead of time and show what the compiler made of them. Needs no GPU."""
    from .kernels.dev import inspection

    if run:
        from .kernels.dev import run_inspection

        raise typer.Exit(run_inspection.inspect(op, target, case, all_ops=all_ops, json=json, verbose=verbose))
    if case is not None:
        raise typer.BadParameter(f"{case!r}: only --run runs cases; add --run, or leave out --case")
    raise typer.Exit(inspection.inspect(op, target, json=json, verbose=verbose, all_ops=all_ops))
