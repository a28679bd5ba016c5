"""Streams that clients create under a root: which there are, what they are, and when they expire.

The description of a stream is a cell (``_streams/NAME.json``), and its log is in a folder of its own (``NAME/FOLDER``).
A stream is made by one conditional write, after its log has all that the request brought: so it is there whole or not
at all. It is deleted by one as well: a folder is never used again, so that what is still written or removed in it can
neither reach nor harm a stream that is made again under the same name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, final

import pyarrow as pa

from strandline.bulk.deleting import delete
from strandline.errors import AlreadyExists, InvalidInput, NotALog, NotFound, StrandlineError
from strandline.formats.json.streams import StreamCodec, StreamDescription
from strandline.model.addresses import Address, ParsedAddress, as_address, check_plain_name, is_plain_name
from strandline.model.cursor import SECOND
from strandline.model.head import WriterId
from strandline.model.stamp import OpId
from strandline.opening import open_url
from strandline.serve.http.stream import StreamLog
from strandline.storage.cell import StoreCell
from strandline.storage.clock import SteadyTime
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectStore
from strandline.storage.objects.urls import open_store

_DESCRIPTIONS: Final = "_streams/"
"""No stream can have this name."""
_SHARE: Final = 8
"""The last use of a stream is stored when it is this part of its lifetime old."""


class Opener(Protocol):
    """Opens the log of a stream."""

    def __call__(self, address: str, *, content_type: str | None) -> StreamLog:
        """The log at an address; with a ``content_type`` a new one, which records it."""


@dataclass(frozen=True, slots=True)
class WantedStream:
    """What a request wants a stream to be."""

    content_type: str
    ttl: int | None = None
    expires: int | None = None
    closed: bool = False


class _Lost(StrandlineError):
    """Another request has made the stream meanwhile."""


def expires_at(state: StreamDescription) -> int | None:
    """When a stream expires, in microseconds: not before its lifetime has passed since its last use.

    >>> expires_at(StreamDescription("f", "text/plain", 0, 1_000_000, ttl=8))
    10000000
    """
    if state.ttl is not None:
        return state.used + state.ttl * SECOND + _slack(state.ttl)
    return state.expires


def _slack(ttl: int) -> int:
    return ttl * SECOND // _SHARE


def is_alive(state: StreamDescription, now: int) -> bool:
    """Whether a stream is there."""
    end = expires_at(state)
    return not state.deleted and (end is None or now < end)


@final
class StreamRoot:
    """The streams under a root address. Its calls block; safe in threads, and in any number of processes.

    ``s3://``, ``gs://``, ``az://``, ``file://``, ``memory://``: their logs are object logs, and any number of servers
    serve them. ``wal:///folder``: write-ahead logs; one server serves them.
    """

    def __init__(
        self,
        address: Address,
        *,
        options: Mapping[str, str] | None = None,
        opener: Opener | None = None,
        env: Env = SYSTEM,
    ) -> None:
        """``opener`` opens and makes the logs, such as those of nodes; without it the scheme of the address decides."""
        self.address = as_address(address).rstrip("/")
        place = ParsedAddress.of(self.address)
        if place.is_node:
            raise InvalidInput(
                f"Streams cannot be created at {self.address}: a node has one log. Name a bucket or a folder."
            )
        self._env = env
        self._options = options
        self._opener = opener
        self._is_wal = place.is_wal
        self._store: ObjectStore = open_store(f"file://{place.folder}" if place.is_wal else self.address, options)
        self._steady = SteadyTime(env.clock, f"the streams at {self.address}")

    @property
    def is_shared(self) -> bool:
        """Whether other servers may change the streams."""
        return not self._is_wal

    def find(self, name: str) -> StreamDescription | None:
        """The stream of a name; None if there is none, or no longer."""
        try:
            state = self._cell(name).read().value
        except NotFound:
            return None
        return state if is_alive(state, self._steady.now()) else None

    def is_alive(self, state: StreamDescription) -> bool:
        """Whether a stream is there by its description."""
        return is_alive(state, self._steady.now())

    def open(self, name: str, state: StreamDescription) -> StreamLog:
        """The log of a stream."""
        return self._open(name, state.folder)

    def create(
        self, name: str, wanted: WantedStream, records: pa.Table | None
    ) -> tuple[StreamDescription, StreamLog | None]:
        """Make a stream with its first records, whole or not at all; returns it with its log.

        If there is one already, returns that, without a log, and changes nothing.
        """
        cell = self._cell(name)
        try:
            found: StreamDescription | None = cell.read().value
        except NotFound:
            found = None
        if found is not None and is_alive(found, self._steady.now()):
            return found, None
        folder, now = self._env.chance.uuid().hex, self._steady.now()
        log = self._open(name, folder, wanted.content_type)
        try:
            if records is not None:
                log.append(
                    records,
                    writer=WriterId(self._env.chance.uuid()),
                    number=0,
                    seal=wanted.closed,
                ).result()
            elif wanted.closed:
                log.seal()
            state = StreamDescription(folder, wanted.content_type, now, now, wanted.ttl, wanted.expires)
            self._publish(cell, state, is_new=found is None)
        except (AlreadyExists, _Lost):
            self.discard(name, folder, log)
            return cell.read().value, None
        except BaseException:
            log.close()
            raise
        if found is not None:
            self.discard(name, found.folder)
        return state, log

    def _publish(self, cell: StoreCell[StreamDescription], state: StreamDescription, *, is_new: bool) -> None:
        op = OpId(self._env.chance.uuid())
        if is_new:
            try:
                cell.create(op, state)
            except AlreadyExists:
                is_new = False
            else:
                return

        def edit(now: StreamDescription) -> StreamDescription:
            if is_alive(now, self._steady.now()):
                raise _Lost("The stream was made meanwhile.")
            return state

        cell.update(op, edit)

    def use(self, name: str, state: StreamDescription) -> StreamDescription:
        """Store that a stream was used now, if it expires by that; returns its description.

        Before the use is answered: the stream stays for its whole lifetime from then on.
        """
        now = self._steady.now()
        if state.ttl is None or now - state.used < _slack(state.ttl):
            return state

        def edit(found: StreamDescription) -> StreamDescription:
            gone = found.folder != state.folder or not is_alive(found, now)
            return found if gone or found.used >= now else replace(found, used=now)

        return self._cell(name).update(OpId(self._env.chance.uuid()), edit)

    def delete(self, name: str, state: StreamDescription) -> bool:
        """Delete a stream; False if another request did meanwhile. Its log takes no more records when this returns."""
        deleted = False

        def edit(found: StreamDescription) -> StreamDescription:
            nonlocal deleted
            deleted = found.folder == state.folder and not found.deleted
            return replace(found, deleted=True) if deleted else found

        try:
            self._cell(name).update(OpId(self._env.chance.uuid()), edit)
        except NotFound:
            return False
        return deleted

    def delete_expired(self, name: str, state: StreamDescription) -> bool:
        """Delete a stream whose time is over; False if it was used or deleted meanwhile."""
        deleted = False

        def edit(found: StreamDescription) -> StreamDescription:
            nonlocal deleted
            deleted = found == state and not is_alive(found, self._steady.now())
            return replace(found, deleted=True) if deleted else found

        self._cell(name).update(OpId(self._env.chance.uuid()), edit)
        return deleted

    def discard(self, name: str, folder: str, log: StreamLog | None = None) -> None:
        """Remove the log of a stream that is gone: whoever still has it open cannot append to it from then on."""
        if log is not None:
            with contextlib.suppress(StrandlineError):
                log.close()
        address = f"{self.address}/{name}/{folder}"
        if self._opener is None:
            with contextlib.suppress(NotALog):
                delete(address, force=True, options=None if self._is_wal else self._options, env=self._env)
        if self._is_wal:
            self._env.disk.remove_folder(ParsedAddress.of(address).folder or "")

    def expired(self) -> Sequence[tuple[str, StreamDescription]]:
        """The streams whose time is over, by this machine's clock."""
        now, gone = self._steady.now(), []
        for item in self._store.list(_DESCRIPTIONS):
            name = item.path.removeprefix(_DESCRIPTIONS).removesuffix(".json")
            if is_plain_name(name):
                state = self._cell(name).read().value
                if not state.deleted and not is_alive(state, now):
                    gone.append((name, state))
        return gone

    def _cell(self, name: str) -> StoreCell[StreamDescription]:
        path = f"{_DESCRIPTIONS}{check_plain_name(name, 'stream')}.json"
        return StoreCell(self._store, path, StreamCodec(), env=self._env)

    def _open(self, name: str, folder: str, content_type: str | None = None) -> StreamLog:
        """The log in a folder; with a content type a new one."""
        address = f"{self.address}/{name}/{folder}"
        if self._opener is not None:
            return self._opener(address, content_type=content_type)
        options = None if self._is_wal else self._options
        return open_url(  # type: ignore[return-value]
            address, create=content_type is not None, content_type=content_type, options=options, env=self._env
        )
