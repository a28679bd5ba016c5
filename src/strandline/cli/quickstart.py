"""``strandline quickstart``: append, follow, kill, resume, compare; without Spark and without Java.

The main functions are printed before they run.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import typer
from rich.syntax import Syntax
from rich.text import Text

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.common import guarded
from strandline.errors import StrandlineError

_RULE: Final = 100
CHANGES: Final = 40_000


def append(url: str, changes: int) -> dict[bytes, bytes]:
    """Append changes to a new log; returns the expected latest values, from a plain dict."""
    truth: dict[bytes, bytes] = {}
    log = sl.open(url, create=True)
    with log.producer() as producer:
        for number in range(changes):
            key = b"order-%d" % (number * 7919 % 5000)
            if number % 11 == 0:
                producer.append(key=key, op=sl.Op.DELETE)
                truth.pop(key, None)
            else:
                value = b'{"order": "%s", "version": %d}' % (key, number)
                producer.append(key=key, value=value)
                truth[key] = value
            if number % 2000 == 0:
                producer.flush()  # durable and listed, up to here
    return truth


def follow(url: str, table: str) -> None:
    """Apply the log to a Delta table, up to its present end, in small commits, so that it can be killed half-way."""
    batching = sl.followers.Batching(records=2000)
    sl.follow(sl.open(url), sl.DeltaSink(table, mode="latest"), slot="quickstart", batching=batching, upto="end")


def follow_and_kill(url: str, table: str) -> int:
    """Follow in another process, and kill that half-way with SIGKILL. Returns the offset of the table."""
    log, sink = sl.open(url), sl.DeltaSink(table, mode="latest")
    child = subprocess.Popen([sys.executable, "-m", "strandline.cli.quickstart", url, table])
    try:
        while child.poll() is None:
            cursor = sink.cursor(log.log_id)
            if cursor is not None and cursor.next >= log.bounds().next // 2:
                break
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    stored = sink.cursor(log.log_id)
    return 0 if stored is None else stored.next


def compare(table: str, truth: dict[bytes, bytes]) -> dict[str, int]:
    """Count the wrong rows in the table, by reading its files."""
    from deltalake import DeltaTable
    from pyarrow import parquet

    # Not to_pyarrow_table: its threads call Python, and if one still does when Python ends, the process aborts.
    rows = parquet.read_table(DeltaTable(table).file_uris(), columns=["key", "value"]).to_pylist()
    found = {row["key"]: row["value"] for row in rows}
    return {
        "rows": len(rows),
        "missing": len(truth.keys() - found.keys()),
        "extra": len(found.keys() - truth.keys()),
        "different": sum(found[key] != truth[key] for key in found.keys() & truth.keys()),
        "doubled": len(rows) - len(found),
    }


@guarded
def quickstart() -> None:
    """Follow a log into a table, killed half-way: the shortest proof.

    Appends, follows into a Delta table, kills the follower, resumes, compares. Needs neither Spark nor Java.

    Example: strandline quickstart
    """
    home = Path(tempfile.mkdtemp(prefix="strandline-quickstart-"))
    began = time.monotonic()
    try:
        facts = _run(str(home / "log"), str(home / "table"))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    facts["seconds"] = round(time.monotonic() - began, 1)
    verdict = ("EXACT" if facts["exact"] else "WRONG", "bold")
    show.answer(facts, Text.assemble(verdict, f" after {show.seconds(facts['seconds'])}"))
    if not facts["exact"]:
        raise typer.Exit(1)


def _run(url: str, table: str) -> dict[str, Any]:
    if not show.for_programs():
        _print_source()
    _say("append", f"{CHANGES:,} changes to {url}")
    truth = append(url, CHANGES)
    end = sl.open(url).bounds().next
    _say("", f"the log ends at offset {end:,}; {len(truth):,} keys are alive")
    _say("follow", "into a Delta table, in a process of its own …")
    killed_at = follow_and_kill(url, table)
    left = show.counted(end - killed_at, "record")
    _say("kill", f"SIGKILL; the table is at offset {killed_at:,}, {left} still to come")
    if not 0 < killed_at < end:
        raise StrandlineError("The follower was not caught half-way; run it again.")
    before = compare(table, truth)
    _say("", f"compared with the truth now: {_words(before)}")
    _say("resume", "from the cursor that the table itself carries; no checkpoint, nothing to clean up")
    follow(url, table)
    after = compare(table, truth)
    _say("compare", f"with the truth: {_words(after)}")
    wrong = {name: count for name, count in after.items() if name != "rows" and count}
    return {
        "changes": CHANGES,
        "killed_at": killed_at,
        "after_kill": before,
        "after_resume": after,
        "exact": not wrong and after["rows"] == len(truth) and end == CHANGES,
    }


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _say(step: str, text: str) -> None:
    if not show.for_programs():
        show.out().print(show.labelled(Text(f"{step:>8}", "bold cyan"), text))


def _print_source() -> None:
    parts = [inspect.getsource(function) for function in (append, follow, follow_and_kill, compare)]
    source = "import signal\nimport subprocess\nimport sys\nimport time\n\nimport strandline as sl\n\n\n" + "\n\n".join(
        parts
    )
    if sys.stdout.isatty():
        show.out().print(Syntax(source, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        print(source)
    show.out().print("─" * min(_RULE, show.out().width))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        follow(*sys.argv[1:])
