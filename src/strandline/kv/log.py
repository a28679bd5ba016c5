"""A key-value store on a log."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

import pyarrow as pa

from strandline.errors import (
    AlreadyExists,
    Conflict,
    Contended,
    CursorExpired,
    Diverged,
    ExpectationFailed,
    InvalidInput,
    OutcomeUnknown,
    StrandlineError,
)
from strandline.kv.contract import KeyListing
from strandline.kv.log_watch import LogFold, LogKeyValueSubscription, VersionedValue
from strandline.log.contract import READING, Log, require
from strandline.log.writers.numbered import InDoubt, NumberedWriter, Refused
from strandline.model.arguments import checked, shown
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import Receipt
from strandline.model.keyed import (
    EVERYTHING,
    UNKNOWN,
    Key,
    KeyValueEntry,
    KeyVersion,
    Prefix,
    Scope,
    as_bytes,
    as_key,
)
from strandline.model.records import MAX_RECORD_BYTES, Op, record_batch
from strandline.model.sink import Store
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.retry import Backoff

_AMONG_OTHERS: Final = Backoff(attempts=64, base=0.005, ceiling=0.1)
"""Retries of a conditional change: any other append in between makes it start again."""

_GROUP: Final = 1000
_GROUP_BYTES: Final = 64 << 20

Rule: TypeAlias = Callable[[VersionedValue | None], None]
"""Checks the current value of a key; raises if the change must not be made."""


@bound_to_process()
@checked
class LogKeyValue:
    """Keyed values in a log: a record puts, deletes or purges its key. Satisfies
    :class:`~strandline.kv.contract.KeyValue`.

    A read sees every change acknowledged before the call, by any writer. The first read loads the whole log, or the
    records after ``base``, and holds all values in memory; ``CursorExpired`` if the log was trimmed above that point. A
    version is the record's offset; a key from the base has an unknown version until it changes. Thread-safe: concurrent
    writes share one append.

    >>> from strandline.log.memory import MemoryLog
    >>> kv = LogKeyValue(MemoryLog())
    >>> version = kv.create("node.1", b"up")
    >>> kv.update("node.1", b"down", version)
    1
    >>> list(kv.scan("node."))
    [KeyValueEntry(key=b'node.1', value=b'down', version=1)]
    """

    def __init__(self, log: Log, *, base: Store | None = None, env: Env = SYSTEM) -> None:
        """Use ``log``. ``base`` is a store made from a snapshot of it, which no other writer may change."""
        require(log, "read as keyed values", *READING)
        self._log = log
        self._env = env
        self._fold = LogFold(log, base)
        self._writer = NumberedWriter(log, env=env)
        self._waiting: deque[_PendingChange] = deque()
        self._turn = threading.Condition()
        self._busy = False  # whether a thread is writing
        self._origin = Origin(f"The key-value store in {log!r}", self)

    @property
    def stream(self) -> UUID:
        """The identity that cursors carry: the log's."""
        return self._log.log_id

    def get(self, key: Key) -> bytes | None:
        """The value, None if the key is absent."""
        found = self.entry(key)
        return None if found is None else found.value

    def entry(self, key: Key) -> KeyValueEntry | None:
        """The value with its version, None if the key is absent."""
        name = as_key(key)
        _, found = self._fold.present([name])
        return _entry(name, found[name]) if found else None

    def keys(self, prefix: Key = b"") -> list[bytes]:
        """The present keys with the prefix, sorted."""
        return sorted(key for key, _ in self._fold.within(Prefix(prefix))[1])

    def scan(self, prefix: Key = b"") -> Iterator[KeyValueEntry]:
        """The entries whose keys have the prefix, sorted, as of the call."""
        return iter([_entry(*item) for item in sorted(self._fold.within(Prefix(prefix))[1])])

    def listing(self, scope: Scope = EVERYTHING) -> KeyListing:
        """The present keys in scope. A log evicts nothing, so that the names of deleted keys are not kept."""
        return KeyListing(frozenset(key for key, _ in self._fold.within(scope)[1]))

    def watch(self, scope: Scope = EVERYTHING) -> LogKeyValueSubscription:
        """The current values in scope in version order, unknown versions first; then changes."""
        end, found = self._fold.within(scope)
        rows = [(version, key, value) for key, (value, version) in found]
        return LogKeyValueSubscription(self._log, scope, self._log.cursor_at(end), rows)

    def watch_from(self, scope: Scope, cursor: Cursor | None) -> LogKeyValueSubscription:
        """Changes at or after the cursor; reads nothing before it."""
        if cursor is None:
            return self.watch(scope)
        try:
            self._log.plan(cursor, Limit(batches=1))  # checks the cursor
        except Diverged as error:
            raise CursorExpired(str(error)) from error
        return LogKeyValueSubscription(self._log, scope, cursor, None)

    def put(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value unconditionally; durable when this returns."""
        return self._change(Op.PUT, key, value)

    def delete(self, key: Key) -> None:
        """Delete the key, if present."""
        self._change(Op.DELETE, key, None)

    def purge(self, key: Key) -> None:
        """Delete the key, and mark its earlier values for removal from the log."""
        self._change(Op.PURGE, key, None)

    def create(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value of an absent key, else ``AlreadyExists``; of concurrent calls, one succeeds."""
        name = as_key(key)

        def rule(found: VersionedValue | None) -> None:
            if found is not None:
                raise AlreadyExists(f"The key {shown(name)} is present; use update, or put to replace it.")

        return self._change(Op.PUT, name, value, rule)

    def update(self, key: Key, value: bytes, expected: KeyVersion) -> KeyVersion:
        """Set the value if the key is at this version, else ``Conflict``."""
        return self._change(Op.PUT, key, value, _at_version(as_key(key), expected))

    def delete_with_version(self, key: Key, expected: KeyVersion) -> None:
        """Delete the key if it is at this version, else ``Conflict``."""
        self._change(Op.DELETE, key, None, _at_version(as_key(key), expected))

    def _change(self, op: Op, key: Key, value: bytes | None, rule: Rule | None = None) -> int:
        require(self._log, "written to", "append")
        change = _PendingChange(op, _plain(as_key(key)), None if op is not Op.PUT else _plain(value), rule)
        with self._turn:
            self._waiting.append(change)
        try:
            while (outcome := self._served(change)) is None:
                pass
        finally:
            if change.outcome is None:  # interrupted: no other thread may make the change later
                with self._turn, suppress(ValueError):
                    self._waiting.remove(change)
        if isinstance(outcome, StrandlineError):
            raise outcome
        return outcome

    def _served(self, change: _PendingChange) -> int | StrandlineError | None:
        """Wait until the change has an outcome, or become the leader and write for all waiting threads."""
        group: list[_PendingChange] = []
        leading = False
        try:
            with self._turn:
                self._turn.wait_for(lambda: change.outcome is not None or not self._busy)
                if change.outcome is not None:
                    return change.outcome
                leading = self._busy = True
                group = _group(self._waiting)
            self._write(group)
            return change.outcome
        finally:
            if leading:
                with self._turn:
                    _answer(group, OutcomeUnknown("The write was interrupted with an unknown outcome: read the key."))
                    self._busy = False
                    self._turn.notify_all()

    def _write(self, group: list[_PendingChange]) -> None:
        """Make changes, either all conditional or all unconditional, with one append; each gets its result."""
        try:
            if group[0].rule is None:
                self._land(group, None)
            else:
                self._decide(group)
        except StrandlineError as error:
            _answer(group, error)

    def _decide(self, group: list[_PendingChange]) -> None:
        """Conditional changes: decide at the end of the log, and append only if that is still its end."""
        for attempt in range(_AMONG_OTHERS.attempts):
            end, found = self._fold.present([change.key for change in group])
            accepted, refused = decide(group, end, found)
            try:
                if accepted:
                    self._land(accepted, end)
            except ExpectationFailed:
                self._env.clock.sleep(_AMONG_OTHERS.pause(attempt, self._env.chance.jitter()))
                continue
            for change, error in refused:  # only now: a refusal may depend on a change accepted in this group
                change.outcome = error
            return
        raise Contended(
            f"The log was changed by others at each of {_AMONG_OTHERS.attempts} tries to change {group[0].key!r} under "
            "a condition; nothing was changed. Try again."
        )

    def _land(self, group: list[_PendingChange], expect: int | None) -> None:
        batch = record_batch(
            timestamps=[self._env.clock.now()] * len(group),
            ops=[change.op for change in group],
            keys=[change.key for change in group],
            values=[change.value for change in group],
        )
        first = self._append(batch, expect)
        for version, change in enumerate(group, first):
            change.outcome = version
        self._fold.absorb(first, [(change.op, change.key, change.value) for change in group])

    def _append(self, batch: pa.RecordBatch, expect: int | None) -> int:
        """Append a batch; returns its first offset. Any error but ``OutcomeUnknown`` means that it was not appended."""
        match self._writer.append(batch, expect):
            case Refused(error):
                raise error
            case InDoubt(error):
                raise OutcomeUnknown(
                    "Whether the change was stored is unknown, since the log kept failing: read the key before you "
                    f"repeat it. ({error})"
                ) from error
            case Receipt(first=int(first)):
                return first
        raise OutcomeUnknown("The change is stored, but at an unknown offset: read the key for its version.")


@dataclass(slots=True, eq=False)
class _PendingChange:
    """A change that waits for an append, and its result."""

    op: Op
    key: bytes
    value: bytes | None
    rule: Rule | None
    outcome: int | StrandlineError | None = None
    """Its version, or why it was not made; None while it waits."""


def decide(
    group: list[_PendingChange], end: int, found: dict[bytes, VersionedValue]
) -> tuple[list[_PendingChange], list[tuple[_PendingChange, StrandlineError]]]:
    """The conditional changes to make, in order from offset ``end`` on, and the errors of the others."""
    held = dict(found)
    accepted: list[_PendingChange] = []
    refused: list[tuple[_PendingChange, StrandlineError]] = []
    for change in group:
        try:
            if change.rule is not None:
                change.rule(held.get(change.key))
        except StrandlineError as error:
            refused.append((change, error))
            continue
        if change.value is None:
            held.pop(change.key, None)
        else:
            held[change.key] = (change.value, end + len(accepted))
        accepted.append(change)
    return accepted, refused


def _at_version(key: bytes, expected: KeyVersion) -> Rule:
    def rule(found: VersionedValue | None) -> None:
        if found is None:
            now = "absent"
        elif found[1] == UNKNOWN:
            now = "from the snapshot, at a version that is unknown until the next put"
        elif found[1] == expected:
            return
        else:
            now = f"at version {found[1]}"
        raise Conflict(f"The key {shown(key)} is {now}, not at version {expected}: read it again. Nothing was changed.")

    return rule


def _group(waiting: deque[_PendingChange]) -> list[_PendingChange]:
    """Take the next group: conditional and unconditional changes never share an append."""
    group = [waiting.popleft()]
    size = len(group[0].value or b"")
    while waiting and len(group) < _GROUP and (waiting[0].rule is None) == (group[0].rule is None):
        size += len(waiting[0].key) + len(waiting[0].value or b"")
        if size > _GROUP_BYTES:
            break
        group.append(waiting.popleft())
    return group


def _answer(group: list[_PendingChange], error: StrandlineError) -> None:
    for change in group:
        if change.outcome is None:
            change.outcome = copy(error)  # each is raised in a thread of its own
            change.outcome.__cause__ = error.__cause__


def _plain(value: bytes | None) -> bytes:
    """The bytes, if they fit into a record."""
    data = as_bytes(value)
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidInput(f"A key or value of {len(data):,} bytes is over the limit of {MAX_RECORD_BYTES:,}.")
    return data


def _entry(key: bytes, held: VersionedValue) -> KeyValueEntry:
    value, version = held
    return KeyValueEntry(key, value, None if version == UNKNOWN else version)
