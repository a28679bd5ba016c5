"""The demo's report: one self-contained HTML page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from strandline.cli import output as show
from strandline.cli.demo.plot import Band, Mark, Series, legend, line_plot
from strandline.cli.demo.story import Event, Results, Sample, Story
from strandline.cli.lag import Lag, floor_sentence

_SMOOTH: Final = 3

_STYLE: Final = """
:root { color-scheme: light dark; --back: #fff; --ink: #1d2430; --soft: #667085; --rule: #e3e6ec; --card: #f6f7f9;
  --ours: #0b6bcb; --naive: #c4560f; --late: #16823c; --made: #7a7f8a; --bad: #c5221f; --band: #c5221f14; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --ink: #e6e9ef; --soft: #98a1b2; --rule: #2b313b;
  --card: #1c2027; --ours: #63b0ff; --naive: #ff9e57; --late: #5bd07f; --made: #8e95a3; --bad: #ff7a73;
  --band: #ff7a7320; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 940px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { margin: .4rem 0; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
.verdict { font-weight: 700; padding: .1rem .5rem; border-radius: .4rem; color: var(--back); background: var(--late); }
.verdict.wrong { background: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .5rem .9rem; }
.tile b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; } svg.plot { width: 100%; height: auto; display: block; }
.plot text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.plot .grid { stroke: var(--rule); } .plot .band { fill: var(--band); }
.plot .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.plot .ours { stroke: var(--ours); } .plot .naive { stroke: var(--naive); stroke-dasharray: 5 3; }
.plot .late { stroke: var(--late); } .plot .made { stroke: var(--made); }
.plot .mark { stroke-width: 1.2; stroke-dasharray: 2 2; }
.plot .mark.kill { stroke: var(--bad); } .plot .mark.checkpoint { stroke: var(--naive); }
.plot .mark.join { stroke: var(--late); }
.plot .label.kill { fill: var(--bad); } .plot .label.checkpoint { fill: var(--naive); }
.plot .label.join { fill: var(--late); }
.legend { display: flex; flex-wrap: wrap; gap: 1.1rem; font-size: .88rem; }
.key i { display: inline-block; width: 1.1rem; height: .2rem; margin-right: .4rem; vertical-align: middle; }
.key .ours { background: var(--ours); } .key .naive { background: var(--naive); }
.key .late { background: var(--late); } .key .made { background: var(--made); }
.key .band { background: var(--band); height: .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0; }
caption { text-align: left; color: var(--soft); font-size: .9rem; padding-bottom: .2rem; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .bad { color: var(--bad); font-weight: 600; }
.events td { text-align: left; white-space: normal; } .events td:first-child { text-align: right; white-space: nowrap; }
"""


def page(story: Story) -> str:
    """The page; it needs nothing but itself."""
    results = story.outcome
    verdict = "EXACT" if results.exact else "WRONG"
    body = [
        f'<h1>Strandline demo <span class="verdict{"" if verdict == "EXACT" else " wrong"}">{verdict}</span></h1>',
        f"<p>{escape(_lead(story))}</p>",
        _tiles(story),
        "<h2>How far behind</h2>",
        _lag_figure(story),
        "<h2>How fast</h2>",
        _speed_figure(story),
        "<h2>Against the truth</h2>",
        _truth_tables(results, story.shape.records),
        "<h2>What happened</h2>",
        _events(story.events),
    ]
    if story.lag is not None:
        body += ["<h2>The slots at the end</h2>", _slots(story.lag)]
    body += ["<h2>How it was done</h2>", *(f"<p>{escape(text)}</p>" for text in _notes(story))]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>Strandline demo: {verdict}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


_NOTES_TEXT: Final = """\
The truth is computed without the log: the generator is run again, into a plain dictionary. Each key belongs to one
producer, so that the order of its changes is defined.

The first kill is not at a random moment. Both queries are stopped right after they have written a batch to their table
and before their checkpoint knows of it, and the whole process group is killed there. Every batch passes through this
moment; an accident seldom hits it, and sooner or later does. The second kill is at no particular moment, and both
checkpoints are deleted before the restart.

The naive twin is a usual structured-streaming job: the same source, trigger and session; foreachBatch appends to a
Delta table; Spark's checkpoint is all it knows; without one it begins at the newest offset. It was running before the
first change was made, so that everything it lacks was lost later. Its lag looks as good as ours even after it has
skipped changes: lag cannot see loss.

Our pipeline keeps its cursor in the table itself, in the same commit as the data, keyed by offset. What was written
before the kill is recognised, and a deleted checkpoint costs nothing.
"""

NOTES: Final = tuple(" ".join(note.split()) for note in _NOTES_TEXT.split("\n\n"))
"""What a reader has to know to judge the result."""


def _notes(story: Story) -> list[str]:
    if story.exposed is None:
        return list(NOTES)
    measured = f"By Spark's own measure the naive twin was in that state for {story.exposed:.1%} of its working time."
    return [NOTES[0], f"{NOTES[1]} {measured}", *NOTES[2:]]


def _lead(story: Story) -> str:
    shape, results = story.shape, story.outcome
    text = (
        f"{shape.records:,} changes over {shape.keys:,} orders, from {shape.producers} processes (seed {shape.seed}), "
        "followed into a Delta table by a Spark pipeline that was killed twice and lost its checkpoint once. "
    )
    ours = "Both tables that follow the log equal the truth. " if results.exact else "Our tables are wrong. "
    twin = (
        "The naive twin happens to be right this time."
        if results.naive_exact
        else f"A naive twin in the same process lost {results.naive.lost:,} changes and doubled "
        f"{results.naive.doubled:,}; a view of the latest values over it is wrong for "
        f"{results.naive_state.missing + results.naive_state.extra + results.naive_state.different:,} orders."
    )
    return text + ours + twin


def _tiles(story: Story) -> str:
    rates = story.rates()
    tiles = [
        (f"{story.shape.records:,}", "changes"),
        (f"{rates.produced:,.0f}/s", "produced, paced"),
        (f"{rates.followed:,.0f}/s", "followed, on average while up"),
        (f"{rates.followed_best:,.0f}/s", "followed, best 5 seconds"),
        (show.seconds(story.seconds), "in all, with three starts of Spark"),
    ]
    return '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _tile(number: str, what: str) -> str:
    return f'<div class="tile"><b>{escape(number)}</b><span class="soft">{escape(what)}</span></div>'


def _lag_figure(story: Story) -> str:
    samples = story.samples
    joined = min((event.at for event in story.events if event.kind == "join" and "late" in event.text), default=0.0)
    series = [
        Series("orders table (Spark, strandline)", "ours", [(s.at, s.produced - s.orders) for s in samples]),
        Series("naive twin, by its own word", "naive", [(s.at, s.produced - s.naive) for s in samples]),
        Series("late history (no Spark)", "late", [(s.at, s.produced - s.history) for s in samples if s.at >= joined]),
    ]
    return _figure("Records behind the end of the log", series, story, "records behind")


def _speed_figure(story: Story) -> str:
    series = [
        Series("produced", "made", _speeds(story.samples, "produced")),
        Series("applied to the orders table", "ours", _speeds(story.samples, "orders")),
    ]
    return _figure("Records per second", series, story, "records/s")


def _figure(title: str, series: Sequence[Series], story: Story, unit: str) -> str:
    plot = line_plot(title, series, marks=_marks(story.events), bands=_bands(story.events), unit="")
    names = legend(series, "Spark is down or starting")
    return f"<figure>{names}{plot}<figcaption>{unit}, over seconds</figcaption></figure>"


def _speeds(samples: Sequence[Sample], name: str) -> list[tuple[float, float]]:
    """Per second, over a few samples, so that a commit's jump does not look like a burst."""
    speeds = []
    for before, after in zip(samples, samples[_SMOOTH:], strict=False):
        if after.at > before.at:
            speeds.append(
                ((before.at + after.at) / 2, (getattr(after, name) - getattr(before, name)) / (after.at - before.at))
            )
    return speeds


def _marks(events: Iterable[Event]) -> list[Mark]:
    marks = []
    for event in events:
        if event.kind == "kill":
            marks.append(Mark(event.at, "SIGKILL", "kill"))
        elif event.kind == "join" and "late" in event.text:
            marks.append(Mark(event.at, "late one joins", "join"))
        elif event.kind == "checkpoint" and marks:
            marks[-1] = Mark(event.at, "SIGKILL, checkpoints deleted", "kill")
    return marks


def _bands(events: Iterable[Event]) -> list[Band]:
    """The stretches in which Spark was not up: at first, and from each kill on."""
    bands: list[Band] = []
    since: float | None = 0.0
    for event in events:
        if event.kind == "kill":
            since = event.at
        elif event.kind == "up" and since is not None:
            bands.append(Band(since, event.at))
            since = None
    return bands


def _truth_tables(results: Results, records: int) -> str:
    states = [
        (name, (found.rows, found.missing, found.extra, found.different, found.doubled))
        for name, found in (("orders table", results.orders), ("naive twin, as a view", results.naive_state))
    ]
    histories = [
        (name, (found.rows, found.lost, found.doubled))
        for name, found in (("late history", results.history), ("naive twin", results.naive))
    ]
    return _table(
        f"The latest value of each key; by the truth {results.keys:,} keys are alive.",
        ["", "rows", "missing", "extra", "different", "doubled"],
        states,
    ) + _table(f"All {records:,} changes, by offset.", ["", "rows", "lost", "doubled"], histories)


def _table(caption: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[int]]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for name, (total, *wrong) in rows:
        cells = [f"<td>{escape(name)}</td>", f"<td>{total:,}</td>"]
        cells += [f'<td class="{"bad" if count else ""}">{count:,}</td>' for count in wrong]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _events(events: Iterable[Event]) -> str:
    rows = "".join(f"<tr><td>{event.at:.1f} s</td><td>{escape(event.text)}</td></tr>" for event in events)
    return f'<table class="events"><tbody>{rows}</tbody></table>'


def _slots(lag: Lag) -> str:
    columns = ("slot", "position", "records behind", "bytes behind", "last seen", "holder", "epoch", "")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = []
    for slot in lag.slots:
        cells = [
            slot.slot,
            f"{slot.position:,}",
            f"{slot.records_behind:,}",
            show.size(slot.bytes_behind),
            f"{show.seconds(slot.seconds_since_seen)} ago",
            (slot.holder or "-")[:8],
            str(slot.epoch),
            "pins the floor" if slot.pins_floor else "",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f"<p>{escape(floor_sentence(lag))}</p>"
    )
