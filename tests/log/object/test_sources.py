"""The sources that a log remembers can be listed, and forgotten when they have ended."""

from __future__ import annotations

from uuid import UUID

import pytest

import strandline as sl
from strandline.bulk.verifying import verify as verify_log
from strandline.errors import InvalidInput, NotFound, Unsupported
from strandline.log.findings import Severity
from strandline.log.object.log import open_log
from strandline.log.writers import numbered
from strandline.log.writers.source import advancing, source_writer
from strandline.model.records import record_batch
from strandline.testing.plain import PlainStore

ROW = record_batch(timestamps=[1], ops=[0], keys=[b"k"], values=[b"v"])


def test_a_forgotten_source_makes_room_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered, "MAX_SOURCES", 2)
    log = open_log(PlainStore(), create=True)
    names = [source_writer(name) for name in ("a", "b", "c")]
    for name in names[:2]:
        log.append(ROW, writer=advancing(name, 10), number=0).result()
    log.append(ROW, writer=advancing(names[0], 5), number=10).result()
    with pytest.raises(InvalidInput, match="strandline sources"):
        log.append(ROW, writer=advancing(names[2], 10), number=0).result()
    assert [(one.id, one.position, one.last_offset) for one in sl.log.sources(log)] == [
        (names[1], 10, 1),
        (names[0], 15, 2),
    ]
    assert sl.log.forget_source(log, names[1]).position == 10
    log.append(ROW, writer=advancing(names[2], 10), number=0).result()
    assert {one.id for one in sl.log.sources(log)} == {names[0], names[2]}
    with pytest.raises(NotFound, match="remembers no source"):
        sl.log.forget_source(log, names[1])
    log.append(ROW, writer=advancing(names[0], 5), number=15).result()  # the others go on
    assert log.bounds().next == 5


def test_a_log_that_forgot_a_source_is_sound_also_when_the_source_begins_again() -> None:
    log = open_log(PlainStore(), create=True)
    name = source_writer("a")
    for position in (0, 10):
        log.append(ROW, writer=advancing(name, 10), number=position).result()
    sl.log.forget_source(log, name)
    [forgotten] = noted(log)
    assert f"has forgotten source {name}: ingested again, its records are appended again" in forgotten
    log.append(ROW, writer=advancing(name, 10), number=0).result()
    log.append(ROW, writer=advancing(name, 10), number=10).result()
    [again] = noted(log)
    assert "the batch at offset 2 begins writer" in again


def test_a_forgotten_source_that_is_ingested_again_further_ahead_is_sound() -> None:
    log = open_log(PlainStore(), create=True)
    name = source_writer("a")
    log.append(ROW, writer=advancing(name, 10), number=0).result()
    sl.log.forget_source(log, name)
    log.append(ROW, writer=advancing(name, 10), number=500).result()
    [again] = noted(log)
    assert "the batch at offset 1 begins writer" in again


def noted(log: sl.log.ObjectLog) -> list[str]:
    found = verify_log(log).findings
    assert {finding.severity for finding in found} == {Severity.NOTE}
    return [finding.message for finding in found]


def test_producers_are_no_sources_and_other_logs_say_so() -> None:
    log = open_log(PlainStore(), create=True)
    log.append(ROW, writer=sl.log.WriterId(UUID(int=5)), number=0).result()
    assert sl.log.sources(log) == []
    with pytest.raises(Unsupported, match="object logs"):
        sl.log.sources(sl.log.MemoryLog())
