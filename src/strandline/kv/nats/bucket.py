"""A key-value store in a NATS JetStream bucket, through ``nats-py``."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final
from uuid import UUID

from strandline.errors import (
    AlreadyExists,
    Conflict,
    Contended,
    CursorExpired,
    Gap,
    InvalidInput,
    TransientStorageError,
)
from strandline.kv.contract import KeyListing, Listed
from strandline.kv.nats.connection import (
    NAME_TAKEN,
    NANOSECONDS,
    NO_MESSAGE,
    NatsConnection,
    NoResponder,
    StreamState,
    granted,
    parse_headers,
)
from strandline.kv.nats.watch import NatsSubscription, removal, scope_filters
from strandline.model.arguments import Duration, Positive, checked, shown, whole
from strandline.model.cursor import Cursor
from strandline.model.keyed import (
    EVERYTHING,
    Key,
    KeyValueEntry,
    KeyVersion,
    Prefix,
    Scope,
    Update,
    Updates,
    as_bytes,
    as_key,
)
from strandline.model.records import Op
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

_BUCKET: Final = re.compile(r"[a-zA-Z0-9_-]+")
_KEY: Final = re.compile(rb"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_MOST_HISTORY: Final = 64
_ATTEMPTS: Final = 16
_LISTINGS: Final = 3
_CHUNK: Final = 1024
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_DELETE: Final = {"KV-Operation": "DEL"}
_PURGE: Final = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}


@bound_to_process()
@checked
class NatsKeyValue(Closing):
    """A NATS JetStream key-value bucket. Satisfies :class:`~strandline.kv.contract.KeyValue`; thread-safe.

    A change is as durable as the stream makes it: replicated as configured, and synced to disk by the server, by
    default within two minutes. Changes that the server drops from the front (by age, size, or a purge of the stream)
    are never skipped silently: a cursor below them is ``CursorExpired``, a watch that lags behind them ends with
    ``Gap``. A removal in the middle of the stream without a marker is not shown by the server: a resync finds it.

    Keys are words of letters, digits and ``-/_=``, joined by dots. Prefixes are any bytes. A version is a sequence
    number of the bucket's stream.
    """

    def __init__(self, connection: NatsConnection, bucket: str, *, prefetch: int = 1024) -> None:
        """Use :meth:`connect`."""
        self._connection = connection
        self._prefetch = prefetch
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._subjects = f"$KV.{bucket}."
        self._origin = Origin(f"The bucket {bucket} at {connection.url}", self)

    @classmethod
    def connect(
        cls,
        url: str | Sequence[str],
        bucket: str,
        *,
        create: bool = False,
        history: Annotated[int, whole(1, _MOST_HISTORY)] = 8,
        ttl: Duration | None = None,
        max_bytes: Positive | None = None,
        replicas: Positive = 1,
        timeout: Duration = 5.0,
        prefetch: Positive = 1024,
        options: Mapping[str, Any] | None = None,
        env: Env = SYSTEM,
    ) -> NatsKeyValue:
        """Connect to a bucket; ``NotFound`` if it does not exist, unless ``create``.

        ``history`` values are kept per key: the more, the longer cursors live. With a ``ttl`` keys are removed that
        many seconds after their last change, and watchers get the removal. At ``max_bytes`` the bucket refuses changes
        with ``DiskFull``. These three and ``replicas`` apply to a new bucket only.

        No call waits much longer than ``timeout`` seconds for the server. At most ``prefetch`` changes of a watch are
        in flight or queued. ``options`` are passed to ``nats.connect``: credentials, TLS and so on.
        """
        if not _BUCKET.fullmatch(bucket):
            raise InvalidInput(f"{bucket!r} cannot name a NATS bucket: use letters, digits, '_' and '-'.")
        servers = [url] if isinstance(url, str) else list(url)
        connection = NatsConnection(servers, timeout=timeout, env=env, options=options or {})
        try:
            made = cls(connection, bucket, prefetch=prefetch)
            if create:
                made._create(history=history, ttl=ttl, max_bytes=max_bytes, replicas=replicas)
            made._state()
        except BaseException:
            connection.close()
            raise
        return made

    def _create(self, *, history: int, ttl: Duration | None, max_bytes: int | None, replicas: int) -> None:
        config: dict[str, Any] = {
            "name": self._stream,
            "subjects": [f"{self._subjects}>"],
            "max_msgs_per_subject": history,
            "max_bytes": -1 if max_bytes is None else max_bytes,
            "max_msgs": -1,
            "max_consumers": -1,
            "num_replicas": replicas,
            "storage": "file",
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "deny_delete": True,
        }
        if ttl is not None:
            age = int(ttl * NANOSECONDS)
            config |= {"max_age": age, "duplicate_window": min(age, 120 * NANOSECONDS)}
            # The server then writes a marker for each expired key; otherwise watchers would keep it.
            config |= {"allow_msg_ttl": True, "subject_delete_marker_ttl": max(age, NANOSECONDS)}
        what = f"Creating the bucket {self._bucket!r}"
        self._connection.ask(f"STREAM.CREATE.{self._stream}", what, config, unless=NAME_TAKEN)

    def __repr__(self) -> str:
        return f"NatsKeyValue({self._bucket!r})"

    @property
    def stream(self) -> UUID:
        """The stream identity that cursors carry, from the server."""
        return self._state().identity

    def _state(self) -> StreamState:
        return self._connection.state(self._stream, f"Reading the state of the bucket {self._bucket!r}")

    def close(self) -> None:
        """Close the connection; its watches end with an error. Idempotent."""
        self._connection.close()

    def put(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value unconditionally."""
        return self._publish(_valid(key), value)

    def delete(self, key: Key) -> None:
        """Delete the key, if present."""
        self._publish(_valid(key), b"", _DELETE)

    def purge(self, key: Key) -> None:
        """Delete the key and its history."""
        self._publish(_valid(key), b"", _PURGE)

    def create(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value of an absent key, else ``AlreadyExists``."""
        name = _valid(key)
        last = 0
        for _ in range(_ATTEMPTS):
            try:
                return self._publish(name, value, {_EXPECTED: str(last)})
            except Conflict:
                found = self._last(name)
            if found is not None and found.value is not None:
                raise AlreadyExists(f"The key {shown(name)} is present; use update, or put to replace it.")
            # The marker of a removed key: replace it, unless another client does so first.
            last = 0 if found is None or found.version is None else found.version
        raise Contended(f"The key {shown(name)} keeps being created and removed; try later.")

    def update(self, key: Key, value: bytes, expected: KeyVersion) -> KeyVersion:
        """Set the value if the key is at this version, else ``Conflict``."""
        return self._conditional(_valid(key), value, expected, {})

    def delete_with_version(self, key: Key, expected: KeyVersion) -> None:
        """Delete the key if it is at this version, else ``Conflict``."""
        self._conditional(_valid(key), b"", expected, _DELETE)

    def _conditional(self, key: bytes, value: bytes, expected: KeyVersion, headers: dict[str, str]) -> int:
        # The server also accepts the version of a marker, and 0 for a key that never existed: those keys are absent.
        found = self._last(key)
        if found is None or found.value is None or found.version != expected:
            now = "absent" if found is None or found.value is None else f"at version {found.version}"
            raise Conflict(
                f"The key {shown(key)} is {now}, not at version {expected}: read it again. Nothing was changed."
            )
        return self._publish(key, value, {_EXPECTED: str(expected), **headers})

    def _publish(self, key: bytes, value: bytes, headers: dict[str, str] | None = None) -> int:
        what = f"Writing the key {shown(key)}"
        connection, data = self._connection, as_bytes(value)
        try:
            answer = connection.run(connection.request(self._subjects + key.decode(), data, headers), what)
        except NoResponder:
            self._state()  # NotFound if the bucket does not exist
            raise
        return int(granted(answer, what)["seq"])

    def _last(self, key: bytes) -> Update | None:
        """The last change of a key: a value or a marker."""
        # From the leader, not from any replica: reads see writes.
        body = {"last_by_subj": self._subjects + key.decode()}
        what = f"Reading the key {shown(key)}"
        answer = self._connection.ask(f"STREAM.MSG.GET.{self._stream}", what, body, unless=NO_MESSAGE)
        if not answer:
            return None
        message = answer["message"]
        head = base64.b64decode(message.get("hdrs", ""))
        op = removal(parse_headers(head)) if head else None
        value = base64.b64decode(message.get("data", "")) if op is None else None
        return Update(Op.PUT if op is None else op, key, value, int(message["seq"]))

    def get(self, key: Key) -> bytes | None:
        """The value, None if the key is absent."""
        found = self.entry(key)
        return None if found is None else found.value

    def entry(self, key: Key) -> KeyValueEntry | None:
        """The value with its version, None if the key is absent."""
        name = as_key(key)
        found = self._last(name) if _KEY.fullmatch(name) else None
        return None if found is None or found.value is None else KeyValueEntry(name, found.value, found.version)

    def keys(self, prefix: Key = b"") -> list[bytes]:
        """The present keys with the prefix, sorted."""
        return sorted(self.listing(Prefix(prefix)).live)

    def scan(self, prefix: Key = b"") -> Iterator[KeyValueEntry]:
        """The entries whose keys have the prefix, sorted, as of the call."""
        found, _ = self._collect(Prefix(prefix), values=True)
        return iter(sorted(KeyValueEntry(row.key, row.value, row.version) for row in found if row.value is not None))

    def listing(self, scope: Scope = EVERYTHING) -> KeyListing:
        """The present keys in scope, and the deleted ones whose markers are retained.

        A key that expired by age does not count as deleted.
        """
        found, aged = self._collect(scope, values=False)
        live = frozenset(row.key for row in found if row.value is not None)
        return KeyListing(live, frozenset(row.key for row in found if row.value is None and row.key not in aged))

    def _collect(self, scope: Scope, *, values: bool) -> tuple[list[Update], set[bytes]]:
        """The last change of every key in scope, and the keys removed by age; complete or an error."""
        for _ in range(_LISTINGS):
            found: dict[bytes, Update] = {}
            try:
                with self._watch(scope, values=values, markers=True) as subscription:
                    while True:
                        given = subscription.take(_CHUNK, self._connection.timeout)
                        if isinstance(given, Listed):
                            return list(found.values()), subscription.aged
                        if not isinstance(given, Updates):
                            raise TransientStorageError(
                                f"Listing the bucket {self._bucket!r} stopped before its end: list again."
                            )
                        found.update(zip(given.keys, given, strict=True))
            except Gap:
                continue
        raise TransientStorageError(
            f"The bucket {self._bucket!r} drops changes faster than it can be listed: list again later."
        )

    def watch(self, scope: Scope = EVERYTHING) -> NatsSubscription:
        """The current values in scope, then changes."""
        return self._watch(scope)

    def _watch(self, scope: Scope, *, values: bool = True, markers: bool = False) -> NatsSubscription:
        state = self._state()
        filters = scope_filters(scope, self._subjects)
        what = f"Reading the state of the bucket {self._bucket!r}"
        target = state.last and self._connection.last(self._stream, filters, what)
        start = {"deliver_policy": "last_per_subject"}
        how = {"seen": max(state.last, target), "listing_upto": target, "values": values, "markers": markers}
        return self._subscribe(scope, state.identity, start, **how)

    def _subscribe(self, scope: Scope, identity: UUID, start: Mapping[str, Any], **how: Any) -> NatsSubscription:
        place = self._connection, self._stream, self._subjects, scope
        return NatsSubscription(*place, start=start, identity=identity, window=self._prefetch, **how)

    def watch_from(self, scope: Scope, cursor: Cursor | None) -> NatsSubscription:
        """Changes at or after the cursor."""
        if cursor is None:
            return self._watch(scope)
        start = max(cursor.next, 1)
        self._check(cursor, self._state())
        policy = {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
        subscription = self._subscribe(scope, cursor.log_id, policy, seen=start - 1)
        try:
            # Again: if the stream was trimmed past the cursor before the consumer existed, the server starts after it
            # without an error.
            self._check(cursor, self._state())
        except BaseException:
            subscription.close()
            raise
        return subscription

    def _check(self, cursor: Cursor, state: StreamState) -> None:
        if cursor.log_id != state.identity:
            raise CursorExpired(
                f"The cursor {cursor} is not of the current bucket {self._bucket!r}: start a full watch."
            )
        if not state.first <= max(cursor.next, 1) <= state.last + 1:
            raise CursorExpired(
                f"The cursor is at {cursor.next}, and the bucket {self._bucket!r} holds changes {state.first} up to "
                f"{state.last}: start a full watch."
            )


def _valid(key: Key) -> bytes:
    name = as_key(key)
    if not _KEY.fullmatch(name):
        raise InvalidInput(
            f"NATS cannot hold the key {name!r}: use words of letters, digits and '-/_=', joined by single dots."
        )
    return name
