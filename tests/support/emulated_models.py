"""Whole models on compiled code: training steps and an engine's steps in processes that emulate what they launch.

    with emulated_models.Emulated("sm_90") as emulated:
        outcome = emulated(1, _body, "gated")[0]

A body is one of ``tests/support/ranks.py``. In its process every Triton kernel that the package launches on tensors of
the CPU is compiled for the architecture and executed from its PTX (kernels/dev/ptx). What runs there is the ordinary
``impl="triton"``: the body builds the same model three times, with kernels, in plain torch (``impl="reference"``), and
that in fp64, and judges the first by the other two with ``kernels/dev/accuracy.py``.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from ranks import Pool

from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.dev.ptx import driver
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers import transformer
from shardfuse.layers.config import TransformerConfig
from shardfuse.layers.fuse import fuse
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group
from shardfuse.parallel.core.sharding import local_tensor, spec_of
from shardfuse.parallel.zero.main_grad import attach_main_grads, main_grads_to_grads, zero_main_grads
from shardfuse.serving.engine import Engine
from shardfuse.serving.request import Request

TIMEOUT_S = 900.0  # for a body: two processes may share a core with others
# What torch would run in place of our kernels.
STOCK = {"mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "linear", "matmul", "einsum", "tensordot"}
STOCK |= {"layer_norm", "native_layer_norm", "native_layer_norm_backward", "rms_norm", "_fused_rms_norm", "rsqrt"}
STOCK |= {"linalg_vector_norm", "gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "tanh", "exp", "exp2"}
STOCK |= {"softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "nll_loss", "nll_loss_forward"}
STOCK |= {"cross_entropy_loss", "scaled_dot_product_attention", "native_dropout", "index_copy", "index_copy_"}
_ATTENTION = ("scaled_dot_product", "ScaledDotProduct")  # of training, which is torch's


class Emulated:
    """A pool of processes that emulate ``arch``; ``emulated(world, body, *args)`` as of ``ranks.Pool``.

    Bodies are called with ``rank, world, *args``, after :func:`emulate`.
    """

    def __init__(self, arch: str) -> None:
        self._pool = Pool(TRITON_INTERPRET="0", SHARDFUSE_POISON="1", KINETO_LOG_LEVEL="99", EMULATED_ARCH=arch)

    def __call__(self, world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self._pool(world, body, *args, timeout=TIMEOUT_S, **kwargs)

    def __enter__(self) -> Emulated:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()


def emulate() -> None:
    """In a worker of :class:`Emulated`: from now on its launches run on the emulator."""
    if not _installed:
        driver.install(os.environ["EMULATED_ARCH"])
        _installed.append(True)


_installed: list[bool] = []


# ------------------------------------------------------------------------------------------------------------ what ran


@dataclass
class Ran:
    """What ran in a block, by name and times."""

    kernels: Counter[str] = field(default_factory=Counter)  # launches that were emulated
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)  # the package's ops: (op, implementation)
    stock: Counter[str] = field(default_factory=Counter)  # torch's own ops in STOCK, but for attention's
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)  # between processes: (kind, site)
    reports: list[str] = field(default_factory=list)  # of the emulator, without notes
    seconds: float = 0.0  # of emulation

    @property
    def others(self) -> dict[tuple[str, str], int]:
        """Calls of ops that no kernel of ours took; attention of training is torch's."""
        return {each: n for each, n in self.ops.items() if each[1] != "triton" and each != ("attention", "sdpa")}


@contextlib.contextmanager
def watched(impl: str) -> Iterator[Ran]:
    """What the block runs, once it has ended. Ops that take no ``impl`` from a layer run this one, too."""
    ran, before = Ran(), dispatch.counts.copy()
    driver.log.clear()
    collectives.reset_counts()
    with _auto(impl), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield ran
    ran.kernels = Counter(each.kernel for each in driver.log)
    ran.seconds = sum(each.seconds for each in driver.log)
    found = dict.fromkeys(report for each in driver.log for report in each.reports)
    ran.reports = [report for report in found if not report.startswith("note: ")]
    ran.ops = dispatch.counts - before
    ran.collectives = Counter(collectives.calls)
    ran.stock = Counter(name for event in profile.events() or () if (name := _stock(event)))


