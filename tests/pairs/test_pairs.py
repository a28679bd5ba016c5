"""Every consumer and tool on every kind of log; those of Spark are in tests/spark/datasource/test_every_log.py."""

from __future__ import annotations

import contextlib
import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import (
    ExpectationFailed,
    Fenced,
    InvalidInput,
    NotALog,
    NotReady,
    NullKey,
    Sealed,
    StrandlineError,
    Unsupported,
)
from strandline.log.wal.log import WalLog
from strandline.testing.sinks import MemorySink
from tests.contracts.logs import writer_named
from tests.pairs.log_kinds import COLD, RECORDS, ROWS, SOON, Opened, expected
from tests.pairs.table import No, pair

READER = No(
    Unsupported,
    "opened for reading",
    "Only the process that writes a write-ahead log may append to it and change its slots. Others read it.",
)
REPLICA_APPENDS = No(Unsupported, "only the primary", "Only the primary of a log orders records.")
REPLICA_SLOTS = No(NotReady, "no primary: ask a", "Slots of consumers are kept by the primary.")
NO_KEYS = No(NullKey, "key", "Records of a queue of version 1 have no keys.")
NO_SLOTS = "A queue of version 1 has one slot, which only its own consumer moves."


# --- appending ---------------------------------------------------------------------------------------------------


@pair("`append(expect=…)`", wal_reader=READER, replica=REPLICA_APPENDS)
def test_an_append_at_an_expected_end(opened: Opened) -> None:
    log, end = opened.log, opened.log.bounds().next
    table = pa.table({"value": [b"more"]})
    with pytest.raises(ExpectationFailed):
        log.append(table, writer=writer_named(7), number=0, expect=end - 1).result(SOON)
    log.append(table, writer=writer_named(7), number=0, expect=end).result(SOON)
    assert opened.values() == [*expected(), b"more"]


@pair("`producer()`", default=("wal", "node"), wal_reader=READER, replica=REPLICA_APPENDS)
def test_a_producer(opened: Opened) -> None:
    with opened.log.producer() as producer:
        handles = [
            producer.append(value=b"a"),
            producer.append_batch(pa.table({"value": [b"b"]})),
            producer.produce([b"c"]),
        ]
    assert [handle.result(0).count for handle in handles] == [1, 1, 1]
    assert opened.values() == [*expected(), b"a", b"b", b"c"]


NO_DELETION = No(Unsupported, "log of a node", "A replicated log is deleted with the folders of its nodes.")


@pair(
    "`seal()`",
    default=("wal", "objects"),
    wal_reader=READER,
    replica=No(Unsupported, "only the primary", "Only the primary of a log orders records."),
    queue_v1=No(Unsupported, "cannot be sealed", "A queue of version 1 has no place for a seal."),
)
def test_a_sealed_log_is_read_to_its_end(opened: Opened) -> None:
    assert opened.log.seal().next == RECORDS
    assert opened.log.bounds().sealed
    with pytest.raises(Sealed):
        opened.append(RECORDS)
    assert opened.values() == expected()
    sink = MemorySink()
    assert sl.follow(opened.log, sink).next == RECORDS  # which ends by itself


@pair(
    "`sl.bulk.delete`",
    default=("wal", "objects"),
    wal_reader=No(Fenced, "open for writing", "A write-ahead log that a process writes is not deleted."),
    replica=NO_DELETION,
    primary=NO_DELETION,
    node=NO_DELETION,
    node_cold=NO_DELETION,
    queue_v1=No(NotALog, "no log", "It deletes logs: a queue of version 1 is deleted as it is acknowledged."),
)
def test_a_deleted_log_is_gone(opened: Opened) -> None:
    opened.release()
    assert sl.bulk.delete(opened.url).deleted
    with pytest.raises(NotALog):
        sl.open(opened.url)


# --- following ---------------------------------------------------------------------------------------------------


