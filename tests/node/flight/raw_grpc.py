"""A gRPC caller made of bytes: what no well-behaved Flight client can be brought to send."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final, Self
from urllib.parse import urlsplit

import pyarrow as pa

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME: Final = 16384
_INITIAL: Final = 65535
_BIG: Final = 0x7FFFFFFF


class Refused(Exception):
    """The node has ended the connection, or the call."""


class RawGrpc:
    """One connection, with as many calls as one likes. Nothing is checked, and nothing is encrypted."""

    def __init__(self, url: str, *, timeout: float = 20.0, receive: int = _BIG) -> None:
        """Connect. ``receive`` is the window of each stream: how much of an answer the node may send unread."""
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname, place.port), timeout)
        self._stream = -1
        self._room = {0: _INITIAL}
        self._initial = _INITIAL
        self._bytes = b""
        self.ended: dict[int, bytes] = {}
        """The last headers of each call that has ended, as they came: only plain texts in them can be read."""
        self.answers: dict[int, bytes] = {}
        self._socket.sendall(_PREFACE)
        self._frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, receive))
        self._frame(_WINDOW, 0, 0, struct.pack(">I", _BIG - _INITIAL))

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> None:
        head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
        try:
            self._socket.sendall(head)
            self._socket.sendall(payload)
        except OSError as error:
            raise Refused(f"the connection is gone: {error}") from error

    def call(self, method: str, *, token: str | None = None, **headers: str) -> int:
        """Begin a call of the Flight service, and send nothing more; returns its stream."""
        self._stream += 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/arrow.flight.protocol.FlightService/{method}",
            ":authority": "node",
            "te": "trailers",
            "content-type": "application/grpc",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        if token is not None:
            fields["authorization"] = f"Bearer {token}"
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._frame(_HEADERS, _END_HEADERS, self._stream, block)
        self._room[self._stream] = self._initial
        return self._stream

    def send(
        self,
        stream: int,
        *pieces: bytes | memoryview,
        last: bool = False,
        announce: int | None = None,
        is_compressed: bool = False,
    ) -> None:
        """Send a message, or the beginning of one of ``announce`` bytes."""
        size = sum(map(len, pieces)) if announce is None else announce
        self._data(stream, struct.pack(">BI", is_compressed, size))
        for piece in pieces:
            self._data(stream, memoryview(piece))
        if last:
            self._frame(_DATA, _END_STREAM, stream)

    def more(self, stream: int, piece: bytes | memoryview) -> None:
        """Send more of a message that was only begun."""
        self._data(stream, memoryview(piece))

    def _data(self, stream: int, data: bytes | memoryview) -> None:
        at = 0
        while at < len(data):
            room = min(self._room[0], self._room.get(stream, 0), _FRAME, len(data) - at)
            if room <= 0:
                self._receive()
                continue
            self._frame(_DATA, 0, stream, data[at : at + room])
            self._room[0] -= room
            self._room[stream] -= room
            at += room

    def result(self, stream: int) -> bytes:
        """Wait until a call has ended; returns its last headers."""
        while stream not in self.ended:
            self._receive()
        return self.ended[stream]

    def _receive(self) -> None:
        """Take one frame."""
        head = self._exactly(9)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        payload = self._exactly(size)
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, size, 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    for known in self._room:
                        self._room[known] += value - self._initial if known else 0
                    self._initial = value
            self._frame(_SETTINGS, _ACK, 0)
        elif kind == _PING and not flags & _ACK:
            self._frame(_PING, _ACK, 0, payload)
        elif kind == _WINDOW:
            self._room[stream] = self._room.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == _DATA:
            self.answers[stream] = self.answers.get(stream, b"") + payload
        elif kind == _RESET:
            self.ended.setdefault(stream, b"reset")
            self._room[stream] = 0
        elif kind == _AWAY:
            raise Refused("the node said good-bye")
        if kind in (_HEADERS, _DATA) and flags & _END_STREAM:
            self.ended[stream] = payload if kind == _HEADERS else b""
        if stream in self.ended and self._room.get(stream) == 0:
            raise Refused("the node has ended the call")

    def _exactly(self, size: int) -> bytes:
        while len(self._bytes) < size:
            try:
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise Refused(f"the connection is gone: {error}") from error
            if not piece:
                raise Refused("the node has closed the connection")
            self._bytes += piece
        taken, self._bytes = self._bytes[:size], self._bytes[size:]
        return taken

    def wait_closed(self) -> None:
        """Wait until the node has closed the connection."""
        with contextlib.suppress(Refused):
            while True:
                self._receive()

    def wait_ended(self) -> None:
        """Wait until the node has ended the last call, or closed the connection."""
        with contextlib.suppress(Refused):
            self.result(self._stream)

    def close(self) -> None:
        """Let go of it, at once."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    left, out = len(data) - 127, bytearray([127])
    while left >= 128:
        out.append(left & 127 | 128)
        left >>= 7
    return bytes(out) + bytes([left]) + data


# --- the messages of Flight --------------------------------------------------------------------------------------


def field(number: int, data: bytes) -> bytes:
    """A field of bytes of a message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def action(name: str, body: bytes) -> bytes:
    """What ``DoAction`` is asked."""
    return field(1, name.encode()) + field(2, body)


def flight_data(header: bytes, body: bytes = b"", *, command: bytes | None = None, metadata: bytes = b"") -> bytes:
    """One message of a stream of Arrow batches."""
    descriptor = b"" if command is None else field(1, _varint(1 << 3) + _varint(2) + field(2, command))
    return descriptor + field(2, header) + (field(3, metadata) if metadata else b"") + field(1000, body)


def message_of(data: pa.Schema | pa.RecordBatch) -> tuple[bytes, bytes]:
    """The header and the body of the Arrow message that a schema or a batch is."""
    whole = data.serialize().to_pybytes()
    size = struct.unpack_from("<i", whole, 4)[0]
    return whole[8 : 8 + size], whole[8 + size :]
