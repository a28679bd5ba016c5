"""Content of streams: bodies of requests into values of records, and values into bodies of answers. Pure."""

from __future__ import annotations

import base64
import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput
from strandline.model.content_type import check_content_type

DEFAULT_TYPE: Final = "application/octet-stream"
JSON: Final = "application/json"

_BETWEEN: Final = re.compile(r"[ \t]*;[ \t]*")

_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ONE: Final = msgspec.json.Decoder(msgspec.Raw)


def checked_type(text: str) -> str:
    """The content type as a log records it; ``InvalidInput`` for what is none.

    >>> checked_type("text/plain;charset=utf-8")
    'text/plain; charset=utf-8'
    """
    return check_content_type(_BETWEEN.sub("; ", text))


def media_type(content_type: str) -> str:
    """The type without parameters, in lower case: what decides whether two are the same.

    >>> media_type("Text/Plain; charset=utf-8")
    'text/plain'
    """
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    """Whether a stream holds JSON messages, and not bytes."""
    return media_type(content_type) == JSON


def is_text(content_type: str) -> bool:
    """Whether events carry the content as it is; other content is in base64."""
    kind = media_type(content_type)
    return kind == JSON or kind.startswith("text/")


def messages_of(body: bytes, content_type: str) -> list[bytes]:
    """The values that a body appends: of JSON its messages, of anything else the body.

    An array is flattened by one level. ``InvalidInput`` for what is no JSON.

    >>> messages_of(b'[1, {"a": [2]}]', "application/json")
    [b'1', b'{"a": [2]}']
    >>> messages_of(b"[1", "text/plain")
    [b'[1']
    """
    if not is_json(content_type):
        return [body] if body else []
    try:
        body.decode()  # the decoder does not look into strings that nobody asks for
        if body.lstrip()[:1] == b"[":
            return [bytes(message) for message in _MESSAGES.decode(body)]
        return [bytes(_ONE.decode(body)).strip()]
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"The body is no JSON ({error}); nothing was appended.") from error


def sizes_of(values: pa.Array, null: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The bytes of each value; a null takes ``null``.

    >>> sizes_of(pa.array([b"abc", None]), 4).tolist()
    [3, 4]
    """
    found: np.ndarray[Any, np.dtype[np.int64]]
    found = pc.fill_null(pc.binary_length(values), null).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def within(sizes: np.ndarray[Any, np.dtype[np.int64]], room: int, *, at_least_one: bool) -> int:
    """How many from the first on take no more than ``room`` bytes."""
    if not len(sizes):
        return 0
    return max(int(np.searchsorted(np.cumsum(sizes), room, side="right")), int(at_least_one))


def body_of(values: Sequence[pa.Array], content_type: str) -> bytes:
    """The body of an answer with these values: a JSON array of the messages, or the bytes one after another.

    >>> body_of([pa.array([b"1", None]), pa.array([b"[2]"])], "application/json")
    b'[1,null,[2]]'
    >>> body_of([pa.array([b"1", None]), pa.array([b"[2]"])], "text/plain")
    b'1[2]'
    >>> body_of([pa.array([b"0", b"1", b"2"]).slice(1, 1), pa.array([b""])], "text/plain")
    b'1'
    """
    if is_json(content_type):
        return b"[" + b",".join(_joined(part, b",", b"null") for part in values if len(part)) + b"]"
    return b"".join(_joined(part, b"", b"") for part in values if len(part))


def _joined(values: pa.Array, between: bytes, null: bytes) -> bytes:
    if not between and not values.null_count and values.type == pa.binary():  # Arrow holds them joined
        ends = memoryview(values.buffers()[1]).cast("B").cast("i")
        first, last = ends[values.offset], ends[values.offset + len(values)]
        return memoryview(values.buffers()[2] or b"")[first:last].tobytes()
    whole = pc.fill_null(values, null) if values.null_count else values
    row = pa.LargeListArray.from_arrays(pa.array([0, len(whole)], pa.int64()), whole.cast(pa.large_binary()))
    return bytes(pc.binary_join(row, pa.scalar(between, pa.large_binary()))[0].as_py())


def event(name: str, text: str) -> bytes:
    r"""A server-sent event; line breaks within the text begin a new line of the event, and end no event.

    A reader drops one space at the beginning of a line: a line that begins with one gets another.

    >>> event("data", "a\r\n b\rc")
    b'event: data\ndata:a\ndata:  b\ndata:c\n\n'
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    begins = ("data: " if line.startswith(" ") else "data:" for line in lines)
    return (
        f"event: {name}\n" + "".join(f"{begin}{line}\n" for begin, line in zip(begins, lines, strict=True)) + "\n"
    ).encode()


class DataEvents:
    r"""The events that carry the bodies of one answer: text as it is, other bytes in base64.

    A character whose bytes were appended in parts is sent whole, with its last part.

    >>> data, (first, second) = DataEvents("text/plain"), ("\N{EURO SIGN}".encode()[:2], "\N{EURO SIGN}".encode()[2:])
    >>> data(b"a" + first), data(second).decode()
    (b'event: data\ndata:a\n\n', 'event: data\ndata:\u20ac\n\n')
    """

    def __init__(self, content_type: str) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")("replace") if is_text(content_type) else None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of a character waits for the rest of it."""
        return self._text is None or not self._text.getstate()[0]

    def __call__(self, body: bytes, *, last: bool = False) -> bytes:
        """The event of a body; ``last`` if no other follows."""
        if self._text is None:
            return event("data", base64.b64encode(body).decode())
        return event("data", self._text.decode(body, last))


def column(batches: Iterable[pa.RecordBatch], name: str) -> list[pa.Array]:
    """One column of batches."""
    return [batch.column(name) for batch in batches]
