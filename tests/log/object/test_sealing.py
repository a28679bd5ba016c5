"""The seal of an object log: races with appends over a failing store, lost answers, and what older programs do."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from strandline.errors import Sealed, UnsupportedVersion
from strandline.formats.object import head as head_format
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head import edits
from strandline.model.cursor import Bounds
from strandline.model.head import Head, Receipt, WriterId
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.logs import append, content, records, writer_named
from tests.interleave import Interleaver
from tests.log.object.histories import BAD_LINE, Caller, History, _meet
from tests.matrix_cases import sampled


def opened(store: PlainStore | FaultyStore, seed: int = 1) -> ObjectLog:
    return open_log(store, create=True, env=Env(clock=ManualClock(), chance=SeededChance(seed)))


@pytest.fixture
def place() -> PlainStore:
    return PlainStore()


@pytest.fixture
def line(place: PlainStore) -> FaultyStore:
    return FaultyStore(place)


# --- races -----------------------------------------------------------------------------------------------------


class Ends:
    """What callers were told of a log that is sealed while others append."""

    def __init__(self) -> None:
        self.listed: dict[tuple[WriterId, int], Receipt] = {}
        self.sealed: list[int] = []
        self.refused = 0


def play(seed: int) -> tuple[History, Ends]:
    """Two writers, one that seals, and one whose last batch seals; in an order drawn from the seed."""
    chance = random.Random(seed)
    order, place = Interleaver(chance.getrandbits(64)), PlainStore()
    history, ends = History(seed), Ends()
    log = opened(place, seed)

    lines: list[FaultyStore] = []

    def caller() -> Caller:
        line = FaultyStore(place, seed=chance.getrandbits(64), faults=BAD_LINE)
        lines.append(line)
        line.hook(_meet(order, random.Random(chance.getrandbits(64))))
        return Caller(history, line, chance)

    names = [writer_named(seed * 8 + name) for name in range(3)]
    tasks = [_writer(caller(), ends, name, 3, seals=False) for name in names[:2]]
    tasks += [_sealer(caller(), ends)] if seed % 2 else [_writer(caller(), ends, names[2], 2, seals=True)]
    order.run(tasks)
    for line in lines:
        line.land_late()
    check(log, ends)
    return history, ends


def _writer(caller: Caller, ends: Ends, name: WriterId, batches: int, *, seals: bool) -> Callable[[], None]:
    """Appends numbered batches until it is refused; the last one ``seals``."""

    def put(log: ObjectLog, number: int) -> Receipt | None:
        last = seals and number == batches - 1
        try:
            return log.append(records(b"%d/%d" % (name.int, number)), writer=name, number=number, seal=last).result()
        except Sealed as error:
            ends.refused += 1
            ends.sealed.append(-1 if error.end is None else error.end)
            return None

    def work() -> None:
        for number in range(batches):
            receipt = caller.insist(lambda log, number=number: put(log, number))
            if receipt is None:
                return
            ends.listed[name, number] = receipt
            if seals and number == batches - 1:
                assert receipt.first is not None
                ends.sealed.append(receipt.first + 1)

    return work


def _sealer(caller: Caller, ends: Ends) -> Callable[[], None]:
    def work() -> None:
        end = caller.insist(lambda log: log.seal())
        if end is not None:
            ends.sealed.append(end.next)

    return work


def check(log: ObjectLog, ends: Ends) -> None:
    found = content(log)
    for (_, number), receipt in ends.listed.items():
        assert receipt.first is not None
        assert found[receipt.first][1] is not None, "an acknowledged append is nowhere"
        assert found[receipt.first][1].endswith(b"/%d" % number)  # type: ignore[union-attr]
    assert len(set(ends.sealed)) <= 1, f"the log was sealed at {set(ends.sealed)}"
    if ends.sealed:
        assert log.bounds() == Bounds(0, ends.sealed[0], sealed=True), "it ends elsewhere than where it was sealed"
        assert all(receipt.first < ends.sealed[0] for receipt in ends.listed.values() if receipt.first is not None)
    # A sealed head takes nothing, whoever asks.
    if log.bounds().sealed:
        with pytest.raises(Sealed):
            append(log, b"late", writer=writer_named(1 << 40), number=0)


@pytest.mark.parametrize("every", sampled(12))
def test_whatever_races_with_a_seal_is_below_it_or_refused(every: int) -> None:
    histories = [play(seed) for seed in range(0, 600, every)]
    assert sum(bool(ends.sealed) for _, ends in histories) > 0.9 * len(histories)
    assert sum(ends.refused for _, ends in histories) > len(histories) / 10
    assert sum(history.deaths for history, _ in histories) > len(histories) / 20


def caught() -> str:
    for seed in range(400):
        try:
            play(seed)
        except AssertionError as error:
            return str(error).splitlines()[0]
    pytest.fail("nobody noticed")


def test_a_twin_whose_appends_ignore_the_seal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "_check_open", lambda head: None)  # noqa: ARG005
    assert "sealed" in caught()


def test_a_twin_that_seals_a_step_after_its_last_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    within = ObjectLog.append

    def in_two_steps(log, batch, *, seal=False, **options):
        handle = within(log, batch, **options)
        if seal:
            log.seal()
        return handle

    monkeypatch.setattr(ObjectLog, "append", in_two_steps)
    assert "sealed" in caught()


# --- lost answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_a_seal_whose_answer_was_lost_is_found(place: PlainStore, line: FaultyStore, times: int) -> None:
    log = opened(line)
    append(log, b"a", number=0)
    line.lose_answers(times, path_prefix="head")
    assert log.seal().next == 1
    assert opened(place).bounds() == Bounds(0, 1, sealed=True)


def test_a_batch_listed_before_the_seal_is_found_by_the_producer_that_got_no_answer(
    place: PlainStore, line: FaultyStore
) -> None:
    """Both batches are listed by one call: the first is in the log, the second is refused, and each handle says so."""
    ours, theirs = opened(line, 3), opened(place, 2)
    producer = ours.producer(linger=3600.0)
    sealed: list[object] = []

    def seal_meanwhile(call) -> None:
        if call.name == "put_if" and call.path == "head" and call.stage == "after" and not sealed:
            sealed.append(theirs.seal())

    line.hook(seal_meanwhile)
    line.lose_answers(1, path_prefix="head")
    first = producer.append(value=b"a")
    producer.flush()
    second = producer.append(value=b"b")
    with pytest.raises(Sealed):
        producer.flush()
    assert first.result() == Receipt(0, 1)
    with pytest.raises(Sealed):
        second.result()
    with pytest.raises(Sealed):
        producer.close()
    assert content(theirs) == [(0, b"a")]


def test_a_listing_of_several_batches_answers_for_those_before_the_seal(place: PlainStore) -> None:
    log = opened(place)
    shipper = log._shipping(None, None).shipper
    first = _finished(shipper, b"a", 0)
    shipper.lister.enlist([first.listing])  # the answer of which the shipper did not get
    log.seal()
    second = _finished(shipper, b"b", 1)
    assert shipper.enlist([first, second]) == [Receipt(0, 1)]
    with pytest.raises(Sealed):
        shipper.enlist([second])


def _finished(shipper, value: bytes, number: int):
    draft = shipper.new_draft()
    draft.add([records(value)])
    return shipper.upload(shipper.seal(draft, number=number))


def test_an_append_to_a_sealed_log_uploads_nothing(place: PlainStore) -> None:
    log = opened(place)
    append(log, b"a", number=0)
    log.seal()
    before = {item.path for item in place.list("")}
    with pytest.raises(Sealed):
        append(log, b"b", number=1)
    assert {item.path for item in place.list("")} == before


# --- formats and versions --------------------------------------------------------------------------------------


def test_the_head_of_a_log_that_is_not_sealed_has_the_format_of_before(place: PlainStore) -> None:
    log = opened(place)
    append(log, b"a", number=0)
    before = place.get("head").data
    assert bytes(before[4:6]) == struct.pack("<H", 1)
    log.seal()
    after = place.get("head").data
    assert bytes(after[4:6]) == struct.pack("<H", 2)
    assert head_format.decode_head(after, "head").value == replace(
        head_format.decode_head(before, "head").value, sealed=True
    )


def test_a_program_that_does_not_know_the_seal_neither_appends_nor_trims(
    place: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older program reads heads of version 1 only."""
    older = opened(place)
    append(older, b"a", number=0)
    opened(place, 2).seal()
    sealed = bytes(place.get("head").data)
    monkeypatch.setattr(head_format, "FLAGGED_VERSION", 1)
    trim = lambda: older.trim(pause=0.0)
    for call in (lambda: append(older, b"b", number=1), older.bounds, lambda: older.slots.create("r", 0), trim):
        with pytest.raises(UnsupportedVersion, match="upgrade strandline"):
            call()
    assert bytes(place.get("head").data) == sealed


@pytest.mark.parametrize("flags", [4, 7, 255])
def test_flags_that_no_program_writes_are_damage(flags: int) -> None:
    stamped = head_format.Stamped(Head(writer_named(1), sealed=True), 1, ())
    data = bytearray(head_format.encode_head(stamped))
    data[-5] = flags
    data[-4:] = struct.pack("<I", head_format.crc32c(bytes(data[:-4])))
    with pytest.raises(head_format.CorruptData, match="flags"):
        head_format.decode_head(bytes(data), "head")
