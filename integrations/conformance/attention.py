"""Check an attention function over a matrix of paged batches against fp64.

The function takes the arguments of :func:`shardfuse.paged_attention`. The cases are those of
``docs/paged_attention.md``: every pair of values of two options occurs in one of them. Data that must not matter is
poisoned: unowned slots hold NaN, and table entries after a sequence's end name no block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ...kernels.dev import registry
from ...kernels.dev.cases import paged_attention as paged
from ...kernels.dev.cases.paged_features import pairwise

# The exceptions by which a function refuses a case.
REFUSALS = (NotImplementedError, ValueError, TypeError)
# Option -> the value that means "off"; calls then omit the option.
_UNASKED = {"causal": True, "window": None, "softcap": None, "invariant": None, "max_query_len": None}


class Result(NamedTuple):
    """The result of a case: "ok", "refused" or "wrong", and the reason."""

    case: str
    verdict: str
    why: str


def load(name: str) -> Callable[..., Any]:
    """The function ``package.module:function``. ValueError if it does not exist."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{name!r} names no function: expected package.module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is {type(found).__name__}: expected a function")
    function: Callable[..., Any] = found
    return function


def names() -> list[str]:
    """The cases in order."""
    return [case.name for case in pairwise()]


def check(attention: Callable[..., Any], device: torch.device, only: str = "") -> Iterator[Result]:
    """Check every case whose name contains ``only``; yield each result at once.

    A result is wrong if its distance from fp64 exceeds twice the error of the same maths in the result's own precision.
    """
    for case in pairwise():
        if only in case.name:
            yield _judged(attention, case, device)


def _judged(attention: Callable[..., Any], case: registry.Case, device: torch.device) -> Result:
    inputs = paged.make_inputs(case, device, seed=0)
    call = {
        name: value
        for name, value in paged.arguments(inputs, case).items()
        if name not in _UNASKED or value != _UNASKED[name]
    }
    if paged.asked(case)["lse"]:
        call["return_lse"] = True
    try:
        found = attention(**call)
    except REFUSALS as error:
        return Result(
            case.name, "refused", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    except Exception as error:  # foreign code: report any error and go on with the next case
        return Result(case.name, "wrong", f"{type(error).__name__}: {error}")
    parts = dict(zip(("out", "lse"), (found,) if isinstance(found, torch.Tensor) else found))
    if "lse" in parts:
        parts["lse"] = parts["lse"].masked_fill(parts["lse"] == float("-inf"), -1.0)
    low = paged.run(inputs, case, "reference")
    oracle = paged.run(registry.to_double(inputs), case, "reference")
    rows = sum(case.options["queries"])  # later rows are padding
    # Keys times their scale may be rounded to q's dtype before their product.
    computed = case.dtype if paged.asked(case)["scales"] else None
    wrong = []
    for name, expected in oracle.items():
        got = parts.get(name)
        if got is None or got.shape != expected.shape:
            wrong.append(f"{name} is {None if got is None else list(got.shape)}, expected {list(expected.shape)}")
            continue
        verdict = paged.SPEC.judge(case, name, got[:rows], low[name][:rows], expected[:rows], computed=computed)
        wrong += [] if verdict.ok else [str(verdict)]
    return Result(case.name, "wrong" if wrong else "ok", "; ".join(wrong))
