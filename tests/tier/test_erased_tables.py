"""Values that a compaction has erased, and the tables that follow the log: verified, built again, replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.model.records import Op
from strandline.tables.maintain.operations import rebuild, verify
from strandline.tier.copy.segment_files import forget_tails
from tests.tier.read.tiered_logs import Tiers
from tests.tier.test_compaction import DAY, keyed

NAME = pa.schema({"name": pa.string()})
MODES = ("latest", "append", "history")


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    """A log whose key ``anna`` was purged, all of it in the cold tier; nothing is erased yet."""
    forget_tails()
    tiers = Tiers("object")
    keyed(tiers, [(Op.PUT, b"anna", b'{"name": "secret 1"}'), (Op.PUT, b"bert", b'{"name": "b1"}')])
    keyed(tiers, [(Op.PUT, b"anna", b"bad, and secret"), (Op.PUT, b"bert", b'{"name": "b2"}')])
    keyed(tiers, [(Op.PURGE, b"anna", None), (Op.PUT, b"carl", b'{"name": "c"}')])
    yield tiers
    forget_tails()


def sink_of(folder: Path, mode: str, codec: sl.values.Json | sl.values.Raw) -> sl.DeltaSink:
    return sl.DeltaSink(str(folder / mode), mode=mode, value=codec, dead_letters=str(folder / f"{mode}-letters"))


def erase(tiers: Tiers) -> sl.Log:
    tiers.tierer(target=1).run_once(everything=True)
    tiers.trim()
    assert tiers.tierer(target=1, grace=DAY).compact(purge=True, everything=True).erased == 2
    tiers.reopen()
    return tiers.tiered()


def text_of(url: str) -> str:
    return str(DeltaTable(url).to_pyarrow_table().to_pylist())


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
def test_a_table_built_again_has_no_erased_value_and_equals_the_log(tiers: Tiers, tmp_path: Path, mode: str) -> None:
    codec = sl.values.Json(NAME)
    sl.follow(tiers.tiered(), sink_of(tmp_path, mode, codec), "s", upto="end")
    log = erase(tiers)
    before = verify(sink_of(tmp_path, mode, codec), log)
    assert before.is_clean is (mode == "latest"), "a table of older values differs from the log, and says so"
    rebuild(sink_of(tmp_path, mode, codec), log)
    assert verify(sink_of(tmp_path, mode, codec), log).is_clean
    assert "secret" not in text_of(str(tmp_path / mode))
    assert "b2" in text_of(str(tmp_path / mode))
    keyed(tiers, [(Op.PUT, b"anna", b'{"name": "new life"}')])
    sl.follow(log, sink_of(tmp_path, mode, codec), "s", upto="end")
    assert "new life" in text_of(str(tmp_path / mode))
    assert verify(sink_of(tmp_path, mode, codec), log).is_clean


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
def test_a_letter_of_a_purged_key_does_not_come_back_as_the_keys_value(tiers: Tiers, tmp_path: Path, mode: str) -> None:
    sl.follow(tiers.tiered(), sink_of(tmp_path, mode, sl.values.Json(NAME)), "s", upto="end")
    assert "bad, and secret" in text_of(str(tmp_path / f"{mode}-letters"))
    log = erase(tiers)
    sl.tables.replay_letters(sink_of(tmp_path, mode, sl.values.Json(NAME)), log)  # still bad
    DeltaTable(str(tmp_path / f"{mode}-letters")).delete("key = X'616e6e61'")
    rebuild(sink_of(tmp_path, mode, sl.values.Json(NAME)), log)
    sl.tables.replay_letters(sink_of(tmp_path, mode, sl.values.Json(NAME)), log)
    assert "secret" not in text_of(str(tmp_path / mode)) + text_of(str(tmp_path / f"{mode}-letters"))
    assert verify(sink_of(tmp_path, mode, sl.values.Json(NAME)), log).is_clean
