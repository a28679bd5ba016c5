"""Routes as users give them: a list of sinks with their conditions, or a rule that makes a sink for each name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import checked, shown
from strandline.model.sink import Sink
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.routes.split import ByConditions, ByLabel, Splitter
from strandline.tables.rows.conditions import Label, RestOf, RowCondition, Taken, label_of

Unrouted: TypeAlias = Sink | Literal["refuse", "skip"]
"""What becomes of a record that no table takes: it goes to a sink, ends the follower, or is skipped. It is counted."""

UNROUTED: Final = "(unrouted)"
"""The name of the sink for records that no table takes."""
MOST_TABLES: Final = 2_000
"""Tables that a rule makes at most, since their names come from the records."""


@dataclass(slots=True)
class Splits:
    """The splitter of a route now: a rule that has made all the tables that it may gets another one."""

    now: Splitter

    def is_taken(self, records: pa.Table) -> pa.ChunkedArray:
        """Which of some records a table takes."""
        return pa.chunked_array([pa.array(self.now.divide(records).is_taken)])


@dataclass(frozen=True, slots=True)
class Route:
    """Which records of a log go into which tables. Use :func:`route` or :func:`by`."""

    splits: Splits
    sinks: Mapping[str, Sink]
    """The sinks of a list by name, and the one for the rest; of a rule, only the latter."""
    unrouted: Literal["sink", "refuse", "skip"]
    rule: Rule | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Makes the sink of each name that appears among the records."""

    label: Label
    make: Callable[[str], Sink]
    names: str | None
    """Where the names are remembered; None: in the folder of the tables."""
    without: frozenset[str] = frozenset()
    options: Mapping[str, str] | None = field(default=None, repr=False)
    """Of the store of the names; None: those of the tables."""
    made: dict[str, tuple[str, Sink]] = field(default_factory=dict)
    """The name of each place, with a sink that keeps the identity of those that have no other."""

    def sink(self, name: str) -> Sink:
        """The sink of a name, whose table takes only its records; ``InvalidInput`` if the rule has none."""
        made = self._made_for(name)
        place = place_of(made)
        other, _ = self.made.setdefault(place, (name, made))
        if other != name:
            raise InvalidInput(
                f"The rule gives the names {other!r} and {name!r} the same table {place}: use the name in its address, "
                "or give one as a name without a table."
            )
        if isinstance(made, MaintainedTable) and made.takes is None:
            made.taking(RowCondition(self.label, name))
        return made

    def _made_for(self, name: str) -> Sink:
        try:
            made = self.make(name)
        except Exception as error:
            raise InvalidInput(
                f"The rule has no sink for the name {name!r} ({type(error).__name__}: {error}): make one, or give the "
                "name as one without a table."
            ) from error
        if not isinstance(made, Sink):
            raise InvalidInput(
                f"The rule gave {shown(made)} for the name {name!r}: return a sink, or give the name as one without a "
                "table."
            )
        return made

    def names_place(self) -> tuple[str, Mapping[str, str] | None]:
        """Where the names are remembered, and the store's options.

        By default that is the folder of the tables, by the sinks of two other names.
        """
        if self.names is not None:
            return self.names, self.options
        folders: set[str | None] = {None}
        options = self.options
        with contextlib.suppress(InvalidInput):
            sinks = {name: self._made_for(name) for name in ("a", "b")}
            folders = {_folder_of(sink, name) for name, sink in sinks.items()}
            options = getattr(sinks["a"], "options", None) if options is None else options
        folder = folders.pop()
        if folders or folder is None:
            raise InvalidInput(
                "The rule's tables are not in one folder under their names, so that there is no place to remember "
                "which there are: give the address of a folder for the names."
            )
        return f"{folder}/_strandline_route", options


