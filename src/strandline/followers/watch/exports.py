"""Exports of a watch: snapshots of its store that other threads request."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from strandline.errors import InvalidInput
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import checked
from strandline.model.snapshot import Snapshot
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A request for an export of the store into a folder."""

    folder: str
    answer: Future[Snapshot] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Fail the request, unless it was cancelled."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


@bound_to_process()
@checked
class Exports(Closing):
    """Requests for exports, from any thread, to the one watch that has this object.

    Each request gets exactly one answer; a failed export never ends the watch. After :meth:`close` the watch continues
    without exports.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._asked: deque[ExportRequest] = deque()  # added and taken one by one, which is atomic
        self._closed = False
        self._origin = Origin("The exports of a watch", self)

    def request(self, folder: Address) -> Future[Snapshot]:
        """Request a snapshot in a folder that is absent or empty; served between two flushes.

        The future holds the snapshot, whose cursor matches its data exactly, or the error. It may be cancelled.
        ``WatchEnded`` if the watch ends first.
        """
        request = ExportRequest(as_address(folder))
        if self._closed:
            raise InvalidInput("These exports are closed: no export can be requested any more.")
        self._asked.append(request)
        return request.answer

    def taken(self) -> list[ExportRequest]:
        """The requests since the last call; used by the watch."""
        return [self._asked.popleft() for _ in range(len(self._asked))]

    def close(self) -> None:
        """Accept no further requests; earlier ones are still served."""
        self._closed = True