@pair("`follow` into a key-value store", queue_v1=NO_KEYS)
def test_a_key_value_store_follows(opened: Opened) -> None:
    store = sl.followers.MemoryStore()
    assert sl.follow(opened.log, store, upto="end").next == RECORDS
    opened.append(RECORDS)
    assert sl.follow(opened.log, store, upto="end").next == RECORDS + 1
    assert dict(store.range()) == {b"k%d" % row: b"%d" % row for row in range(RECORDS + 1)}


@pair("`follow` into a Delta table")
def test_a_delta_table_follows(opened: Opened) -> None:
    place = opened.folder / "table"
    for turn in range(2):
        if turn:
            opened.append(RECORDS)
        sl.follow(opened.log, sl.DeltaSink(place, mode="append"), upto="end")
        found = DeltaTable(str(place)).to_pyarrow_table(columns=["value"])["value"].to_pylist()
        assert sorted(found) == sorted([*expected(), b"%d" % RECORDS][: RECORDS + turn])
        check = sl.tables.verify(sl.DeltaSink(place, mode="append"), opened.log)
        assert (check.is_clean, check.rows) == (True, RECORDS + turn)


@pair(
    "`follow` with a slot",
    default=("wal", "node"),
    wal_reader=READER,
    replica=REPLICA_SLOTS,
    queue_v1=No(StrandlineError, "slot|queue", NO_SLOTS),
)
def test_a_follower_with_a_slot(opened: Opened) -> None:
    sink = MemorySink()
    assert sl.follow(opened.log, sink, "billing", upto="end").next == RECORDS
    assert opened.log.slots.get("billing").position == RECORDS
    opened.append(RECORDS)
    sl.follow(opened.log, sink, "billing", upto="end")
    assert opened.log.slots.get("billing").position == RECORDS + 1


@pair("`watch_applied` over `LogKeyValue`", queue_v1=NO_KEYS)
def test_a_watch_of_keys(opened: Opened) -> None:
    keys, stop, applied = sl.kv.LogKeyValue(opened.log), threading.Event(), {}

    def apply(batch: list[sl.kv.Update]) -> None:
        applied.update({update.key: update.value for update in batch})
        if len(applied) == RECORDS:
            stop.set()

    cursor = sl.watch_applied(keys, apply, reader=keys, store=sl.followers.MemoryStore(), stop=stop)
    assert cursor is not None
    assert cursor.next == RECORDS
    assert applied == {b"k%d" % row: b"%d" % row for row in range(RECORDS)}


@pair("snapshot and bootstrap", wal_reader=READER, replica=REPLICA_SLOTS, queue_v1=NO_KEYS)
def test_a_newcomer_bootstraps_from_a_snapshot(opened: Opened) -> None:
    folder = opened.folder
    with sl.followers.AppendLogStore.open(folder / "veteran") as veteran:
        sl.follow(opened.log, veteran, upto="end")
        artifacts = sl.snapshots.Artifacts((folder / "published").as_uri(), "routes")
        artifacts.export(veteran, scratch=str(folder / "scratch"))
    opened.append(RECORDS)
    with sl.snapshots.bootstrap(
        artifacts, str(folder / "newcomer"), sl.followers.AppendLogStore, log=opened.log, slot="newcomer"
    ) as newcomer:
        assert newcomer.position().cursor.next == RECORDS
        assert opened.log.slots.get("newcomer").position == RECORDS
        sl.follow(opened.log, newcomer, "newcomer", upto="end")
        assert len(list(newcomer.range())) == RECORDS + 1


@pair("`Consumer`", default=("wal",), wal_reader=READER, replica=REPLICA_SLOTS)
def test_a_consumer(opened: Opened) -> None:
    with sl.Consumer(opened.log, trim_every=None) as consumer:
        batches = list(consumer)
        assert [value for batch in batches for value in batch.values] == expected()
        consumer.ack_through(batches[-2].sequence)
    with sl.Consumer(opened.log, trim_every=None) as consumer:
        assert [batch.values for batch in consumer] == [batches[-1].values]


