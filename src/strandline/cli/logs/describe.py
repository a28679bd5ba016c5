"""``strandline describe``: identity, bounds, size, retention, values, slots and cold tier of a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.text import Text

import strandline as sl
from strandline.cli.logs.lag import Lag, behind, current_lag
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, LogPlace, on_any_log
from strandline.errors import MissingExtra, Unsupported, UnsupportedVersion
from strandline.log.lag import lag_of
from strandline.log.read.value_format import named_codec, named_versions
from strandline.model.cursor import Bounds
from strandline.model.segments import ColdTier
from strandline.node.messages import SlotKind
from strandline.tier.opening import cold_cell
from strandline.tier.read.tiered_log import hot_tier


@dataclass(frozen=True, slots=True)
class LogDescription:
    """A log as it is now."""

    kind: str
    lag: Lag
    both: Bounds
    """The offsets of both tiers."""
    size: int | None
    """Bytes of the log's own tier; None if the log does not know."""
    columns: dict[str, str]
    version: tuple[str, int] | None
    """The format of the values and its newest version; None for plain bytes, or if the log does not tell."""
    cold: ColdTier | None

    def fields(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        lag = self.lag.fields()
        value = None
        if self.version is not None:
            value = {"format": self.version[0], "version": self.version[1], "columns": self.columns}
        cold = None if self.cold is None else {"store": self.cold.store, "events": self.cold.events}
        return {
            "url": self.lag.url,
            "kind": self.kind,
            "log_id": self.lag.log_id,
            "first": self.both.first,
            "next": self.both.next,
            "hot_first": self.lag.first,
            "bytes": self.size,
            "retention": lag["retention"],
            "slot_lag_bytes": lag["lag_bytes"],
            "slot_idle_seconds": lag["idle_seconds"],
            "value": value,
            "slots": [
                {
                    "slot": slot.slot,
                    "position": slot.position,
                    "behind": slot.records_behind,
                    "bytes_behind": slot.bytes_behind,
                    "seconds_behind": slot.seconds_behind,
                    "invalid": slot.invalid,
                    "kind": slot.kind,
                }
                for slot in self.lag.slots
            ],
            "cold": cold,
        }

    def lines(self) -> Iterator[Text]:
        """The text output."""
        lag, both = self.lag, self.both
        yield Text.assemble((lag.url, "bold"), f"  {self.kind}")
        yield _line("id", lag.log_id)
        records = show.counted(both.next - both.first, "record")
        held = f"offsets {both.first:,} to {both.next - 1:,}, {records}" if both.first < both.next else "no records"
        yield _line("holds", held + ("" if self.size is None else f" ({show.size(self.size)} in its own tier)"))
        if lag.retention is not None:
            yield _line("retention", f"{lag.retention}: {show.policy(lag.retention)}")
        else:
            yield _line("retention", "decided by the process that writes it")
        yield _line("values", self._values())
        if self.cold is not None:
            yield _line("cold tier", f"{self.cold.store}; its own tier begins at offset {lag.first:,}")
        for slot in lag.slots:
            state = f"invalid: {slot.invalid}" if slot.invalid else behind(slot)
            whose = "" if slot.kind is SlotKind.CONSUMER else f" {slot.owner}"
            yield _line(
                "slot", f"{show.short(slot.slot)}{whose} at {slot.position:,}, {state}", "red" if slot.invalid else ""
            )
        if not lag.slots:
            yield _line("slots", "none")

    def _values(self) -> str:
        if self.version is None:
            return "plain bytes" if self.kind != _NODE else "not on record at a node"
        columns = ", ".join(f"{name}: {kind}" for name, kind in self.columns.items())
        return f"{self.version[0]}, version {self.version[1]}" + (f" ({columns})" if columns else "")


_NODE = "log of a node"


@on_any_log
def describe(place: LogPlace) -> None:
    """Show what a log is: its id, offsets, size, retention, format of values, slots and cold tier. Changes nothing.

    Numbers that the log does not know are null in --json.

    Example: strandline describe s3://bucket/orders
    """
    with place.reading() as log:
        found = described(log)
    show.answer(found.fields(), *found.lines())


def described(log: AnyLog) -> LogDescription:
    """The log as it is now."""
    lag = current_lag(log)
    if isinstance(log, sl.node.RemoteLog):
        return LogDescription(_NODE, lag, log.bounds(), None, {}, None, None)
    hot = hot_tier(log)
    kind = "object log" if isinstance(hot, sl.log.ObjectLog) else "write-ahead log"
    versions, columns = named_versions(hot), dict[str, str]()
    with suppress(MissingExtra, Unsupported, UnsupportedVersion):  # the columns only
        codec = named_codec(hot)
        columns = {} if codec is None else {field.name: str(field.type) for field in codec.schema}
    version = (versions[-1].format, versions[-1].number) if versions else None
    size = lag_of(hot, lag.first, 0).bytes
    return LogDescription(kind, lag, log.bounds(), size, columns, version, cold_cell(log).read())


def _line(word: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {word:<9}", "cyan"), "  ", (text, style))
