"""The settings of a ``shardfuse train`` run: a TOML file, changed by the command line.

Each section of the file is a dataclass here, and each key is a field of it. RunSettings holds the settings at the top
level. TOML has no None: ``false`` stands for it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..kernels.runtime.names import expected
from ..layers.config import TransformerConfig
from .data.items import TRAIN_ON
from .rates import SHAPES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

ZERO_STAGES = (0, 1, 2, 3)
PARTITIONS = ("modelled", "measured")
LR, START_LR = 1e-3, 2e-5  # the default rates of fresh weights, and of trained ones, which more would undo
# The format of the products. Parameters, gradients, Adam's moments and the loss stay fp32 (mixed precision:
# Micikevicius et al., arXiv:1710.03740); with "fp16" the loss is scaled.
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class DataSettings:
    """The training data.

    ``path`` is text or records: files, folders or globs (None: the standard library's sources); or a ``.npy`` file of
    token numbers in one dimension; or a folder that ``prepare_data`` wrote. A folder's ``tokenizer`` reads it (None:
    that of ``start``; without either, tokens are bytes). A sequence has ``seq`` tokens; a step takes ``batch``
    sequences over all ranks. ``shuffle`` draws a new order each epoch.

    ``validation`` is data like ``path`` for the held-out loss; None: a part of ``path`` that is not trained on. The
    loss counts the answers of chats alone (``train_on`` "answers"), or "all" tokens. ``packing`` fills sequences with
    several documents. Up to ``skip_bad`` bad records are left out. ``cache`` is the folder for prepared tokens (None:
    one beside the run's).
    """

    path: str | tuple[str, ...] | None = None
    tokenizer: str | None = None
    validation: str | tuple[str, ...] | None = None
    seq: int = 128
    batch: int = 8
    shuffle: bool = True
    train_on: str = "answers"
    packing: bool = True
    skip_bad: int = 0
    cache: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, "data", 1, "seq", "batch")
        _at_least(self, "data", 0, "skip_bad")
        _one_of(self, "data", "train_on", TRAIN_ON)
        for name in ("path", "validation"):
            given = getattr(self, name)
            if isinstance(given, tuple) and not (given and all(isinstance(each, str) for each in given)):
                raise ValueError(f"data.{name} = {list(given)!r}: expected a path, or a list of at least one")


@dataclass(frozen=True)
class ParallelSettings:
    """The run's layout over processes: the options of ``parallelize``, and of the model.

    The mesh is ``dp_replicate`` copies of ``dp`` shards of ``pp`` stages of ``tp`` ranks; with ``dp`` None it follows
    from the number of processes. The model processes a rank's batch in ``microbatches`` parts, one after another, with
    or without a pipeline. ``recompute`` keeps only every block's input for backward, ``mlp_recompute`` 1 or 2 less of
    every MLP (ParallelMLP's ``recompute``). ``partition`` balances a pipeline's stages by "modelled" FLOPs or
    "measured" seconds. For None, ``parallelize`` chooses; :func:`resolve` chooses ``microbatches``.
    """

    dp_replicate: int = 1
    dp: int | None = None
    pp: int = 1
    tp: int = 1
    zero: int = 0
    schedule: str | None = None
    microbatches: int | None = None
    partition: str = "modelled"
    offload: bool = False
    precision: str = "fp32"
    recompute: bool | None = None
    mlp_recompute: int = 0
    sequence_parallel: bool = False
    overlap: str | None = None

    def __post_init__(self) -> None:
        _at_least(
            self,
            "parallel",
            1,
            *(name for name in ("dp_replicate", "dp", "pp", "tp", "microbatches") if getattr(self, name) is not None),
        )
        _one_of(self, "parallel", "zero", ZERO_STAGES)
        _one_of(self, "parallel", "precision", PRECISIONS)
        _one_of(self, "parallel", "mlp_recompute", (0, 1, 2))
        _one_of(self, "parallel", "partition", PARTITIONS)
        if self.pp > 1 and self.schedule is None:
            raise ValueError(f"parallel.pp = {self.pp}: a pipeline also needs a schedule, such as schedule = '1f1b'")

    def over(self, processes: int) -> ParallelSettings:
        """A copy with ``dp`` filled in. Raises ValueError if the product of the degrees is not ``processes``."""
        others = self.dp_replicate * self.pp * self.tp
        dp = processes // others if self.dp is None else self.dp
        if not dp or dp * others != processes:
            shown = "" if self.dp is None else f"dp={self.dp} * "
            wanted = f"a multiple of {others}" if self.dp is None else str(self.dp * others)
            raise ValueError(
                f"{shown}dp_replicate={self.dp_replicate} * pp={self.pp} * tp={self.tp} does not make up the "
                f"{processes} process{'es' if processes > 1 else ''} of this run; change the degrees, or start {wanted}"
            )
        return dataclasses.replace(self, dp=dp)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW. The rate reaches ``lr`` (None: LR, or START_LR for a trained model) after ``warmup`` steps, then follows
    ``schedule`` down to ``min_lr`` at the last step. ``clip`` bounds the gradient's norm over all parameters (None: no
    bound). ``weight_decay`` is for matrices.
    """

    lr: float | None = None
    schedule: str = "cosine"
    warmup: int = 0
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        given = [name for name in ("lr", "clip") if getattr(self, name) is not None]
        _above_0(self, "optimizer", "eps", *given)
        _at_least(self, "optimizer", 0, "warmup", "weight_decay", "min_lr")
        _one_of(self, "optimizer", "schedule", SHAPES)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} = {getattr(self, name)}: expected at least 0 and less than 1")
        lr = LR if self.lr is None else self.lr
        if self.min_lr > lr:
            raise ValueError(f"optimizer.min_lr = {self.min_lr}: expected at most lr = {lr}")


@dataclass(frozen=True)
class CheckpointSettings:
    """The run saves a checkpoint ``every`` n steps (None: never) and at the end, and keeps the newest ``keep``.

    With ``asynchronous`` it writes them while training continues. ``export`` writes a folder for transformers when the
    run is complete.
    """

    every: int | None = 100
    keep: int = 2
    asynchronous: bool = True
    export: bool = True

    def __post_init__(self) -> None:
        _at_least(self, "checkpoint", 1, "keep", *(() if self.every is None else ("every",)))


@dataclass(frozen=True)
class LogSettings:
    """The run writes a line to ``metrics.jsonl`` ``every`` n steps, and TensorBoard events if it is installed and
    ``tensorboard`` is true. It evaluates ``eval_batches`` batches of held-out text every ``eval_every`` steps and at
    the end; ``eval_batches`` 0 turns that off, and None evaluates all of it.
    """

    every: int = 1
    tensorboard: bool = True
    eval_every: int | None = None
    eval_batches: int | None = 8

    def __post_init__(self) -> None:
        _at_least(self, "log", 1, "every", *(() if self.eval_every is None else ("eval_every",)))
        _at_least(self, "log", 0, *(() if self.eval_batches is None else ("eval_batches",)))


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run.

    ``out`` is its folder, ``steps`` its length, or ``epochs``, passes over the data, from which ``steps`` then follow.
    ``seed`` is the seed of initial weights, data order and dropout. ``start`` is a Hugging Face folder that provides
    config, initial weights and tokenizer, instead of ``[model]``. ``device`` is "cpu" or "cuda"; None: a GPU if there
    is one. ``timeout``, in seconds, bounds every collective, and with it the time until the run notices a hanging rank.
    ``time_limit``, in seconds from the first step, ends the run as its last step would: evaluated, saved and exported;
    ``--resume`` can continue it later.

    Raises ValueError for invalid values.
    """

    steps: int = 200
    epochs: int | None = None
    seed: int = 0
    out: str = "run"
    start: str | None = None
    device: str | None = None
    timeout: float | None = None
    time_limit: float | None = None
    model: TransformerConfig = field(default_factory=TransformerConfig)
    data: DataSettings = field(default_factory=DataSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}: expected at least 1")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs = {self.epochs}: expected at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed}: expected 0 to {2**63 - 1}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device = {self.device!r}: expected 'cpu' or 'cuda'")
        for name in ("timeout", "time_limit"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} = {seconds}: expected seconds above 0")
        if self.start is None:
            self.check_length()

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch * self.data.seq

    def check_length(self) -> None:
        """Raise ValueError where sequences are longer than the model's maximum number of positions."""
        if self.data.seq > self.model.max_positions:
            raise ValueError(
                f"data.seq = {self.data.seq}: the model was made for at most {self.model.max_positions} positions "
                "(model.max_positions)"
            )

    def share(self, shares: int) -> int:
        """The sequences per step for each of ``shares`` data-parallel ranks. Raises ValueError for a remainder."""
        if self.data.batch % shares:
            raise ValueError(
                f"data.batch = {self.data.batch}: it does not divide over dp_replicate * dp = {shares} data-parallel "
                f"ranks; use a multiple of {shares}"
            )
        return self.data.batch // shares

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunSettings:
        """The inverse of :meth:`to_json`."""
        return parse(json.loads(text))


def flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Each setting's value as text, by its dotted name."""
    found: dict[str, str] = {}
    for each in dataclasses.fields(settings):
        value, name = getattr(settings, each.name), f"{prefix}{each.name}"
        found |= flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: repr(value)}
    return found


