"""Opens logs with their cold tier, and attaches cold tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import InvalidInput, NotFound
from strandline.log.object.log import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader, WalReading
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import ANY, checked, whole
from strandline.model.segments import COLD_FOLDER, ColdTier, TopicPartition
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.urls import open_store
from strandline.tier.attachment import PARTITIONS, ColdAccess, ColdCell, open_events
from strandline.tier.copy.tierer import Tierer
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.cold_reader import ColdReader
from strandline.tier.read.tiered_log import TieredLog, check_tierable, hot_log

H = TypeVar("H", bound=ObjectLog | WalLog | WalReader)
_MOST_PARTITIONS: Final = 10_000
_PLAIN: Final = ColdAccess()
Tierable = Annotated[ObjectLog | WalReading | WriteAheadLog | TieredLog, ANY]
"""The logs that can have a cold tier."""


@checked
def tiered(
    log: H,
    *,
    options: Mapping[str, str] | None = None,
    events_options: Mapping[str, Any] | None = None,
    close_hot: bool = False,
    env: Env = SYSTEM,
) -> H | TieredLog:
    """The log with its cold tier, which is opened on first use; the log itself if it has none.

    ``options`` are for stores, ``events_options`` for Kafka's client. Closing the result closes the cold tier; the log
    itself stays open unless ``close_hot``. A :class:`~strandline.log.wal.read.reading.WalReader` can be read so, and
    has no slots to change. ``Unsupported`` for logs that cannot have a cold tier.
    """
    if isinstance(log, TieredLog):
        return log
    access = ColdAccess(options, events_options, env)
    cell = cold_cell(log, access)
    cold = cell.read()
    if cold is None:
        return log

    def reader(opened: contextlib.ExitStack) -> ColdReader:
        manager = opened.enter_context(follow_events(cold, access))
        return ColdReader(manager, open_store(cold.store, options), partition_of(cold), env)

    return TieredLog(hot_log(log), cell, reader, close_hot=close_hot)


@checked
def attach(
    log: Tierable,
    store: Address | None = None,
    events: Address | None = None,
    *,
    partitions: Annotated[int, whole(1, _MOST_PARTITIONS)] = PARTITIONS,
    name: str = "",
    options: Mapping[str, str] | None = None,
    events_options: Mapping[str, Any] | None = None,
    env: Env = SYSTEM,
) -> ColdTier:
    """Attach a cold tier to a log: durably record its store and event topic, and create the topic if needed.

    ``store`` is the address of an object store, by default ``cold`` beside the log's own objects; ``events`` that of a
    topic, by default ``events`` in that store, or ``kafka://host:port/topic``. Nothing is copied yet. Idempotent;
    ``AlreadyExists`` if the log has another cold tier, ``Unsupported`` if it cannot have one.
    """
    base = log_address(log)
    store = f"{base.rstrip('/')}/{COLD_FOLDER}" if store is None else as_address(store)
    events = f"{store.rstrip('/')}/events" if events is None else as_address(events)
    if "://" not in store or "://" not in events:
        raise InvalidInput(f"Write whole addresses, such as s3://bucket/cold or file:///folder: {store}, {events}.")
    cold = ColdTier(hot_log(log).log_id, store, events, partitions, name)
    open_store(store, options)  # no request; refuses an invalid address before it is stored
    access = ColdAccess(options, events_options, env)
    open_events(cold, access, create=True).close()
    return cold_cell(log, access).attach(store, events, partitions=partitions, name=name)


def cold_cell(log: Tierable, access: ColdAccess = _PLAIN) -> ColdCell:
    """The cell that describes the cold tier of a log."""
    hot = hot_log(log)
    place = hot.store if isinstance(hot, ObjectLog) else open_store(log_address(hot), access.options)
    return ColdCell(place, hot.log_id, env=access.env)


def cold_tier(log: Tierable, access: ColdAccess = _PLAIN) -> ColdTier:
    """The log's cold tier; ``NotFound`` if it has none."""
    found = cold_cell(log, access).read()
    if found is None:
        raise NotFound(f"The log at {log_address(log)} has no cold tier: attach one first (strandline tier attach).")
    return found


def partition_of(cold: ColdTier) -> TopicPartition:
    """The log's name in the events."""
    return TopicPartition(cold.name, cold.log_id, 0)


@contextlib.contextmanager
def follow_events(
    cold: ColdTier, access: ColdAccess = _PLAIN, snapshot_dir: str | None = None, *, background: bool = True
) -> Iterator[MetadataManager]:
    """A metadata manager that follows the events of a log's segments within the block; see its ``background``."""
    with contextlib.ExitStack() as opened:
        topic = open_events(cold, access, create=False)
        opened.callback(topic.close)
        manager = MetadataManager.start(topic, snapshot_dir=snapshot_dir, background=background, env=access.env)
        opened.callback(manager.close)
        manager.reconcile_assignment([manager.metadata_partition(partition_of(cold))])
        yield manager


@checked
@contextlib.contextmanager
def tiering(
    log: Tierable,
    *,
    options: Mapping[str, str] | None = None,
    events_options: Mapping[str, Any] | None = None,
    snapshot_dir: str | None = None,
    background: bool = True,
    env: Env = SYSTEM,
    **settings: Any,
) -> Iterator[Tierer]:
    """The tierer of a log with a cold tier, within the block; ``settings`` are those of a :class:`Tierer`.

    Without ``background`` no thread follows the events: rounds do, each for itself.

    ``Unsupported`` for a log that cannot have a cold tier, ``NotFound`` for a log without one.
    """
    hot = hot_log(log)
    check_tierable(hot)
    access = ColdAccess(options, events_options, env)
    cell, cold = cold_cell(log, access), cold_tier(log, access)
    with follow_events(cold, access, snapshot_dir, background=background) as manager:
        store = open_store(cold.store, options)
        yield Tierer(hot, manager, store, name=cold.name, announced=cell, env=env, **settings)


def log_address(log: Tierable) -> str:
    """The address of the log itself."""
    hot = hot_log(log)
    return hot.url if isinstance(hot, ObjectLog) else Path(hot.folder).absolute().as_uri()
