"""``shardfuse plan``: the quickest layouts of a model on a cluster, before anything is rented."""

from __future__ import annotations

import json as jsonlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Debug, Json

if TYPE_CHECKING:
    from rich.console import Console

    from ..parallel.plan.search import Found
    from ..planning import Plan

GIB = 1 << 30


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A known model, such as llama3-405b, a folder of transformers, or a TOML file of shardfuse train."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs, or with --gpu cpu of processes on this machine.")
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="Kind of GPU: a100, a100-40, h100, h100-96, h800, h200, b200, gb200, gb300, mi300x; or cpu, for this "
            "machine."
        ),
    ] = "h100",
    network: Annotated[
        str | None, typer.Option(help="Other links: names such as pcie-5,ethernet-100, or a TOML file; docs/plan.md.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences per step. Default: the file's, else up to four million tokens.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence. Default: the file's, else up to 2048.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp8; fp32 with --gpu cpu.")] = None,
    tp: Annotated[str | None, typer.Option(help="Allowed tensor-parallel degrees, such as 4,8. Default: any.")] = None,
    pp: Annotated[str | None, typer.Option(help="Allowed numbers of pipeline ranks. Default: any.")] = None,
    dp: Annotated[str | None, typer.Option(help="Allowed numbers of ZeRO shards. Default: any.")] = None,
    replicas: Annotated[
        str | None, typer.Option(help="Allowed numbers of replicas of those shards. Default: any.")
    ] = None,
    zero: Annotated[str | None, typer.Option(help="Allowed ZeRO stages. Default: 0,1,3.")] = None,
    micro: Annotated[
        str | None, typer.Option(help="Allowed sizes of a micro-batch, in sequences. Default: any.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Allowed pipeline schedules, such as 1f1b,zbv.")] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Allowed recomputation of blocks: none or full. Default: none,full.")
    ] = None,
    mlp_recompute: Annotated[
        str | None, typer.Option(help="Allowed recomputation of MLPs alone: 0, 1 or 2. Default: 0,1,2.")
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel", help="Default: if the sequence divides by the degree."
        ),
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="Default: where nothing else fits, or is as quick.")
    ] = None,
    count: Annotated[int, typer.Option(help="Number of layouts to show.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the best layout as a TOML file for shardfuse train.")] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw timeline and memory as a picture (.png, .svg, .pdf) or a page (.html).")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare predictions with published runs. Exit code 1: a judged one is off.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict the quickest layouts of a model on a cluster: memory, step time, communication, idle time."""
    if check:
        from .plan_check import run_check

        given = {"--model": model, "--gpus": gpus, "--out": out, "--draw": draw}
        other = next((name for name, value in given.items() if value is not None), None)
        if other is not None:
            raise ValueError(f"{other} with --check: it predicts the published runs alone; leave one of the two out")
        raise typer.Exit(run_check(json=json))
    if model is None or gpus is None:
        raise ValueError("shardfuse plan needs --model and --gpus: --model llama3-8b --gpus 64 --gpu h100")
    from ..kernels.runtime.printing import console

    choices = {"tp": _numbers("tp", tp), "pp": _numbers("pp", pp), "dp": _numbers("dp", dp)}
    choices |= {"replicas": _numbers("replicas", replicas)}
    choices |= {"zero": _numbers("zero", zero), "micro": _numbers("micro", micro)}
    choices |= {"mlp_recompute": _numbers("mlp-recompute", mlp_recompute)}
    words = {"schedule": _words("schedule", schedule), "recompute": _words("recompute", recompute)}
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out}: it is a folder; give a file, such as {out / 'run.toml'}")
    if draw is not None:
        from .plan_page import check_suffix, write

        check_suffix(draw)
    people = console(stderr=json)
    with people.status("searching layouts"):
        from ..planning import plan as make

        made: Plan = make(
            model, gpus=gpus, gpu=gpu, network=network, batch=batch, seq=seq, precision=precision, count=count,
            **choices, **words, sequence_parallel=sequence_parallel, offload=offload,
        )  # fmt: skip
    show(people, made)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(made.toml(), encoding="utf-8")
    if draw is not None:
        write(made, draw)
    for path in (out, draw):
        if path is not None:
            people.print(f"wrote {path}", soft_wrap=True)
    if json:
        print(jsonlib.dumps(made.record()))


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--{name} {text}: expected whole numbers, such as 4 or 4,8") from None
    least = 0 if name in ("zero", "mlp-recompute") else 1
    if min(numbers) < least:
        raise ValueError(f"--{name} {text}: expected numbers of at least {least}")
    return numbers


