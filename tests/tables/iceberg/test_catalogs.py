"""Iceberg tables in the catalogs Hive and Glue: the contract of tables, committers at once, and lost answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import Contended, Diverged, Fenced, Gap, TransientStorageError
from strandline.tables.files.part import TablePart
from strandline.tables.iceberg.table import FollowedIceberg
from tests.contracts.tables import TableContract
from tests.servers import fresh_prefix, started
from tests.tables.iceberg.glue_server import GlueServer
from tests.tables.iceberg.hive_server import HiveServer
from tests.tables.test_lost_answers import apply, filled

pytest.importorskip("boto3")
pytest.importorskip("thrift")

STEPS = (
    (FollowedIceberg, "begin"),
    (FollowedIceberg, "open"),
    (TablePart, "write"),
    (FollowedIceberg, "commit"),
    (FollowedIceberg, "make_durable"),
)


@pytest.fixture
def glue(tmp_path: Path) -> Iterator[dict[str, str]]:
    with GlueServer() as server:
        found: Any = {"type": "glue", "warehouse": f"file://{tmp_path}/warehouse", **server.options}
        found["server"] = server
        yield found


@pytest.fixture(scope="module")
def hive_server() -> Iterator[HiveServer]:
    server = started(HiveServer())
    yield server
    server.stop()


@pytest.fixture
def hive(hive_server: HiveServer, tmp_path: Path) -> dict[str, str]:
    place = {"uri": hive_server.uri, "warehouse": f"file://{tmp_path}/warehouse"}
    return {"type": "hive", "hive.hive2-compatible": "true", **place}  # the metastore is that of Hive 2.3


class Lake:
    """A catalog of pyiceberg, and a table in it that no other test has."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.server: Any = options.pop("server", None)
        self.options = options
        self.table = f"{fresh_prefix().replace('-', '_')}.orders"

    def catalog(self) -> Any:
        """The catalog as another process would open it."""
        from pyiceberg.catalog import load_catalog

        return load_catalog("lake", **self.options)

    def sink(self, mode: Any = "append") -> sl.IcebergSink:
        return sl.IcebergSink(self.catalog(), self.table, mode=mode)

    def rows(self) -> Any:
        return self.catalog().load_table(self.table).scan().to_arrow()

    def offsets(self) -> list[int]:
        return sorted(self.rows()["offset"].to_pylist())


@pytest.fixture
def lake(request: pytest.FixtureRequest) -> Lake:
    return Lake(request.getfixturevalue(request.param))


both = pytest.mark.parametrize("lake", ["glue", pytest.param("hive", marks=pytest.mark.matrix)], indirect=True)


class _Contract(TableContract):
    steps = STEPS

    def again(self, sink: Any) -> Any:
        found: Any = sink.lake.sink("latest")
        found.lake = sink.lake
        return found

    def content(self, sink: Any) -> Any:
        rows = sink.lake.rows()
        return dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))

    def offsets(self, sink: Any) -> Any:
        return sink.lake.offsets()


@pytest.mark.matrix
class TestGlue(_Contract):
    @pytest.fixture
    def sink(self, glue: dict[str, str]) -> Any:
        lake = Lake(glue)
        found: Any = lake.sink("latest")
        found.lake = lake
        return found


@pytest.mark.matrix
class TestHive(_Contract):
    @pytest.fixture
    def sink(self, hive: dict[str, str]) -> Any:
        lake = Lake(hive)
        # If two clients create one database at once, the metastore lets one of them remove its folder.
        lake.catalog().create_namespace(lake.table.partition(".")[0])
        found: Any = lake.sink("latest")
        found.lake = lake
        return found


