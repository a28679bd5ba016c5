"""The demo's picture: how far each reader was at every moment, and when Spark was down. SVG text, for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from strandline.cli.demo.report import DemoEvent, Sample

_WIDTH: Final = 960
_HEIGHT: Final = 400
_LEFT: Final = 80
_RIGHT: Final = 20
_TOP: Final = 52
_BOTTOM: Final = 34
_TICKS: Final = 5
_LINES: Final = (
    ("produced", "the log's end", "#8a939b"),
    ("orders", "orders table", "#2f6fb0"),
    ("changes", "all changes, without Spark", "#8a63b8"),
    ("naive", "naive twin", "#d0342c"),
)
_STYLE: Final = (
    ".demo text{font:12px system-ui,sans-serif;fill:currentColor}.demo .dim{opacity:.65}"
    ".demo .grid{stroke:currentColor;opacity:.15}.demo .down{fill:currentColor;opacity:.1}"
    ".demo .kill{stroke:#d0342c;stroke-dasharray:4 3}.demo .reader{fill:none;stroke-width:2;stroke-linejoin:round}"
)


def drawn(samples: Sequence[Sample], events: Sequence[DemoEvent]) -> str:
    """Draw the samples and the kills, as SVG text that takes its colours from the page."""
    end = max([1.0, *(sample.at for sample in samples)])
    top = max([1, *(max(sample.produced, sample.naive) for sample in samples)])

    def x(at: float) -> float:
        return _LEFT + at / end * (_WIDTH - _LEFT - _RIGHT)

    def y(offset: int) -> float:
        return _HEIGHT - _BOTTOM - offset / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [*_grid(x, y, end, top), *_outages(samples, x), *_kills(events, x), *_readers(samples, x, y), *_legend()]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
    head = f'<svg class="demo" {size} role="img" aria-label="The offset that each reader had reached, over time">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>"])


def _grid(x: Callable[[float], float], y: Callable[[int], float], end: float, top: int) -> Iterator[str]:
    for number in range(_TICKS + 1):
        at, offset = end * number / _TICKS, top * number // _TICKS
        height = f"{y(offset):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height}" y2="{height}"/>'
        yield f'<text class="dim" x="{_LEFT - 8}" y="{y(offset) + 4:.1f}" text-anchor="end">{offset:,}</text>'
        yield f'<text class="dim" x="{x(at):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{at:.0f} s</text>'


def _outages(samples: Sequence[Sample], x: Callable[[float], float]) -> Iterator[str]:
    """A band for each time in which Spark was down or starting."""
    for run, group in groupby(samples, key=lambda sample: sample.run):
        down = list(group)
        if run == 0:
            left, right = x(down[0].at), x(down[-1].at)
            yield f'<rect class="down" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_inner()}"/>'


def _kills(events: Sequence[DemoEvent], x: Callable[[float], float]) -> Iterator[str]:
    for event in events:
        if event.kind == "kill":
            at = f"{x(event.at):.1f}"
            yield f'<line class="kill" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_TOP + _inner()}">'
            yield f"<title>{escape(event.text)}</title></line>"
            yield f'<text x="{at}" y="{_TOP - 6}" text-anchor="middle">SIGKILL</text>'


def _readers(samples: Sequence[Sample], x: Callable[[float], float], y: Callable[[int], float]) -> Iterator[str]:
    for name, _, colour in _LINES:
        points = " ".join(f"{x(sample.at):.1f},{y(getattr(sample, name)):.1f}" for sample in samples)
        yield f'<polyline class="reader" stroke="{colour}" points="{points}"/>'


def _legend() -> Iterator[str]:
    at = _LEFT
    for _, title, colour in _LINES:
        yield f'<rect x="{at}" y="12" width="14" height="4" fill="{colour}"/>'
        yield f'<text x="{at + 20}" y="18">{title}</text>'
        at += 36 + 6 * len(title)
    yield f'<rect class="down" x="{at}" y="8" width="14" height="12"/>'
    yield f'<text x="{at + 20}" y="18">Spark is down or starting</text>'


def _inner() -> int:
    return _HEIGHT - _TOP - _BOTTOM