@pair(
    "`Fenced` for a `Consumer` that was replaced",
    default=("wal",),
    wal_reader=READER,
    replica=REPLICA_SLOTS,
    queue_v1=No(StrandlineError, "slot|queue", NO_SLOTS),
)
def test_a_consumer_that_was_replaced(opened: Opened) -> None:
    slots = opened.log.slots
    former = sl.Consumer(opened.log, slot="orders", trim_every=None)
    batches = list(former)
    with sl.Consumer(opened.log, slot="orders", trim_every=None) as successor:
        with pytest.raises(Fenced, match="orders"):
            former.ack_through(batches[-1].sequence)
        assert slots.get("orders").position == 0, "what it confirmed does not count"
        successor.ack_through(next(iter(successor)).sequence)
        successor.flush()
        position = slots.get("orders").position
        assert position > 0
        with pytest.raises(Fenced, match="orders"):
            former.flush()
        with contextlib.suppress(Fenced):
            former.close()
        assert slots.get("orders").position == position


# --- tools -------------------------------------------------------------------------------------------------------

_BY_NODES = No(
    Unsupported,
    "cold",
    "The nodes of a replicated log tier it themselves (`cold=`, `strandline node run --cold`): see the column with a "
    "cold tier.",
)


@pair(
    "tierer",
    wal_reader=READER,
    primary=_BY_NODES,
    replica=_BY_NODES,
    node=_BY_NODES,
    queue_v1=No(
        Unsupported, "cold tier", "A queue of version 1 is deleted as it is acknowledged: it has nothing to tier."
    ),
)
def test_a_tierer(opened: Opened) -> None:
    if opened.is_tiered is not None:  # whichever node leads
        opened.append(RECORDS)
        assert opened.is_tiered(RECORDS + 1)
        return
    if not isinstance(opened.log, sl.tier.TieredLog):
        sl.tier.attach(opened.log, (opened.folder / "cold").as_uri())
    opened.append(RECORDS)
    with sl.tier.tiering(opened.log) as tierer:
        copied = tierer.run_once(everything=True).copied
    assert copied[-1].end == RECORDS
    assert [value for batch in sl.tier.tiered(opened.log).read() for value in batch["value"].to_pylist()][
        -1
    ] == b"%d" % RECORDS


def command(*arguments: object, given: str = "") -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    if done.exit_code:
        raise CommandFailed(done.stderr)
    return done.stdout


class CommandFailed(Exception):
    """A command ended with a status other than 0."""


_TAKES_LOGS = No(
    CommandFailed,
    "queue of version 1",
    "The command takes logs; a queue of version 1 is inspected with `lag --format queue-v1`, and copied into a log "
    "with `upgrade` or `ingest`.",
)


@pair("`strandline tail`", queue_v1=_TAKES_LOGS)
def test_tail(opened: Opened) -> None:
    lines = [json.loads(line) for line in command("tail", opened.url, "--from", "beginning", "--json").splitlines()]
    assert [(line["offset"], line["value"]) for line in lines] == [(row, f"{row}") for row in range(RECORDS)]


@pair(
    "`strandline produce`",
    wal_reader=No(CommandFailed, "open it for reading", READER.reason),
    replica=No(CommandFailed, "no primary", REPLICA_APPENDS.reason),
    queue_v1=_TAKES_LOGS,
)
def test_produce(opened: Opened) -> None:
    opened.release()
    command("produce", opened.url, given="one\ntwo\n")
    assert command("tail", opened.url, "--from", RECORDS).count("\n") == 2


@pair("`strandline lag`", replica=No(CommandFailed, "no primary: ask a", REPLICA_SLOTS.reason))
def test_lag(opened: Opened) -> None:
    if opened.format is not None:
        assert (
            json.loads(command("lag", opened.url, "--format", opened.format, "--json"))["batches_behind"]
            == RECORDS // ROWS
        )
        return
    if opened.writer is None:
        opened.log.slots.create("billing", COLD)
        getattr(opened.log.slots, "flush", lambda: None)()
    seen = json.loads(command("lag", opened.url, "--json"))
    assert seen["next"] == RECORDS
    assert [(slot["slot"], slot["records_behind"]) for slot in seen["slots"] if slot["slot"] == "billing"] == (
        [("billing", RECORDS - COLD)] if opened.writer is None else []
    )