@checked
def route(sinks: Iterable[Sink], *, unrouted: Unrouted = "refuse") -> Route:
    """A route of tables, each with the condition of its sink (``sink.taking(sl.tables.where(…))``).

    A sink without a condition takes all records, and a record may be several tables'. One that no table takes goes to
    the sink ``unrouted``, is skipped (``"skip"``), or ends the follower with ``BadRecord`` (``"refuse"``).
    """
    named: dict[str, Sink] = {}
    places: set[str] = set()
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise InvalidInput(f"A route is a list of sinks, and {shown(sink)} is none.")
        place = place_of(sink)
        if place in places:
            raise InvalidInput(f"The route has the table {place} twice: give it one condition.")
        places.add(place)
        named[_name_of(place, named)] = sink
    if not named:
        raise InvalidInput("The route has no table: give at least one sink.")
    splits = Splits(ByConditions({name: taken_by(sink) for name, sink in named.items()}))
    return _with_rest(splits, named, unrouted, places)


@checked
def by(
    *,
    sink: Callable[[str], Sink],
    field: str | Sequence[str] | None = None,
    header: str | None = None,
    key_until: bytes | None = None,
    unrouted: Unrouted = "refuse",
    names: Address | None = None,
    without: Collection[str] = (),
    options: Mapping[str, str] | None = None,
) -> Route:
    """A route by a rule: ``sink`` makes the sink of each name that appears, as ``sl.DeltaSink(f"{folder}/{name}")``.

    The name of a record is its ``field``, ``header`` or ``key_until``, as :func:`~strandline.tables.where` takes them.
    A table that appears tomorrow is created then. A record without a name, with one that is not plain (up to 128
    letters, digits, ``.``, ``_`` and ``-``), or with one of ``without``, is ``unrouted``: it goes to that sink, is
    skipped (``"skip"``), or ends the follower with ``BadRecord`` (``"refuse"``).

    The names are remembered in a small object below ``names``, by default in the folder of the tables, so that a
    follower which starts again knows its tables; ``options`` are those of its store, by default those of the tables.
    There are 2,000 names at most; further ones are unrouted.
    """
    label = label_of(field=field, header=header, key_until=key_until)
    left_out = frozenset(without)
    splits = Splits(ByLabel(label, left_out))
    rule = Rule(label, sink, None if names is None else as_address(names), left_out, options)
    found = _with_rest(splits, {}, unrouted, set())
    rule.made.update({place_of(rest): (UNROUTED, rest) for rest in found.sinks.values()})
    return Route(found.splits, found.sinks, found.unrouted, rule)


def as_route(given: Any) -> Route | None:
    """The route that is given, also as a list of sinks; None for anything else, such as one sink."""
    if isinstance(given, Route):
        return given
    return route(given) if isinstance(given, list | tuple) else None


def taken_by(sink: Sink) -> Taken | None:
    """Which records a sink takes; None: all of them."""
    return sink.takes if isinstance(sink, MaintainedTable) else None


def place_of(sink: Sink) -> str:
    """What tells the table of a sink from every other one."""
    return sink.where if isinstance(sink, MaintainedTable) else f"{type(sink).__name__} {id(sink)}"


def _with_rest(splits: Splits, named: dict[str, Sink], unrouted: Unrouted, places: set[str]) -> Route:
    if isinstance(unrouted, str):
        if unrouted not in ("refuse", "skip"):
            raise InvalidInput(f"unrouted is a sink, 'refuse' or 'skip', not {unrouted!r}.")
        return Route(splits, named, unrouted)
    if not isinstance(unrouted, Sink):
        raise InvalidInput(f"unrouted is a sink, 'refuse' or 'skip', not {shown(unrouted)}.")
    if not isinstance(unrouted, MaintainedTable):
        raise InvalidInput("unrouted takes the sink of a table: it keeps only the records that no other table takes.")
    if place_of(unrouted) in places:
        raise InvalidInput(f"The table {unrouted.where} is for unrouted records and in the route: give it one place.")
    unrouted.taking(RestOf(splits.is_taken))
    return Route(splits, {**named, UNROUTED: unrouted}, "sink")


def _name_of(place: str, taken: Collection[str]) -> str:
    """A short name of a table that no other one of the route has."""
    short = place.rstrip("/").rpartition("/")[2]
    return place if short in taken or short == UNROUTED else short


def _folder_of(sink: Any, name: str) -> str | None:
    """The folder of a table that is called as it is named; None if it is somewhere else."""
    url = getattr(sink, "url", None)
    folder, _, last = url.rstrip("/").rpartition("/") if isinstance(url, str) else ("", "", "")
    return folder if folder and last == name else None
