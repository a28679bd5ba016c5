"""A network between simulated machines: calls and their answers get lost or come late, and feeds break."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from strandline.errors import StrandlineError, TransientStorageError
from strandline.formats.checksum import crc32c
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch
from strandline.model.node import Heartbeat
from strandline.node.messages import (
    Acknowledgement,
    Caller,
    ElectionReport,
    Handover,
    Registration,
    ReplicaProgress,
    ReplicationFeed,
    Resume,
    SnapshotChunk,
    SnapshotOffer,
    Topology,
)
from strandline.node.node import Node
from tests.cluster.history import Promised
from tests.cluster.machine import Machine, Time

R = TypeVar("R")

_LATE: Final = frozenset({"acknowledge", "acknowledge_nowait", "report", "register", "resume", "end_snapshot"})
"""Calls that may arrive when nobody waits for their answer any more."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How likely (0 to 1) a message goes wrong, and in which way."""

    lost: float = 0.0
    """The call does not arrive."""
    unanswered: float = 0.0
    """It is done, and the answer is lost."""
    late: float = 0.0
    """It is done later, and nobody hears of it; or once more later."""
    broken: float = 0.0
    """A feed breaks; or a snapshot's piece is cut short, or spoiled."""
    held: float = 0.0
    """What was sent over a feed is still under way when it is looked for."""
    ahead: float = 0.0
    """What is written is sent over a feed before the disk has synced it."""


FINE: Final = Weather()


class Network:
    """Who reaches whom. Calls are done at once, in the caller's thread, with all that the weather does to them."""

    def __init__(
        self,
        machines: Mapping[str, Machine],
        time: Time,
        dice: random.Random,
        *,
        died: Callable[[Machine], None],
        promised: Callable[[Promised], None],
    ) -> None:
        """``died`` is told of a machine that crashed while it was called, ``promised`` of each report."""
        self.promised = promised
        self.weather = FINE
        self.cuts: set[frozenset[str]] = set()
        """Pairs that cannot reach each other."""
        self.acting: list[str] = []
        """Machines that are in the middle of something, the innermost last: they cannot be called."""
        self.machines = machines
        self._time = time
        self._dice = dice
        self._died = died
        self._late: list[tuple[str, str, Callable[[Node], object]]] = []
        self._feeds: list[SimulatedFeed] = []

    def answers(self, name: str) -> bool:
        """Whether a machine is up, goes on, and is not in the middle of something."""
        machine = self.machines[name]
        return machine.node is not None and machine.paused <= self._time.now and name not in self.acting

    def is_cut(self, source: str, target: str) -> bool:
        """Whether two machines cannot reach each other."""
        return bool(self.cuts) and frozenset((source, target)) in self.cuts

    def chance(self, rate: float) -> bool:
        """Whether something of this rate happens now."""
        return rate > 0 and self._dice.random() < rate

    def call(self, source: str, target: str, name: str, work: Callable[[Node], R]) -> R:
        """Do a call, as the weather lets it."""
        weather = self.weather
        if self.is_cut(source, target) or not self.answers(target) or self.chance(weather.lost):
            raise lost(f"{target} did not answer to {name}.")
        if name in _LATE and self.chance(weather.late):
            self._late.append((target, name, work))
            if self.chance(0.5):
                raise lost(f"{target} has not answered to {name} in time.")
        answer = self.within(target, work)
        if self.chance(weather.unanswered):
            raise lost(f"The answer of {target} to {name} was lost.")
        return answer

    def within(self, target: str, work: Callable[[Node], R]) -> R:
        """Let a machine do something; if it crashes meanwhile, whoever asked hears nothing."""
        machine = self.machines[target]
        if machine.node is None:
            raise lost(f"{target} is down.")
        self.acting.append(target)
        try:
            return work(machine.node)
        except BaseException:
            if not machine.disk.stopped:
                raise
            self._died(machine)
            raise lost(f"{target} went down.") from None
        finally:
            self.acting.pop()

    def opened(self, feed: SimulatedFeed) -> None:
        """A feed has begun."""
        self._feeds = [each for each in self._feeds if not each.closed]
        self._feeds.append(feed)

    def send_ahead(self, name: str) -> int:
        """A machine has written something, and its disk syncs it: perhaps it is sent meanwhile; returns how often."""
        return sum(feed.send_ahead() for feed in self._feeds if feed.target == name and self.chance(self.weather.ahead))

    def deliver_late(self) -> str | None:
        """Let a call arrive that was under way for long; says which, or None."""
        if not self._late:
            return None
        target, name, work = self._late.pop(self._dice.randrange(len(self._late)))
        if not self.answers(target):
            return None
        try:
            self.within(target, work)
        except StrandlineError as error:
            return f"late {name} at {target}: {type(error).__name__}"
        return f"late {name} at {target}"

    def calm_down(self) -> None:
        """Let everybody reach everybody, and lose what was under way."""
        self.weather = FINE
        self.cuts.clear()
        self._late.clear()


