"""``shardfuse bench verify``: whether an implementation of an op is right, ours or a stranger's.

Each case runs twice, with other inputs in the same tensors the second time: an answer that was kept from the first run
is wrong there. The second run finds NaN in memory that torch leaves uninitialised. The references run after both, so
that no freed memory holds a right answer before.
"""

from __future__ import annotations

import json as jsonlib
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.text import Text

from ...kernels.dev.registry import Case, OpSpec, to_double
from ...kernels.runtime.names import expected
from ...kernels.runtime.printing import Sheet, console, figure, prose, unbroken
from .drawn import check_drawn, tensors
from .gate import copy_inputs
from .implementation import Implementation, load
from .ops import find_op
from .runner import default_device

RUNS = 2


@dataclass(frozen=True)
class Finding:
    """The verdict on one output of one case, or on its inputs; ``error`` and ``budget`` as in ``accuracy.Verdict``.

    ``why`` explains a failure that is no matter of accuracy.
    """

    case: str
    name: str
    ok: bool
    error: float | None = None
    budget: float | None = None
    why: str = ""


def verify(
    op: str,
    impl: str = "auto",
    *,
    cases: Sequence[str] = (),
    seed: int | None = None,
    device: str | None = None,
    rivals: Sequence[str] = (),
    json: bool = False,
) -> int:
    """Print a verdict for every output of the named cases (default: those of the tests, odd and empty shapes included).

    Cases that a rival refuses are listed with its reason. ``rivals`` are files with more rivals, each a PATH:NAME.
    Returns the exit code: 0 if all are right, 1 if not, 2 if nothing could run. The seed is random unless given.
    """
    errors = console(stderr=True)
    try:
        spec = find_op(op)
        on = find_device(device)
        implementation = load(spec, impl, on, rivals)
        chosen, refused = split(choose(spec, cases), implementation, named=bool(cases))
        seed = secrets.randbelow(2**31) if seed is None else seed
        for case in chosen:
            check_drawn(spec, case, on, seed)
        findings = [each for case in chosen for each in verify_case(spec, case, implementation, on, seed)]
    except (ValueError, RuntimeError) as error:
        errors.print("[red]error:[/]", end=" ")
        errors.print(str(error), markup=False)
        return 2
    good = all(finding.ok for finding in findings)
    if json:
        result = {"op": spec.name, "impl": implementation.name, "device": str(on), "seed": seed, "ok": good}
        result |= {"refused": refused}
        print(jsonlib.dumps(result | {"findings": [asdict(each) for each in findings]}), flush=True)
    else:
        _show(f"{spec.name}, {implementation.name} on {on}, seed {seed}", findings, refused)
    return 0 if good else 1


def find_device(name: str | None) -> torch.device:
    """The device called ``name``, by default a GPU if there is one; ValueError if torch cannot use it here."""
    if name is None:
        return default_device()
    try:
        found = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:0") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no GPU that torch can use; pass --device cpu")
    return found


def choose(spec: OpSpec, names: Sequence[str]) -> list[Case]:
    """The cases of these names, or without any those tagged "test"; ValueError for an unknown one."""
    by_name = {case.name: case for case in spec.cases}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(
            f"{spec.name} has no case called {', '.join(unknown)}; {expected(unknown[0], by_name, 'it has')}"
        )
    return [by_name[name] for name in names] or spec.tagged("test")


def split(cases: Sequence[Case], implementation: Implementation, *, named: bool) -> tuple[list[Case], dict[str, str]]:
    """The cases that the implementation takes, and the names of the others with its reasons.

    Raises ValueError if it takes none, or refuses one that the user has ``named``.
    """
    refused = {case.name: why for case in cases if (why := implementation.refuses(case))}
    if refused and (named or len(refused) == len(cases)):
        name, why = next(iter(refused.items()))
        raise ValueError(f"{implementation.name} has no answer to the case {name}: {why}")
    return [case for case in cases if case.name not in refused], refused


