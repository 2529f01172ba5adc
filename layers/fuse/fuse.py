"""``fuse`` and ``unfuse`` put our kernels into a foreign model, module by module, in place and reversibly."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...kernels.runtime.checks import type_name
from ...parallel.core.first_calls import agree_on_processors
from ...parallel.core.mesh import SINGLE, MeshLike, tp_group
from .check import compare
from .finding import MATCHERS, OVER_RANKS, Matcher, find, fusible
from .ranks.sequence import divide
from .ranks.whole import refuse_computed, replicate
from .report import stayed
from .swap import Fused, become, restore

_log = logging.getLogger("shardfuse.fuse")


def fuse(
    model: nn.Module,
    mesh: MeshLike = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    matchers: Sequence[Matcher] = (),
    strict: bool = False,
    check: Any = None,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Let our kernels run the modules of ``model``, a Hugging Face or plain torch model, in place; return ``model``.

    The matchers recognise modules by their computation: feed-forward parts with an activation (gated and packed ones
    too), norms, rotary positions, attention written out in products and a softmax, head and loss. They recognise
    projections of queries, keys and values by name. A module keeps its parameters, their names and its place; only its
    class changes, to one that derives from its stock class. Other models of the same classes do not change. A module
    that no matcher recognises stays stock; ``explain(model)`` lists both kinds, for a stock model what this function
    would do. A second call changes nothing, and :func:`unfuse` undoes the first. What was fused is logged, at level
    INFO of the logger "shardfuse.fuse"; a call that finds nothing warns.

    The matchers try modules out on small CPU tensors. No mode around this call changes what they find: neither a
    default device or dtype, nor fake tensors, autocast, inference mode, torch.func, torch.compile, ...

    Args:
        model: on any device, the meta device included; before or after adapters and DDP, before FSDP2.
        mesh: None for a single process. Otherwise feed-forward parts and attention are split over its tensor-parallel
            ranks, each of which gets its part of rank 0's values. All ranks make this call, and later process the same
            batches.
        filter_fn: called with each module and its path; a module for which it returns False stays as it is.
        matchers: your own matchers, tried before ours; ``docs/fuse.md`` shows one.
        strict: raise if a module with parameters stays stock that could have been fused.
        check: a batch (a mapping of keyword arguments, a sequence of arguments, or one tensor) to run through the stock
            model; each module is compared with its fused version on the way. If one exceeds the budget of
            ``kernels/dev/accuracy.py``, this function changes nothing and raises. The check leaves out head and loss.
        sequence_parallel: over a mesh, in training, the layers also divide each sequence among the ranks, so norms and
            residuals save R times less for backward. S must divide by R.

    Raises:
        TypeError: ``model`` is not a module, or ``mesh`` not a mesh.
        ValueError: ``strict`` or ``check`` fails, or ``mesh`` is given for a model that was fused without one, that has
            lazy parameters, or hooks of torch's pruning or weight norm. The model stays unchanged.
        RuntimeError: a matcher fails, which is an error of ours or of yours. The model stays unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model is a {type_name(model)}: expected an nn.Module")
    group = tp_group(mesh)
    before = [(path, module) for path, module in model.named_modules() if isinstance(module, Fused)]
    for path, unsplit in before:
        if group.size > 1 and _is_unsplit(unsplit):
            raise ValueError(f"fuse: {path or 'the model'} was fused without a mesh; unfuse the model first")
    if group.size > 1:
        refuse_computed(model)
    chosen = [(path, module) for path, module in fusible(model) if filter_fn is None or filter_fn(module, path)]
    found = find(chosen, (*matchers, *MATCHERS, *(OVER_RANKS if group.size > 1 else ())))
    worst = None if check is None else compare(model, {each.module: each for each in found}, check)
    if worst is not None and not worst.ok:
        raise ValueError(
            f"fuse: {worst}; nothing was changed: leave the module out with filter_fn, and please report it"
        )
    for each in found:
        become(*each)
    if strict and (left := [each for each in stayed(model) if not each.nothing_to_fuse]):
        for each in found:
            restore(each.module)
        said = "\n".join(f"  {path} ({kind}): {why}" for path, kind, why, _ in left)
        raise ValueError(f"fuse: strict=True, and {len(left)} modules stay stock; nothing was changed:\n{said}")
    for module, matcher, match in found if group.size > 1 else ():
        match.ranks = group
        if hasattr(matcher, "split"):
            match.whole = matcher.split(module, match, group)
            match.group = SINGLE if match.whole else group
    if sequence_parallel and group.size > 1:
        divide(model, group)
    if group.size > 1:
        replicate(model, group, {each.path: each for each in stayed(model, reasons=False)})
        if found and not any(isinstance(param, DTensor) for param in model.parameters()):
            _log.warning(
                "nothing of this %s was split over %d ranks, and each keeps its own values: sf.explain(model) says why",
                type(model).__name__,
                group.size,
            )
    agree_on_processors(group)
    if found:
        _tell(model, len(found))
    elif not before:
        which = "a module that filter_fn lets through" if filter_fn is not None else "a module"
        warnings.warn(
            f"fuse: nothing was fused: no matcher knows {which} of this {type(model).__name__}; "
            "shardfuse.explain(model) says what was looked at",
            stacklevel=2,
        )
    return model


def _tell(model: nn.Module, fused: int) -> None:
    """Log how many modules were fused."""
    if _log.isEnabledFor(logging.INFO):
        left = len(stayed(model, reasons=False))
        why = f"; {left} stay stock: sf.explain(model)" if left else ""
        _log.info("fused %d of %d modules%s", fused, fused + left, why)


def _is_unsplit(module: Fused) -> bool:
    """Whether ``module`` was fused without a mesh although its matcher can split it."""
    match = module._match
    return match is not None and hasattr(match.matcher, "split") and match.group.size == 1 and match.whole is None


def unfuse(model: nn.Module) -> nn.Module:
    """Restore every module of ``model`` to its state before :func:`fuse`; return ``model``.

    Raises ValueError, and changes nothing, if a module's class has changed again since.
    """
    for path, module in model.named_modules():
        if isinstance(module, Fused) and "_stock" not in vars(type(module)):
            raise ValueError(
                f"unfuse: {path or 'the model'} has another class by now (FSDP2's fully_shard gives one); unfuse before"
            )
        if isinstance(module, Fused) and module._match is not None and module._match.group.size > 1:
            raise ValueError(
                f"unfuse: {path or 'the model'} is split over {module._match.group.size} ranks; load its "
                "full_state_dict into a stock model"
            )
    for module in model.modules():
        restore(module)
    return model