@contextlib.contextmanager
def _auto(impl: str) -> Iterator[None]:
    """Within the block "auto" is ``impl``, as in a process with SHARDFUSE_IMPL."""
    usual, dispatch._AUTO = dispatch._AUTO, impl
    dispatch._decided.clear()
    try:
        yield
    finally:
        dispatch._AUTO = usual
        dispatch._decided.clear()


def _stock(event: Any) -> str:
    """The name of torch's op in STOCK that an event of the profiler is, unless attention called it; else nothing."""
    name = event.name.removeprefix("aten::")
    if name == event.name or name not in STOCK:
        return ""
    while event is not None:
        if any(each in event.name for each in _ATTENTION):
            return ""
        event = event.cpu_parent
    return name


# ------------------------------------------------------------------------------------------------------------- training


@dataclass
class Outcome:
    """What a body hands back: what ran with kernels and without, and what is wrong."""

    ran: Ran
    plain: Ran  # of the twin in plain torch
    verdicts: list[tuple[str, bool]]  # as text, and whether it is within the budget
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        return [text for text, ok in self.verdicts if not ok] + self.ran.reports


def build(
    config: TransformerConfig,
    impl: str,
    dtype: torch.dtype,
    exact: bool = False,
    mesh: Group | None = None,
    **options: Any,
) -> ParallelTransformer:
    """The model with weights of ``dtype``, the same ones whatever else is asked for; ``exact``: computing in fp64."""
    model = ParallelTransformer(config, impl=impl, dtype=torch.float64, mesh=mesh, **options)
    model.init_weights(5)
    for index, param in enumerate(model.parameters()):  # constants, of norms and biases, would hide mistakes
        spec = spec_of(param)
        if len(spec.logical_shape) == 1:
            whole = torch.randn(spec.logical_shape, generator=torch.Generator().manual_seed(index)) * 0.2
            with torch.no_grad():
                local_tensor(param).add_(whole[spec.index])
    return model.to(dtype).to(torch.float64 if exact else dtype)


