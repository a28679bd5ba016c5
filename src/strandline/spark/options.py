"""Options of the data source: parsing of Spark's strings. Pure."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeVar

from strandline.compat.v1.log import QueueFormat
from strandline.errors import InvalidInput
from strandline.log.slots.rules import check_name
from strandline.model.addresses import ParsedAddress
from strandline.model.arguments import LARGEST_NUMBER, shown
from strandline.model.cursor import NO_LIMIT, Cursor, Limit, Start, microseconds
from strandline.model.retention import parse_seconds
from strandline.spark.record_bounds import EVERYTHING, RecordBounds
from strandline.spark.storage_options import STORAGE_PREFIX, storage_options
from strandline.values.decoding import BadRows

Word = TypeVar("Word", bound=str)

NODE_OPTIONS: Final = {
    "token_file": "tokenFile",
    "ca": "ca",
    "ca_file": "caFile",
    "cert_file": "certFile",
    "key_file": "keyFile",
}
"""Options by which nodes are called, beside the token itself."""
_ACCESS: Final = {"token": "token", **NODE_OPTIONS}
_KNOWN: Final = (
    "path",
    "startingOffset",
    "startingTimestamp",
    "endingOffset",
    "endingTimestamp",
    "timestampFrom",
    "timestampBefore",
    "keyPrefix",
    "keyPrefixHex",
    "slot",
    "resetSlot",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "maxBatchesPerTrigger",
    "failOnDataLoss",
    "partitions",
    "hold",
    "logFormat",
    "manifest",
    "data",
    *_ACCESS.values(),
    "readFrom",
    "decode",
    "badRows",
)

QUEUE_V1: Final = "queue-v1"
_DIGITS: Final = len(str(LARGEST_NUMBER))


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """How a node is called to plan. Only the driver has it: executors read by the tickets of what was planned."""

    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ca: str | None = field(default=None, repr=False)
    """The roots that sign the nodes' certificates, as PEM."""
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    read_from: Literal["primary", "replicas"] = "primary"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read and how.

    ``limit`` is per trigger of a stream. ``partitions`` is the target number of tasks, usually the number of cores of
    the cluster; None means those of the driver's machine. ``hold`` is for how many seconds the planned records of a
    batch read are pinned; None means not at all. ``where`` bounds the records that are read. ``slot`` is the slot of a
    stream, which ``resets_slot`` makes valid again. ``decode``: values are decoded as the log says; ``bad_rows`` is
    what happens to those that cannot be. ``queue`` has the paths of a queue of version 1; None means an object log.
    """

    url: str
    start: Start = "retained"
    end: Start = "now"
    limit: Limit = NO_LIMIT
    fail_on_data_loss: bool = True
    partitions: int | None = None
    hold: int | None = None
    where: RecordBounds = EVERYTHING
    slot: str | None = None
    resets_slot: bool = False
    decode: bool = False
    bad_rows: BadRows = "fail"
    queue: QueueFormat | None = None
    storage: dict[str, str] = field(default_factory=dict, repr=False)
    node: NodeAccess = NodeAccess()

    @property
    def is_node(self) -> bool:
        """Whether the log is read from nodes."""
        return ParsedAddress.of(self.url).is_node


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read; one sentence about the first invalid one.

    >>> parse_options({"path": "s3://bucket/orders", "startingOffset": "42"}).start
    42
    >>> parse_options({"path": "s3://bucket/orders", "startOffset": "42"})
    Traceback (most recent call last):
    ...
    strandline.errors.InvalidInput: The source has no option 'startoffset'; did you mean 'startingOffset'?
    """
    given = given_options(options, _KNOWN, "source")
    url = shared_address(given)
    if "resetslot" in given and "slot" not in given:
        raise InvalidInput("resetSlot is for the slot of a stream: name that with the option slot.")
    return ReadOptions(
        url=url,
        start=_start_or_end(given, "starting", "retained"),
        end=_start_or_end(given, "ending", "now"),
        limit=Limit(*(count_of(given, f"max{what}PerTrigger") for what in ("Records", "Bytes", "Batches"))),
        fail_on_data_loss=truth_of(given, "failOnDataLoss", default=True),
        partitions=count_of(given, "partitions"),
        hold=_hold(given),
        where=_bounds(given),
        slot=None if "slot" not in given else check_name(given["slot"]),
        resets_slot=truth_of(given, "resetSlot", default=False),
        decode=truth_of(given, "decode", default=False),
        bad_rows=_bad_rows(given),
        queue=_queue(given),
        storage=storage_options(given),
        node=node_access_of(given, url),
    )


def node_access_of(given: Mapping[str, str], url: str) -> NodeAccess:
    """How nodes are called; ``InvalidInput`` if the log is not one of a node."""
    texts = {field: given.get(name.lower()) for field, name in _ACCESS.items()}
    named = [name for name in (*_ACCESS.values(), "readFrom") if name.lower() in given]
    if not ParsedAddress.of(url).is_node:
        if named:
            raise InvalidInput(f"{', '.join(named)} is for nodes (grpc://), not for {url}.")
        return NodeAccess()
    for one, other in (("token", "tokenFile"), ("ca", "caFile")):
        if one in named and other in named:
            raise InvalidInput(f"Give {one} or {other}, not both.")
    return NodeAccess(**texts, read_from=word_of(given, "readFrom", "primary", "replicas"))


def _hold(given: Mapping[str, str]) -> int | None:
    text = given.get("hold")
    if text is None:
        return None
    if given.get("logformat", "").strip():
        raise InvalidInput(
            "hold is for object logs: a queue has one slot, its consumer's, and only that pins its batches."
        )
    seconds = whole_of(text)
    if seconds is None:
        with contextlib.suppress(InvalidInput):
            seconds = parse_seconds(text.strip())
    if not seconds:
        raise InvalidInput(f"hold is a time of at least a second, such as 900, '15m' or '1h', not {shown(text)}.")
    return seconds


