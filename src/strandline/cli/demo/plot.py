"""Line plots as inline SVG: small, without dependencies, and coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

Point = tuple[float, float]

_WIDTH: Final = 900
_HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 44, 34
_LETTER: Final = 7


@dataclass(frozen=True, slots=True)
class Series:
    """A line. ``style`` is the class that the page colours it by."""

    name: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: a vertical line with a label at its top."""

    at: float
    label: str
    style: str


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of time that is shaded."""

    since: float
    until: float


def ticks(top: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to the first one at or above ``top``.

    >>> ticks(930), ticks(0)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [0.0, 1.0])
    """
    if top <= 0:
        return [0.0, 1.0]
    rough = top / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def short(number: float) -> str:
    """A tick's label.

    >>> short(0), short(1500), short(250_000), short(2_000_000)
    ('0', '1.5k', '250k', '2M')
    """
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


def line_plot(
    title: str, series: Sequence[Series], *, marks: Sequence[Mark] = (), bands: Sequence[Band] = (), unit: str = ""
) -> str:
    """The plot as an ``<svg>`` element; x is seconds, y begins at 0."""
    points = [point for line in series for point in line.points]
    across = ticks(max((x for x, _ in points), default=0.0), 8)
    up = ticks(max((y for _, y in points), default=0.0))
    end = max([x for x, _ in points] + [mark.at for mark in marks] + [1.0])

    def x_of(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / end, 1)

    def y_of(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / up[-1], 1)

    floor = y_of(0)
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg"'
    parts = [f'<svg class="plot" role="img" aria-label="{escape(title)}" {size}>']
    for band in bands:
        width = round(x_of(band.until) - x_of(band.since), 1)
        parts.append(f'<rect class="band" x="{x_of(band.since)}" y="{_TOP}" width="{width}" height="{floor - _TOP}"/>')
    for value in up:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_of(value)}" y2="{y_of(value)}"/>')
        label = short(value) + (f" {unit}" if unit and value == up[-1] else "")
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y_of(value) + 4}" text-anchor="end">{label}</text>')
    for value in across:
        if value <= end:
            label = short(value) + (" s" if value == across[0] else "")
            parts.append(f'<text class="tick" x="{x_of(value)}" y="{floor + 18}" text-anchor="middle">{label}</text>')
    parts += [
        f'<polyline class="line {line.style}" points="{" ".join(f"{x_of(x)},{y_of(y)}" for x, y in line.points)}"/>'
        for line in series
    ]
    taken = 0.0
    for mark in marks:
        x = x_of(mark.at)
        y = _TOP - 6 if x >= taken else _TOP - 20  # a label that would run into the one before it goes above it
        taken = x + _LETTER * len(mark.label)
        parts.append(f'<line class="mark {mark.style}" x1="{x}" x2="{x}" y1="{y - 8}" y2="{floor}"/>')
        parts.append(f'<text class="label {mark.style}" x="{x + 3}" y="{y}">{escape(mark.label)}</text>')
    parts.append("</svg>")
    return "\n".join(parts)


def legend(series: Sequence[Series], shaded: str = "") -> str:
    """Which line is which, as HTML."""
    items = [f'<span class="key"><i class="{line.style}"></i>{escape(line.name)}</span>' for line in series]
    if shaded:
        items.append(f'<span class="key"><i class="band"></i>{escape(shaded)}</span>')
    return f'<p class="legend">{"".join(items)}</p>'