def _words(name: str, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    words = tuple(part.strip() for part in text.split(","))
    if not all(words):
        raise ValueError(f"--{name} {text}: expected words separated by commas; leave the option out for any")
    return words


def show(people: Console, made: Plan) -> None:
    """Print the layouts, why each beats the next, and what the best one holds and sends."""
    from ..parallel.plan.shapes import described

    layout = made.best.layout
    people.print(
        f"{described(made.shape)}\n{made.cluster.gpus} x {made.cluster.gpu.name}, {made.cluster.network.name}; batches "
        f"of {layout.batch} sequences of {layout.length} tokens in {layout.precision}"
    )
    people.print(layouts_table(made))
    for number, reason in enumerate(made.reasons(), 1):
        people.print(f"{number} beats {number + 1}: {reason}")
    for table in (_memory_table(made, made.best), _step_table(made.best), _traffic_table(made, made.best)):
        people.print()
        people.print(table)
    people.print(
        f"\n{made.considered} layouts were considered in {made.seconds:.1f} s. All figures are predictions; "
        "docs/plan.md says how they are checked.",
        style="dim",
    )


def layouts_table(made: Plan) -> Any:
    """A table with a row for each layout, best first."""
    from ..kernels.runtime.printing import Sheet, figure, prose, unbroken

    table = Sheet(
        unbroken(""), prose("layout", 32), figure("step"), figure("tokens/s"), figure("MFU"), figure("GiB"),
        figure("exposed"), figure("idle"),
    )  # fmt: skip
    for number, each in enumerate(made.found, 1):
        step = each.time
        table.add(
            str(number), each.layout.described(), f"{step.total:.3g} s", f"{made.tokens_per_second(each):,.0f}",
            f"{made.utilization(each):.1%}", f"{each.memory.total / GIB:.1f}", f"{step.exposed / step.total:.1%}",
            f"{step.bubble / step.total:.1%}",
        )  # fmt: skip
    return table


def _memory_table(made: Plan, found: Found) -> Any:
    from ..kernels.runtime.printing import Sheet, figure, unbroken

    kinds = [each.name for each in fields(found.memory)]
    unit, size = memory_unit(found)
    table = Sheet(
        unbroken(unit),
        figure("fullest"),
        *(figure(f"rank {rank}") for rank in _ends(found)),
        title=f"Memory of the best layout; a GPU has {made.cluster.gpu.memory / GIB:.1f} GiB",
    )
    ranks = made.memory_of(found)
    for kind in kinds:
        values = [getattr(found.memory, kind), *(getattr(ranks[rank], kind) for rank in _ends(found))]
        if any(values):
            table.add(kind, *(f"{value / size:.2f}" for value in values))
    table.add(
        "total", *(f"{value / size:.2f}" for value in (found.memory.total, *(ranks[r].total for r in _ends(found))))
    )
    return table


def memory_unit(found: Found) -> tuple[str, int]:
    """The unit of the memory's kinds, and its bytes: MiB where the fullest rank holds less than a GiB."""
    return ("GiB", GIB) if found.memory.total >= GIB else ("MiB", 1 << 20)


def _ends(found: Found) -> list[int]:
    """The first, a middle and the last rank of a pipeline."""
    last = found.layout.pp - 1
    return sorted({0, last // 2, last}) if last else []


def _step_table(found: Found) -> Any:
    from ..kernels.runtime.printing import Sheet, figure, unbroken
    from ..planning import PARTS

    table = Sheet(unbroken("part"), figure("seconds"), figure("share"), title="Step of the best layout")
    for name, words in PARTS.items():
        seconds = getattr(found.time, name)
        if seconds > 0:
            table.add(words, f"{seconds:.3g}", f"{seconds / found.time.total:.1%}")
    return table


def _traffic_table(made: Plan, found: Found) -> Any:
    from ..kernels.runtime.printing import Sheet, figure, unbroken

    table = Sheet(
        unbroken("what"), unbroken("collective"), unbroken("over"), unbroken("link"), figure("GiB"),
        title="What the first rank sends in a step",
    )  # fmt: skip
    for flow in made.traffic(found):
        table.add(flow.what, flow.kind, flow.group, flow.link, gib(flow.bytes))
    if not table.rows:
        table.add("nothing", "", "", "", "0")
    return table


def gib(size: float) -> str:
    """Bytes in GiB, rounded for reading."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"
