"""``plan``: the quickest layouts of a model on a cluster, from the planner of ``parallel/plan/``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .kernels.runtime.checks import whole_number
from .kernels.runtime.names import expected
from .layers.config import TransformerConfig
from .parallel.pipeline.schedules import find
from .parallel.plan import efficiency, shapes, software
from .parallel.plan.hardware import GPUS, Cluster, cluster
from .parallel.plan.memory import Memory, of_rank
from .parallel.plan.search import Found, Search, Space, smallest
from .parallel.plan.shapes import ModelShape
from .parallel.plan.software import Software
from .parallel.plan.step_time import StepTime
from .parallel.plan.traffic import Flow, traffic
from .training.settings import DataSettings, RunSettings, read_settings
from .training.settings_file import to_toml

TOKENS = 1 << 22  # per step, if no batch is given: usual for models of 100 billion parameters
LENGTH = 2048  # of a sequence, unless it is given
CPU_BATCH = 8
PARTS = {
    "products": "products",
    "attention": "attention",
    "passes": "norms and activations",
    "recompute": "recomputation",
    "tensor": "exposed tensor-parallel exchange",
    "gathers": "exposed gathers of ZeRO",
    "loss": "head and loss",
    "bubble": "idle pipeline",
    "gradients": "exposed reduction of gradients",
    "optimizer": "optimizer",
}


class DoesNotFit(ValueError):
    """No layout fits the cluster. ``smallest`` is the layout on the fewest GPUs that would, or None."""

    def __init__(self, message: str, found: Found | None) -> None:
        super().__init__(message)
        self.smallest = found


@dataclass(frozen=True)
class Plan:
    """The quickest layouts of a model on a cluster, best first; made by :func:`plan`.

    For each layout ``found`` holds the memory of its fullest rank, in bytes by kind, and the time of its step, in
    seconds by part. All figures are predictions: ``docs/plan.md`` says how they are checked.
    """

    shape: ModelShape
    cluster: Cluster
    software: Software
    settings: RunSettings | None  # of the file or folder that named the model
    found: tuple[Found, ...]
    considered: int
    seconds: float

    @property
    def best(self) -> Found:
        return self.found[0]

    def tokens_per_second(self, found: Found) -> float:
        """The tokens per second of all GPUs together."""
        return found.layout.batch * found.layout.length / found.time.total

    def utilization(self, found: Found) -> float:
        """The model FLOPs utilization (MFU): a share of the dense peak, without recomputation and masked scores."""
        flops = self.shape.flops(found.layout.batch * found.layout.length, found.layout.length)
        return flops / (found.time.total * self.cluster.gpu.flops[found.layout.precision] * self.cluster.gpus)

    def memory_of(self, found: Found) -> list[Memory]:
        """The memory of each pipeline rank, in bytes by kind."""
        return [of_rank(self.shape, found.layout, self.software, rank) for rank in range(found.layout.pp)]

    def traffic(self, found: Found) -> list[Flow]:
        """The bytes that the first rank sends in a step, by collective and link."""
        return traffic(self.shape, found.layout, self.cluster, self.software)

    def reasons(self) -> list[str]:
        """Why each layout beats the next, a line for each pair."""
        return [_reason(one.time, other.time) for one, other in zip(self.found, self.found[1:])]

    def toml(self, found: Found | None = None) -> str:
        """The settings of ``shardfuse train`` for a layout, the best one by default.

        Raises ValueError for a layout that ``shardfuse train`` cannot run: with context parallelism, in fp8, or with
        other numbers of stages on a rank than a schedule's own.
        """
        return _file(self, self.best if found is None else found)

    def record(self) -> dict[str, Any]:
        """The plan as values that JSON can hold, with times in seconds and memory in bytes."""
        return {
            "model": dataclasses.asdict(self.shape),
            "gpu": self.cluster.gpu.name,
            "gpus": self.cluster.gpus,
            "network": self.cluster.network.name,
            "considered": self.considered,
            "layouts": [
                {
                    "layout": dataclasses.asdict(each.layout),
                    "step": {**dataclasses.asdict(each.time), "total": each.time.total},
                    "memory": {**dataclasses.asdict(each.memory), "total": each.memory.total},
                    "tokens_per_second": self.tokens_per_second(each),
                    "mfu": self.utilization(each),
                    "traffic": [dataclasses.asdict(flow) for flow in self.traffic(each)],
                }
                for each in self.found
            ],
            "reasons": self.reasons(),
        }


def plan(
    model: str | Path | ModelShape | TransformerConfig,
    *,
    gpus: int,
    gpu: str = "h100",
    network: str | Path | None = None,
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    count: int = 5,
    **choices: Any,
) -> Plan:
    """Predict the quickest layouts of ``model`` on ``gpus`` GPUs, among those that fit in memory.

    Args:
        model: a known model, such as "llama3-405b" (``parallel/plan/shapes.json``), a folder of transformers, a TOML
            file of ``shardfuse train``, or a configuration.
        gpus: number of GPUs, or of processes for ``gpu="cpu"``.
        gpu: a kind of GPU in ``parallel/plan/hardware.py``, or "cpu" for this machine, whose speed is measured first.
        network: links that differ from those of the GPU's reference system, such as "pcie-5,ethernet-100", or a TOML
            file of them: see ``docs/plan.md``.
        batch: sequences per step over all GPUs. Default: the TOML file's, else as many as the GPUs divide: up to four
            million tokens, on CPUs up to 8 sequences.
        seq: tokens per sequence. Default: the TOML file's, else 2048, or as many as the model has positions for.
        precision: "bf16", "fp16" or "fp8" on GPUs, "fp32" on CPUs. Default: "bf16", and "fp32" on CPUs.
        count: the number of layouts to return.
        **choices: one or several allowed values of a part of the layout: ``tp=8``, ``pp=(1, 2, 4)``,
            ``recompute="none"``. The names are ``tp``, ``pp``, ``cp``, ``dp`` (ZeRO's shards), ``replicas`` (of them),
            ``zero``, ``micro`` (sequences of a micro-batch), ``schedule``, ``interleave``, ``recompute``,
            ``mlp_recompute``, ``sequence_parallel`` and ``offload``. The search chooses the rest.

    Raises ValueError for invalid values, and :class:`DoesNotFit` if no layout fits, with the smallest one that would.
    """
    shape, settings, data = _resolved(model)
    seq = whole_number("seq", _default_length(shape, settings, data) if seq is None else seq)
    _check_length(shape, settings, seq)
    where, how, rates = _hardware(gpu, whole_number("gpus", gpus), network)
    if batch is None:
        batch = data.batch if data else _shared(gpus, CPU_BATCH if gpu == "cpu" else max(1, TOKENS // seq))
    if precision is None:
        precision = "fp32" if gpu == "cpu" else "bf16"
    if precision not in where.gpu.flops:
        raise ValueError(f"precision={precision!r}: expected one that {gpu} has, {', '.join(where.gpu.flops)}")
    choices = {"offload": False, **choices} if gpu == "cpu" else choices  # host and device share one memory
    search = Search(shape, where, how, rates, whole_number("batch", batch), seq, precision, _space(choices))
    result = search.best(whole_number("count", count))
    if not result.found:
        chosen = any(value is not None for name, value in choices.items() if name != "offload")
        raise _refusal(search, chosen) if result.considered else _indivisible(search, chosen)
    return Plan(shape, where, how, settings, result.found, result.considered, result.seconds)


def _resolved(
    model: str | Path | ModelShape | TransformerConfig,
) -> tuple[ModelShape, RunSettings | None, DataSettings | None]:
    """The shape, the settings that hold the whole model if there are any, and the data that a file names."""
    if isinstance(model, ModelShape):
        return model, None, None
    if isinstance(model, TransformerConfig):
        return _shape(model, "model"), _settings(model), None
    path = Path(model)
    if path.suffix == ".toml":
        settings = read_settings(path, {})
        if settings.start is not None:
            from .layers.hf.reading import read_hf_config

            settings = replace(settings, model=read_hf_config(settings.start))
        return _shape(settings.model, path.stem), settings, settings.data
    shape = shapes.find(str(model))
    if str(model) in shapes.known():
        return shape, None, None
    try:
        from .layers.hf.reading import read_hf_config

        config = read_hf_config(path)
    except ValueError:  # a model that the layers do not have, whose sizes are enough for a plan
        return shape, None, None
    return _shape(config, shape.name), _settings(config), None


def _settings(model: TransformerConfig) -> RunSettings:
    return RunSettings(model=model, data=DataSettings(seq=min(DataSettings.seq, model.max_positions)))


def _default_length(shape: ModelShape, settings: RunSettings | None, data: DataSettings | None) -> int:
    return data.seq if data else min(LENGTH, settings.model.max_positions if settings else shape.positions or LENGTH)


def _check_length(shape: ModelShape, settings: RunSettings | None, seq: int) -> None:
    """ValueError for sequences that are longer than the model's positions."""
    if settings is not None:
        replace(settings, data=replace(settings.data, seq=seq)).check_length()
    elif shape.positions and seq > shape.positions:
        raise ValueError(f"seq={seq}: {shape.name} has {shape.positions} learned positions; use at most as many tokens")


def _shared(gpus: int, most: int) -> int:
    """The largest batch up to ``most`` that is a power of two times the odd part of ``gpus``, so that they divide it.

    ``most`` where that part is larger.
    """
    batch = gpus // (gpus & -gpus)
    if batch > most:
        return most
    while 2 * batch <= most:
        batch *= 2
    return batch


def _shape(config: TransformerConfig, name: str) -> ModelShape:
    return ModelShape(
        name,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.intermediate_size,
        config.vocab_size,
        gated=config.style == "gated",
        biases=config.bias,
        tied=config.tie_embeddings,
        head_dim=config.head_dim,
    )


def _hardware(gpu: str, gpus: int, network: str | Path | None) -> tuple[Cluster, Software, efficiency.Efficiency]:
    if gpu != "cpu":
        if gpu not in GPUS:
            raise ValueError(f"gpu={gpu!r}: {expected(gpu, GPUS, 'expected cpu for this machine, or one of')}")
        return cluster(gpu, gpus, network), software.OURS, efficiency.of(gpu)
    if network is not None:
        raise ValueError(f"network={str(network)!r} with gpu='cpu': this machine's links are known; leave it out")
    from .parallel.plan.this_machine import this_machine

    return this_machine(gpus)


def _space(choices: Mapping[str, Any]) -> Space:
    names = {each.name for each in dataclasses.fields(Space)}
    unknown = sorted(choices.keys() - names)
    if unknown:
        raise ValueError(f"{unknown[0]}: {expected(unknown[0], sorted(names), 'expected some of')}")
    several = {
        name: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        for name, value in choices.items()
        if value is not None
    }
    other = [each for each in several.get("recompute", ()) if each not in ("none", "full")]
    if other:
        raise ValueError(
            f"recompute={other[0]!r}: expected none or full, for whole blocks, or both in a list; "
            "mlp_recompute is for their MLPs alone"
        )
    return Space(**several)


def _refusal(search: Search, chosen: bool) -> DoesNotFit:
    found = smallest(search)
    where = _where(search.cluster)
    if found is None and search.cluster.one_machine:
        free = search.cluster.gpu.memory * search.cluster.gpus / 2**30
        return DoesNotFit(
            f"{_asked(search)}: no layout fits on {where}, nor on fewer: they share the {free:.3g} GiB that are free; "
            "use a smaller model or batch, or shorter sequences",
            None,
        )
    if found is None:
        hint = "leave out some of the choices" if chosen else "use a larger batch, which more GPUs can divide"
        return DoesNotFit(f"{_asked(search)}: no layout fits on {where}, nor on more of them; {hint}", None)
    fits = f"{found.layout.gpus}: {found.layout.described()}, {found.memory.total / 2**30:.1f} GiB on the fullest GPU"
    return DoesNotFit(
        f"{_asked(search)}: no layout fits on {where}; the smallest number that holds it is {fits}", found
    )


def _indivisible(search: Search, chosen: bool) -> DoesNotFit:
    """Where memory is not the reason."""
    shape, gpus = search.shape, search.cluster.gpus
    hint = "use another number of GPUs"
    if chosen:
        hint = (
            f"leave out some of the choices, or {hint}; in a pipeline ZeRO 3 runs under 1f1b and interleaved_1f1b "
            "alone, and offloading needs ZeRO"
        )
    batch = _shared(gpus, search.batch)
    if replace(search, batch=batch).divides():
        hint = f"use a batch of {batch}, or {hint}"
    return DoesNotFit(
        f"{_asked(search)}: no layout divides this over {_where(search.cluster)}: tensor-parallel ranks divide "
        f"{shape.heads} heads ({shape.kv_heads} of keys and values), a feed-forward width of {shape.ffn} and "
        f"{shape.vocab} tokens, stages {shape.layers} blocks, and data-parallel ranks the batch; {hint}",
        None,
    )


def _where(cluster: Cluster) -> str:
    return f"{cluster.gpus} {'processes of this machine' if cluster.one_machine else cluster.gpu.name}"


def _asked(search: Search) -> str:
    return f"{search.shape.name} in batches of {search.batch} sequences of {search.length} tokens"


def _reason(one: StepTime, other: StepTime) -> str:
    """The parts that the quicker step saves time in, and the part that takes it longer."""
    differences = {name: getattr(other, name) - getattr(one, name) for name in PARTS}
    whole = other.total - one.total
    saved = sorted((name for name in PARTS if differences[name] > 0.1 * whole), key=lambda name: -differences[name])
    paid = sorted((name for name in PARTS if differences[name] < -0.1 * whole), key=lambda name: differences[name])
    text = f"{_seconds(whole)} quicker: " if whole > 0 else "as quick: "
    text += (
        ", ".join(f"{PARTS[name]} {_seconds(differences[name])} less" for name in saved[:2]) or "a little in every part"
    )
    if paid:
        text += f", but {PARTS[paid[0]]} {_seconds(-differences[paid[0]])} more"
    return text


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _file(made: Plan, found: Found) -> str:
    layout, shape, settings = found.layout, made.shape, made.settings
    stages = find(layout.schedule).stages_per_rank if layout.pp > 1 else 1
    if layout.interleave != stages:
        raise ValueError(
            f"{layout.described()}: shardfuse train runs {layout.schedule} with {stages} stages on a rank; plan "
            "without interleave"
        )
    if layout.cp > 1 or layout.precision == "fp8":
        raise ValueError(
            f"{layout.described()} in {layout.precision}: shardfuse train has no context parallelism and no fp8; "
            "plan with cp=1 and precision='bf16'"
        )
    comments = [shapes.described(shape), f"{layout.described()}: predicted {_seconds(found.time.total)} a step"]
    if settings is None:
        settings = RunSettings(model=_config(shape, layout.length), data=DataSettings(seq=layout.length))
        comments.append(f"of {shape.name} only the sizes; rope_theta and other options are as by default")
        if shape.positions:
            comments.append("shardfuse train uses rotary positions instead of this model's learned ones")
    parallel = replace(
        settings.parallel,
        dp_replicate=layout.replicas,
        dp=layout.dp,
        pp=layout.pp,
        tp=layout.tp,
        zero=layout.zero,
        schedule=layout.schedule or None,
        microbatches=layout.microbatches,
        precision=layout.precision,
        recompute=layout.recompute == "full",
        mlp_recompute=layout.mlp_recompute,
        sequence_parallel=layout.sequence_parallel,
        offload=layout.offload,
    )
    data = replace(settings.data, seq=layout.length, batch=layout.batch)
    return to_toml(replace(settings, data=data, parallel=parallel), comments)


def _config(shape: ModelShape, length: int) -> TransformerConfig:
    return TransformerConfig(
        style="gated" if shape.gated else "gelu",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=length,
        tie_embeddings=shape.tied,
        bias=shape.biases,
    )
