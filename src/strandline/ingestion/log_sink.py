"""A log as the sink of another one: appends its records, and the position in the source, in one append."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, Protocol, final, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.errors import CommitTimedOut, NotReady, OutcomeUnknown, StrandlineError
from strandline.log.contract import Handle, LogReading, require
from strandline.log.writers.source import advancing, source_writer
from strandline.model.cursor import Cursor
from strandline.model.head import Receipt, SourceProof, WriterId, WriterState, proven
from strandline.model.records import RECORD_SCHEMA, RecordSource, halved
from strandline.model.sink import remaining
from strandline.storage.env import SYSTEM, Env
from strandline.storage.retry import Backoff

APPEND_BYTES: Final = 64 << 20
"""Limit of one append; a larger source batch is split. Twice the bytes of one read, so that it mostly is one append."""

_COMMITTED_WITHIN: Final = 30.0
_LOOK: Final = 0.05

RETRIES: Final = Backoff(attempts=40, base=0.05, ceiling=2.0)
"""For about a minute: as long as a failover may take."""


TARGET: Final = ("append", "bounds", "cursor_at", "last_append", "plan")


@runtime_checkable
class TargetLog(LogReading, Protocol):
    """The part of a log that an ingest needs of its target."""

    def append(self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None) -> Handle:
        """Append a batch, whole or not at all, once per number."""

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a source; None if there was none."""


def pieces_of(
    batches: Iterable[pa.RecordBatch], upto: int, *, most: int = APPEND_BYTES, whole: bool = False
) -> Iterator[tuple[pa.Table, int]]:
    """The records of a range in appends of about ``most`` bytes, each with the position in the source behind it.

    Records with the same offset, as in a batch of a queue of version 1, are never separated. ``whole``: each offset is
    an append of its own.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in chain.from_iterable(halved(batch, most) for batch in batches):
        first = batch.column(0)[0].as_py()
        # Records with one offset stay together: their position cannot be told apart.
        is_border = bool(held) and held[-1].column(0)[-1].as_py() != first
        if is_border and (whole or size + batch.nbytes > most):
            yield _joined(held), first
            held, size = [], 0
        held.append(batch)
        size += batch.nbytes
    if held:
        yield _joined(held), upto


def _joined(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches).select(RECORD_SCHEMA.names)


@final
class LogSink:
    """The copy of a source in a log. Satisfies :class:`~strandline.model.sink.Sink`. One thread at a time.

    Each append begins at the position that the target remembers for the source, else the target refuses it: a second
    ingest, or a target that lost its end, is ``OutOfOrder``, and nothing is doubled or skipped. Timestamps, operations,
    keys, values and headers are kept; other writers may append to the target, too.
    """

    def __init__(self, target: TargetLog, *, whole: bool = False, env: Env = SYSTEM) -> None:
        """Into ``target``. ``whole``: each source batch with an offset of its own becomes an append of its own."""
        require(target, "the target of an ingest", *TARGET)
        self._target = target
        self._whole = whole
        self._env = env
        self._has_looked = False
        self._number: int | None = None
        """The position that the target remembers: the next append begins there. None before the first one."""
        self._shown: Cursor | None = None
        """The cursor to resume from."""
        self._later: Cursor | None = None
        """A later cursor of the same history, which proves records that have no fingerprint."""
        self._at: Cursor | None = None
        """Everything below is stored, or holds no records."""
        self.records = 0
        """Number of records appended by this object."""
        self._gives_up = False

    def __repr__(self) -> str:
        return f"LogSink({self._target!r})"

    def last_append(self, log_id: UUID) -> WriterState | None:
        """The last append from a source, when readers of the target can see it; None if there was none.

        Not earlier: until then a failover may lose it, and its source must not forget the records.
        """
        deadline = self._env.clock.monotonic() + _COMMITTED_WITHIN
        while True:
            found = self._target.last_append(source_writer(str(log_id)))
            if found is None or self._target.bounds().next >= found.first + found.count:
                return found
            if self._env.clock.monotonic() > deadline:
                raise NotReady(
                    f"{self._target!r} has not committed its records up to offset {found.first + found.count} within "
                    f"{_COMMITTED_WITHIN:g} s: see that its replicas run, and start the ingest again."
                )
            self._env.clock.sleep(_LOOK)

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The position in the source that is stored in the target; None if nothing was ingested yet."""
        if not self._has_looked:
            found = self.last_append(log_id)
            if found is not None:
                self._number, proof = found.number, found.proof
                is_proven = proof is not None and proof.next == found.number
                self._shown = self._at = proof.cursor(log_id) if proof and is_proven else Cursor(log_id, found.number)
            self._has_looked = True
        return self._shown

    def look_again(self) -> None:
        """Ask the target for the position next time: after a failure only the target knows what it holds."""
        self._has_looked = False
        self._number = self._shown = self._at = None

    def give_up(self) -> None:
        """Stop retrying a failing append: the waiting caller was interrupted. Safe in threads."""
        self._gives_up = True

    @property
    def has_stored(self) -> bool:
        """Whether the target holds records of the source."""
        return self._number is not None

    def skip_to(self, cursor: Cursor) -> None:
        """Continue at a later cursor of the source: the next append passes over the offsets before it."""
        self._shown = self._at = cursor

    def prove_by(self, later: Cursor) -> None:
        """Prove records without a fingerprint, such as those of a cold tier, by a cursor of the source behind them."""
        self._later = later

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Append the records of a range, with the position ``upto``; durable when it returns.

        The position of a range without records is stored with the next records.
        """
        rest = remaining(records, since=since, upto=upto, at=self._at)
        if rest is None:
            return
        writer = source_writer(str(since.log_id))
        number = since.next if self._number is None else self._number
        self._shown = since if self._shown is None else self._shown
        proof = SourceProof.at(upto)
        if proof is None and self._later is not None and self._later.next >= upto.next:
            proof = SourceProof.at(self._later)
        for piece, behind in pieces_of(rest.to_batches(), upto.next, whole=self._whole):
            # A piece before the last one has the proof of the range, too: that is of a later position.
            self._append(piece, proven(advancing(writer, behind - number), proof), number)
            self._number = number = behind
            self._shown = self._at = upto if number == upto.next else since.at(number)
            self.records += piece.num_rows
        self._at = upto

    def _append(self, records: pa.Table, writer: WriterId, number: int) -> Receipt:
        """Append once, however often it is tried: the target recognises the repetition by its number."""
        return RETRIES.repeat(
            lambda: self._target.append(records, writer=writer, number=number).result(),
            lambda error: not self._gives_up and may_be_repeated(error),
            self._env,
        )


def may_be_repeated(error: StrandlineError) -> bool:
    """Whether trying again can help. An append may be repeated in any case: the target knows its number."""
    return error.retryable or isinstance(error, (OutcomeUnknown, CommitTimedOut))
