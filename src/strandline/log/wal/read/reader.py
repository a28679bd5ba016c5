"""Reader of a write-ahead log that another process writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NoReturn, Self, final
from uuid import UUID

from strandline.errors import InvalidInput, NotReady
from strandline.log import slots as rules
from strandline.log.reading import HeadPoller
from strandline.log.wal.names import firsts_in
from strandline.log.wal.read.catalog import Catalog
from strandline.log.wal.read.reading import WalReading
from strandline.log.wal.read.tail import Held
from strandline.log.wal.read.watermark import View, read_mark
from strandline.log.wal.recover.scan_tail import read_identity, read_kept
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Bounds, Cursor
from strandline.model.retention import SlotState
from strandline.storage.clock import CLOCK, Clock, boot_id
from strandline.storage.disk import DISK, Disk
from strandline.storage.fork_check import Origin, bound_to_process

_LOOKS: Final = 8
"""How often a mark is read that is being written at the same moment."""


@bound_to_process(keep=("log_id", "folder", "disk"))
@final
@checked
class WalReader(WalReading):
    """A log as other processes on the machine see it: up to the mark that its writer publishes after each sync.

    Changes nothing, takes no lock, and never shows what is not durable. After the machine stopped without the log being
    closed, ``NotReady`` until it was opened for writing: how far it reaches is known only then. Its slots can be looked
    at; what would change the log is ``InvalidInput``.
    """

    def __init__(self, folder: Address, *, disk: Disk = DISK, clock: Clock = CLOCK, boot: UUID | None = None) -> None:
        """Read the log in this folder; ``NotALog`` if there is none."""
        folder = as_folder(folder)
        log_id = read_identity(folder, disk=disk)
        super().__init__(folder, log_id, Catalog(folder, log_id, firsts_in(disk.scan(folder)), disk=disk), disk=disk)
        self._clock = clock
        self._boot = boot_id() if boot is None else boot
        self._waiter = HeadPoller()
        self._seen = 0
        """Where the log ended when it was looked at last."""
        self._origin = Origin(f"The log in {folder}", advice="open it again there")

    def __repr__(self) -> str:
        return f"WalReader({self._folder!r}, log_id={self._log_id})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def view(self) -> View:
        """What is durable and retained now, by the word of the writer."""
        for _ in range(_LOOKS):
            mark = read_mark(self._folder, self._log_id, disk=self._disk)
            if mark is None:
                continue
            if not mark.clean and mark.boot != self._boot:
                break  # a crash of the machine may have set it back
            if mark.next < self._seen:
                self._catalog.begin_anew()
            elif mark.active not in self._catalog.firsts[-1:]:
                self._catalog.look_again()
            self._seen = mark.next
            return View(Bounds(mark.start, mark.next), mark.term)
        raise NotReady(
            f"How far the log in {self._folder} reaches is not known, since the machine stopped while it was open: "
            "open it for writing once, which repairs what is left."
        )

    def _frames(self, since: int, end: int) -> Iterator[Held]:
        return map(Held, self._catalog.frames(since, end))

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until something past the cursor is durable (True) or the time is over (False), looking now and then."""
        return self._waiter.wait(self, past, timeout, self._clock)

    def slots(self) -> list[SlotState]:
        """All slots, by name, as they were last written; their positions may be further by now."""
        kept = read_kept(self._folder, self._log_id, disk=self._disk, clock=self._clock)
        return sorted((state for state in kept.slots if not state.dropped), key=lambda state: state.name)

    def floor(self) -> int | None:
        """The lowest position that a valid slot still needs, as last written."""
        return rules.floor(self.slots())

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise InvalidInput(f"The log in {self._folder} was opened for reading: only the process that writes it may.")

    append = create_slot = claim_slot = reset_slot = drop_slot = _refuse
