"""Limits of the HTTP server: what callers may make it hold, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.model.arguments import Positive, checked


@checked
@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one process. Above a limit of size a request is 413 or 431, above one of number 429 or 503."""

    body_bytes: Positive = 32 << 20
    """The body of one request."""
    body_messages: Positive = 1 << 18
    """JSON messages, or lines, of one body: each takes some hundred bytes of memory, however short it is."""
    memory_bytes: Positive = 256 << 20
    """Bodies of all requests that are being received or appended; and again those of all answers that are sent."""
    body_seconds: float = 60.0
    """From the headers of a request until all of its body has come."""
    header_bytes: Positive = 32 << 10
    """The request line and the headers of one request."""
    header_seconds: float = 10.0
    """From the first byte of a connection, or of its next request, until all headers have come."""
    chunk_bytes: Positive = 1 << 20
    """The records of one answer; a single larger record is sent whole."""
    send_seconds: float = 60.0
    """How long a reader may take for each 64 KiB of an answer."""
    threads: Positive = 16
    """Calls of logs that run at once; each blocks on a disk or a store."""
    waiting: Positive = 4096
    """Calls that wait for one of these threads."""
    connections: Positive = 8192
    """Connections."""
    readers: Positive = 4096
    """Live readers: long polls and event streams. They take no thread."""
    long_poll_seconds: float = 15.0
    """How long a long poll waits for records."""
    events_seconds: float = 60.0
    """How long an event stream lasts; its client comes back."""
    poll_seconds: float = 0.2
    """Pause between two looks at a log with live readers. What this process appends is seen at once."""
