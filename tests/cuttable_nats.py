"""A line to a NATS server that a test may cut, stop, or rob of single messages: faults over the wire."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from typing import Self

_HEAD = re.compile(rb"(H?)MSG \S+ \S+ (?:(\S+) )?(?:\d+ )?(\d+)\r\n", re.IGNORECASE)


class NatsLine:
    """Relays connections on a port of loopback to the server, message by message on the way back. A context manager."""

    def __init__(self, port: int) -> None:
        """To the server that listens on ``port``."""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._closed = False
        self.robs: Callable[[str], bool] = lambda _: False
        """Whether a message of the server with this reply is lost on the way."""
        self.stopped = False
        """Whether nothing of the server comes through, although the connection stands."""
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Break all connections; new ones may be made."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # closed; or the server is not there, and the client is let down
                continue
            self._open |= {client, server}
            for source, sink, work in ((client, server, self._forward), (server, client, self._back)):
                threading.Thread(target=self._pump, args=(source, sink, work), daemon=True).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, work: Callable[[socket.socket, socket.socket], None]
    ) -> None:
        with contextlib.suppress(OSError):
            work(source, sink)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            self._open.discard(end)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        while piece := source.recv(1 << 16):
            sink.sendall(piece)

    def _back(self, source: socket.socket, sink: socket.socket) -> None:
        held = b""
        while piece := source.recv(1 << 16):
            held += piece
            while b"\r\n" in held:
                head = _HEAD.match(held)
                end = held.index(b"\r\n") + 2 if head is None else head.end() + int(head[3]) + 2
                if len(held) < end:
                    break
                lost = head is not None and self.robs((head[2] or b"").decode())
                if not (lost or self.stopped):
                    sink.sendall(held[:end])
                held = held[end:]

    def close(self) -> None:
        """Break everything and listen no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep it open
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
