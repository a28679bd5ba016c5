"""Logs that name the format of their values: every kind of log, over restarts, races, crashes and newer releases."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import BadRecord, InvalidInput, SchemaRefused, Unsupported, UnsupportedVersion
from strandline.formats.json.checked import with_checksum
from strandline.log.object.log import open_log
from strandline.log.wal import snapshot
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.rewind import rewind
from strandline.storage.objects.urls import store_at
from strandline.testing.faulty import Call, FaultyStore
from strandline.testing.simdisk import SimulatedDisk, crash_everywhere
from tests.contracts.logs import append, content
from tests.log.wal.workload import open_on
from tests.matrix_cases import sampled

FIRST = sl.values.Json(pa.schema({"id": pa.int32()}))
SECOND = sl.values.Json(pa.schema({"id": pa.int64(), "note": pa.string()}))
THIRD = sl.values.Json(pa.schema({"id": pa.int64(), "note": pa.string(), "vip": pa.bool_()}))


def _addresses(tmp_path: Path) -> list[str]:
    return [f"{tmp_path}/object", f"wal://{tmp_path}/wal"]


def test_a_log_names_its_codec_over_restarts_and_takes_permitted_changes(tmp_path: Path) -> None:
    for url in _addresses(tmp_path):
        with sl.open(url, create=True, value=FIRST) as log:
            assert log.value == FIRST
            assert log.evolve_value(SECOND) == SECOND
            assert log.evolve_value(SECOND) == SECOND
            with pytest.raises(SchemaRefused, match="missing from the new schema"):
                log.evolve_value(sl.values.Json(pa.schema({"other": pa.int64()})))
        for codec in (None, FIRST, SECOND):  # also a program that was not updated
            with sl.open(url, value=codec, create=codec is FIRST) as log:
                assert log.value == SECOND
        with pytest.raises(InvalidInput, match=r"version 2.*evolve_value does"):
            sl.open(url, value=THIRD)
    versions = json.loads((tmp_path / "object" / "log.json").read_bytes())["values"]
    assert [(one["version"], one["format"]) for one in versions] == [(1, "json"), (2, "json")]
    with sl.open(f"wal://{tmp_path}/wal", read_only=True, value=FIRST) as reader:
        assert reader.value == SECOND
        with pytest.raises(Unsupported, match="opened for reading"):
            reader.evolve_value(THIRD)
    with pytest.raises(InvalidInput, match="evolve_value does"):
        sl.open(f"wal://{tmp_path}/wal", read_only=True, value=THIRD)


def test_a_log_without_a_codec_is_as_it_was_and_may_get_one_later(tmp_path: Path) -> None:
    for url in _addresses(tmp_path):
        with sl.open(url, create=True) as log:
            assert log.value is None
        assert b'"values"' not in (tmp_path / Path(url).name / "log.json").read_bytes()
        with pytest.raises(InvalidInput, match="plain bytes"):
            sl.open(url, value=FIRST)
        with sl.open(url) as log:
            log.evolve_value(FIRST)
            assert log.value == FIRST
    memory = sl.log.MemoryLog(value=FIRST)
    assert memory.value == FIRST
    assert memory.evolve_value(SECOND) == memory.value


def test_a_pickled_log_and_a_tiered_one_name_it_too(tmp_path: Path) -> None:
    log = sl.open(f"{tmp_path}/log", create=True, value=FIRST)
    append(log, b'{"id":1}', number=0)
    assert pickle.loads(pickle.dumps(log)).value == FIRST
    sl.tier.attach(log, (tmp_path / "cold").as_uri())
    with sl.open(f"{tmp_path}/log") as both:
        assert isinstance(both, sl.tier.TieredLog)
        assert both.evolve_value(SECOND) == both.value == SECOND
    assert log.value == SECOND


def test_a_change_of_retention_and_one_of_the_codec_do_not_lose_each_other(tmp_path: Path) -> None:
    one = open_log(f"{tmp_path}/log", create=True, value=FIRST)
    other = open_log(f"{tmp_path}/log")
    one.evolve_value(SECOND)
    other.set_retention("consumed")  # its identity is older
    assert one.value == other.value == SECOND
    one.evolve_value(THIRD)
    assert str(open_log(f"{tmp_path}/log").identity.retention) == "consumed"
    assert other.value == THIRD


def test_two_changes_at_once_are_made_one_after_the_other(tmp_path: Path) -> None:
    open_log(f"{tmp_path}/log", create=True, value=FIRST)
    store = FaultyStore(store_at(f"{tmp_path}/log", None))
    slow, quick = open_log(store), open_log(f"{tmp_path}/log")
    other = sl.values.Json(pa.schema({"id": pa.int32(), "vip": pa.bool_()}))

    def meanwhile(call: Call) -> None:
        if call.name == "put_if":
            store.unhook()
            quick.evolve_value(other)

    store.hook(meanwhile)
    with pytest.raises(SchemaRefused, match="'vip' is in the values"):  # judged again, by what is stored now
        slow.evolve_value(SECOND)
    store.hook(meanwhile)
    quick.set_retention("forever")
    slow.evolve_value(THIRD)
    assert slow.value == quick.value == THIRD
    assert [version.number for version in slow.identity.values] == [1, 2, 3]


def test_a_change_whose_answer_was_lost_is_recorded_once(tmp_path: Path) -> None:
    store = FaultyStore(store_at(f"{tmp_path}/log", None))
    log = open_log(store, create=True, value=FIRST)
    store.lose_answers(2, path_prefix="log.json")
    log.evolve_value(SECOND)
    assert [version.number for version in log.identity.values] == [1, 2]


def test_a_format_of_a_newer_release_is_read_as_bytes_and_named_to_those_who_decode(tmp_path: Path) -> None:
    for url in _addresses(tmp_path):
        with sl.open(url, create=True, value=FIRST) as log:
            append(log, b"new", number=0)
        identity = tmp_path / Path(url).name / "log.json"
        fields = json.loads(identity.read_bytes())
        fields["values"].append({"version": 2, "format": "cbor", "schema": {"cddl": "x"}})
        del fields["checksum"]
        identity.write_text(json.dumps(with_checksum(fields)))
        with sl.open(url) as log:
            assert content(log) == [(0, b"new")]
            append(log, b"more", number=1)
            with pytest.raises(UnsupportedVersion, match=r"'cbor' \(version 2\).*upgrade strandline"):
                _ = log.value
            with pytest.raises(UnsupportedVersion, match="cbor"):
                log.evolve_value(SECOND)
            if hasattr(log, "set_retention"):
                log.set_retention("consumed")
        assert json.loads(identity.read_bytes())["values"] == fields["values"]


def test_a_node_refuses_codecs_because_it_records_none() -> None:
    with pytest.raises(Unsupported, match="after a failover"):
        sl.open("grpc://127.0.0.1:1", value=FIRST)
    with sl.open("grpc://127.0.0.1:1") as log:
        with pytest.raises(Unsupported, match="records no value format"):
            _ = log.value
        with pytest.raises(Unsupported, match="Give the codec"):
            log.evolve_value(FIRST)


def test_a_copy_and_a_quarantine_of_a_write_ahead_log_name_the_codec(tmp_path: Path) -> None:
    with WalLog.open(f"{tmp_path}/wal", value=FIRST) as log:
        for number in range(4):
            append(log, b'{"id":%d}' % number, number=number)
        log.evolve_value(SECOND)
        (tmp_path / "copy").mkdir()
        snapshot.fill(log, str(tmp_path / "copy"))
    rewind(f"{tmp_path}/wal", 2, quarantine=f"{tmp_path}/aside")
    for name in ("wal", "copy", "aside"):
        with WalLog.open(f"{tmp_path}/{name}", create=False) as log:
            assert log.value == SECOND, name


@pytest.mark.parametrize("every", sampled(9))
def test_a_crash_at_every_step_of_a_change_leaves_one_version_or_the_other(every: int) -> None:
    def change(disk: SimulatedDisk, notes: list[Any]) -> None:
        with open_on(disk, value=FIRST) as log:
            notes.append("created")
            log.evolve_value(SECOND)
            notes.append("changed")

    def check(disk: SimulatedDisk, notes: list[Any]) -> None:
        with open_on(disk, value=FIRST) as log:
            assert log.value in ([SECOND] if "changed" in notes else [FIRST, SECOND])

    assert crash_everywhere(change, check, every=every).states > 60 // every


def test_typed_batches_are_read_from_any_log_and_bad_rows_are_named(tmp_path: Path) -> None:
    log = sl.open(f"wal://{tmp_path}/wal", create=True, value=FIRST)
    with log.producer() as producer:
        producer.append(key=b"a", value={"id": 1})
        producer.append(value=b"bad")
        producer.append(key=b"c", op=sl.Op.DELETE).result()
    with pytest.raises(BadRecord, match=r"offset 1 cannot be decoded: JSON is malformed"):
        list(sl.log.read_decoded(log))
    table = pa.Table.from_batches(sl.log.read_decoded(log, bad="null"))
    assert table.column_names == ["id", "_key", "_offset", "_timestamp", "_op", "_headers", "_error", "_value"]
    assert table["id"].to_pylist() == [1, None, None]
    assert table["_value"].to_pylist() == [None, b"bad", None]
    assert table["_op"].to_pylist() == [0, 0, 1]
    [batch] = sl.log.read_decoded(log, 2, value=SECOND)
    assert batch.to_pylist()[0]["note"] is None
    log.evolve_value(SECOND)
    [first] = sl.log.read_decoded(log, upto=1)
    assert first.schema.field("id").type == pa.int64()
    with pytest.raises(InvalidInput, match="name a codec"):
        sl.log.read_decoded(sl.log.MemoryLog())
    with pytest.raises(InvalidInput, match="begins with an underscore"):
        sl.log.read_decoded(sl.log.MemoryLog(value=sl.values.Json(pa.schema({"_id": pa.int64()}))))
    log.close()


def test_records_in_the_cold_tier_are_decoded_by_the_newest_version(tmp_path: Path) -> None:
    url = f"wal://{tmp_path}/wal"
    with sl.open(url, create=True, value=FIRST) as log:
        with log.producer() as producer:
            producer.append(value={"id": 1}).result()
            producer.append(value={"id": 2}).result()
        sl.tier.attach(log, (tmp_path / "cold").as_uri())
        with sl.tier.tiering(log) as tierer:
            tierer.run_once(everything=True)
        assert log.trim(2) == 2
    with sl.open(url, value=FIRST) as both:
        assert isinstance(both, sl.tier.TieredLog)
        both.evolve_value(SECOND)
        with both.producer() as producer:
            producer.append(value={"id": 3, "note": "n"}).result()
        table = pa.Table.from_batches(sl.log.read_decoded(both))
        assert table.select(["id", "note"]).to_pydict() == {"id": [1, 2, 3], "note": [None, None, "n"]}