def _bad_rows(given: Mapping[str, str]) -> BadRows:
    if "badrows" in given and not truth_of(given, "decode", default=False):
        raise InvalidInput("badRows is for decoded values: add .option('decode', 'true').")
    return word_of(given, "badRows", "fail", "null")


def _queue(given: Mapping[str, str]) -> QueueFormat | None:
    paths: dict[str, Any] = {name: given[name] for name in ("manifest", "data") if name in given}
    match given.get("logformat", "").strip().lower():
        case "":
            if paths:
                raise InvalidInput(f"The option {min(paths)!r} is for queues: add .option('logFormat', '{QUEUE_V1}').")
            return None
        case "queue-v1":
            return QueueFormat(**paths)
    raise InvalidInput(f"logFormat is '{QUEUE_V1}', 'topic' or, for a log, left out; not {shown(given['logformat'])}.")


def given_options(options: Mapping[str, str], known: Sequence[str], what: str) -> dict[str, str]:
    """The options in lower case; ``InvalidInput`` for one that ``what`` does not have, or without the log's address."""
    given = {name.lower(): value for name, value in options.items()}
    names = {name.lower(): name for name in known}
    for name in given:
        if name not in names and not name.startswith(STORAGE_PREFIX):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {names[near[0]]!r}?" if near else f"it has {', '.join(known)} and {STORAGE_PREFIX}*."
            raise InvalidInput(f"The {what} has no option {shown(name)}; {hint}")
    if not given.get("path"):
        verb = "load" if what == "source" else "save"
        raise InvalidInput(f"The {what} 'strandline' needs the log's address: .{verb}('s3://bucket/log').")
    return given


def shared_address(given: Mapping[str, str]) -> str:
    """The address of a log that all of Spark's processes can open."""
    place = ParsedAddress.of(given["path"])
    if place.scheme == "memory":
        raise InvalidInput(
            f"{place.text} is in one process's memory, but Spark works in others: use a file:// or bucket address."
        )
    return place.text


def _position(given: Mapping[str, str], name: str, default: Start) -> Start:
    text = given.get(name.lower())
    if text is None:
        return default
    text = text.strip()
    match text.lower():
        case "earliest" | "retained":
            return "retained"
        case "beginning":
            return 0  # refused if that was trimmed
        case "latest":
            return "now"
    if (offset := whole_of(text)) is not None:
        return offset
    try:
        return Cursor.parse(text)
    except InvalidInput as error:
        raise InvalidInput(
            f"{name} is 'earliest' (the first retained record), 'beginning' (the very first record), 'latest', an "
            f"offset or a cursor ('log-id/term/offset'), not {shown(text)}."
        ) from error


def _start_or_end(given: Mapping[str, str], which: str, default: Start) -> Start:
    time = time_of(given, f"{which}Timestamp")
    if time is None:
        return _position(given, f"{which}Offset", default)
    if f"{which}offset" in given:
        raise InvalidInput(f"Give {which}Offset or {which}Timestamp, not both.")
    return time


def _bounds(given: Mapping[str, str]) -> RecordBounds:
    since, before = (time_of(given, name) for name in ("timestampFrom", "timestampBefore"))
    if "keyprefix" in given and "keyprefixhex" in given:
        raise InvalidInput("Give keyPrefix or keyPrefixHex, not both.")
    prefix: bytes | None = None
    try:
        if "keyprefix" in given:
            prefix = given["keyprefix"].encode()
        elif "keyprefixhex" in given:
            prefix = bytes.fromhex(given["keyprefixhex"])
    except ValueError as error:
        which, what = ("keyPrefix", "text") if "keyprefix" in given else ("keyPrefixHex", "in hexadecimal")
        raise InvalidInput(f"{which} is {shown(given[which.lower()])}, and not {what}.") from error
    return RecordBounds(
        None if since is None else microseconds(since), None if before is None else microseconds(before), prefix
    )


def time_of(given: Mapping[str, str], name: str) -> datetime | None:
    """A time: in ISO 8601 with a time zone, or in milliseconds since the epoch; None if it is not given."""
    text = given.get(name.lower())
    if text is None:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        if (number := whole_of(text)) is not None:
            return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=number)
        found = datetime.fromisoformat(text.strip())
        if found.tzinfo is not None:
            return found
    raise InvalidInput(
        f"{name} is a time with its zone, such as '2026-11-17T08:00:00Z', or milliseconds since the epoch, not "
        f"{shown(text)}."
    )


def count_of(given: Mapping[str, str], name: str, least: int = 1) -> int | None:
    """A number of at least ``least``; None if it is not given."""
    text = given.get(name.lower())
    if text is None:
        return None
    number = whole_of(text)
    if number is None or number < least:
        raise InvalidInput(f"{name} is a whole number of at least {least}, not {shown(text)}.")
    return number


def whole_of(text: str) -> int | None:
    """The number in a text; None if it is none, or larger than any offset."""
    plain = text.strip()
    number = int(plain) if plain.isdecimal() and len(plain) <= _DIGITS else -1
    return number if 0 <= number <= LARGEST_NUMBER else None


def truth_of(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    """An option that is true or false."""
    return default if name.lower() not in given else word_of(given, name, "true", "false") == "true"


def word_of(given: Mapping[str, str], name: str, *words: Word) -> Word:
    """An option that is one of some words, the first of which is the default."""
    text = given.get(name.lower(), words[0])
    found = next((word for word in words if word == text.strip().lower()), None)
    if found is None:
        raise InvalidInput(f"{name} is {' or '.join(map(repr, words))}, not {shown(text)}.")
    return found
