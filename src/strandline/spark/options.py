"""The data source's options, from Spark's strings to values. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from strandline.model.cursor import NO_LIMIT, Cursor, Limit
from strandline.model.errors import InvalidInput

Position = Literal["earliest", "latest"] | int | Cursor
"""A place in a log: one of its ends, an offset, or a cursor that also names the log."""

STORAGE_PREFIX: Final = "storage."
"""Options that begin so are passed on to the object store, without the prefix."""

_KNOWN: Final = (
    "path",
    "startingOffset",
    "endingOffset",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "maxBatchesPerTrigger",
    "failOnDataLoss",
    "partitions",
)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read and how.

    ``limit`` is per trigger of a stream. ``partitions`` is how many tasks to aim for, usually the number of cores of
    the cluster; None means those of the driver's machine.
    """

    url: str
    start: Position = "earliest"
    end: Position = "latest"
    limit: Limit = NO_LIMIT
    fail_on_data_loss: bool = True
    partitions: int | None = None
    storage: dict[str, str] = field(default_factory=dict)


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a read, or one sentence about the first that cannot be meant.

    >>> parse_options({"path": "s3://bucket/orders", "startingOffset": "42"}).start
    42
    >>> parse_options({"path": "s3://bucket/orders", "startOffset": "42"})
    Traceback (most recent call last):
    ...
    strandline.model.errors.InvalidInput: The source has no option 'startoffset'; did you mean 'startingOffset'?
    """
    given = {name.lower(): value for name, value in options.items()}
    known = {name.lower(): name for name in _KNOWN}
    for name in given:
        if name not in known and not name.startswith(STORAGE_PREFIX):
            raise InvalidInput(_unknown(name, known))
    url = given.get("path", "")
    if not url:
        raise InvalidInput("The source 'strandline' needs the log's address: .load('s3://bucket/log').")
    if url.startswith("memory:"):
        raise InvalidInput(
            f"{url} lives in one process's memory, and Spark reads in others: use a file:// or bucket address."
        )
    return ReadOptions(
        url=url,
        start=_position(given, "startingOffset", "earliest"),
        end=_position(given, "endingOffset", "latest"),
        limit=Limit(
            records=_count(given, "maxRecordsPerTrigger"),
            bytes=_count(given, "maxBytesPerTrigger"),
            batches=_count(given, "maxBatchesPerTrigger"),
        ),
        fail_on_data_loss=_truth(given, "failOnDataLoss", default=True),
        partitions=_count(given, "partitions"),
        storage={
            name[len(STORAGE_PREFIX) :]: value for name, value in given.items() if name.startswith(STORAGE_PREFIX)
        },
    )


def _unknown(name: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {known[near[0]]!r}?" if near else f"it has {', '.join(_KNOWN)} and {STORAGE_PREFIX}*."
    return f"The source has no option {name!r}; {hint}"


def _position(given: Mapping[str, str], name: str, default: Position) -> Position:
    text = given.get(name.lower())
    if text is None:
        return default
    text = text.strip()
    match text.lower():
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
    if text.isdecimal():
        return int(text)
    try:
        return Cursor.parse(text)
    except InvalidInput as error:
        raise InvalidInput(
            f"{name} is 'earliest', 'latest', an offset or a cursor ('log-id/term/offset'), not {text!r}."
        ) from error


def _count(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name.lower())
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise InvalidInput(f"{name} is a whole number of at least 1, not {text!r}.")
    return int(text)


def _truth(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = given.get(name.lower())
    if text is None:
        return default
    match text.strip().lower():
        case "true":
            return True
        case "false":
            return False
    raise InvalidInput(f"{name} is 'true' or 'false', not {text!r}.")
