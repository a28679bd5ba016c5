"""Watch of a keyed log: changes as Arrow tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Final, NamedTuple, Self
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CursorExpired, Gap, InvalidInput, NotFound, StrandlineError
from strandline.kv.contract import Ended, Listed
from strandline.kv.log_fold import refuse_null_keys
from strandline.log.contract import Log
from strandline.log.fetch import fetch_in_order
from strandline.log.planning import behind
from strandline.model.arguments import Positive, Timeout, checked
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.keyed import Scope, Update, Updates
from strandline.model.records import READ_SCHEMA, Op
from strandline.storage.fork_check import Origin, bound_to_process

_AT_ONCE: Final = Limit(batches=64)
_AHEAD: Final = 32 << 20
"""About how many bytes are prefetched."""


class _Piece(NamedTuple):
    """The changes in scope of one span, and the cursor after the span."""

    table: pa.Table
    upto: Cursor


@bound_to_process()
@checked(own=("__init__",))
class LogKeyValueSubscription:
    """A watch of a log. Arrow filters by scope; no row becomes a Python object here.

    For changes that are all out of scope, ``take`` returns empty :class:`Updates` with an advanced cursor.
    """

    def __init__(self, log: Log, scope: Scope, cursor: Cursor, current: list[Update] | None) -> None:
        """Use :meth:`~strandline.kv.log.LogKeyValue.watch`."""
        self._log = log
        self._scope = scope
        self._cursor = cursor
        self._current = None if current is None else deque(current)
        self._listed = Cursor(log.log_id, 0)
        self._rest: _Piece | None = None
        self._fetching: Generator[tuple[Span, list[pa.RecordBatch]], Any, None] | None = None
        self._dry = False
        self._closed = False
        self._origin = Origin(f"A watch of {log!r}", self)

    @property
    def stream(self) -> UUID:
        """The identity of the log."""
        return self._log.log_id

    def take(self, most: Positive, timeout: Timeout) -> Updates | Listed | Ended | None:
        """The next changes, up to ``most``; None if none came in time."""
        if self._closed:
            raise InvalidInput("This watch is closed: open another one.")
        if self._current is not None:
            return self._initial(self._current, most)
        # After an empty take, wait for the log before planning: waiting backs off.
        taken = None if self._dry and timeout > 0 else self._gather(most)
        if taken is None and timeout > 0 and self._log.wait(self._cursor, timeout) and not self._closed:
            taken = self._gather(most)
        self._dry = taken is None
        return taken

    def close(self) -> None:
        """Close the watch; the log stays open."""
        self._closed = True
        self._drop_plan()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _initial(self, current: deque[Update], most: int) -> Updates | Listed:
        if not current:
            self._current = None
            return Listed(self._cursor)
        given = Updates.of([current.popleft() for _ in range(min(most, len(current)))], self._listed)
        self._listed = given.upto or self._listed
        return given

    def _gather(self, most: int) -> Updates | None:
        """The available changes of one plan; the position advances past them, and stays if this raises."""
        tables: list[pa.Table] = []
        before, count = self._cursor, 0
        while count < most:
            try:
                piece = self._next_piece(fresh=self._cursor == before)
            except StrandlineError:
                if self._cursor == before:
                    raise
                break  # return the changes before the error; the next take raises it
            if piece is None:
                break
            room = most - count
            if piece.table.num_rows > room:
                self._rest = _Piece(piece.table.slice(room), piece.upto)
                last = piece.table.column("offset")[room - 1].as_py()
                piece = _Piece(piece.table.slice(0, room), piece.upto.within_batch(last + 1))
            tables.append(piece.table)
            count += piece.table.num_rows
            self._cursor = piece.upto
        if self._cursor == before:
            return None
        return Updates.of_table(tables[0] if len(tables) == 1 else pa.concat_tables(tables), self._cursor)

    def _next_piece(self, *, fresh: bool) -> _Piece | None:
        """The next piece; None at the end of the log, or at the end of the plan if not ``fresh``."""
        if self._rest is not None:
            piece, self._rest = self._rest, None
            return piece
        try:
            if self._fetching is None:
                if not fresh:
                    return None
                spans = self._log.plan(self._cursor, _AT_ONCE)
                if not spans:
                    return None
                self._fetching = _fetch(spans)
            found = next(self._fetching, None)
        except CursorExpired as error:
            raise self._gap() from error
        except NotFound as error:
            self._drop_plan()
            self._check_retained(error)
            raise
        except BaseException:
            self._drop_plan()
            raise
        if found is None:
            self._drop_plan()
            return self._next_piece(fresh=fresh)
        span, batches = found
        return _Piece(self._in_scope(batches), behind(self._cursor, span))

    def _in_scope(self, batches: list[pa.RecordBatch]) -> pa.Table:
        table = pa.Table.from_batches(batches, READ_SCHEMA)
        try:
            refuse_null_keys(table.column("offset"), table.column("key"))
        except StrandlineError:
            self._drop_plan()
            raise
        if not self._scope.everything:
            table = table.filter(self._scope.mask(table.column("key")))
        return _with_plain_values(table)

    def _check_retained(self, cause: NotFound) -> None:
        """``Gap`` if the missing batch was trimmed, rather than lost to damage."""
        try:
            self._log.plan(self._cursor, Limit(batches=1))
        except CursorExpired:
            raise self._gap() from cause

    def _gap(self) -> Gap:
        return Gap(
            f"The log {self.stream} was trimmed to offset {self._log.bounds().first} before this watch had taken the "
            f"changes from {self._cursor.next} on: resume from the applied cursor, which resyncs the rest."
        )

    def _drop_plan(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            with suppress(ValueError):  # a taker is using it: it ends after that
                fetching.close()


def _fetch(spans: Any) -> Generator[tuple[Span, list[pa.RecordBatch]], Any, None]:
    yield from fetch_in_order(spans, ahead=_AHEAD)


def _with_plain_values(table: pa.Table) -> pa.Table:
    """Normalise values: never null for puts, always null for removals."""
    values = table.column("value")
    puts = pc.equal(table.column("op"), int(Op.PUT))
    if pc.all(pc.equal(pc.is_valid(values), puts), min_count=0).as_py():
        return table
    plain = pc.if_else(puts, pc.fill_null(values, b""), pa.scalar(None, pa.binary()))
    return table.set_column(table.schema.get_field_index("value"), READ_SCHEMA.field("value"), plain)
