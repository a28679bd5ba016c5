"""The tables of a rule, remembered: a new follower knows them all, also those that had no record for long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from strandline.errors import AlreadyExists, Diverged, NotFound
from strandline.formats.json.route_names import RouteNames, RouteNamesCodec
from strandline.model.cursor import Cursor
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.objects.urls import open_store

FILE = "names.json"


class NamesKeeper:
    """The names of a rule's tables in one small object. Followers that run at the same time add to it both.

    A name is stored before its table is created, and its cursor moves only over records whose names are stored. So the
    slot of a route, which follows this cursor, too, never passes a record of an unknown table.
    """

    def __init__(self, address: str, env: Env, options: Mapping[str, str] | None = None) -> None:
        self._cell = StoreCell(open_store(address, options), FILE, RouteNamesCodec(), env=env)
        self._env = env
        self._known: RouteNames | None = None
        self.is_stored = False
        """Whether there is such an object: that of a new route is made with its first name or cursor."""

    @property
    def where(self) -> str:
        """The object, in messages."""
        return self._cell.where

    @property
    def known(self) -> RouteNames:
        """The names as they were read or written last."""
        if self._known is None:
            raise AssertionError("opened() was not called")
        return self._known

    def opened(self, start: Cursor, by: str) -> RouteNames:
        """The names of a route; a new one begins at ``start``. ``Diverged`` if it is of another log, or by others."""
        self._known = RouteNames(start, {}, by)
        with contextlib.suppress(NotFound):
            self._known, self.is_stored = self._own(self._cell.read().value), True
        return self._known

    def _own(self, found: RouteNames) -> RouteNames:
        """The names, of this route: a cursor says nothing of the names in another log, or by something else."""
        own = self.known
        if (found.cursor.log_id, found.by) != (own.cursor.log_id, own.by):
            raise Diverged(
                f"{self.where} has the tables of a route of log {found.cursor.log_id} by {found.by}, not of "
                f"{own.cursor.log_id} by {own.by}: give this route tables of its own, or remove that object with its "
                "tables to build them again."
            )
        return found

    def add(self, names: Iterable[str], since: Cursor) -> RouteNames:
        """Store new names, whose tables begin at a cursor; returns all of them."""
        fresh = dict.fromkeys(names, since.next)
        return self._edited(lambda found: replace(found, names={**fresh, **found.names}))

    def advance(self, to: Cursor) -> Cursor:
        """All names below a cursor are stored; returns the stored cursor, which never moves back."""
        return self._edited(lambda found: found if found.cursor.next >= to.next else replace(found, cursor=to)).cursor

    def _edited(self, edit: Callable[[RouteNames], RouteNames]) -> RouteNames:
        op, known = OpId(self._env.chance.uuid()), self.known

        def own(found: RouteNames) -> RouteNames:
            return edit(self._own(found))

        try:
            self._known = self._cell.update(op, own)
        except NotFound:  # new; or somebody removed it, and what this follower knows is stored again
            try:
                self._known = self._cell.create(op, edit(known))
            except AlreadyExists:
                self._known = self._cell.update(op, own)
        self.is_stored = True
        return self._known
