"""The contract of tables, for those with a layout: any cuts, crashes at every step, races, replaced followers."""

from __future__ import annotations

from typing import Any

import pytest

import strandline as sl
from strandline.model.records import Op
from strandline.tables import Layout
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.part import TablePart
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.testing.sinks import DELETE, folded
from tests.contracts.tables import TableContract
from tests.tables.layouts.formats import PLACES


class _Contract(TableContract):
    format: str
    mode: Any = "append"
    layout: Layout

    @pytest.fixture
    def sink(self, tmp_path):
        place = PLACES[self.format](tmp_path)
        yield self.opened(place)
        place.close()

    def opened(self, place: Any) -> Any:
        options = {"mode": self.mode, "layout": self.layout}
        if self.format == "delta":
            sink: Any = sl.DeltaSink(place.address, **options)
        else:
            sink = sl.IcebergSink(place.catalog, "shop.orders", **options)
        sink.place = place
        return sink

    def again(self, sink):
        return self.opened(sink.place)


class _Append(_Contract):
    keeps_all = True
    layout = Layout(["op", "hour(timestamp)"], "key")

    def offsets(self, sink):
        return sink.place.rows()["offset"].to_pylist()

    def content(self, sink):
        rows = sink.place.rows().sort_by("offset").to_pylist()
        assert {values[0] for values in sink.place.files().values()} <= {Op.PUT, Op.DELETE}
        return folded([(row["key"], DELETE if row["op"] == Op.DELETE else row["value"]) for row in rows])


class _History(_Contract):
    mode = "history"
    layout = Layout(["hour(valid_from)", "day(valid_to)"], ["valid_from_offset", "key"])

    def offsets(self, sink):
        return sink.place.rows()["valid_from_offset"].to_pylist()

    def content(self, sink):
        rows = [row for row in sink.place.rows().to_pylist() if row["valid_to_offset"] is None]
        state = {row["key"]: row["value"] for row in rows}
        assert len(state) == len(rows), "a key has two current versions"
        return state


DELTA = (
    (DeltaCommits, "created"),
    (FollowedDelta, "open"),
    (FollowedDelta, "last_commit"),
    (TablePart, "write"),
    (DeltaCommits, "commit"),
    (DeltaCommits, "_settle"),
    (FollowedDelta, "make_durable"),
)
ICEBERG = (
    (FollowedIceberg, "begin"),
    (FollowedIceberg, "open"),
    (TablePart, "write"),
    (FollowedIceberg, "commit"),
    (FollowedIceberg, "make_durable"),
)


class TestDeltaAppend(_Append):
    format, steps = "delta", DELTA


class TestDeltaHistory(_History):
    format, steps = "delta", DELTA


class TestIcebergAppend(_Append):
    format, steps = "iceberg", ICEBERG


class TestIcebergHistory(_History):
    format, steps = "iceberg", ICEBERG
