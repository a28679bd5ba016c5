"""``strandline config``: check, show and reload the file of a server."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Any, Final

from strandline.cli.shared import output as show
from strandline.cli.shared.common import guarded
from strandline.cli.shared.groups import group
from strandline.cli.shared.options import argument
from strandline.errors import InvalidInput, NotReady
from strandline.serve.config.changes import changes
from strandline.serve.config.reading import parse_config, read_config
from strandline.serve.config.shown import shown_settings
from strandline.serve.own_folder import RUNNING, running_process
from strandline.storage.disk import DISK

config = group("Check, show and reload the file of a server.")

SettingsFile = Annotated[str, argument("FILE", "The file with the settings: strandline.toml.")]

_PATIENCE: Final = 30.0
"""Seconds in which a server reads its file again."""
_LOOK: Final = 0.05


@config.command()
@guarded
def check(file: SettingsFile) -> None:
    """Read the file of a server, and name the line of whatever is wrong in it. Nothing is opened or started.

    Example: strandline config check strandline.toml
    """
    found = read_config(file, DISK)
    counts = {name: len(getattr(found.settings, name)) for name in ("logs", "ingest", "tables", "snapshots")}
    parts = ", ".join(f"{count} in [{name}]" for name, count in counts.items() if count)
    show.answer({"file": file, **counts}, f"{file} is right: {parts or 'no logs'}.")


@config.command("show")
@guarded
def show_(file: SettingsFile) -> None:
    """Show every setting of a server, and where its value comes from: a line of the file, a default, the environment.

    Secrets are hidden.

    Example: strandline config show strandline.toml
    """
    shown = shown_settings(read_config(file, DISK), os.environ)
    table = show.table("setting", "value", "from")
    for each in shown:
        table.add_row(each.name, _text(each.value), each.source)
    rows = [{"setting": each.name, "value": each.value, "from": each.source} for each in shown]
    show.answer({"file": file, "settings": rows}, table)


def _text(value: Any) -> str:
    """A value as the file has it."""
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@config.command()
@guarded
def reload(file: SettingsFile) -> None:
    """Let the running server of a file read it again: it changes what it can without a restart.

    Says what is changed, and what only a restart changes. A file with an error changes nothing.

    Example: strandline config reload strandline.toml
    """
    wanted = read_config(file, DISK)
    folder = wanted.settings.process.folder
    process = running_process(folder, DISK)
    if process is None:
        raise NotReady(f"No server of {file} runs: there is none on {folder}. Start it with 'strandline serve {file}'.")
    before = parse_config(DISK.read(f"{folder}/{RUNNING}").decode(), file)
    found = changes(before.settings, wanted.settings)
    try:
        os.kill(process.pid, signal.SIGHUP)
    except PermissionError as error:
        raise InvalidInput(f"Process {process.pid} belongs to another user: reload it as that one, or root.") from error
    deadline = time.monotonic() + _PATIENCE
    while DISK.read(f"{folder}/{RUNNING}").decode() != wanted.text:
        if time.monotonic() > deadline:
            raise NotReady(f"Process {process.pid} has not read {file} within {_PATIENCE:g} s: look at its log.")
        time.sleep(_LOOK)
    applied, restart = found.lines()[: -len(found.restart) or None], list(found.restart)
    fields = {"pid": process.pid, "changed": applied, "restart": restart}
    show.answer(fields, *(found.lines() or ["Nothing is changed."]))
