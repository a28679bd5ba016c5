"""Notification of systemd, or of whatever supervises as it does: one datagram for each state, and no dependency."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Final, final

SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG: Final = "WATCHDOG_USEC"


@final
class SystemdNotifier:
    """The supervisor of this process, if it has one that listens."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._place = environment.get(SOCKET, "")
        wanted = environment.get(WATCHDOG, "")
        self.watchdog = int(wanted) / 2_000_000 if wanted.isdecimal() and int(wanted) > 0 and self._place else None
        """Seconds between two signs of life: half of what the supervisor waits for; None if it wants none."""

    def tell(self, state: str) -> None:
        """Send a state such as ``READY=1``. A supervisor that does not listen is no error."""
        if not self._place.startswith(("/", "@")):
            return
        place = "\0" + self._place[1:] if self._place.startswith("@") else self._place
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), place)
