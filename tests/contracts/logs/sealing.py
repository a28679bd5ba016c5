"""Contract of the seal: the durable end of a log."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest

from strandline.errors import ExpectationFailed, Sealed, StrandlineError
from strandline.log.contract import Log
from strandline.model.cursor import Bounds
from strandline.model.head import Receipt
from strandline.testing.stores import together
from tests.contracts.logs.batches import SOON, append, content, records, writer_named
from tests.contracts.slots import LogOwner

LATE = 3600.0
"""Seconds that no test waits: a wait of that length has to end by itself."""


class SealingContract(LogOwner):
    """What a seal ends, and what goes on behind it."""

    sealing_appends: ClassVar[int] = 40
    """Number of appends of each thread that races with a seal."""

    def test_a_log_is_not_sealed_until_it_is(self, log: Log) -> None:
        append(log, b"a", number=0)
        assert not log.bounds().sealed
        end = log.seal()
        assert end == log.end()
        assert end.next == 1
        assert log.bounds() == Bounds(0, 1, sealed=True)

    def test_a_sealed_log_takes_no_append_and_says_where_it_ends(self, log: Log) -> None:
        append(log, b"a", b"b", number=0)
        log.seal()
        # Also a number that does not follow, and an unknown writer: the seal is what its caller has to know first.
        for writer, number in ((writer_named(1), 1), (writer_named(2), 0), (writer_named(1), 7), (writer_named(3), 7)):
            with pytest.raises(Sealed, match="sealed at offset 2 and takes no more records") as caught:
                append(log, b"c", writer=writer, number=number)
            assert caught.value.end == 2
            assert not caught.value.retryable
        with pytest.raises(Sealed):
            append(log, b"c", number=1, expect=2)
        assert content(log) == [(0, b"a"), (1, b"b")]

    def test_sealing_again_gives_the_same_end(self, log: Log) -> None:
        append(log, b"a", number=0)
        assert log.seal() == log.seal() == log.end()
        assert log.bounds() == Bounds(0, 1, sealed=True)

    def test_an_empty_log_can_be_sealed(self, log: Log) -> None:
        assert log.seal().next == 0
        assert log.bounds() == Bounds(0, 0, sealed=True)
        with pytest.raises(Sealed):
            append(log, b"a", number=0)
        with pytest.raises((Sealed, ExpectationFailed)):
            append(log, b"a", number=0, expect=7)
        assert log.bounds() == Bounds(0, 0, sealed=True)
        assert log.plan(log.start()) == []

    def test_a_repeated_append_has_its_receipt_after_the_seal_too(self, log: Log) -> None:
        append(log, b"a", number=0)
        append(log, b"b", b"c", number=1)
        log.seal()
        assert append(log, b"b", b"c", number=1) == Receipt(1, 2)
        assert append(log, b"a", number=0).first in (0, None)
        assert log.bounds() == Bounds(0, 3, sealed=True)

    def test_a_batch_and_the_seal_behind_it_are_one_append(self, log: Log) -> None:
        append(log, b"a", number=0)
        for _ in range(2):  # the second one is a repetition, as after a lost answer
            handle = log.append(records(b"b", b"c"), writer=writer_named(1), number=1, seal=True)
            assert handle.result(SOON) == Receipt(1, 2)
            assert log.bounds() == Bounds(0, 3, sealed=True)
        with pytest.raises(Sealed):
            append(log, b"d", number=2)
        assert log.seal().next == 3
        assert content(log) == [(0, b"a"), (1, b"b"), (2, b"c")]

    def test_a_last_batch_that_is_refused_seals_nothing(self, log: Log) -> None:
        append(log, b"a", number=0)
        with pytest.raises(ExpectationFailed):
            log.append(records(b"b"), writer=writer_named(1), number=1, expect=5, seal=True).result(SOON)
        with pytest.raises(StrandlineError):
            log.append(records(b"b"), writer=writer_named(1), number=3, seal=True).result(SOON)
        assert log.bounds() == Bounds(0, 1)
        assert append(log, b"b", number=1) == Receipt(1, 1)

    def test_waiting_at_the_sealed_end_is_over_at_once(self, log: Log) -> None:
        append(log, b"a", number=0)
        end = log.seal()
        assert not log.wait(end, LATE)
        assert not log.wait(end, LATE)
        assert log.wait(end.at(0), LATE)
        assert log.bounds().ended(end.next)
        assert not log.bounds().ended(0)

    def test_a_seal_wakes_those_who_wait(self, log: Log) -> None:
        append(log, b"a", number=0)
        end, found = log.end(), list[bool]()
        waiter = threading.Thread(target=lambda: found.append(log.wait(end, LATE)))
        waiter.start()
        log.seal()
        waiter.join(SOON)
        assert found == [False]

    def test_the_handles_of_a_producer_say_that_the_log_is_sealed(self, log: Log) -> None:
        producer = log.producer(linger=LATE)
        listed = producer.append(value=b"a")
        producer.flush()
        assert listed.result(SOON) == Receipt(0, 1)
        log.seal()
        pending = [producer.append(value=b"b") for _ in range(3)]
        with pytest.raises(Sealed):
            producer.flush()
        for handle in pending:
            with pytest.raises(Sealed):
                handle.result(SOON)
        with pytest.raises(Sealed):
            producer.append(value=b"c")
        with pytest.raises(Sealed):
            producer.close()
        assert content(log) == [(0, b"a")]

    def test_slots_and_trimming_go_on(self, log: Log) -> None:
        for number in range(4):
            append(log, b"%d" % number, number=number)
        end = log.seal()
        log.slots.create("reader", 1)
        slot = log.slots.claim("reader", "me")
        slot.advance(log.cursor_at(3))
        assert slot.state().position == 3
        self.retain_from(log, 3)
        assert log.bounds().first == 3
        assert log.bounds() == Bounds(3, 4, sealed=True)
        assert content(log) == [(3, b"3")]
        slot.advance(end)
        log.slots.drop("reader")
        with pytest.raises(Sealed):
            append(log, b"5", number=4)

    def test_an_append_that_races_with_the_seal_is_below_it_or_refused(self, log: Log) -> None:
        listed: dict[bytes, Receipt] = {}
        refused: list[int] = []
        half = threading.Event()
        ends: list[int] = []

        def write(name: int) -> None:
            for number in range(self.sealing_appends):
                value = b"%d/%d" % (name, number)
                try:
                    listed[value] = append(log, value, writer=writer_named(name), number=number)
                except Sealed as error:
                    refused.append(-1 if error.end is None else error.end)
                    return
                if number == self.sealing_appends // 4:
                    half.set()

        def seal() -> None:
            half.wait(SOON)
            ends.append(log.seal().next)

        together(*[lambda name=name: write(name) for name in range(3)], seal)
        found = content(log)
        assert log.bounds() == Bounds(0, ends[0], sealed=True)
        assert len(found) == ends[0] == len(listed)
        assert {receipt.first: value for value, receipt in listed.items()} == dict(found)
        assert set(refused) <= {ends[0]}
