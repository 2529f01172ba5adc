"""Elements of the page and the logarithmic axes of its plots.

The page is a tree of ``xml.etree`` elements, whose serializer escapes every text and attribute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

__all__ = ["Element", "LogScale", "add", "box", "new", "render", "svg", "text_at"]


def new(tag: str, text: str = "", /, **attributes: object) -> Element:
    """An element. ``class_`` and ``data_rows`` become ``class`` and ``data-rows``."""
    found = Element(tag, _attributes(attributes))
    found.text = text
    return found


def add(parent: Element, tag: str, text: str = "", /, **attributes: object) -> Element:
    """Append a new element to ``parent``; returns the new one."""
    found = SubElement(parent, tag, _attributes(attributes))
    found.text = text
    return found


def box(parent: Element, label: str) -> Element:
    """A box that scrolls sideways by itself, by keyboard too."""
    return add(parent, "div", class_="scroll", tabindex=0, role="region", aria_label=label)


def svg(parent: Element, label: str, width: int, height: int) -> Element:
    """A drawing of ``width`` x ``height`` units that scales with its parent."""
    return add(parent, "svg", role="img", aria_label=label, viewBox=f"0 0 {width} {height}")


def text_at(parent: Element, x: float, y: float, text: str, anchor: str = "middle") -> None:
    """Text in a drawing at (``x``, ``y``), in the drawing's units."""
    add(parent, "text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def render(elements: Iterable[Element]) -> str:
    """The HTML of ``elements``."""
    return "\n".join(tostring(each, encoding="unicode", method="html") for each in elements)


def _attributes(given: dict[str, object]) -> dict[str, str]:
    return {name.rstrip("_").replace("_", "-"): str(value) for name, value in given.items()}


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis: ``low`` to ``high`` (both > 0) are drawn from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, margin: float = 1.1) -> LogScale:
        """An axis over the positive ``values``, with a margin (a factor) at both ends; a decade without any."""
        found = [value for value in values if 0 < value < math.inf] or [1.0, 10.0]
        return cls(min(found) / margin, max(found) * margin, start, end)

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values on the axis, some 3 to 10: evenly spaced if it spans less than a factor of 2."""
        span = self.high / self.low
        if span < 2:
            rough = (self.high - self.low) / 5
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
            found = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        else:
            digits = (1, 1.5, 2, 3, 5, 7) if span < 10 else (1, 2, 5) if span < 1e3 else (1,)
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**decade for decade in decades for digit in digits]
        return [tick for tick in found if self.low <= tick <= self.high]
