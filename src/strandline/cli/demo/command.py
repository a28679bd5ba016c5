"""``strandline demo``."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.demo.children import Family
from strandline.cli.demo.generator import Shape
from strandline.cli.demo.orchestrate import Demo
from strandline.cli.demo.places import OUTPUT, Places
from strandline.cli.demo.report import page
from strandline.cli.demo.screen import Screen
from strandline.cli.demo.story import Results, Story
from strandline.cli.lag import rendered
from strandline.errors import MissingExtra, StrandlineError


@guarded
def demo(
    *,
    records: Annotated[int, typer.Option(min=1000, help="How many changes.")] = 1_000_000,
    keys: Annotated[int, typer.Option(min=1, help="Over how many keys.")] = 100_000,
    producers: Annotated[int, typer.Option(min=1, max=16, help="From how many processes.")] = 3,
    seed: Annotated[int, typer.Option(help="The same seed makes the same changes.")] = 7,
    dir: Annotated[Path | None, typer.Option(help="Keep log, tables and report in this new folder.")] = None,  # noqa: A002
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Kill a Spark pipeline at its worst moments, delete its checkpoint, and count what is wrong: nothing.

    Several processes append changes of orders to a log while Spark follows it into a Delta table. Beside it runs a
    naive twin that trusts the checkpoint alone. Needs the extras spark and delta, and Java. Ends with status 0 only
    if our tables are exact.
    """
    if keys < producers:
        raise typer.BadParameter("--keys must be at least --producers: each producer has keys of its own.")
    if dir is not None and dir.exists() and any(dir.iterdir()):
        raise typer.BadParameter(f"--dir {dir} is not empty.")
    _check_extras()
    shape = Shape(records, keys, producers, seed)
    home = _own_folder(dir)
    try:
        with _terminated_like_interrupted():
            story = _play(shape, home, quiet=json)
        report = home / "report.html"
        report.write_text(page(story), encoding="utf-8")
    except StrandlineError:
        if dir is None and not keep:
            _leave(home, home / OUTPUT)  # where it is told what went wrong
        raise
    except BaseException:
        if dir is None and not keep:
            shutil.rmtree(home, ignore_errors=True)
        raise
    if dir is None and not keep:
        _leave(home, report)
    if json:
        show.document({**story.fields(), "report": str(report)})
    else:
        _print(story)
        show.line(f"Report: {report}")
    if not story.outcome.exact:
        raise typer.Exit(1)


def _own_folder(asked: Path | None) -> Path:
    """A new folder that nobody else can have prepared: nothing is written outside of it."""
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="strandline-demo-"))
    home = asked.absolute()
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(mode=0o700)
    return home


def _leave(home: Path, kept: Path) -> None:
    """Remove all but one file or folder."""
    for found in home.iterdir():
        if found == kept:
            continue
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)
        else:
            found.unlink(missing_ok=True)


def _check_extras() -> None:
    for module, extra in (("pyspark", "spark"), ("deltalake", "delta")):
        if find_spec(module) is None:
            raise MissingExtra(f"The demo needs the extra {extra!r}: pip install 'strandline[{extra}]'.")


def _play(shape: Shape, home: Path, *, quiet: bool) -> Story:
    with Screen(shape, quiet=quiet) as screen, Family() as family:
        return Demo(shape, Places(home), family, screen).play()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let a polite request to end clean up as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(story: Story) -> None:
    out, rates, results = show.out(), story.rates(), story.outcome
    if story.lag is not None:
        out.print("\nWho is behind at the end:")
        out.print(rendered(story.lag))
    out.print()
    out.print(_states(results))
    out.print()
    out.print(_histories(results, story.shape.records))
    out.print()
    best = f"{rates.followed_best:,.0f} at best"
    out.print(f"Produced, paced:     {rates.produced:>9,.0f} records/s")
    out.print(f"Followed, with Spark:{rates.followed:>10,.0f} records/s on average while it was up, {best}")
    if story.exposed is not None:
        out.print(
            f"By chance, a kill would have doubled a batch of the twin in {story.exposed:.1%} of its working time."
        )
    out.print(f"Started three times, killed twice, {show.seconds(story.seconds)} in all.\n")
    out.print(_verdict(results))


def _states(results: Results) -> Table:
    table = Table(title="The latest value of each key, against the truth", title_justify="left", box=None)
    for name in ("table", "rows", "missing", "extra", "different", "doubled"):
        table.add_column(name, justify="left" if name == "table" else "right")
    for name, found in (("orders table", results.orders), ("naive twin, as a view", results.naive_state)):
        counts = (found.missing, found.extra, found.different, found.doubled)
        table.add_row(name, f"{found.rows:,}", *map(_counted, counts))
    return table


def _histories(results: Results, records: int) -> Table:
    table = Table(title=f"All {records:,} changes, counted by offset", title_justify="left", box=None)
    for name in ("table", "rows", "lost", "doubled"):
        table.add_column(name, justify="left" if name == "table" else "right")
    for name, found in (("late history", results.history), ("naive twin", results.naive)):
        table.add_row(name, f"{found.rows:,}", _counted(found.lost), _counted(found.doubled))
    return table


def _counted(wrong: int) -> Text:
    return Text(f"{wrong:,}", "bold red" if wrong else "green")


def _verdict(results: Results) -> Text:
    twin = (
        "The naive twin happens to be right this time."
        if results.naive_exact
        else f"The naive twin lost {results.naive.lost:,} changes and doubled {results.naive.doubled:,}."
    )
    if results.exact:
        return Text.assemble(("EXACT", "bold green"), f": both tables that follow the log equal the truth. {twin}")
    return Text.assemble(("WRONG", "bold red"), f": {results.orders}, {results.history}. {twin}")