@pair(
    "`strandline slots`",
    wal_reader=No(CommandFailed, "open it for reading", READER.reason),
    replica=No(CommandFailed, "no primary: ask a", REPLICA_SLOTS.reason),
    queue_v1=_TAKES_LOGS,
)
def test_slots(opened: Opened) -> None:
    opened.release()
    for step in (["create", "--at", COLD], ["reset", "--at", "now", "--yes"], ["drop", "--yes"]):
        command("slots", step[0], opened.url, "billing", *step[1:])
        listed = json.loads(command("slots", opened.url, "--json"))["slots"]
        assert ("billing" in {slot["slot"] for slot in listed}) is (step[0] != "drop")


@pair("`strandline verify`", queue_v1=_TAKES_LOGS)
def test_verify(opened: Opened) -> None:
    seen = json.loads(command("verify", opened.url, "--json"))
    assert (seen["clean"], seen["examined"]["records"]) == (True, RECORDS)


@pair("`sl.bulk.infer`", default=("wal", "node_cold"))
def test_a_schema_is_inferred(opened: Opened) -> None:
    opened.append(RECORDS)
    with pytest.raises(InvalidInput, match=rf"No value of {RECORDS + 1} records of .* is a JSON object"):
        sl.bulk.infer(opened.log)  # they are numbers; the sentence counts what was looked at


@pair("`sl.bulk.verify`", default=("wal", "node_cold"))
def test_a_bulk_verification(opened: Opened) -> None:
    audit = sl.bulk.verify(opened.log)
    assert audit.is_clean, audit.findings
    assert audit.examined["records"] == RECORDS


@pair(
    "`sl.bulk.export`",
    default=("wal", "node_cold"),
    queue_v1=No(
        Unsupported, "number batches and not records", "A queue of version 1 numbers batches: copy it into a log first."
    ),
)
def test_a_bulk_export(opened: Opened) -> None:
    done = sl.bulk.export(opened.log, opened.folder / "exported", part_bytes=1)
    tables = [pq.read_table(opened.folder / "exported" / part.path) for part in done.parts]
    assert pa.concat_tables(tables).column("value").to_pylist() == expected()


@pair("`sl.bulk.build_snapshot`", default=("wal", "node_cold"), queue_v1=NO_KEYS)
def test_a_snapshot_that_is_built_in_bulk(opened: Opened) -> None:
    done = sl.bulk.build_snapshot(opened.log, opened.folder / "sealed", group_bytes=1)
    opened.append(RECORDS)
    with sl.snapshots.bootstrap(
        done.folder, opened.folder / "store", sl.followers.AppendLogStore, log=opened.log
    ) as store:
        assert store.position().cursor.next == RECORDS
        sl.follow(opened.log, store, upto="end")
        assert len(list(store.range())) == RECORDS + 1


_NO_TARGET = No(
    StrandlineError,
    "queue|key|Queue",
    "A queue of version 1 has neither keys nor a place for the position in the source.",
)


@pair("`ingest` from it into a write-ahead log")
def test_ingest_out(opened: Opened) -> None:
    with WalLog.open(opened.folder / "copy") as copy:
        sl.ingest(opened.log, copy)
        assert [value for batch in copy.read() for value in batch.column("value").to_pylist()] == expected()


@pair(
    "`ingest` from an object log into it",
    wal_reader=No(Unsupported, "cannot be the target", READER.reason),
    replica=No(Unsupported, "cannot be the target", REPLICA_APPENDS.reason),
    queue_v1=_NO_TARGET,
)
def test_ingest_in(opened: Opened) -> None:
    source = sl.open((opened.folder / "source").as_uri(), create=True)
    with source.producer() as producer:
        producer.append(key=b"k", value=b"more")
    for _ in range(2):  # once
        sl.ingest(source, opened.log)
    assert opened.values() == [*expected(), b"more"]
