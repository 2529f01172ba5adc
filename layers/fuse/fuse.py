"""``fuse`` and ``unfuse`` put our kernels into a foreign model, module by module, in place and reversibly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from ...kernels.runtime.checks import type_name
from ...parallel.core.first_calls import agree_on_processors
from ...parallel.core.mesh import SINGLE, MeshLike, tp_group
from .check import compare
from .matchers.attention import Attention, PackedAttention
from .matchers.feed_forward import FeedForward, SpelledOut
from .matchers.head import Head
from .matchers.norms import Norm
from .ranks.sequence import divide
from .report import stayed
from .swap import Fused, Match, become, restore


class Matcher(Protocol):
    """Finds modules of one kind."""

    @property
    def fused(self) -> type[Fused]:
        """The class of the fused modules: a subclass of :class:`Fused` with a ``fused_forward``."""

    def match(self, module: nn.Module) -> Match | None:
        """Return the match in ``module``, or None. The module stays unchanged and may be on the meta device."""

    # A matcher may also have split(module, match, group): it splits a fused module over ranks, or returns the reason
    # why the module stays whole.


MATCHERS: tuple[Matcher, ...] = (FeedForward(), SpelledOut(), Norm(), Attention(), Head())

OVER_RANKS: tuple[Matcher, ...] = (PackedAttention(),)


class _Found(NamedTuple):
    module: nn.Module
    matcher: Matcher
    match: Match


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
    that no matcher recognises stays stock; ``explain(model)`` lists both kinds. A second call changes nothing, and
    :func:`unfuse` undoes the first.

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
        ValueError: ``strict`` or ``check`` fails, or ``mesh`` is given for a model that was fused without one. The
            model stays unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model is a {type_name(model)}: expected an nn.Module")
    group = tp_group(mesh)
    found = []
    for name, module in model.named_modules():
        if group.size > 1 and isinstance(module, Fused) and _is_unsplit(module):
            raise ValueError(f"fuse: {name or 'the model'} was fused without a mesh; unfuse the model first")
        if (
            isinstance(module, Fused)
            or "forward" in module.__dict__
            or (filter_fn is not None and not filter_fn(module, name))
        ):
            continue
        for matcher in (*matchers, *MATCHERS, *(OVER_RANKS if group.size > 1 else ())):
            if (match := matcher.match(module)) is not None:
                found.append(_Found(module, matcher, match))
                break
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
    agree_on_processors(group)
    return model


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
