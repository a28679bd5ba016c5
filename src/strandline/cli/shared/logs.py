"""Log messages of commands on standard error: lines for people, or JSON lines for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal


class _Text(logging.Formatter):
    """Log lines with untrusted names escaped."""

    def format(self, record: logging.LogRecord) -> str:
        from strandline.cli.shared.text import escaped  # here, since --help needs none of it

        return escaped(super().format(record), keep="\n")


class _Json(logging.Formatter):
    """One JSON object per message."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what standard error is now: a progress bar replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, stream: Any) -> None:
        pass


_LOGGER: Final = logging.getLogger("strandline")
_HANDLER: Final = _Stderr()


def write_as(form: Literal["text", "json"]) -> None:
    """The format of all log messages of this process. As JSON, warnings are written from now on."""
    _HANDLER.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)-7s %(message)s"))
    if form == "json":
        log_to_stderr(logging.WARNING)


def log_to_stderr(level: int) -> None:
    """Write the package's log messages to standard error, from ``level`` on."""
    if _HANDLER.formatter is None:
        write_as("text")
    _LOGGER.handlers[:] = [_HANDLER]
    _LOGGER.setLevel(level)


def is_json() -> bool:
    """Whether all that is written to standard error has to be JSON lines."""
    return isinstance(_HANDLER.formatter, _Json)


def say(level: int, text: str) -> None:
    """Write one line in the format of log messages."""
    _HANDLER.emit(logging.LogRecord("strandline.cli", level, "", 0, text, None, None))
