"""Requests for a snapshot of the store of a running watch."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from strandline.errors import InvalidInput
from strandline.model.addresses import Address, as_address
from strandline.model.arguments import checked
from strandline.model.snapshot import Snapshot
from strandline.storage.fork_check import Origin, bound_to_process


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Somebody wants the store's content in this folder."""

    folder: str
    answer: Future[Snapshot] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Tell the requester, unless it has left."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


@bound_to_process()
@checked
class Exports:
    """Requests for exports, from any thread, to the one watch that is given this object.

    Each is answered exactly once, and only its requester hears of it: a failed export never ends the watch. Without
    requests, and after :meth:`close`, a watch goes on as if it had none.
    """

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self._lock = threading.Lock()
        self._asked: deque[ExportRequest] = deque()
        self._closed = False
        self._origin = Origin("The exports of a watch", self)

    def request(self, folder: Address) -> Future[Snapshot]:
        """Ask for a snapshot in a folder that is absent or empty; served between two flushes.

        The answer is the snapshot, whose cursor is exactly what its data holds, or why there is none. Cancel it to
        leave. If the watch ends first, the answer says so.
        """
        request = ExportRequest(as_address(folder))
        with self._lock:
            if self._closed:
                raise InvalidInput("These exports are closed: nothing can be asked of the watch any more.")
            self._asked.append(request)
        return request.answer

    def taken(self) -> list[ExportRequest]:
        """What was asked since the last look: the watch's side."""
        if not self._asked:
            return []
        with self._lock:
            asked = list(self._asked)
            self._asked.clear()
        return asked

    def close(self) -> None:
        """Ask no more. What was asked is still served."""
        with self._lock:
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
