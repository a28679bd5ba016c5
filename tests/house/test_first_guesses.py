"""Wrong first guesses of a newcomer: each error names what the caller wrote, and says what to write instead."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import StrandlineError

Guess = Callable[[Any, Path], object]


@pytest.fixture
def log(tmp_path: Path) -> Any:
    log = sl.open(tmp_path / "log", create=True)
    with log.producer() as producer:
        producer.produce([b"a", b"b"])
    return log


class OnlyApplies:
    def apply(self, *_: object) -> None: ...


def acknowledge_the_batch_itself(log: Any, _: Path) -> None:
    with sl.Consumer(log) as consumer:
        consumer.ack(consumer.next_batch(timeout=60))


@pytest.mark.parametrize(
    ("guess", "advice"),
    [
        (lambda log, _: list(log.read("earliest")), "since is 'beginning', 'retained', 'now', a whole"),
        (lambda log, _: list(log.read(7)), "past the log's end at 2: the log .* or has never had that offset"),
        (lambda log, _: sl.Consumer(log, slot="late", start=7), "past the end of the log .2.: name one up to that"),
        (lambda log, _: log.append(b"x"), "batch is a pyarrow.Table or .* .log.producer.. appends single records"),
        (lambda log, _: log.producer().append(b"v"), r"by name: append\(value=…\), or append\(key=…, value=…\)\."),
        (
            lambda log, _: log.producer().append(value=b"v", timestamp=datetime(2026, 1, 15)),  # noqa: DTZ001
            "no time zone: add one, such",
        ),
        (lambda log, _: log.producer().append(value=b"v", timestamp=1.5), "is a datetime, or a whole number of micro"),
        (lambda log, _: log.producer().append(key=b"k", op="delete"), "Op.PUT, Op.DELETE and Op.PURGE, not 'delete'"),
        (lambda log, _: log.producer().append(value=b"v", headers={"a": "b"}), "text to bytes: encode their values"),
        (
            lambda log, _: sl.follow(log, OnlyApplies(), upto="end"),
            "OnlyApplies cannot .* no cursor... Implement",
        ),
        (
            lambda log, _: sl.watch_applied(sl.kv.LogKeyValue(log), print, scope="k"),
            "a Prefix such as sl.kv.Prefix",
        ),
        (lambda *_: sl.values.Json({"id": "int"}), "The value has no type in the JSON Schema: give it one"),
        (acknowledge_the_batch_itself, "sequence is a batch's sequence number .batch.sequence., not"),
    ],
)
def test_a_wrong_guess_is_one_sentence_with_the_advice(log: Any, tmp_path: Path, guess: Guess, advice: str) -> None:
    with pytest.raises(StrandlineError, match=advice) as refused:
        guess(log, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "guess",
    [
        lambda _, path: sl.open(path / "new", creat=True),
        lambda _, path: sl.open(path / "new", True),
        lambda log, _: log.append(pa.table({"value": [b"v"]})),
        lambda log, _: log.slots.create("billing"),
        lambda log, path: sl.follow(log, sl.DeltaSink(path / "new"), until="end"),
    ],
)
def test_an_argument_that_a_call_does_not_have_is_python_s_own_error_and_changes_nothing(
    log: Any, tmp_path: Path, guess: Guess
) -> None:
    with pytest.raises(TypeError, match=r"argument|positional"):
        guess(log, tmp_path)
    assert not (tmp_path / "new").exists()
    assert (log.bounds().next, log.slots.list()) == (2, [])


def test_an_error_from_within_a_call_stays_what_it_is(tmp_path: Path) -> None:
    log = sl.open(tmp_path / "keyed", create=True)
    with log.producer() as producer:
        producer.append(key=b"k", value=b"v")

    def failing(_: object) -> None:
        raise TypeError("of the program")

    with pytest.raises(TypeError, match="of the program"):
        sl.follow(log, sl.followers.MemoryStore(), upto="end", on_progress=failing)
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        sl.follow(log, sl.followers.MemoryStore(), upto="end", on_progress=lambda: None)  # type: ignore[arg-type, misc]


def test_a_timestamp_may_be_a_datetime_with_a_time_zone(log: Any) -> None:
    at = datetime(2026, 1, 15, 5, 29, 0, 250_001, tzinfo=UTC)
    with log.producer() as producer:
        producer.append(value=b"c", timestamp=at)
    (batch,) = log.read(2)
    assert batch["timestamp"].to_pylist() == [at]


def test_open_is_called_open_in_help_and_can_be_pickled() -> None:
    assert (sl.open.__module__, sl.open.__name__) == ("strandline", "open")
    assert pickle.loads(pickle.dumps(sl.open)) is sl.open
    with pytest.raises(TypeError, match=r"^open\(\) got"):
        sl.open("memory://", creat=True)  # type: ignore[call-overload]


def test_an_append_handle_shows_whether_its_outcome_is_known(log: Any) -> None:
    with log.producer() as producer:
        handle = producer.append(value=b"c")
        assert repr(handle) in ("<RecordHandle, not done>", "<RecordHandle, done>")
        handle.result(60)
        assert repr(handle) == "<RecordHandle, done>"