def read_settings(path: Path | None, changes: Mapping[str, Any]) -> RunSettings:
    """The settings in the TOML file ``path`` (None: the defaults) with ``changes``: {"optimizer.lr": 1e-3, ...}.

    Raises FileNotFoundError for a missing file, ValueError for one that cannot be read or is not TOML, for unknown
    settings and for invalid values; the message is one line.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: there is no such file; give a TOML file of settings") from None
        except OSError as error:
            what = "it is a folder" if path.is_dir() else f"it cannot be read ({error.strerror})"
            raise ValueError(f"{path}: {what}; give a TOML file of settings") from None
        except ValueError as error:  # TOML's and Unicode's errors
            raise ValueError(f"{path}: not TOML ({' '.join(str(error).split())})") from None
    for name, value in changes.items():
        section, dot, key = name.rpartition(".")
        place = values.setdefault(section, {}) if dot else values
        if not isinstance(place, dict):
            raise ValueError(f"{path}: {section} is a section, [{section}], not a value")
        place[key] = value
    try:
        if values.get("steps") is not None and values.get("epochs") not in (None, False):
            raise ValueError(
                f"steps = {values['steps']} and epochs = {values['epochs']}: either decides the run's length; leave "
                "one out (--set epochs=false)"
            )
        return parse(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None and not changes else str(error)) from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """``"optimizer.lr=1e-3"`` -> ("optimizer.lr", 0.001): a TOML value, or a string if it is not valid TOML."""
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not name:
        raise ValueError(f"--set {text}: expected SETTING=VALUE, such as optimizer.lr=1e-3")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except ValueError:
        return name, value


def parse(values: Mapping[str, Any]) -> RunSettings:
    """RunSettings from nested dictionaries. Raises ValueError for unknown names and values of the wrong type."""
    return _build(RunSettings, values, "")


def _build(kind: type[T], values: Mapping[str, Any], prefix: str) -> T:
    hints = get_type_hints(kind)
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        where = f"[{prefix[:-1]}]" if prefix else "the top"
        said = expected(unknown[0], sorted(hints), f"at {where} there are")
        raise ValueError(f"{prefix}{unknown[0]}: there is no such setting; {said}")
    fields: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ValueError(f"{prefix}{name} = {value!r}: expected a section, [{prefix}{name}]")
            fields[name] = _build(hint, value, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            fields[name] = _typed(value, hint, f"{prefix}{name}")
    return kind(**fields)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _typed(value: Any, hint: Any, name: str) -> Any:
    """``value`` as the type ``hint``: an int may stand for a float, and false for None where no bool is expected."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    optional = type(None) in kinds
    if optional and (value is None or (value is False and bool not in kinds)):
        return None
    for kind in kinds:
        if kind is float and type(value) is int:
            return float(value)
        if get_origin(kind) is tuple:
            if isinstance(value, list):
                return tuple(value)
            continue
        if type(value) is kind or (kind not in _WORDS and kind is not type(None) and isinstance(value, Mapping)):
            return value
    words = [
        "a list" if get_origin(kind) is tuple else _WORDS.get(kind, "a table")
        for kind in kinds
        if kind is not type(None)
    ]
    words += ["false for none"] if optional and bool not in kinds else []
    raise ValueError(f"{name} = {value!r}: expected {' or '.join(words)}")


def _at_least(settings: Any, section: str, low: int, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) >= low:
            raise ValueError(f"{section}.{name} = {getattr(settings, name)}: expected at least {low}")


def _above_0(settings: Any, section: str, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{section}.{name} = {getattr(settings, name)}: expected a number above 0")


def _one_of(settings: Any, section: str, name: str, choices: Any) -> None:
    if getattr(settings, name) not in choices:
        given = getattr(settings, name)
        raise ValueError(f"{section}.{name} = {given!r}: {expected(given, choices)}")