def batches(config: TransformerConfig, count: int, shape: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of so many micro-batches, some targets of which do not count."""
    draw = torch.Generator().manual_seed(1)
    found = [[torch.randint(config.vocab_size, shape, generator=draw) for _ in range(2)] for _ in range(count)]
    for _, targets in found:
        targets[0, :3] = -100
    return [(tokens, targets) for tokens, targets in found]


def train(
    model: ParallelTransformer, data: Sequence[tuple[torch.Tensor, torch.Tensor]], micro: int = 2, lr: float = 0.05
) -> dict[str, torch.Tensor]:
    """Steps of ``micro`` micro-batches: each loss, each accumulated gradient (this rank's part), the last weights."""
    exact = next(model.parameters()).dtype == torch.float64
    attach_main_grads(model, torch.float64 if exact else torch.float32)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=lr), {}
    for index, (tokens, targets) in enumerate(data):
        loss = model(tokens, targets=targets)
        (loss / micro).backward()
        found[f"loss {index}"] = loss.detach().reshape(1)
        if index % micro < micro - 1:
            continue
        for name, param in model.named_parameters():
            buffer = getattr(param, "main_grad", None)
            if buffer is not None and param.grad is None:
                found[f"accumulated {index // micro} {name}"] = buffer.clone()
        main_grads_to_grads(model)
        for name, param in model.named_parameters():
            assert param.grad is not None, f"{name} got no gradient"
            found[f"gradient {index // micro} {name}"] = local_tensor(param.grad).clone()
        optimizer.step()
        zero_main_grads(model)
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        found[f"weight {name}"] = local_tensor(param.detach()).clone()
    return found


@contextlib.contextmanager
def fused_loss() -> Iterator[None]:
    """Within the block logits of any size are formed in the cross-entropy's kernels, as large ones are."""
    plain, transformer.FUSED_LOSS_BYTES = transformer.FUSED_LOSS_BYTES, 0
    try:
        yield
    finally:
        transformer.FUSED_LOSS_BYTES = plain


def train_alike(
    config: TransformerConfig,
    dtype: torch.dtype,
    *,
    steps: int = 1,
    micro: int = 2,
    shape: tuple[int, int] = (2, 40),
    mesh: Group | None = None,
    **options: Any,
) -> Outcome:
    """Train with kernels, over ``mesh``'s ranks, and in one process without; compare everything that came out."""
    data = batches(config, steps * micro, shape)

    def trained(impl: str, exact: bool = False, mesh: Group | None = None) -> tuple[Ran, dict[str, torch.Tensor], Any]:
        model = build(config, impl, dtype, exact, mesh, fuse_wgrad_accumulation=True, **options).train()
        torch.manual_seed(7)  # for the keys of dropout's masks
        with fused_loss(), watched(impl) as ran:
            found = train(model, data, micro)
        return ran, found, model

    ran, ours, model = trained("triton", mesh=mesh)
    plain, low, _ = trained("reference")
    _, oracle, _ = trained("reference", exact=True)
    specs = {name: spec_of(param).index for name, param in model.named_parameters()}
    terms = max(config.vocab_size, config.intermediate_size, 3 * config.hidden_size, shape[0] * shape[1])
    verdicts = []
    for name in ours.keys() | low.keys():
        if not (name in ours and name in low):
            verdicts.append((f"{name}: on one side only", False))
            continue
        part = specs.get(name.split()[-1], ...)
        verdict = accuracy.judge(name, ours[name], low[name][part], oracle[name][part], terms=terms, computed=dtype)
        verdicts.append((str(verdict), verdict.ok))
        if name.startswith("accumulated") and torch.equal(ours[name], ours[name].to(dtype).float()):
            verdicts.append((f"{name}: rounded to {dtype}, not accumulated in fp32", False))
    losses = {name: [each[name].item() for each in (ours, low, oracle)] for name in ours if name.startswith("loss")}
    return Outcome(ran, plain, sorted(verdicts), {"losses": losses})


def fuse_alike(model: torch.nn.Module, dtype: torch.dtype, tokens: torch.Tensor, terms: int) -> Outcome:
    """Compare a causal language model of transformers that ``fuse`` has changed with itself as it was: its loss, every
    gradient, and the logits of inference.
    """

    def run(impl: str, as_dtype: torch.dtype) -> tuple[Ran, dict[str, torch.Tensor]]:
        ours: Any = copy.deepcopy(model).to(dtype).to(as_dtype).train()
        if impl == "triton":
            fuse(ours)
        with watched(impl) as ran:
            loss = ours(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            with torch.no_grad():
                logits = ours.eval()(tokens, use_cache=False).logits
        found = {f"gradient {name}": param.grad for name, param in ours.named_parameters()}
        return ran, {"loss": loss.detach().reshape(1), "logits": logits, **found}

    ran, ours = run("triton", dtype)
    plain, low = run("reference", dtype)
    _, oracle = run("reference", torch.float64)
    judged = [accuracy.judge(key, ours[key], low[key], oracle[key], terms=terms, computed=dtype) for key in oracle]
    return Outcome(ran, plain, [(str(verdict), verdict.ok) for verdict in judged])


# -------------------------------------------------------------------------------------------------------------- serving


@dataclass
class Served:
    logits: list[torch.Tensor]  # [S, V] of each step
    answers: list[list[int]]
    ran: Ran
    stats: dict[str, Any]  # of the engine


def serve(
    config: TransformerConfig,
    impl: str,
    dtype: torch.dtype,
    rounds: Sequence[Sequence[Request]],
    *,
    exact: bool = False,
    mesh: Group | None = None,
    history: Sequence[torch.Tensor] | None = None,
    layers: dict[str, Any] | None = None,
    **options: Any,
) -> Served:
    """What an engine says that serves some requests, and then others; ``options`` are its own, ``layers`` the model's.

    With ``history`` the tokens [S] of each step are these, whatever the logits say: the next step then sees what the
    engine saw that has chosen them.
    """
    model = build(config, impl, dtype, exact, mesh, **(layers or {})).eval()
    gather, seen = model.gather_logits, list[torch.Tensor]()

    def recorded(logits: torch.Tensor) -> torch.Tensor:
        whole = gather(logits)
        seen.append(whole.clone())
        if history is None:
            return whole
        tokens = history[len(seen) - 1]
        assert len(tokens) == len(whole), f"step {len(seen)} chooses {len(whole)} tokens, and {len(tokens)} before"
        return torch.nn.functional.one_hot(tokens, whole.shape[1]).to(whole.dtype)

    model.gather_logits = recorded  # type: ignore[method-assign]
    with watched(impl) as ran, Engine(model, impl=impl, enforce_eager=True, **options) as engine:
        answers: list[list[int]] = []
        if model.group.rank:
            engine.follow()
        else:
            answers = [answer for requests in rounds for answer in engine.generate(requests)]
    return Served(seen, answers, ran, vars(engine.stats))


def serve_alike(
    config: TransformerConfig,
    dtype: torch.dtype,
    rounds: Sequence[Sequence[Request]],
    *,
    mesh: Group | None = None,
    **options: Any,
) -> Outcome:
    """Serve with kernels, over ``mesh``'s ranks, and in one process without, which is made to go on with the same
    tokens. Every row of logits is compared, and every token.

    A token may differ from the twin's where fp64's logits of the two are closer than both roundings together.
    """
    ours = serve(config, "triton", dtype, rounds, mesh=mesh, **options)
    if mesh is not None and mesh.rank:
        return Outcome(ours.ran, Ran(), [])
    history = [logits.argmax(-1) for logits in ours.logits]
    low, oracle = (
        serve(config, "reference", dtype, rounds, exact=exact, history=history, **options) for exact in (False, True)
    )
    assert low.answers == ours.answers, "the twin was to go on with the same tokens"
    rows = [torch.cat(each.logits) for each in (ours, low, oracle)]
    verdict = accuracy.judge("logits", *rows, terms=3 * config.intermediate_size)
    verdicts = [(str(verdict), verdict.ok)] + [(text, False) for text in _tokens_apart(*rows)]
    facts = {"tokens": len(rows[0]), "stats": ours.stats, "answers": ours.answers}
    facts["equal"] = int((rows[0].argmax(-1) == rows[1].argmax(-1)).sum())
    facts["decisive"] = int((_lead(rows[2]) > _blur(rows[1], rows[2])).sum())
    return Outcome(ours.ran, low.ran, verdicts, facts)


def _blur(low: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """[S]: how far apart two logits of a row may come by what the accuracy rule allows each of them."""
    error = (low.double() - oracle).abs().amax(-1)
    return 2 * accuracy.FACTOR * torch.maximum(error, oracle.abs().amax(-1) * accuracy.rounding(low.dtype))


def _lead(oracle: torch.Tensor) -> torch.Tensor:
    """[S]: by how much the likeliest token leads."""
    best = oracle.topk(2).values
    return best[:, 0] - best[:, 1]


def _tokens_apart(ours: torch.Tensor, low: torch.Tensor, oracle: torch.Tensor) -> list[str]:
    """A line for each token that is not the twin's although their logits in fp64 are further apart than roundings."""
    chosen, twin = ours.argmax(-1, keepdim=True), low.argmax(-1, keepdim=True)
    apart = (oracle.gather(1, twin) - oracle.gather(1, chosen)).abs().squeeze(1)
    blur = _blur(low, oracle)
    return [
        f"token {row}: {chosen[row].item()}, the twin's is {twin[row].item()}: logits {apart[row]:.3f} apart, "
        f"roundings account for {blur[row]:.3f}"
        for row in (apart > blur).nonzero().flatten().tolist()
    ]
