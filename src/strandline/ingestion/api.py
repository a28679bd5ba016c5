"""The public call: ``ingest``, of logs or of their addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from os import PathLike
from threading import Event as StopEvent
from typing import Any, TypeVar

from strandline.errors import InvalidInput
from strandline.followers.run import Batching
from strandline.ingestion.jetstream import JetStreamSource
from strandline.ingestion.kafka import KafkaPartition
from strandline.ingestion.log_sink import TargetLog
from strandline.ingestion.run import Ingested, IngestProgress, ingest_log
from strandline.log.contract import Log
from strandline.model.addresses import Address, ParsedAddress
from strandline.model.arguments import checked
from strandline.model.cursor import Start
from strandline.opening import open_url
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env

T = TypeVar("T")


@checked
def ingest(
    source: Address | Log,
    target: Address | TargetLog,
    *,
    follow: bool = False,
    slot: str | None = None,
    start: Start = "beginning",
    skip_trimmed: bool = False,
    stop: StopEvent | None = None,
    batching: Batching | None = None,
    on_progress: Callable[[IngestProgress], None] | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    env: Env = SYSTEM,
) -> Ingested:
    """Append every record of a source to a log, exactly once and in order, however often it is interrupted.

    The target alone holds the progress: records and source position are in one append. Killed at any moment and
    started again, it continues behind the last record in the target, even if the target has deleted that record since.
    Of two ingests of the same source into one target, one is refused; other writers of the target do no harm. Keys,
    operations, values, timestamps and headers are kept; offsets differ, see
    :func:`~strandline.ingestion.translation.translate_cursor`.

    Args:
        source: A log or its address, as for ``strandline.open``, where a WAL is read beside the process that writes
            it; or ``kafka://host:port/topic[/partition]``, or ``nats://host:port/stream``.
        target: A log that can be appended to, or its address; an object log or a WAL is created if there is none.
        follow: Continue at the end until ``stop`` is set, and survive outages of source and target of up to a
            quarter of an hour. Otherwise it ends at the source's end as of now.
        slot: The slot that pins the source between two runs. Without one the source is pinned only while
            this runs; with ``follow`` the slot is called ``ingest-`` and the target's id.
        start: Where the first ingest of a source begins; later ones continue.
        skip_trimmed: Continue with the first retained record if the source deleted records before they were ingested.
        stop: Ends it soon; everything that was read is appended before.
        batching: Limits of one append.
        on_progress: Called after each append.
        source_options: Arguments of ``strandline.open`` for the address of the source; for Kafka and NATS ``config``,
            the settings of the client, and ``timeout``.
        target_options: The same for the target.
        env: Clock and chance, for tests.

    Raises ``CursorExpired`` if the source deleted records that were not ingested yet, ``Diverged`` if it is not the one
    that was ingested before, ``OutOfOrder`` if another ingest appends the same source, or the target lost its end.

    >>> import pyarrow as pa
    >>> orders = open_url("memory://doctest-ingest", create=True)
    >>> with orders.producer() as producer:
    ...     _ = producer.append_batch(pa.table({"key": [b"a", b"b"], "value": [b"1", b"2"]}))
    >>> copy = open_url("memory://doctest-ingested", create=True)
    >>> ingest(orders, copy).records, ingest(orders, copy).records, copy.bounds()
    (2, 0, Bounds(first=0, next=2))
    """
    with contextlib.ExitStack() as opened:
        return ingest_log(
            entered(source, open_source, source_options, opened),
            entered(target, open_target, target_options, opened),
            slot=slot,
            start=start,
            skip_trimmed=skip_trimmed,
            keep_following=follow,
            stop=stop,
            batching=batching,
            on_progress=on_progress or (lambda _: None),
            env=env,
        )


def entered(
    log: T | Address, open_: Callable[..., T], options: Mapping[str, Any] | None, opened: contextlib.ExitStack
) -> T:
    """The given log; or the one at an address, which is closed at the end."""
    if not isinstance(log, (str, PathLike)):
        return log
    found = open_(log, **(options or {}))
    if isinstance(found, Closing):
        opened.enter_context(found)
    return found


def open_source(address: Address, **options: Any) -> Any:
    """The source at an address; a write-ahead log is opened for reading."""
    place = ParsedAddress.of(address)
    match place.scheme:
        case "kafka":
            return KafkaPartition(place.text, **_stream_options(options))
        case "nats" | "tls":
            return JetStreamSource(place.text, **_stream_options(options))
        case "wal":
            return open_url(address, **{"read_only": True, **options})
    return open_url(address, **options)


def _stream_options(options: dict[str, Any]) -> dict[str, Any]:
    if wrong := sorted(options.keys() - {"config", "timeout", "clock"}):
        raise InvalidInput(f"The source_options of a stream are config and timeout, not {wrong[0]!r}.")
    return options


def open_target(address: Address, **options: Any) -> Any:
    """The target at an address; an object log or a write-ahead log is created if there is none."""
    is_node = ParsedAddress.of(address).is_node
    return open_url(address, **options) if is_node else open_url(address, create=True, **options)
