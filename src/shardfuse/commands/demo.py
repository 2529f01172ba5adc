"""``shardfuse demo``: train a small sharded transformer on real text, check it, save it, serve it.

The steps end in checks; a failed check makes the exit code non-zero. All output goes to one folder, which appears only
when it is complete; ``report.html`` in it shows the run.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.padding import Padding

from .. import __version__
from ..explanation import Explanation, explain
from ..kernels.dev import registry
from ..kernels.runtime import dispatch
from ..kernels.runtime.printing import Sheet, prose, unbroken
from ..layers.config import TransformerConfig
from ..layers.hf.tokenizers import holds_tokenizer
from ..layers.transformer import ParallelTransformer
from ..training.checks import FACTOR, Agreement, compare_with_transformers, compare_with_unsharded, same_weights
from ..training.data.corpus import Corpus, bigram_nats, load_corpus, unigram_nats
from ..training.folders import CHECKPOINTS, EXPORT, REPORT, SETTINGS, output_folder, write_report
from ..training.launch import Stopped, available_cores, check_port, launch, stop_signals
from ..training.layout import check_gpus, resolve
from ..training.metrics import FILE as METRICS
from ..training.metrics import read_lines
from ..training.restart import StopFile
from ..training.run import evaluate_saved, restore, train_run
from ..training.settings import (
    CheckpointSettings,
    DataSettings,
    LogSettings,
    OptimizerSettings,
    ParallelSettings,
    RunSettings,
)
from ..training.trainer import RunResult
from . import errors
from .demo_page import PAGE, write_page
from .demo_serving import BLOCK_SIZE, DemoServing, serve
from .env import OPS, by_choice, collect

MAKER = "shardfuse demo"
MODEL = TransformerConfig(
    style="gelu",
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    max_positions=512,
    init_std=0.05,
)
COMPARED_STEPS = 8  # the steps repeated in one process
HELD_OUT_BAR = 2.35  # nats per byte of the standard library's sources; a table of byte pairs scores about 2.4
NEED_BYTES = 128 << 20  # three times the size of checkpoint, exported model and the replaced output


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``shardfuse demo``.

    ``data`` is a text file or a folder of them (None: the standard library's sources), ``out`` the output folder,
    ``tp`` the number of tensor-parallel processes (None: 2, or 1 on one GPU), ``port`` their rendezvous port (None: any
    free one), ``seconds`` the time limit of the training, ``device`` "cpu" or "cuda" (None: a GPU if there is one),
    ``precision`` one of ``training.settings.PRECISIONS``, ``dropout`` the dropout rate of embeddings and residual
    branches in training.
    """

    data: Path | None = None
    out: Path = Path("shardfuse-demo")
    tp: int | None = None
    port: int | None = None
    seed: int = 0
    steps: int = 240
    seconds: float = 40.0
    device: str | None = None
    precision: str = "fp32"
    dropout: float = 0.0
    model: TransformerConfig = MODEL


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 if every check held, 1 after a failed check or an error, 128 + n after signal n."""
    console = Console(highlight=False)
    try:
        with stop_signals(), _one_thread():
            return 0 if _Demo(options, console).run() else 1
    except Stopped as stop:
        errors.restore(console)
        print(f"stopped by {stop}; nothing was left running or half-written", file=sys.stderr)
        return 128 + stop.signum
    except (ValueError, RuntimeError, OSError) as error:
        errors.restore(console)
        return errors.report(error)


class _Demo:
    """The steps of the demo, and the state that they share."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self.options = options
        self.console = console
        self.checks: list[tuple[str, bool]] = []
        self.seconds: dict[str, float] = {}
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: this machine has no GPU that torch can use; choose --device cpu")
        default = min(2, torch.cuda.device_count()) if self.device == "cuda" else 2
        self.tp = default if options.tp is None else options.tp
        self.settings = self._settings()

    def run(self) -> bool:
        began = time.monotonic()
        check_port(self.options.port)
        path = self.settings.data.path
        assert not isinstance(path, tuple)  # as _settings sets it
        corpus = load_corpus(path, seq=self.settings.data.seq)
        names = (SETTINGS, METRICS, CHECKPOINTS, EXPORT, PAGE)
        with output_folder(self.options.out, maker=MAKER, names=names, need_bytes=NEED_BYTES) as folder:
            self.settings = dataclasses.replace(self.settings, out=str(folder))
            with self._step("1/5", "What is here"):
                explanation = self._show_found(corpus)
            with self._step("2/5", f"Train, tensor-parallel over {self.tp} process{'es' if self.tp > 1 else ''}"):
                ranks = self._train(folder, corpus)
            with self._step("3/5", "Repeat the first steps in one process, unsharded"):
                agreement = self._compare(folder)
            with self._step("4/5", "Save, load at another degree, serve"):
                model = self._reload(folder, ranks[0], agreement)
                self._check_export(folder, model, corpus)
                serving = self._serve(model, corpus)
            self.settings = dataclasses.replace(self.settings, out=str(self.options.out))
            (folder / SETTINGS).write_text(self.settings.to_json() + "\n", encoding="utf-8")
            report = self._report(ranks, agreement, serving) | {
                "text": corpus.source,
                "baselines": {"unigram": unigram_nats(corpus), "bigram": bigram_nats(corpus)},
                "model": explanation.record(),
            }
            write_report(folder, MAKER, report)
            write_page(folder, report, [line["loss"] for line in read_lines(folder / METRICS)])
        self._summary(ranks, serving, time.monotonic() - began)
        return all(ok for _, ok in self.checks)

    def _settings(self) -> RunSettings:
        """The run's settings. Raises ValueError where they cannot work on this machine."""
        if self.tp < 1:
            raise ValueError(f"--tp {self.tp}: expected at least 1")
        dropout = self.options.dropout
        settings = RunSettings(
            steps=self.options.steps,
            seed=self.options.seed,
            device=self.device,
            time_limit=self.options.seconds,
            model=dataclasses.replace(self.options.model, embedding_dropout=dropout, residual_dropout=dropout),
            data=DataSettings(path=None if self.options.data is None else str(self.options.data)),
            parallel=ParallelSettings(tp=self.tp, precision=self.options.precision),
            optimizer=OptimizerSettings(lr=2e-3, schedule="linear", warmup=20, beta2=0.98),
            checkpoint=CheckpointSettings(every=None),
            log=LogSettings(tensorboard=False, eval_batches=32),
        )
        resolved = resolve(settings, self.tp)
        check_gpus(resolved, self.tp)
        return resolved

    # --- the steps ----------------------------------------------------------------------------------------------------

    def _show_found(self, corpus: Corpus) -> Explanation:
        """Show device, versions and text, and the implementation chosen for each op, with the reason.

        Returns what the model's modules run.
        """
        device = torch.device(self.device)
        self._say(f"device   {_device_line(device)}")
        self._say(
            f"text     {corpus.source}: {len(corpus.train) / 1e6:.1f} MB, {len(corpus.held_out) / 1e3:.0f} kB held out"
        )
        with torch.device("meta"):
            model = ParallelTransformer(self.settings.model)
        explanation = explain(model, device)
        shape = self.settings.model
        self._say(
            f"model    {explanation.parameters / 1e6:.2f} M parameters, {shape.num_layers} layers of width "
            f"{shape.hidden_size}, {shape.num_heads} heads ({shape.num_kv_heads} KV), bytes as tokens"
        )
        runs = {row.op: (row.runs, row.why) for row in explanation.rows if row.op}
        for op in sorted(registry.ops()):  # includes serving's ops
            choice = dispatch.choose(op, device)
            runs.setdefault(op, (choice.impl, choice.reason))
        table = Sheet(unbroken("runs"), prose("ops"), prose("why"))
        for (impl, why), ops in by_choice(runs).items():
            table.add(impl, ", ".join(ops), why)
        self.console.print(Padding(table, (0, 0, 0, 2)))
        return explanation

    def _train(self, folder: Path, corpus: Corpus) -> list[RunResult]:
        # This process owns the folder, so no rank has to lock it. A stop signal ends all ranks at once.
        unasked = StopFile(folder / "stop")
        ranks = launch(
            train_run, self.settings, False, unasked, processes=self.tp, port=self.options.port, folder=folder
        )
        first = ranks[0]
        complete = first.steps == self.settings.steps
        assert first.held_out is not None
        self._say(
            f"{first.steps} steps of {self.settings.tokens_per_step} tokens"
            f"{'' if complete else ' (time limit)'}, {first.tokens_per_second:,.0f} tokens/s"
        )
        unigram, bigram = unigram_nats(corpus), bigram_nats(corpus)
        # The fixed bar does not apply to other text or to an incomplete run; there the model must only beat byte
        # frequencies.
        bar = HELD_OUT_BAR if complete and self.settings.data.path is None else unigram
        self._check(
            first.held_out < bar,
            f"held-out loss {first.held_out:.3f} nats per byte, to be below {bar:.2f} "
            f"(counting bytes: {unigram:.2f}, counting pairs: {bigram:.2f})",
        )
        return ranks

    def _compare(self, folder: Path) -> Agreement:
        losses = [line["loss"] for line in read_lines(folder / METRICS)[:COMPARED_STEPS]]
        agreement = compare_with_unsharded(losses, self.settings)
        shown = "  ".join(f"{loss:.6f}" for loss in agreement.sharded[:6])
        self._say(f"sharded    {shown} ...")
        shown = "  ".join(f"{loss:.6f}" for loss in agreement.unsharded[:6])
        self._say(f"unsharded  {shown} ...")
        self._check(
            agreement.ok,
            f"{len(agreement.sharded)} losses differ by at most {agreement.difference:.1e}; the budget is "
            f"{agreement.budget:.1e}, {FACTOR:.0f} times what {self.options.precision} rounds away here (measured "
            "against fp64), or one rounding of that format",
        )
        return agreement

    def _reload(self, folder: Path, trained: RunResult, agreement: Agreement) -> ParallelTransformer:
        """Load the model in this process alone, after checking the checkpoint's loss at another degree."""
        trainer = restore(_at_degree(self.settings, 1))
        other = 1 if self.tp > 1 else 2
        if other == 1:
            held_out = trainer.evaluate()
        else:
            held_out = launch(evaluate_saved, _at_degree(self.settings, 2), processes=2, folder=folder)[0]
        assert trained.held_out is not None
        assert held_out is not None
        difference = abs(held_out - trained.held_out) / trained.held_out
        self._check(
            difference <= agreement.budget and bool(trainer.optimizer.state),
            f"checkpoint written at tp={self.tp} loads at tp={other}, Adam's state too: held-out loss "
            f"{held_out:.6f} against {trained.held_out:.6f}",
        )
        trainer.close()
        return cast(ParallelTransformer, trainer.model.module)

    def _check_export(self, folder: Path, model: ParallelTransformer, corpus: Corpus) -> None:
        self._check(
            same_weights(folder / EXPORT, model), "exported model.safetensors holds the same weights, bit for bit"
        )
        tokens = corpus.held_out[: 4 * self.settings.data.seq].view(4, -1).long()
        try:
            verdict = compare_with_transformers(folder / EXPORT, model, tokens)
        except ImportError:
            self._say("transformers is not installed (pip install 'shardfuse[hf]'): its logits were not compared")
            return
        self._check(verdict.ok, f"transformers' Starcoder2 loads it, {verdict}")

    def _serve(self, model: ParallelTransformer, corpus: Corpus) -> DemoServing:
        serving = serve(model, corpus, self.console, seed=self.options.seed)
        self._say(
            f"{len(serving.requests)} requests, max_num_seqs={serving.max_num_seqs}: {serving.stats.generated_tokens} "
            f"tokens in {serving.stats.steps} steps, at most {serving.stats.peak_seqs} at once"
        )
        total = len(serving.requests)
        self._check(
            serving.equal == total,
            f"{serving.equal} of {total} answers equal a solo forward's without a cache, except for ties",
        )
        return serving

    # --- what is printed and kept -------------------------------------------------------------------------------------

    def _summary(self, ranks: list[RunResult], serving: DemoServing, seconds: float) -> None:
        self._heading("5/5", "Summary")
        stats = serving.stats
        peaks = ", ".join(f"{rank.peak_bytes / 1e6:.0f}" for rank in ranks)
        self._say(f"training     {ranks[0].tokens_per_second:,.0f} tokens/s, peak memory per process {peaks} MB")
        self._say(
            f"serving      {stats.tokens_per_s:,.0f} tokens/s, {stats.decode_tokens_per_s:,.0f} in pure decode steps"
        )
        self._say(
            f"KV cache     {stats.kv_waste:.1%} of the allocated slots held no token, "
            f"{stats.peak_blocks} blocks of {BLOCK_SIZE} at the peak"
        )
        out = self.options.out
        for name in (CHECKPOINTS, EXPORT, SETTINGS, METRICS, REPORT, PAGE):
            self._say(f"written      {out / name} ({decimal(_size(out / name))})")
        if holds_tokenizer(out / EXPORT):
            self._say(f"to serve it  shardfuse serve {shlex.quote(str(out / EXPORT))}")
        failed = [text for text, ok in self.checks if not ok]
        mark = "[bold green]ok[/]" if not failed else "[bold red]FAILED[/]"
        self.console.print(f"{mark}  {len(self.checks) - len(failed)} of {len(self.checks)} checks, {seconds:.0f} s")

    def _report(self, ranks: list[RunResult], agreement: Agreement, serving: DemoServing) -> dict[str, object]:
        return {
            "settings": dataclasses.asdict(self.settings),
            "ranks": [dataclasses.asdict(rank) for rank in ranks],
            "agreement": dataclasses.asdict(agreement)
            | {"difference": agreement.difference, "budget": agreement.budget},
            "serving": dataclasses.asdict(serving.stats) | {"kv_waste": serving.stats.kv_waste},
            "serving_calls": [
                {"op": op, "runs": impl, "calls": calls} for (op, impl), calls in sorted(serving.calls.items())
            ],
            "requests": [dataclasses.asdict(request) for request in serving.requests],
            "checks": [{"check": text, "ok": ok} for text, ok in self.checks],
            "seconds": self.seconds,
            "torch": torch.__version__,
            "environment": {name: content for name, content in collect().items() if not name.startswith(OPS)},
        }

    @contextmanager
    def _step(self, number: str, title: str) -> Iterator[None]:
        """Print a step's heading, then its duration and whether all of its checks held."""
        self._heading(number, title)
        began, before = time.monotonic(), len(self.checks)
        yield
        self.seconds[number] = time.monotonic() - began
        ok = all(ok for _, ok in self.checks[before:])
        self.console.print(f"  {'[green]ok[/]' if ok else '[bold red]FAILED[/]'}  ({self.seconds[number]:.1f} s)\n")

    def _heading(self, number: str, title: str) -> None:
        self.console.print(f"[bold]{number}  {title}[/]")

    def _say(self, text: str) -> None:
        self.console.print(f"  {text}", markup=False, soft_wrap=True)

    def _check(self, ok: bool, text: str) -> None:
        self.checks.append((text, ok))
        self.console.print("  [green]ok[/]      " if ok else "  [bold red]FAILED[/]  ", end="")
        self.console.print(text, markup=False, soft_wrap=True)


def _at_degree(settings: RunSettings, tp: int) -> RunSettings:
    """The settings over ``tp`` processes: several of them run on a CPU, since this machine may have one GPU."""
    parallel = dataclasses.replace(settings.parallel, tp=tp)
    return dataclasses.replace(settings, parallel=parallel, device="cpu" if tp > 1 else settings.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread here: this process does little work, and on a busy machine threads block each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device_line(device: torch.device) -> str:
    triton = dispatch.triton_version()
    versions = f"torch {torch.__version__}, {f'Triton {triton}' if triton else 'no Triton'}"
    if device.type == "cuda":
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}; {versions}"
    return f"CPU, {available_cores()} cores; {versions}, shardfuse {__version__}"


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
