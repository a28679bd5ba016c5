"""A table for each name among the records, by one address that has ``{name}`` where the name goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import InvalidInput
from strandline.model.sink import Sink
from strandline.tables.maintain.opening import is_in_database, sink_at
from strandline.tables.routes.route import Route, by
from strandline.tables.rows.conditions import Label, label_of

NAME: Final = "{name}"


@dataclass(frozen=True, slots=True)
class NamedTables:
    """How records are divided among the tables of an address."""

    table: str
    """The address with ``{name}``."""
    what: str
    """Where the name of a record is: a field of JSON values such as ``source.table``, ``header:NAME``, or
    ``key:SEPARATOR``, which is the key up to that."""
    unrouted: str | None = None
    """The address of a table for the records without a name, as bytes; ``skip``; None: the first one ends it."""
    without: Sequence[str] = ()
    """Names that have no table."""
    names: str | None = None
    """Where the names are remembered; None: beside the tables."""

    def route(self, sink: Callable[[str], Sink], options: Mapping[str, str] | None = None) -> Route:
        """The route; ``options`` are for the store of the names and of the unrouted table."""
        unrouted = self.unrouted or "refuse"
        rest: Any = unrouted if unrouted in ("refuse", "skip") else sink_at(unrouted, options, mode="append")
        place = self.names or names_beside(self.table)
        return by(sink=sink, unrouted=rest, names=place, without=self.without, options=options, **_given(self.what))


def label_at(what: str) -> Label:
    """What is read of each record for its name; ``InvalidInput`` for what says none.

    >>> label_at("header:table"), label_at("table")
    (HeaderLabel(header='table'), FieldLabel(paths=('table',)))
    """
    given: dict[str, Any] = {"field": None, "header": None, "key_until": None}
    return label_of(**{**given, **_given(what)})


def _given(what: str) -> dict[str, Any]:
    kind, separator, rule = what.partition(":")
    if separator and kind in ("header", "key"):
        return {"header": rule} if kind == "header" else {"key_until": rule.encode()}
    if separator:
        raise InvalidInput(f"Names are in a field such as a.b, header:NAME or key:SEPARATOR, not in {what!r}.")
    return {"field": what}


def named(text: str, name: str) -> str:
    """A text, such as an address, for one name."""
    return text.replace(NAME, name)


def names_beside(table: str) -> str | None:
    """Where the names are remembered: beside the folder that each table has under its name; None if it has none.

    >>> names_beside("./tables/{name}"), names_beside("sqlite:shop.db#{name}")
    ('./tables/_strandline_route', None)
    """
    before, _, behind = table.partition(NAME)
    is_elsewhere = table.startswith("iceberg://") or is_in_database(table)
    is_folder = f"/{before}".endswith("/") and not before.endswith("://") and behind[:1] in ("", "/")
    return f"{before}_strandline_route" if is_folder and not is_elsewhere else None
