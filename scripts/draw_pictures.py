"""Draws docs/pictures/*.svg from the texts beside them.

``draw_pictures.py`` writes every picture; ``--check`` exits with 1 if one is not what its text says. A text has a line
for each thing:

    picture WIDTH HEIGHT "what it shows, for who cannot see it"
    box NAME X Y WIDTH HEIGHT KIND "first line, bold" "further lines" ...
    arrow FROM TO ["label"] [dashed]
    text X Y "words"

Kinds are ``plain``, ``log``, ``state`` and ``cold``. An arrow joins the sides of two boxes that face each other.
Colours follow the theme of the reader: light, or dark.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
LETTER = 6.6
"""Width of an average letter in pixels: wide enough for the fonts of all systems."""

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #12303b }
.bold { font-weight: 600 } .small { font-size: 12px; fill: #45606a } .label { font-size: 12px; fill: #45606a }
rect { rx: 8px; stroke-width: 1.4 } path { fill: none; stroke: #5d7781; stroke-width: 1.6 }
#tip path { fill: #5d7781; stroke: none }
.dashed { stroke-dasharray: 5 4 }
.plain { fill: #faf5ea; stroke: #c8b48c } .log { fill: #d9eef0; stroke: #0e6b7c }
.state { fill: #e2f1e6; stroke: #43855e } .cold { fill: #e5e8f4; stroke: #6a74b0 }
@media (prefers-color-scheme: dark) {
text { fill: #e3edee } .small, .label { fill: #b4c7cc } path { stroke: #86a0a9 } #tip path { fill: #86a0a9 }
.plain { fill: #2a2a22; stroke: #a8935f } .log { fill: #0f3b46; stroke: #5cc3d0 }
.state { fill: #173a28; stroke: #6fc192 } .cold { fill: #252c4d; stroke: #a3ade0 }
}
"""


class BadPicture(ValueError):
    """A text that cannot be drawn; the message says why."""


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    lines: tuple[str, ...]

    @property
    def middle(self) -> tuple[float, float]:
        """Where its centre is."""
        return self.x + self.width / 2, self.y + self.height / 2


def draw(text: str) -> str:
    r"""The picture of a text, as SVG.

    >>> "<title>a &amp; b</title>" in draw('picture 100 50 "a & b"')
    True
    >>> draw('picture 100 50 "a"\\nbox one 0 0 20 20 plain "much too long"')
    Traceback (most recent call last):
    scripts.draw_pictures.BadPicture: 'much too long' does not fit into the box 'one'.
    """
    boxes: dict[str, Box] = {}
    parts: list[str] = []
    size, title = ("0", "0"), ""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        match words:
            case []:
                continue
            case ["picture", width, height, title]:
                size = (width, height)
            case ["box", name, x, y, width, height, kind, *lines]:
                boxes[name] = Box(float(x), float(y), float(width), float(height), kind, tuple(lines))
                parts.append(_box(name, boxes[name]))
            case ["arrow", start, end, *rest]:
                labels = [word for word in rest if word != "dashed"]
                parts.append(_arrow(boxes[start], boxes[end], labels[0] if labels else "", dashed="dashed" in rest))
            case ["text", x, y, label]:
                parts.append(f'<text class="label" x="{x}" y="{y}">{escape(label)}</text>')
            case _:
                raise BadPicture(f"A picture has no line such as {line!r}.")
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0 0 L8 4 L0 8 z"/></marker>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f"aria-label={quoteattr(title)}>\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<defs>{tip}</defs>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _box(name: str, box: Box) -> str:
    for line in box.lines:
        if len(line) * LETTER > box.width:
            raise BadPicture(f"{line!r} does not fit into the box {name!r}.")
    x, y = box.middle
    top = y - (len(box.lines) - 1) * 9 + 4.5
    texts = "".join(
        f'<text class="{"small" if number else "bold"}" text-anchor="middle" x="{x:g}" y="{top + number * 18:g}">'
        f"{escape(line)}</text>"
        for number, line in enumerate(box.lines)
    )
    rect = f'<rect class="{box.kind}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"/>'
    return rect + texts


def _arrow(start: Box, end: Box, label: str, *, dashed: bool) -> str:
    (x1, y1), (x2, y2) = start.middle, end.middle
    style = ' class="dashed"' if dashed else ""
    if start.x + start.width <= end.x or end.x + end.width <= start.x:
        forward = start.x < end.x
        x1, x2 = (start.x + start.width, end.x) if forward else (start.x, end.x + end.width)
        bend = (x1 + x2) / 2
        path = f"M{x1:g} {y1:g} C{bend:g} {y1:g} {bend:g} {y2:g} {x2:g} {y2:g}"
        place = f'text-anchor="middle" x="{bend:g}" y="{(y1 + y2) / 2 - 8:g}"'
    else:
        y1, y2 = (start.y + start.height, end.y) if start.y < end.y else (start.y, end.y + end.height)
        bend = (y1 + y2) / 2
        path = f"M{x1:g} {y1:g} C{x1:g} {bend:g} {x2:g} {bend:g} {x2:g} {y2:g}"
        place = f'x="{(x1 + x2) / 2 + 8:g}" y="{bend + 4:g}"'
    words = f'<text class="label" {place}>{escape(label)}</text>' if label else ""
    return f'<path{style} d="{path}" marker-end="url(#tip)"/>{words}'


def main(arguments: list[str]) -> int:
    """Write the pictures, or say which are not up to date."""
    stale = []
    for source in sorted(FOLDER.glob("*.txt")):
        picture, target = draw(source.read_text()), source.with_suffix(".svg")
        if "--check" not in arguments:
            target.write_text(picture)
        elif not target.exists() or target.read_text() != picture:
            stale.append(target.name)
    if stale:
        print(f"Not as their texts say: {', '.join(stale)}. Run scripts/draw_pictures.py.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
