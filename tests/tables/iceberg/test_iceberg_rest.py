"""Iceberg tables in a REST catalog: the contract of tables, refused commits, and answers that are lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog

import strandline as sl
from strandline.errors import Contended, Diverged, Fenced, TransientStorageError
from strandline.model.cursor import Cursor
from strandline.tables.files.part import TablePart
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.testing.sinks import LOG, changes
from tests.contracts.tables import TableContract
from tests.matrix_cases import some
from tests.rest_catalog import Fault, RestCatalogServer
from tests.tables.test_lost_answers import filled


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestCatalogServer]:
    with RestCatalogServer(str(tmp_path)) as found:
        yield found


def catalog_of(server: RestCatalogServer) -> RestCatalog:
    """The catalog as another process would open it."""
    return RestCatalog("shop", uri=server.uri)


def sink_of(server: RestCatalogServer, mode: Any = "append", **options: Any) -> sl.IcebergSink:
    return sl.IcebergSink(catalog_of(server), "shop.orders", mode=mode, **options)


def offsets_of(server: RestCatalogServer) -> list[int]:
    rows = server.catalog.load_table("shop.orders").scan().to_arrow()
    return sorted(rows["offset"].to_pylist())


@pytest.mark.matrix
class TestRestCatalog(TableContract):
    steps = (
        (FollowedIceberg, "begin"),
        (FollowedIceberg, "open"),
        (TablePart, "write"),
        (FollowedIceberg, "commit"),
        (FollowedIceberg, "make_durable"),
    )

    @pytest.fixture
    def sink(self, server: RestCatalogServer) -> Any:
        found: Any = sink_of(server, "latest")
        found.server = server
        return found

    def again(self, sink: Any) -> Any:
        found: Any = sink_of(sink.server, "latest")
        found.server = sink.server
        return found

    def content(self, sink: Any) -> Any:
        rows = sink.server.catalog.load_table("shop.orders").scan().to_arrow()
        return dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))

    def offsets(self, sink: Any) -> Any:
        return offsets_of(sink.server)


@pytest.mark.matrix
@pytest.mark.parametrize("fault", some([500, "reset", 502, 503, 504], 2))
@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_whose_answer_was_lost_is_found_by_its_snapshot(
    server: RestCatalogServer, fault: Fault, landed: bool
) -> None:
    log, sink = filled(9), sink_of(server)
    for end in (3, 6, 9):
        server.lose_commits(fault, landed=landed)
        if landed:
            assert sl.follow(log, sink, upto=end).next == end
        else:
            with pytest.raises((Contended, TransientStorageError)):
                sl.follow(log, sink, upto=end)
            assert sl.follow(log, sink, upto=end).next == end
    assert offsets_of(server) == list(range(9))
    assert server.commits == [200] * 3
    assert sl.tables.verify(sink_of(server), log).is_clean


@pytest.mark.matrix
def test_a_commit_on_an_older_state_is_refused_by_the_catalog_and_the_follower_is_fenced(
    server: RestCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, slow = filled(9), sink_of(server)
    sl.follow(log, slow, upto=3)
    commit = FollowedIceberg.commit

    def overtaken(self: FollowedIceberg, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        sl.follow(log, sink_of(server), upto=6)
        commit(self, *arguments, **options)

    monkeypatch.setattr(FollowedIceberg, "commit", overtaken)
    with pytest.raises(Fenced):
        sl.follow(log, slow, upto=9)
    assert server.commits == [200, 200, 409]
    assert offsets_of(server) == list(range(6))
    assert sl.follow(log, sink_of(server), upto=9).next == 9
    assert offsets_of(server) == list(range(9))


@pytest.mark.matrix
def test_of_two_followers_that_create_a_table_one_does(
    server: RestCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, slow = filled(6), sink_of(server)
    commit = FollowedIceberg.commit

    def overtaken(self: FollowedIceberg, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        sl.follow(log, sink_of(server), upto=3)
        commit(self, *arguments, **options)

    monkeypatch.setattr(FollowedIceberg, "commit", overtaken)
    with pytest.raises(Fenced):
        sl.follow(log, slow, upto=6)
    assert server.commits == [200, 409]
    assert offsets_of(server) == [0, 1, 2]


def test_a_table_that_is_dropped_while_it_is_followed_is_diverged(server: RestCatalogServer) -> None:
    sink = sink_of(server)
    upto = Cursor(LOG, 1)
    sink.apply(changes(0, (b"a", b"1")), since=upto.at(0), upto=upto)
    catalog_of(server).drop_table("shop.orders")
    with pytest.raises(Diverged, match="removed while it was followed"):
        sink.apply(changes(1, (b"b", b"2")), since=upto, upto=upto.at(2))


@pytest.mark.matrix
def test_a_catalog_that_is_down_is_tried_again_later(tmp_path: Path) -> None:
    log = filled(6)
    with RestCatalogServer(str(tmp_path)) as server:
        sink = sink_of(server)
        sl.follow(log, sink, upto=3)
    with pytest.raises(TransientStorageError):
        sl.follow(log, sink, upto=6)
    with RestCatalogServer(str(tmp_path)) as again:
        assert sl.follow(log, sink_of(again), upto=6).next == 6
        assert offsets_of(again) == list(range(6))


_FOLLOWER = """
import os, signal, sys
import strandline as sl
from pyiceberg.catalog.rest import RestCatalog
from strandline.errors import StrandlineError
from strandline.followers.run import Batching
from strandline.tables.iceberg.table import FollowedIceberg

uri, log, step = sys.argv[1:]
if step:
    def killed(*arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(FollowedIceberg, step, killed)
sink = sl.IcebergSink(RestCatalog("shop", uri=uri), "shop.orders", mode="append")
try:
    sl.follow(sl.open(log), sink, upto="end", batching=Batching(records=4))
except StrandlineError as error:
    print(type(error).__name__)
else:
    print("ok")
"""


def _follower(server: RestCatalogServer, log: str, step: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FOLLOWER, server.uri, log, step]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})


@pytest.mark.matrix
def test_processes_that_are_killed_and_that_race_apply_each_record_once(
    server: RestCatalogServer, tmp_path: Path
) -> None:
    place = f"{tmp_path}/log"
    log = sl.open(place, create=True)

    def extend() -> None:
        with log.producer() as producer:
            for n in range(9):
                producer.append(key=b"k%d" % n, value=b"v")

    for step in ("begin", "commit", "_committed", "make_durable"):
        extend()
        assert _follower(server, place, step).wait(120) < 0
    for _ in range(3):
        extend()
        pair = [_follower(server, place) for _ in range(2)]
        outcomes = {process.communicate(timeout=300)[0].strip() for process in pair}
        assert outcomes <= {"ok", "Fenced", "Contended", "TransientStorageError"}
    assert _follower(server, place).communicate(timeout=120)[0] == "ok\n"
    assert offsets_of(server) == list(range(log.end().next))
