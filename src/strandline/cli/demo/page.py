"""The demo's report as one self-contained HTML page: the result, the picture, the counts, the events, the method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from strandline.cli.demo.picture import drawn
from strandline.cli.demo.report import DemoResult, twin_verdict
from strandline.cli.shared import output as show

_STYLE: Final = """
:root { color-scheme: light dark; --paper: #fdfcf9; --ink: #1c2b31; --dim: #5b6f77; --box: #f3f0e8; --line: #ddd8ca;
  --good: #2c7a52; --bad: #c0392b; --sea: #0e6b7c }
@media (prefers-color-scheme: dark) { :root { --paper: #0d181d; --ink: #dfe9eb; --dim: #9fb3b9; --box: #142329;
  --line: #26393f; --good: #6fc192; --bad: #ff8a7a; --sea: #5cc3d0 } }
body { background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; margin: 0 auto;
  max-width: 1040px; padding: 24px }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 8px } h2 { font-size: 19px; margin: 34px 0 10px }
.good { color: var(--good) } .bad { color: var(--bad) } .dim { color: var(--dim) }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin: 22px 0 }
.tiles div { background: var(--box); border-radius: 10px; border-top: 3px solid var(--sea); padding: 10px 14px }
.tiles b { display: block; font-size: 23px; line-height: 1.3 }
figure { margin: 0; overflow-x: auto } svg { height: auto; min-width: 640px; width: 100% }
.wide { overflow-x: auto } .wide + .wide { margin-top: 16px } table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: 6px 10px; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: var(--dim); font-weight: 500 }
td.bad { font-weight: 650 }
ol { border-left: 2px solid var(--line); list-style: none; margin: 0 0 0 6px; padding: 0 }
li { margin: 0 0 6px; padding-left: 18px; position: relative }
li::before { background: var(--sea); border-radius: 50%; content: ""; height: 10px; left: -6px; position: absolute;
  top: 8px; width: 10px }
li.kill::before, li.checkpoint::before, li.retry::before { background: var(--bad) }
li span { color: var(--dim); display: inline-block; min-width: 62px }
"""
_NOTES: Final = """\
The truth is computed without the log: the generator runs again, into a plain dictionary. Each key belongs to one
producer, so that the order of its changes is defined.

The first kill is not at a random moment. All queries stop right after they have written a batch to their table and
before their slot or checkpoint has it, and the whole session is killed there. Every batch passes through this moment;
an accident seldom hits it, and sooner or later does. The second kill is at no particular moment, and the checkpoint is
deleted before the restart.

The naive twin is a usual structured-streaming job: the same source, trigger and session; foreachBatch appends to a
Delta table; Spark's checkpoint is all it knows. It began with the oldest change. When the checkpoint is gone, it begins
at the newest one: from the beginning it would double every row. Its lag looks as good as ours even after it has skipped
changes: lag does not show loss.

Our pipeline stores its cursor in the table itself, in the same commit as the data, keyed by offset. It recognises a
batch that was written before the kill, and has no checkpoint. Values are decoded into typed columns; the comparison
writes each row as JSON again and expects the very bytes that were produced."""


def page(result: DemoResult) -> str:
    """The HTML page. It loads nothing from elsewhere."""
    body = "\n".join(_parts(result))
    head = '<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/><title>Strandline demo</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _parts(result: DemoResult) -> Iterator[str]:
    found, rates, records = result.comparison, result.rates(), result.workload.records
    kills = sum(event.kind == "kill" for event in result.events)
    if found.exact:
        yield '<h1><span class="good">EXACT</span>: all tables that follow the log equal the truth</h1>'
    else:
        yield '<h1><span class="bad">WRONG</span>: a table that follows the log differs from the truth</h1>'
    together = "Both ran in the same Spark session, and were killed together."
    yield f'<p class="dim">{escape(twin_verdict(found))} {together}</p>'
    yield _tiles(
        {
            f"{records:,}": f"changes of {result.workload.keys:,} orders",
            f"{kills}": "times killed, and the checkpoint deleted",
            f"{rates['followed']:,.0f}/s": "followed with Spark, over the best 5 seconds",
            show.seconds(result.seconds): f"in all; changes are paced, {rates['produced']:,.0f}/s",
        }
    )
    yield f"<figure>{drawn(result.samples, result.events)}</figure>"
    yield "<h2>Against the truth</h2>"
    yield _table(
        ("the latest value of each key", "rows", "missing", "extra", "different", "doubled"),
        {"orders table": found.orders, "naive twin, as a view": found.naive_state},
    )
    yield _table(
        (f"all {records:,} changes, by offset", "rows", "lost", "doubled"),
        {"all changes": found.changes, "naive twin": found.naive},
    )
    yield "<h2>What happened</h2>"
    steps = (
        f'<li class="{event.kind}"><span>{event.at:.1f} s</span> {escape(event.text)}</li>' for event in result.events
    )
    yield f"<ol>{''.join(steps)}</ol>"
    yield "<h2>Lag at the end</h2>"
    slots = (
        f"<tr><td>{escape(lag.state.name)}</td><td>{lag.state.position:,}</td><td>{lag.records_behind:,}</td>"
        f"<td>{'pins the floor' if lag.pins_floor else ''}</td></tr>"
        for _, lag in result.lag.slots
    )
    head = "<tr><th>slot</th><th>position</th><th>records behind</th><th></th></tr>"
    yield f'<div class="wide"><table>{head}{"".join(slots)}</table></div>'
    yield "<h2>How it is measured</h2>"
    yield "".join(f"<p>{escape(paragraph)}</p>" for paragraph in _NOTES.split("\n\n"))


def _tiles(numbers: Mapping[str, str]) -> str:
    boxes = (f"<div><b>{escape(number)}</b>{escape(text)}</div>" for number, text in numbers.items())
    return f'<div class="tiles">{"".join(boxes)}</div>'


def _table(columns: Sequence[str], tables: Mapping[str, object]) -> str:
    """Counts of each table; all but the rows should be zero."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for name, found in tables.items():
        rows, *wrong = (int(getattr(found, column)) for column in columns[1:])
        cells = "".join(f'<td class="{"bad" if count else "good"}">{count:,}</td>' for count in wrong)
        lines.append(f"<tr><td>{escape(name)}</td><td>{rows:,}</td>{cells}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
