"""A line between nodes that a test may cut, stop in one direction, slow down or spoil: faults over the wire."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

Way = Literal["up", "down"]
"""To the node that listens, or from it."""

WAYS: tuple[Way, Way] = ("up", "down")
_PIECE = 64 << 10
_RESET = struct.pack("ii", 1, 0)
_WHOLE = 1 << 62


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    over: bool = False

    def ends(self, way: Way) -> tuple[socket.socket, socket.socket]:
        return (self.client, self.server) if way == "up" else (self.server, self.client)


class TcpProxy:
    """Relays connections on a port of loopback to a port that may change. A context manager.

    What is held is not lost but late, as TCP has it: it arrives after :meth:`heal`, unless the connection was cut.
    """

    def __init__(self, seed: int = 0) -> None:
        """Relay to nowhere yet: every connection is refused."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._changed = threading.Condition()
        self._open: set[_Connection] = set()
        self._target: int | None = None
        self._is_cut = self._closed = False
        self._left: dict[Way, int] = dict.fromkeys(WAYS, _WHOLE)
        """How many bytes may still pass before it holds the rest."""
        self._pause: dict[Way, float] = dict.fromkeys(WAYS, 0.0)
        self._spoil: dict[Way, Callable[[bytes], bytes] | None] = dict.fromkeys(WAYS)
        self._chance = random.Random(seed)
        self.passed: dict[Way, int] = dict.fromkeys(WAYS, 0)
        """How many bytes were let through, in all connections."""
        self.spoiled = 0
        """How many bytes were changed."""
        self._thread = threading.Thread(target=self._serve, daemon=True, name="tcp-proxy")
        self._thread.start()

    @property
    def port(self) -> int:
        """What clients connect to."""
        return int(self._listener.getsockname()[1])

    # --- what goes wrong -----------------------------------------------------------------------------------------

    def lead_to(self, port: int | None) -> None:
        """Relay new connections to this port; None refuses them."""
        with self._changed:
            self._target = port

    def cut(self) -> None:
        """Break all connections, and refuse new ones, until it is healed."""
        with self._changed:
            self._is_cut = True
        self.hang_up()

    def hang_up(self) -> None:
        """Break all connections; new ones may be made."""
        with self._changed:
            broken = list(self._open)
        for connection in broken:
            self._end(connection)

    def hold(self, *ways: Way, after: int = 0) -> None:
        """Pass ``after`` more bytes in these directions (all, if none is named), and then nothing."""
        with self._changed:
            for way in ways or WAYS:
                self._left[way] = after

    def slow(self, way: Way, seconds: float) -> None:
        """Let each piece of up to 64 KiB take so long."""
        with self._changed:
            self._pause[way] = seconds

    def flip(self, way: Way, *, every: int) -> None:
        """Flip one byte in about ``every`` bytes."""

        def spoil(piece: bytes) -> bytes:
            if self._chance.random() * every >= len(piece):
                return piece
            at = self._chance.randrange(len(piece))
            self.spoiled += 1
            return piece[:at] + bytes([piece[at] ^ 1 << self._chance.randrange(8)]) + piece[at + 1 :]

        self.alter(way, spoil)

    def alter(self, way: Way, spoil: Callable[[bytes], bytes] | None) -> None:
        """Pass each piece through a function."""
        with self._changed:
            self._spoil[way] = spoil

    def heal(self) -> None:
        """Pass everything as it is; what was held arrives."""
        with self._changed:
            self._is_cut = False
            self._left = dict.fromkeys(WAYS, _WHOLE)
            self._pause = dict.fromkeys(WAYS, 0.0)
            self._spoil = dict.fromkeys(WAYS)
            self._changed.notify_all()

    def is_holding(self, way: Way) -> bool:
        """Whether nothing more passes in a direction."""
        with self._changed:
            return self._left[way] <= 0

    # --- relaying ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._changed:
                target = None if self._is_cut or self._closed else self._target
            try:
                if target is None:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", target))
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, server)
            with self._changed:
                self._open.add(connection)
            for way in WAYS:
                threading.Thread(target=self._pump, args=(connection, way), daemon=True).start()

    def _pump(self, connection: _Connection, way: Way) -> None:
        source, sink = connection.ends(way)
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                while piece:
                    count, spoil = self._admit(connection, way, len(piece))
                    if not count:
                        return
                    part, piece = piece[:count], piece[count:]
                    sink.sendall(part if spoil is None else spoil(part))
                    with self._changed:
                        self.passed[way] += count
        self._end(connection)

    def _admit(self, connection: _Connection, way: Way, size: int) -> tuple[int, Callable[[bytes], bytes] | None]:
        """How much of a piece may pass now, waiting until something may; 0 if the connection is over."""
        with self._changed:
            if self._pause[way]:
                self._changed.wait_for(lambda: connection.over or not self._pause[way], self._pause[way])
            self._changed.wait_for(lambda: connection.over or self._left[way] > 0)
            if connection.over:
                return 0, None
            count = min(size, self._left[way])
            self._left[way] -= count
            return count, self._spoil[way]

    def _end(self, connection: _Connection) -> None:
        with self._changed:
            connection.over = True
            self._open.discard(connection)
            self._changed.notify_all()
        for end in (connection.client, connection.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break everything and listen no more."""
        with self._changed:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep it open
        self._listener.close()
        self.hang_up()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
