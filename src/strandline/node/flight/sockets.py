"""The TCP connections that this process has accepted on a port, as the kernel counts them. Linux only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
from pathlib import Path
from typing import Any, Final, NamedTuple, final

_DESCRIPTORS: Final = "/proc/self/fd"
_INFO_SIZE: Final = 136
_COUNTERS: Final = struct.Struct("=QQ")
_COUNTERS_AT: Final = 120
"""Of ``struct tcp_info``: ``tcpi_bytes_acked`` and ``tcpi_bytes_received``."""
_WAITING: Final = struct.Struct("=i")


class Traffic(NamedTuple):
    """An accepted connection, and how much went over it since it was made."""

    peer: tuple[str, int]
    """Address and port of the other end."""
    received: int
    """Bytes that came and were read by who accepted it: what waits in the kernel is not in this process."""
    sent: int
    """Bytes that the other end has acknowledged."""
    descriptor: int


def can_watch() -> bool:
    """Whether this system tells what goes over the connections of a process."""
    return sys.platform == "linux" and hasattr(socket, "TCP_INFO") and Path(_DESCRIPTORS).is_dir()


@final
class AcceptedConnections:
    """All connections to a port of this process, whoever accepted them. For one thread."""

    def __init__(self, port: int) -> None:
        """Those to this port."""
        self.port = port
        self._others: set[tuple[int, int]] = set()
        """Descriptors, with what they stand for, that are no such connections."""
        self._peers: dict[tuple[int, int], tuple[str, int]] = {}
        """Of those that are, the other end."""

    def look(self) -> list[Traffic]:
        """How much went over each of them until now."""
        found: list[Traffic] = []
        others: set[tuple[int, int]] = set()
        peers: dict[tuple[int, int], tuple[str, int]] = {}
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - fifty times a second
            descriptor = int(name)
            with contextlib.suppress(OSError):  # closed meanwhile
                key = descriptor, os.fstat(descriptor).st_ino
                peer = self._peers.get(key)
                if peer is None and key not in self._others:
                    peer = self._peer(descriptor)
                if peer is None:
                    others.add(key)
                    continue
                peers[key] = peer
                sent, received = _counters(descriptor)
                found.append(Traffic(peer, received, sent, descriptor))
        self._others, self._peers = others, peers
        return found

    def _peer(self, descriptor: int) -> tuple[str, int] | None:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        connection = socket.socket(fileno=descriptor)
        try:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if connection.getsockname()[1] != self.port:
                return None
            return address_of(connection.getpeername())
        except OSError:
            return None  # it listens
        finally:
            connection.detach()  # it is not ours to close

    def shut(self, traffic: Traffic) -> None:
        """End a connection, whoever reads from it or writes to it; one that has ended by itself is fine."""
        with contextlib.suppress(OSError):
            # A second descriptor first: the number may be another connection's by the time that it is used.
            held = socket.socket(fileno=os.dup(traffic.descriptor))
            try:
                if held.getsockname()[1] == self.port and address_of(held.getpeername()) == traffic.peer:
                    held.shutdown(socket.SHUT_RDWR)
            finally:
                held.close()


def _counters(descriptor: int) -> tuple[int, int]:
    """Bytes sent and received."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
        (waiting,) = _WAITING.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(_WAITING.size)))
    finally:
        connection.detach()
    if len(info) < _INFO_SIZE:
        return 0, 0
    sent, received = _COUNTERS.unpack_from(info, _COUNTERS_AT)
    return sent, max(0, received - waiting)


def address_of(name: tuple[Any, ...]) -> tuple[str, int]:
    """Address and port of a socket's end; one of IPv4 is told as such, also where both kinds are listened on.

    >>> address_of(("::ffff:127.0.0.1", 7450, 0, 0))
    ('127.0.0.1', 7450)
    """
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