@both
def test_a_commit_on_an_older_state_is_refused_by_the_catalog_and_the_follower_is_fenced(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, slow = filled(9), lake.sink()
    sl.follow(log, slow, upto=3)
    commit = FollowedIceberg.commit

    def overtaken(self: FollowedIceberg, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        sl.follow(log, lake.sink(), upto=6)
        commit(self, *arguments, **options)

    monkeypatch.setattr(FollowedIceberg, "commit", overtaken)
    with pytest.raises(Fenced):
        sl.follow(log, slow, upto=9)
    assert lake.offsets() == list(range(6))
    assert sl.follow(log, lake.sink(), upto=9).next == 9
    assert lake.offsets() == list(range(9))


@pytest.mark.parametrize("lake", ["glue"], indirect=True)
def test_two_committers_that_saw_the_same_state_are_told_apart_by_the_version_of_the_table_in_glue(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked at the table: only the update itself can refuse the second one."""
    from pyiceberg.catalog.glue import GlueCatalog

    log, slow = filled(9), lake.sink()
    sl.follow(log, slow, upto=3)
    update = GlueCatalog._update_glue_table

    def overtaken(self: GlueCatalog, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        sl.follow(log, lake.sink(), upto=6)
        update(self, *arguments, **options)

    monkeypatch.setattr(GlueCatalog, "_update_glue_table", overtaken)
    with pytest.raises(Fenced):
        sl.follow(log, slow, upto=9)
    assert lake.server.updates[-1] == "ConcurrentModificationException"
    assert lake.offsets() == list(range(6))


@pytest.mark.parametrize("lake", ["glue"], indirect=True)
@pytest.mark.parametrize("landed", [True, False])
def test_an_update_of_glue_whose_answer_was_lost_is_repeated_and_is_found(lake: Lake, landed: bool) -> None:
    """Its client repeats the request by itself. If the first one had landed, the second is refused."""
    log, sink = filled(9), lake.sink()
    for end in (3, 6, 9):
        lake.server.lost = [landed]
        assert sl.follow(log, sink, upto=end).next == end
        assert lake.offsets() == list(range(end))
    assert lake.server.updates.count("ConcurrentModificationException") == (2 if landed else 0)
    assert sl.tables.verify(lake.sink(), log).is_clean


@pytest.mark.matrix
@pytest.mark.parametrize("lake", ["hive"], indirect=True)
@pytest.mark.parametrize("landed", [True, False])
def test_an_alteration_of_hive_whose_answer_was_lost_is_found(
    lake: Lake, landed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hive_metastore.ThriftHiveMetastore import Client
    from thrift.transport.TTransport import TTransportException

    log, sink = filled(6), lake.sink()
    sl.follow(log, sink, upto=3)
    alter = Client.alter_table_with_environment_context

    def unanswered(self: Client, *arguments: Any, **options: Any) -> None:
        if landed:
            alter(self, *arguments, **options)
        raise TTransportException(message="The line broke.")

    with monkeypatch.context() as patch:
        patch.setattr(Client, "alter_table_with_environment_context", unanswered)
        if landed:
            assert sl.follow(log, sink, upto=6).next == 6
        else:
            with pytest.raises((Contended, TransientStorageError)):
                sl.follow(log, sink, upto=6)
    assert sl.follow(log, sink, upto=6).next == 6
    assert lake.offsets() == list(range(6))


def locks_of(lake: Lake) -> list[int]:
    """The locks that the metastore keeps of the table."""
    from hive_metastore.ttypes import ShowLocksRequest

    with lake.catalog()._client as client:
        database, table = lake.table.split(".")
        return [
            one.lockid
            for one in client.show_locks(ShowLocksRequest()).locks
            if (one.dbname, one.tablename) == (database, table)
        ]


def unlock(lake: Lake) -> None:
    """Forget the locks of the table, as the metastore does when they are too old."""
    from hive_metastore.ttypes import UnlockRequest

    for number in locks_of(lake):
        with lake.catalog()._client as client:
            client.unlock(UnlockRequest(lockid=number))


@pytest.mark.matrix
@pytest.mark.parametrize("lake", ["hive"], indirect=True)
def test_a_follower_killed_within_its_commit_leaves_its_lock_in_hive_and_nothing_else(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hive_metastore.ThriftHiveMetastore import Client

    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit

    apply(lake.sink(), 0, (b"a", b"1"))
    with monkeypatch.context() as patch:
        patch.setattr(Client, "alter_table_with_environment_context", killed)
        patch.setattr(Client, "unlock", killed)
        with pytest.raises(SystemExit):
            apply(lake.sink(), 1, (b"b", b"2"))
    assert len(locks_of(lake)) == 1
    with pytest.raises((Contended, TransientStorageError)) as refused:
        apply(lake.sink(), 1, (b"b", b"2"))
    assert lake.offsets() == [0], refused.value
    unlock(lake)
    apply(lake.sink(), 1, (b"b", b"2"))
    assert lake.offsets() == [0, 1]
    assert not locks_of(lake)


@pytest.mark.matrix
@pytest.mark.parametrize("lake", ["hive"], indirect=True)
def test_a_commit_whose_lock_hive_forgot_undoes_a_later_one_and_the_table_is_exact_at_its_cursor(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alteration has no condition of its own. The cursor is in the same metadata, so that nothing is lost of it."""
    from hive_metastore.ThriftHiveMetastore import Client

    slow, other = lake.sink(), lake.sink()
    apply(slow, 0, (b"a", b"1"))
    alter = Client.alter_table_with_environment_context

    def suspended(self: Client, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        unlock(lake)
        apply(other, 1, (b"b", b"2"), (b"c", b"3"))
        alter(self, *arguments, **options)

    monkeypatch.setattr(Client, "alter_table_with_environment_context", suspended)
    apply(slow, 1, (b"b", b"2"))
    assert lake.offsets() == [0, 1]
    with pytest.raises((Diverged, Fenced, Gap)):
        apply(other, 3, (b"d", b"4"))
    apply(lake.sink(), 1, (b"b", b"2"), (b"c", b"3"), (b"d", b"4"))
    assert lake.offsets() == [0, 1, 2, 3]
