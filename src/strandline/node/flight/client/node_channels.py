"""Connections to the nodes of one log: finds the primary, follows its changes, and chooses the nodes to read from.

Reads are monotonic over all of them: no answer is older than an earlier one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, TypeAlias, TypeVar, final
from uuid import UUID

from strandline.errors import (
    CursorExpired,
    Diverged,
    Fenced,
    InvalidInput,
    NotReady,
    Overloaded,
    StrandlineError,
    TransientStorageError,
    Unsupported,
)
from strandline.formats.json.fields import Fields
from strandline.log.read.reading import pauses
from strandline.model.addresses import as_address, refuse_credentials, split_address
from strandline.model.cursor import Bounds
from strandline.node.flight.client.channel import TOKEN_REMEDY, Channel
from strandline.node.flight.security import ClientSecurity, is_loopback
from strandline.node.message_json import read_status
from strandline.node.messages import NodeStatus
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process

T = TypeVar("T")

ReadFrom: TypeAlias = Literal["primary", "replicas"]

FAILOVER_TIMEOUT: Final = 30.0
"""Twice the default lease period: a failover may take that long after the primary was lost."""

_LEADING, _FOLLOWING = "leading", "following"
_GRACE: Final = 0.25
"""Seconds to wait for the other answers once a node has said that it leads: one of a higher term may say so, too."""

_FALLBACK_SECONDS: Final = 1.0
_REPLICA_SECONDS: Final = 10.0
"""How long a node is read from before a better one is looked for."""


def addresses_of(url: str) -> tuple[str, ...]:
    """The addresses of nodes in one text, each once: they have one scheme, and commas between them.

    >>> addresses_of("grpc://db1:7007,db2:7007")
    ('grpc://db1:7007', 'grpc://db2:7007')
    """
    refuse_credentials(as_address(url), TOKEN_REMEDY)
    scheme, mark, rest = url.partition("://")
    found = [each if "://" in each else f"{scheme}{mark}{each}" for each in rest.split(",")]
    if len({each.partition("://")[0] for each in found}) > 1:
        raise InvalidInput(f"{url!r} mixes schemes: give all nodes of a log as grpc:// or all as grpc+tls://.")
    return tuple(dict.fromkeys(found))


def near_first(urls: Sequence[str]) -> tuple[str, ...]:
    """The same addresses in the same order, but those of this machine first.

    >>> near_first(["grpc://db1:7007", "grpc://127.0.0.1:7007"])
    ('grpc://127.0.0.1:7007', 'grpc://db1:7007')
    """
    return tuple(sorted(urls, key=lambda url: not _is_here(split_address(url).hostname or "")))


def _is_here(host: str) -> bool:
    return is_loopback(host) or host == socket.gethostname()


@dataclass(frozen=True, slots=True)
class _KnownPrimary:
    """A node that said that it leads."""

    channel: Channel
    term: int


@bound_to_process(keep=("url",))
@final
class NodeChannels:
    """Calls to the nodes of one log. Safe in threads.

    With one address every call goes there, whatever its role. With several, changes go to the node that leads, and
    reads to a node that can serve them; while none can, a call waits for up to ``failover_timeout`` seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        security: ClientSecurity | None,
        timeout: float,
        failover_timeout: float,
        read_from: ReadFrom,
        env: Env,
    ) -> None:
        self.url = url
        self.security = security
        self.timeout = timeout
        self.failover_timeout = failover_timeout
        self._read_from = read_from
        self._clock = env.clock
        self._lock = threading.Lock()
        self._primary: _KnownPrimary | None = None
        self._readers: tuple[Channel, ...] = ()
        """The nodes to read from, in this order."""
        self._next_check = 0.0
        """When to ask the nodes for their status again."""
        self.log_id: UUID | None = None
        """The log's identity, once a node has answered."""
        self._first = 0
        """The highest first offset that was shown."""
        self.end = 0
        """The highest end of the log that was shown."""
        self.seal: int | None = None
        """The offset at which the log was sealed, once that was shown."""
        self.all = tuple(Channel(each, security=security, timeout=timeout) for each in addresses_of(url))
        self._origin = Origin(f"The connection to {url}", self)

    @property
    def is_one(self) -> bool:
        """Whether there is one address only."""
        return len(self.all) == 1

    def only(self, what: str) -> Channel:
        """The one node; ``Unsupported`` with several addresses."""
        if not self.is_one:
            raise Unsupported(
                f"{what} concerns one node, and {self.url} names {len(self.all)}: give the node's own address."
            )
        return self.all[0]

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with contextlib.ExitStack() as closing:
            for channel in self.all:
                closing.callback(channel.close)

    # --- changes -----------------------------------------------------------------------------------------------

    def on_primary(self, call: Callable[[Channel], T], *, may_repeat: bool) -> T:
        """Call the node that leads. If it does not lead any more, find the next one and call that.

        ``may_repeat``: the call is harmless if it is executed twice. Otherwise one without an answer is not repeated,
        and ``TransientStorageError`` says that its outcome is unknown.
        """
        if self.is_one:
            return call(self.all[0])
        waiting: Iterator[float] | None = None
        while True:
            primary = self._primary
            try:
                if primary is None:
                    self._look()
                    primary = self._primary
                if primary is None:
                    raise NotReady(f"None of {self.url} leads now: ask again, or promote one of them.")  # noqa: TRY301
                return call(primary.channel)
            except NotReady as error:  # nothing was done
                failure: StrandlineError = error
            except TransientStorageError as error:
                if primary is not None and not may_repeat:
                    self._forget(primary)
                    raise
                failure = error
            except Fenced as error:
                # It was the primary when the call began; or the caller may not do this at all.
                if primary is None or not may_repeat or self._leads(primary):
                    raise
                failure = error
            self._forget(primary)
            waiting = waiting or pauses(self.failover_timeout, self._clock)
            self._pause(waiting, failure)

    def ask_primary(self, action: str, *, may_repeat: bool = False, **fields: Any) -> Fields:
        """Call an action of the node that leads, as :meth:`on_primary` does; returns its answer."""
        return self.on_primary(lambda channel: channel.ask(action, **fields), may_repeat=may_repeat)

    def _pause(self, waiting: Iterator[float], failure: StrandlineError) -> None:
        pause = next(waiting, 0.0)
        if not pause:
            raise failure
        self._clock.sleep(pause)

    def _forget(self, primary: _KnownPrimary | None) -> None:
        with self._lock:
            if self._primary is primary:
                self._primary = None
            self._next_check = 0.0

    def _leads(self, primary: _KnownPrimary) -> bool:
        """Whether a node still leads in the same term; asks it."""
        try:
            status = _status(primary.channel)
        except StrandlineError:
            return False
        return status.condition == _LEADING and status.term == primary.term

    # --- reads -------------------------------------------------------------------------------------------------

    def on_reader(self, call: Callable[[Channel], T], *, waits: bool = True) -> T:
        """Call a node that can be read from. If it cannot serve the call, try the next one.

        ``CursorExpired`` and ``Diverged`` are raised only if the primary answers so, and ``NotReady`` if no primary can
        be asked. Without ``waits`` each node is tried once.
        """
        if self.is_one:
            return call(self.all[0])
        waiting = pauses(self.failover_timeout if waits else 0.0, self._clock)
        while True:
            failure: StrandlineError | None = None
            for channel in self._to_read():
                try:
                    return call(channel)
                except (CursorExpired, Diverged) as error:
                    primary = self._primary
                    if primary is not None and primary.channel is channel and self._leads(primary):
                        raise
                    failure = failure or NotReady(
                        f"{channel.url} does not lead, and no primary could confirm its answer: {error}"
                    )
                except (NotReady, TransientStorageError, Overloaded) as error:
                    failure = error if failure is None or isinstance(error, NotReady) else failure
            self._forget(self._primary)
            self._pause(waiting, failure or NotReady(f"None of {self.url} can be read from now: ask again."))

    def ask_reader(
        self, action: str, *, end: str = "end", waits: bool = True, timeout: float | None = None, **fields: Any
    ) -> tuple[Fields, Channel]:
        """Call an action of a node to read from; returns its answer, and the node that gave it.

        A node whose log, by the field ``end`` of its answer, ends before an end that was shown is skipped for the next
        one. With one address nothing is compared: a node never shows less than before.
        """
        shown = self.end

        def ask(channel: Channel) -> tuple[Fields, Channel]:
            found = channel.ask(action, timeout=timeout, **fields)
            if not self.is_one and end in found:
                if (there := found.natural(end)) < shown:
                    self._refuse_shorter(channel, there, shown)
                self.show(0, there)
            return found, channel

        return self.on_reader(ask, waits=waits)

    def _refuse_shorter(self, channel: Channel, end: int, shown: int) -> None:
        self._look()
        if self._primary is not None and self._primary.channel is channel:
            raise Diverged(
                f"Offsets below {shown} of {self.url} were readable, and {channel.url}, which leads, ends at {end}: a "
                "forced promotion or a restored folder lost them. Rebuild everything that has read them, and open the "
                "log again."
            )
        raise NotReady(f"{channel.url} lags: it ends at {end}, and offsets below {shown} were read. Ask another node.")

    def show(self, first: int, end: int) -> None:
        """Note bounds that were shown, or the end of an acknowledged append."""
        with self._lock:
            self._first = max(self._first, first)
            self.end = max(self.end, end)

    def shown(self, log_id: UUID, bounds: Bounds) -> Bounds:
        """The bounds to show for those that a node answered; ``Diverged`` if the node has another log."""
        self.identify(log_id)
        if bounds.sealed:
            self.show_seal(bounds.next)
        if self.is_one:
            return bounds
        self.show(bounds.first, bounds.next)
        return Bounds(min(self._first, bounds.next), bounds.next, bounds.next == self.seal)

    def show_seal(self, at: int) -> None:
        """Note that the log was shown as sealed at an offset: a node that lags does not take that back."""
        self.show(0, at)
        self.seal = at

    def identify(self, log_id: UUID) -> None:
        """Note the log for which a node answered; ``Diverged`` if an earlier answer was for another log."""
        known = self.log_id
        if not self.is_one and known is not None and known != log_id:
            raise Diverged(f"{self.url} is log {log_id} now, and was log {known}: it was replaced. Open it again.")
        self.log_id = log_id

    def reading_urls(self) -> tuple[str, ...]:
        """The addresses of all nodes, best to read from first."""
        return tuple(channel.url for channel in (self.all if self.is_one else self._to_read()))

    def _to_read(self) -> tuple[Channel, ...]:
        if not self._readers or self._clock.monotonic() >= self._next_check:
            self._look()
        return self._readers

    # --- looking -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Ask all nodes for their status, and choose the primary and the order of those to read from."""
        found = self._statuses()
        _check_one_log(found)
        leading = [_KnownPrimary(channel, each.term) for channel, each in found.items() if each.condition == _LEADING]
        primary = max(leading, key=lambda each: each.term, default=None)
        best = [] if primary is None else [primary.channel]
        shift = os.getpid() % len(self.all)  # clients of different processes spread over the replicas
        turned = (*self.all[shift:], *self.all[:shift])
        following = [each for each in turned if each in found and found[each].condition == _FOLLOWING]
        is_preferred = bool(best)
        if self._read_from == "replicas":
            near = near_first([each.url for each in following])
            best = [*sorted(following, key=lambda each: near.index(each.url)), *best]
            is_preferred = bool(following)
        others = sorted((each for each in self.all if each not in best), key=lambda each: -_committed(found.get(each)))
        with self._lock:
            self._primary = primary
            self._readers = (*best, *others)
            pause = _REPLICA_SECONDS if is_preferred else _FALLBACK_SECONDS
            self._next_check = self._clock.monotonic() + pause

    def _statuses(self) -> dict[Channel, NodeStatus]:
        """The status of each node that answers in time; not all are waited for once one leads."""
        answers: SimpleQueue[tuple[Channel, NodeStatus | None]] = SimpleQueue()

        def ask(channel: Channel) -> None:
            status = None
            with contextlib.suppress(StrandlineError):
                status = _status(channel)
            answers.put((channel, status))

        for channel in self.all:
            threading.Thread(target=ask, args=(channel,), name="strandline-status", daemon=True).start()
        found: dict[Channel, NodeStatus] = {}
        deadline = self._clock.monotonic() + self.timeout
        for _ in self.all:
            try:
                channel, status = answers.get(timeout=max(0.0, deadline - self._clock.monotonic()))
            except Empty:
                break
            if status is not None:
                found[channel] = status
                if status.condition == _LEADING:
                    deadline = min(deadline, self._clock.monotonic() + _GRACE)
        return found


def _status(channel: Channel) -> NodeStatus:
    return read_status(channel.ask("status"))


def _committed(status: NodeStatus | None) -> int:
    """The commit watermark of a node; -1 if it does not answer, or does not know it."""
    return -1 if status is None or status.committed is None else status.committed


def _check_one_log(found: dict[Channel, NodeStatus]) -> None:
    logs = {each.position.log_id: channel for channel, each in found.items() if each.position is not None}
    if len(logs) > 1:
        (one, first), (other, second), *_ = logs.items()
        raise InvalidInput(
            f"{first.url} is a node of log {one} and {second.url} of log {other}: give addresses of one log."
        )
