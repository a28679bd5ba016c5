"""The picture of a verification: SVG text with an axis of offsets, a bar for each tier and table, damage in red."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Final

from strandline.log.findings import Severity

if TYPE_CHECKING:
    from strandline.bulk.audit import AuditRow, LogAudit

_WIDTH: Final = 960
_LEFT: Final = 150
_RIGHT: Final = 60
_TOP: Final = 64
_ROW: Final = 34
_BAR: Final = 18
_NARROWEST: Final = 3.0
"""Pixels of the smallest damage: one record of a billion is seen, too."""
_TICKS: Final = 5
_LONGEST_NAME: Final = 17
_LONGEST_TITLE: Final = 110
_LONGEST_MESSAGE: Final = 130
_SHOWN: Final = 5

_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#1b2733}.dim{fill:#66737f;font-size:11px}.title{font-weight:600}"
    ".hot{fill:#2f6f8f}.cold{fill:#8fb8cc}.table{fill:#6b8f71}.bad{fill:#c8322b}.bad-text{fill:#c8322b;font-weight:600}"
    ".line{stroke:#c9d2d9}"
)


def drawn(audit: LogAudit) -> str:
    """The picture of a verification, as SVG text."""
    low = min([audit.first, *(row.first for row in audit.rows)])
    high = max([audit.next, low + 1, *(row.next for row in audit.rows)])
    found, lines = audit.verification, []

    def x(offset: int) -> float:
        return _LEFT + (offset - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    bottom = _TOP + _ROW * len(audit.rows)
    for number in range(_TICKS + 1):
        offset = low + (high - low) * number // _TICKS
        lines.append(f'<line class="line" x1="{x(offset):.1f}" x2="{x(offset):.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
        lines.append(f'<text class="dim" x="{x(offset):.1f}" y="{bottom + 16}" text-anchor="middle">{offset:,}</text>')
    for number, row in enumerate(audit.rows):
        lines += _bar(row, _TOP + _ROW * number, x)
    damage = found.damage
    at = bottom + 44
    for finding in damage[:_SHOWN]:
        lines.append(f'<text class="dim" x="20" y="{at}">{_text(finding.message, _LONGEST_MESSAGE)}</text>')
        at += 18
    if (more := found.count(Severity.DAMAGE) - _SHOWN) > 0:
        lines.append(f'<text class="dim" x="20" y="{at}">… and {more:,} more</text>')
        at += 18
    verdict = ("clean", "title") if audit.is_clean else (f"{found.count(Severity.DAMAGE):,} damaged", "bad-text")
    read = f"{found.examined['records']:,} records read, {found.examined['compared']:,} of them in both tiers"
    head = [
        f'<text class="title" x="20" y="24">{_text(found.subject, _LONGEST_TITLE)}</text>',
        f'<text class="{verdict[1]}" x="20" y="44">{verdict[0]}</text>',
        f'<text class="dim" x="{_LEFT}" y="44">{read}</text>',
    ]
    size = f'width="{_WIDTH}" height="{at}" viewBox="0 0 {_WIDTH} {at}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{at}" fill="#ffffff"/>',
            *head,
            *lines,
            "</svg>\n",
        ]
    )


def _bar(row: AuditRow, top: int, x: Callable[[int], float]) -> list[str]:
    kind = row.name if row.name in ("hot", "cold") else "table"
    middle = top + _BAR - 5
    lines = [
        f'<text x="20" y="{middle}"><title>{escape(row.name)}</title>{_text(row.name, _LONGEST_NAME, end=True)}</text>'
    ]
    if row.next > row.first:
        lines.append(_rect(kind, x(row.first), x(row.next) - x(row.first), top, f"{row.first:,} to {row.next - 1:,}"))
    for first, end in row.damage:
        width = max(_NARROWEST, x(end) - x(first))
        left = min(x(first), _WIDTH - _RIGHT - width)
        lines.append(_rect("bad", left, width, top, f"damaged: {first:,} to {max(first, end - 1):,}"))
    return lines


def _rect(kind: str, left: float, width: float, top: int, title: str) -> str:
    place = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}"'
    return f'<rect class="{kind}" {place}><title>{title}</title></rect>'


def _text(text: str, longest: int, *, end: bool = False) -> str:
    """Text for SVG, cut; control characters as spaces."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    if len(plain) > longest:
        plain = f"…{plain[-longest:]}" if end else f"{plain[:longest]}…"
    return escape(plain)
