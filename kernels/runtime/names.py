"""Names that a caller gives, beside the known ones: the end of an error's message. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 64  # characters of a name that is compared, as no known one is longer
_CLOSE = 0.82  # difflib's ratio: a slip or two of the fingers, but no other word before "_penalty" or "_tokens"
_LISTED = 8  # names beside a suggestion


def nearest(given: object, known: Iterable[object]) -> str | None:
    """The name among ``known`` that ``given`` misspells; None if none is close. Case, "-" and "_" count for nothing."""
    if not isinstance(given, str) or len(given) > _LONGEST:
        return None
    names = {_plain(name): name for name in map(str, known)}
    found = difflib.get_close_matches(_plain(given), names, n=1, cutoff=_CLOSE)
    return names[found[0]] if found else None


def expected(given: object, known: Iterable[object], lead: str = "expected one of") -> str:
    """What an error says after ``given``, which is none of the ``known`` names: ``lead`` and these, or the nearest one.

    "did you mean 'rms_norm'? (expected one of linear_act, rms_norm)"; of more than eight names only the nearest.
    """
    names = [str(name) for name in known]
    listed = f"{lead} {', '.join(names) or 'none'}"
    close = nearest(given, names)
    if close is None:
        return listed
    return f"did you mean {close!r}?" + (f" ({listed})" if len(names) <= _LISTED else "")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