class SimulatedLink:
    """A node as another one reaches it. Satisfies :class:`~strandline.node.messages.Upstream`."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        """Reach ``target`` from ``source``, which need not be up: only a call finds that out."""
        self._network = network
        self._source, self._target = source, target

    def _call(self, name: str, work: Callable[[Node], R]) -> R:
        return self._network.call(self._source, self._target, name, work)

    def register(self, caller: Caller, *, region: str | None) -> Registration:
        """Over the network."""
        return self._call("register", lambda node: node.primary.register(caller, region=region))

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """Over the network."""
        return self._call("resume", lambda node: node.primary.resume(caller, since))

    def feed(self, caller: Caller, since: Cursor) -> SimulatedFeed:
        """Over the network."""
        feed = self._call("feed", lambda node: node.primary.feed(caller, since))
        return SimulatedFeed(self._network, self._source, self._target, feed)

    def acknowledge(self, caller: Caller, progress: ReplicaProgress) -> Acknowledgement:
        """Over the network."""
        return self._call("acknowledge", lambda node: node.primary.acknowledge(caller, progress))

    def acknowledge_nowait(self, caller: Caller, progress: ReplicaProgress) -> None:
        """Over the network; nobody hears what became of it."""
        with contextlib.suppress(StrandlineError):
            self._call("acknowledge_nowait", lambda node: node.primary.acknowledge_nowait(caller, progress))

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Over the network."""
        return self._call("begin_snapshot", lambda node: node.primary.begin_snapshot(caller, kind))

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Iterator[SnapshotChunk]:
        """Over the network; may be cut short, and a piece may be spoiled on its way."""
        network = self._network
        pieces = self._call("chunks", lambda node: list(node.primary.chunks(caller, snapshot, path, offset)))
        for piece in pieces:
            if network.chance(network.weather.broken):
                if network.chance(0.5):
                    yield replace(piece, data=bytes([piece.data[0] ^ 1]) + piece.data[1:])
                half = piece.data[: len(piece.data) // 2]
                if half:
                    yield SnapshotChunk(piece.offset, half, crc32c(half))
                raise lost(f"The connection to {self._target} broke.")
            yield piece

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """Over the network."""
        self._call("end_snapshot", lambda node: node.primary.end_snapshot(caller, cursor))

    def topology(self, caller: Caller) -> Topology:
        """Over the network."""
        return self._call("topology", lambda node: node.primary.topology(caller))

    def handover(self, caller: Caller, *, membership: tuple[int, int] = (0, 0)) -> Handover:
        """Over the network."""
        return self._call("handover", lambda node: node.primary.handover(caller, membership=membership))

    def report(self, caller: Caller) -> ElectionReport:
        """Over the network."""
        report = self._call("report", lambda node: node.report(caller))
        self._network.promised(Promised(self._target, caller.term))
        return report

    def close(self) -> None:
        """Nothing to let go of."""


class SimulatedFeed:
    """A feed over the network: what was sent may arrive late, even from a primary that is none any more.

    Satisfies :class:`~strandline.node.messages.ReplicationFeed`; never blocks.
    """

    def __init__(self, network: Network, source: str, target: str, inner: ReplicationFeed) -> None:
        """What ``inner`` of ``target`` gives, as it arrives at ``source``."""
        self._network = network
        self._source, self.target = source, target
        self._inner = inner
        self._life = network.machines[target].life
        self._under_way: deque[tuple[Sequence[LogBatch], Heartbeat | None]] = deque()
        self._error: StrandlineError | None = None
        self.closed = False
        self.heartbeat: Heartbeat | None = inner.heartbeat
        """The latest word that has arrived."""
        network.opened(self)

    def wait(self, timeout: float) -> int:
        """0: nothing is read from a disk to be taken."""
        del timeout
        return 0

    def take(self, timeout: float) -> Sequence[LogBatch]:
        """What has arrived; the error that broke it comes behind all that was under way."""
        network = self._network
        if self._error is None:
            try:
                self._send()
            except StrandlineError as error:
                self._error = error
                if network.chance(0.5):
                    self._under_way.clear()
        if self._under_way and not network.chance(network.weather.held):
            batches, self.heartbeat = self._under_way.popleft()
            if batches:
                return batches
        if self._error is not None and not self._under_way:
            raise self._error
        if timeout > 0:
            network.machines[self._source].idle = True
        return ()

    def _is_broken(self) -> bool:
        network, machine = self._network, self._network.machines[self.target]
        is_gone = machine.life != self._life or machine.node is None
        return self.closed or is_gone or network.is_cut(self._source, self.target)

    def send_ahead(self) -> int:
        """Send what is written, while the disk syncs it."""
        batches: Sequence[LogBatch] = ()
        if self._error is None and not self._is_broken():
            with contextlib.suppress(StrandlineError):
                batches = self._inner.take(0.0)
        self._under_way.extend(([batch], self._inner.heartbeat) for batch in batches)
        return len(batches)

    def _send(self) -> None:
        network, target = self._network, self.target
        if self._is_broken() or network.chance(network.weather.broken):
            raise lost(f"The connection to {target} broke.")
        if network.answers(target):  # or it stands still, and nothing comes
            batches = network.within(target, lambda _: self._inner.take(0.0))
            heartbeat = self._inner.heartbeat
            if not network.weather.held:
                self._under_way.append((batches, heartbeat))
            elif batches or not self._under_way:
                self._under_way.extend(
                    ([batch], heartbeat) for batch in batches
                )  # any of them may be the last to arrive
                self._under_way.append(((), heartbeat))

    def close(self) -> None:
        """End the feed."""
        self.closed = True


def lost(what: str) -> TransientStorageError:
    """What a caller gets whose answer does not come."""
    return TransientStorageError(what)