def verify_case(
    spec: OpSpec, case: Case, implementation: Implementation, device: torch.device, seed: int
) -> list[Finding]:
    """Run one case twice, with the inputs of ``seed`` and of ``seed + 1``, and judge every output of both runs."""
    drawn = [spec.make_inputs(case, device, seed + number) for number in range(RUNS)]
    held: list[dict[str, torch.Tensor]] = []
    returned: list[Mapping[str, torch.Tensor]] = []
    inputs: dict[str, Any] = copy_inputs(drawn[0])
    for number, values in enumerate(drawn):
        if number:
            inputs = _refill(inputs, copy_inputs(values))
        try:
            if number:
                with _nan_in_new_memory():
                    outputs = implementation.run(inputs, case)
            else:
                outputs = implementation.run(inputs, case)
            held.append(_snapshot(outputs))
        except Exception as error:
            if not implementation.foreign:
                raise
            return [Finding(case.name, "run", False, why=f"raised {type(error).__name__}: {error}")]
        returned.append(outputs)
        changed = [name for name in inputs if name not in spec.mutates and not _same(inputs[name], values[name])]
        if changed:
            why = "this input was changed, and the op's OpSpec does not declare it"
            return [Finding(case.name, name, False, why=why) for name in changed]
    own = {value.untyped_storage().data_ptr() for value in tensors(inputs)}  # a gradient may be an input itself
    lost = [
        name
        for name, value in returned[0].items()
        if value.untyped_storage().data_ptr() not in own and not _same(value, held[0][name])
    ]
    if lost:
        why = "the second run changed the first one's result"
        return [Finding(case.name, name, False, why=why) for name in lost]
    return _judge(spec, case, drawn, held, device)


def _judge(
    spec: OpSpec, case: Case, drawn: list[dict[str, Any]], held: list[dict[str, torch.Tensor]], device: torch.device
) -> list[Finding]:
    """Of each output the worse run, by the rule of ``kernels/dev/accuracy.py``."""
    worst: dict[str, Finding] = {}
    for values, ours in zip(drawn, held):
        low = spec.run(copy_inputs(values), case, "reference")
        oracle = spec.run(to_double(copy_inputs(values), device), case, "reference")
        for name in dict.fromkeys((*oracle, *ours)):
            if name not in ours or name not in oracle:
                found = Finding(case.name, name, False, why="not returned" if name in oracle else "not one of the op's")
            elif ours[name].dtype != low[name].dtype:
                # Its rounding sets the budget, so another dtype would set another one.
                why = f"is {ours[name].dtype}, expected {low[name].dtype}"
                found = Finding(case.name, name, False, why=why)
            else:
                verdict = spec.judge(case, name, ours[name], low[name], oracle[name])
                found = Finding(case.name, name, verdict.ok, verdict.error, verdict.budget)
            worst[name] = max(worst.get(name, found), found, key=_badness)
    return list(worst.values())


def _badness(finding: Finding) -> tuple[bool, float]:
    return not finding.ok, finding.error or 0.0


def _snapshot(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, queued behind the call on the current stream: work that runs on another one is not waited for.

    Raises TypeError for anything but plain tensors: a subclass could compute, or compare, when it is asked.
    """
    for name, value in outputs.items():
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{name} is a {type(value).__name__}: expected a plain torch.Tensor")
    return {name: value.detach().clone() for name, value in outputs.items()}


@contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """Torch fills what ``torch.empty`` returns with NaN (integers: the largest value), as it does for debugging."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ops without a deterministic form
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        settings.fill_uninitialized_memory = before


def _refill(old: Any, new: Any) -> Any:
    """The values of ``new``, in the tensors of ``old`` where they fit: an answer kept by address is found out, too."""
    if isinstance(old, dict):
        return {name: _refill(old[name], value) for name, value in new.items()}
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        return type(new)(_refill(*pair) for pair in zip(old, new))
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return new
    if old.shape != new.shape or old.dtype != new.dtype or old.stride() != new.stride():
        return new
    with torch.no_grad():
        return old.copy_(new)


def _same(a: Any, b: Any) -> bool:
    """Whether both hold the same bits, NaN included."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(*pair) for pair in zip(a, b))
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    return bool(a == b)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1).contiguous().view(torch.uint8)


def _show(title: str, findings: Sequence[Finding], refused: Mapping[str, str]) -> None:
    columns = (unbroken("case"), unbroken("output"), figure("error"), figure("budget"), figure("ok"), prose("why"))
    table = Sheet(*columns, title=title)
    for each in findings:
        error, budget = ("" if value is None else f"{value:.2e}" for value in (each.error, each.budget))
        ok = Text("yes", "green") if each.ok else Text("no", "red")
        table.add(each.case, each.name, error, budget, ok, each.why)
    for name, why in refused.items():
        table.add(name, "", "", "", "refused", why)
    console().print(table)
