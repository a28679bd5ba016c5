"""``strandline demo``."""

from __future__ import annotations

import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from strandline.cli import output as show
from strandline.cli.common import Json, guarded
from strandline.cli.demo.folder import OUTPUT, DemoFolder
from strandline.cli.demo.generator import Shape
from strandline.cli.demo.orchestrate import Demo
from strandline.cli.demo.processes import ProcessGroup
from strandline.cli.demo.report import page, summary
from strandline.cli.demo.result import DemoResult
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
    for module, extra in (("pyspark", "spark"), ("deltalake", "delta")):
        if find_spec(module) is None:
            raise MissingExtra(f"The demo needs the extra {extra!r}: pip install 'strandline[{extra}]'.")
    shape = Shape(records, keys, producers, seed)
    temporary = dir is None and not keep
    folder = _new_folder(dir)
    report = folder / "report.html"
    try:
        result = _run(shape, folder, quiet=json)
        report.write_text(page(result), encoding="utf-8")
    except StrandlineError:
        if temporary:
            _remove_all_but(folder / OUTPUT)  # the error names a file of it
        raise
    except BaseException:
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if temporary:
        _remove_all_but(report)
    if json:
        show.document({**result.fields(), "report": str(report)})
    else:
        show.out().print(summary(result))
        show.line(f"Report: {report}")
    if not result.comparison.exact:
        raise typer.Exit(1)


def _new_folder(asked: Path | None) -> Path:
    """A folder that nobody else can have prepared: the demo writes only into it."""
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="strandline-demo-"))
    folder = asked.absolute()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    return folder


def _remove_all_but(kept: Path) -> None:
    for found in kept.parent.iterdir():
        if found == kept:
            continue
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)
        else:
            found.unlink(missing_ok=True)


def _run(shape: Shape, folder: Path, *, quiet: bool) -> DemoResult:
    """Run the demo. SIGTERM cleans up as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with ProcessGroup() as processes:
            printed = (lambda _: None) if quiet else show.out().print
            return Demo(shape, DemoFolder(folder), processes, printed).run()
    finally:
        signal.signal(signal.SIGTERM, before)
