"""``strandline describe``: identity, bounds, size, retention, values, slots and cold tier of a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from rich.text import Text

import strandline as sl
from strandline.cli.logs.lag import Lag, current_lag, owner, state_of
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, AnyLogAt
from strandline.cli.shared.common import connecting
from strandline.errors import MissingExtra, Unsupported, UnsupportedVersion
from strandline.log.lag import lag_of
from strandline.log.read.value_format import named_codec, named_versions
from strandline.node.messages import SlotKind
from strandline.tier.opening import cold_cell
from strandline.tier.read.tiered_log import hot_tier

_NODE: Final = "log of a node"


@connecting
def describe(place: AnyLogAt) -> None:
    """Show what a log is: offsets, size, retention, values, slots.

    Changes nothing. Numbers that the log does not know are null in --json.

    Example: strandline describe s3://bucket/orders
    """
    with place.reading() as log:
        lag = current_lag(log)
        fields = _fields(log, lag)
    show.answer(fields, *_lines(fields, lag))


def _fields(log: AnyLog, lag: Lag) -> dict[str, Any]:
    """The fields of ``--json``; those of its own tier are null for the log of a node."""
    seen, bounds, hot = lag.fields(), log.bounds(), hot_tier(log)
    fields = {
        "url": lag.url,
        "kind": _NODE,
        "log_id": seen["log_id"],
        "first": bounds.first,
        "next": bounds.next,
        "hot_first": lag.bounds.first,
        "bytes": None,
        "retention": seen["retention"],
        "slot_lag_bytes": seen["lag_bytes"],
        "slot_idle_seconds": seen["idle_seconds"],
        "sealed": bounds.sealed,
        "value": None,
        "content_type": log.content_type,
        "slots": seen["slots"],
        "cold": None,
    }
    if isinstance(log, sl.node.RemoteLog):
        return fields
    if versions := named_versions(hot):
        columns = {}
        with suppress(MissingExtra, Unsupported, UnsupportedVersion):  # the columns only
            codec = named_codec(hot)
            columns = {} if codec is None else {field.name: str(field.type) for field in codec.schema}
        fields["value"] = {"format": versions[-1].format, "version": versions[-1].number, "columns": columns}
    cold = cold_cell(log).read()
    return fields | {
        "kind": "object log" if isinstance(hot, sl.log.ObjectLog) else "write-ahead log",
        "bytes": lag_of(hot, lag.bounds.first, 0).bytes,
        "cold": None if cold is None else {"store": cold.store, "events": cold.events},
    }


def _lines(fields: dict[str, Any], lag: Lag) -> Iterator[Text]:
    """The text output."""
    yield Text.assemble((lag.url, "bold"), f"  {fields['kind']}")
    yield show.fact("id", fields["log_id"])
    size = "" if fields["bytes"] is None else f" ({show.size(fields['bytes'])} in its own tier)"
    sealed = "; sealed: no more records" if fields["sealed"] else ""
    yield show.fact("holds", show.offsets(fields["first"], fields["next"]) + size + sealed)
    decided = "decided by the process that writes it"
    yield show.fact("retention", decided if lag.retention is None else f"{lag.retention}: {show.policy(lag.retention)}")
    content = "" if fields["content_type"] is None else f", {fields['content_type']}"
    yield show.fact("values", _values(fields) + content)
    if fields["cold"] is not None:
        yield show.fact("cold tier", f"{fields['cold']['store']}; its own tier begins at offset {lag.bounds.first:,}")
    for slot in lag.slots:
        state = slot.lag.state
        whose = "" if slot.kind is SlotKind.CONSUMER else f" {owner(slot)}"
        text = f"{show.short(state.name)}{whose} at {state.position:,}, {state_of(slot)}"
        yield show.fact("slot", text, "" if state.invalid is None else "red")
    if not lag.slots:
        yield show.fact("slots", "none")


def _values(fields: dict[str, Any]) -> str:
    value = fields["value"]
    if value is None:
        return "plain bytes" if fields["kind"] != _NODE else "not on record at a node"
    columns = ", ".join(f"{name}: {kind}" for name, kind in value["columns"].items())
    return f"{value['format']}, version {value['version']}" + (f" ({columns})" if columns else "")
