"""``strandline serve``: one process from one file."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from strandline.cli.shared import output as show
from strandline.cli.shared.common import Quiet, guarded, stop_on_signal
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.options import argument
from strandline.errors import InvalidInput, StrandlineError
from strandline.model.addresses import ParsedAddress
from strandline.serve.api.app import served
from strandline.serve.api.permissions import check_http
from strandline.serve.config.reading import ConfigFile, read_config
from strandline.serve.config.settings import LogSection, ProcessSection, Settings
from strandline.serve.opening import access_of
from strandline.serve.own_folder import held_folder, keep_running
from strandline.serve.server import Server
from strandline.serve.systemd import SystemdNotifier
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM

_LOOK: Final = 0.2
_LOGGER: Final = logging.getLogger("strandline.serve")


@guarded
def serve(
    file: Annotated[str, argument("FILE|URL", "The file with the settings; or a log, for a look at it.")],
    *,
    quiet: Quiet = False,
) -> None:
    """Run everything that a file names: logs, nodes, ingests, tables, HTTP.

    Logs with their trims and cold tiers, also snapshots, health and metrics, until Ctrl-C or SIGTERM. A part that fails
    is tried again, and the others go on. SIGHUP, or 'strandline config reload', reads the file again.
    SIGTERM lets everything finish within the deadline of the file; a second one ends the process at once, which loses
    nothing. With the address of a log instead of a file, nothing is stored or changed.

    Example: strandline serve strandline.toml
    """
    config = _config(file)
    settings = config.settings
    access = access_of(settings, os.environ, SYSTEM)
    check_http(settings.http.listen, access.server)
    log_to_stderr(logging.WARNING if quiet else logging.INFO)
    folder = settings.process.folder or None
    supervisor = SystemdNotifier(os.environ)
    with contextlib.ExitStack() as held:
        if folder is not None:
            held.enter_context(held_folder(folder, SYSTEM))
            keep_running(folder, config.text, DISK)
        stop = held.enter_context(stop_on_signal())
        wanted = held.enter_context(_reload_on_signal())
        server = Server(settings, access, folder)
        with served(settings, server, access) as url:
            server.start()
            fields = {"url": url, "pid": os.getpid(), "logs": list(settings.logs), "tables": list(settings.tables)}
            show.answer(fields, f"{file} is served at {url}.")
            _run(server, config, stop, wanted, supervisor)
            supervisor.tell("STOPPING=1")
        late = server.stop()
    _LOGGER.info("Stopped%s.", f"; not in time: {', '.join(map(str, late))}" if late else "")


def _run(
    server: Server, config: ConfigFile, stop: threading.Event, wanted: threading.Event, supervisor: SystemdNotifier
) -> None:
    """Tell the supervisor of the process, and read the file again if asked to, until it is stopped."""
    is_told, alive = False, time.monotonic()
    while not stop.wait(_LOOK):
        if not is_told and server.why_not_ready() is None:
            is_told = True
            supervisor.tell("READY=1")
        if supervisor.watchdog and time.monotonic() - alive >= supervisor.watchdog and server.why_failed() is None:
            alive = time.monotonic()
            supervisor.tell("WATCHDOG=1")
        if wanted.is_set():
            wanted.clear()
            _reload(server, config)


def _reload(server: Server, config: ConfigFile) -> None:
    try:
        found = read_config(config.path, DISK)
        server.change(found.settings)
    except (StrandlineError, OSError) as error:
        _LOGGER.error("%s is not read again, and nothing is changed: %s", config.path, error)  # noqa: TRY400
        return
    keep_running(server.settings.process.folder, found.text, DISK)


@contextlib.contextmanager
def _reload_on_signal() -> Iterator[threading.Event]:
    """An event that SIGHUP sets."""
    wanted = threading.Event()
    before = signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=wanted.set).start())
    try:
        yield wanted
    finally:
        signal.signal(signal.SIGHUP, before)


def _config(file: str) -> ConfigFile:
    """The settings of a file; or for the address of a log those that only look at it."""
    if "://" not in file and not Path(file).is_dir():
        return read_config(file, DISK)
    address = file if "://" in file else str(Path(file).absolute())
    name = ParsedAddress.of(address).text.rstrip("/").rpartition("/")[2] or "log"
    if ParsedAddress.of(address).is_wal:
        raise InvalidInput(
            f"{file} is a write-ahead log, which only one process writes: write a file with [logs.NAME] to serve it."
        )
    settings = Settings(process=ProcessSection(folder=""), logs={name: LogSection(address=address)})
    return ConfigFile(file, "", settings, {}, {})
