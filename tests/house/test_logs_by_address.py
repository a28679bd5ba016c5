"""Calls that take a log take its address, too: text or a path, opened for the call and closed after it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import Fenced, NotALog, StrandlineError, Unsupported

Call = Callable[[Any, Path], object]

HELD = {
    "sl.kv.LogKeyValue": "keeps the log for as long as it lives",
    "sl.tier.Tierer": "keeps the log for as long as it lives",
    "sl.tier.attach": "is about an opened log",
    "sl.tier.tiering": "is about an opened log",
    "sl.tier.tiered": "is about an opened log",
    "sl.log.read_decoded": "yields while the log is open",
    "sl.compat.WriteAheadLog": "wraps an opened log",
}
"""What takes an opened log only, and why."""


def sink(path: Path) -> sl.DeltaSink:
    return sl.DeltaSink(path / "table", mode="append")


def followed(log: Any, path: Path) -> sl.DeltaSink:
    sl.follow(log, sink(path), upto="end")
    return sink(path)


def copied(log: Any, path: Path) -> tuple[int, int]:
    here = sl.ingest(log, path / "copy").source
    there = sl.bulk.translate_cursor(here, source=log, target=path / "copy")
    return there.next, sl.bulk.translate_cursor(there, source=log, target=str(path / "copy")).next


def loaded(log: Any, path: Path) -> int:
    (path / "rows.jsonl").write_text('{"id": 1}\n')
    return sl.bulk.load(path / "rows.jsonl", log, job="once").records


def bootstrapped(log: Any, path: Path) -> int:
    sl.bulk.build_snapshot(log, path / "snapshot")
    with sl.snapshots.bootstrap(
        path / "snapshot", path / "store", sl.followers.AppendLogStore, log=log, slot="store"
    ) as store:
        return store.position().cursor.next


CALLS: dict[str, tuple[Call, object]] = {
    "follow": (lambda log, _: sl.follow(log, sl.followers.MemoryStore(), upto="end").next, 2),
    "follow with a slot": (lambda log, _: sl.follow(log, sl.followers.MemoryStore(), slot="s", upto="end").next, 2),
    "translate_cursor": (copied, (2, 2)),
    "tables.describe": (lambda log, path: sl.tables.describe(followed(log, path), log).cursor.next, 2),
    "tables.verify": (lambda log, path: sl.tables.verify(followed(log, path), log).is_clean, True),
    "tables.rebuild": (lambda log, path: sl.tables.rebuild(followed(log, path), log).next, 2),
    "bulk.export": (lambda log, path: sl.bulk.export(log, path / "files").records, 2),
    "bulk.verify": (lambda log, _: sl.bulk.verify(log).is_clean, True),
    "bulk.build_snapshot": (lambda log, path: sl.bulk.build_snapshot(log, path / "snapshot").cursor.next, 2),
    "log.sources": (lambda log, _: sl.log.sources(log), []),
    "bulk.load": (loaded, 1),
    "snapshots.bootstrap": (bootstrapped, 2),
}
OBJECT_LOGS = {"log.sources", "bulk.load"}


@pytest.fixture(params=["object log", "write-ahead log"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    address = str(tmp_path / "log") if request.param == "object log" else f"wal://{tmp_path}/log"
    log = sl.open(address, create=True)
    with log.producer() as producer:
        for key in (b"a", b"b"):
            producer.append(key=key, value=b"{}")
    if address.startswith("wal:"):
        log.close()
    return address


@pytest.mark.parametrize("name", CALLS)
def test_the_address_of_a_log_does_as_the_log_itself(name: str, address: str, tmp_path: Path) -> None:
    call, result = CALLS[name]
    if address.startswith("wal:") and name in OBJECT_LOGS:
        with pytest.raises(Unsupported):
            call(address, tmp_path)
    else:
        assert call(address, tmp_path) == result
    if address.startswith("wal:"):
        sl.open(address).close()  # it was closed: a second opener is not fenced


@pytest.mark.parametrize("name", CALLS)
def test_an_address_without_a_log_is_refused_and_nothing_is_made_there(name: str, tmp_path: Path) -> None:
    call, _ = CALLS[name]
    with pytest.raises(StrandlineError):
        call(tmp_path / "none", tmp_path)
    assert not (tmp_path / "none").exists()


def test_a_write_ahead_log_is_read_beside_its_writer_and_a_slot_needs_the_log_itself(tmp_path: Path) -> None:
    address = f"wal://{tmp_path}/log"
    with sl.open(address, create=True) as log:
        producer = log.producer()
        producer.append(key=b"a", value=b"1").result(60)
        assert sl.follow(address, sl.followers.MemoryStore(), upto="end").next == 1
        with pytest.raises(Fenced):
            sl.follow(address, sl.followers.MemoryStore(), slot="s", upto="end")
        assert sl.follow(log, sl.followers.MemoryStore(), slot="s", upto="end").next == 1
        producer.append(key=b"a", value=b"2").result(60)  # a given log stays open
        producer.close()


def test_a_table_is_described_by_addresses_alone(tmp_path: Path) -> None:
    log = sl.open(tmp_path / "log", create=True)
    with log.producer() as producer:
        producer.append(key=b"a", value=b"1")
    followed(log, tmp_path)
    found = sl.tables.describe(tmp_path / "table", str(tmp_path / "log"))
    assert (found.rows, found.cursor) == (1, log.end())
    assert sl.tables.optimize(str(tmp_path / "table")) == 0
    assert sl.tables.vacuum(tmp_path / "table") == 0
    with pytest.raises(NotALog):
        sl.tables.describe(tmp_path / "table", tmp_path / "none")


def test_every_public_call_with_a_log_takes_an_address_or_says_why_not() -> None:
    found = {}
    for module in (sl, sl.bulk, sl.tables, sl.tier, sl.kv, sl.snapshots, sl.log, sl.compat, sl.spark):
        for name in module.__all__:
            call = getattr(module, name)
            is_call = inspect.isfunction(call) or inspect.isclass(call)
            for parameter in inspect.signature(call).parameters.values() if is_call else ():
                hint = str(parameter.annotation)
                is_log = parameter.name == "log" or (parameter.name in ("source", "target") and "Log" in hint)
                if is_log and "Address" not in hint:
                    found[f"{module.__name__.replace('strandline', 'sl')}.{name}"] = hint
    assert set(found) == set(HELD)
