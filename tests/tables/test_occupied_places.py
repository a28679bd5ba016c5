"""Nothing new is created where something else is, which it would hide or delete: in a bucket as in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

import strandline as sl
from strandline.errors import WrongKind
from strandline.log.topic.logs import open_object_topic
from strandline.storage.objects.urls import open_store
from strandline.tables.delta.sink import DeltaSink
from tests.matrix_cases import some
from tests.servers import BUCKET, S3Server

Place = tuple[str, dict[str, str]]


def log_at(url: str, options: dict[str, str]) -> None:
    with sl.open(url, create=True, options=options) as log, log.producer() as producer:
        producer.append(key=b"k", value=b"v").result(120)


def topic_at(url: str, options: dict[str, str]) -> None:
    open_object_topic(url, 1, options=options).close()


def queue_at(url: str, options: dict[str, str]) -> None:
    with sl.open(url, format="queue-v1", options=options).producer() as producer:
        producer.produce([b"one"])


def table_at(url: str, options: dict[str, str]) -> None:
    with sl.open(f"memory://{uuid4()}", create=True) as log:
        with log.producer() as producer:
            producer.append(key=b"k", value=b"v")
        sl.follow(log, DeltaSink(url, options=options), upto="end")


THINGS = {"an object log": log_at, "a topic": topic_at, "a queue of version 1": queue_at, "a Delta table": table_at}


@pytest.fixture
def place(s3_server: S3Server) -> Place:
    return s3_server.url(BUCKET, f"place-{uuid4()}"), s3_server.options


def names(place: Place) -> list[str]:
    return [row.path for row in open_store(*place).list("")]


@pytest.mark.parametrize(
    ("there", "new"),
    some(
        [(there, new) for new in (log_at, topic_at, table_at) for there, make in THINGS.items() if make is not new], 4
    ),
)
def test_nothing_begins_where_something_else_is(there: str, new: Callable[..., None], place: Place) -> None:
    THINGS[there](*place)
    before = names(place)
    with pytest.raises(WrongKind, match=f"{there} .*would hide it. Nothing was changed: .*, or choose another path"):
        new(*place)
    assert names(place) == before


def test_a_followed_table_is_not_created_on_the_log_itself(place: Place) -> None:
    log_at(*place)
    with sl.open(place[0], options=place[1]) as log:
        with pytest.raises(WrongKind, match="is an object log"):
            sl.follow(log, DeltaSink(place[0], options=place[1]), slot="s", upto="end")
        assert log.slots.list() == []


def test_a_table_without_its_first_commits_is_seen_by_its_checkpoint(place: Place) -> None:
    open_store(*place).put("_delta_log/_last_checkpoint", b"{}")
    with pytest.raises(WrongKind, match="a Delta table"):
        log_at(*place)


@pytest.mark.parametrize("there", ["a topic", "a queue of version 1"])
def test_no_log_begins_on_something_else_in_memory(there: str) -> None:
    url = f"memory://{uuid4()}"
    THINGS[there](url, {})
    with pytest.raises(WrongKind, match=there):
        log_at(url, {})


def test_no_log_begins_in_a_folder_of_something_else_that_is_given_as_a_store(tmp_path: Path) -> None:
    topic_at(str(tmp_path), {})
    with pytest.raises(WrongKind, match="a topic"):
        sl.open(open_store(str(tmp_path)), create=True)
