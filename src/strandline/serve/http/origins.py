"""Pages of other origins in browsers: which may call a server and read its answers (CORS). Pure.

A page sends a token of its own, or none: no answer allows cookies or certificates of the browser.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Final, final

from strandline.serve.http.answers import HttpAnswer

ANY: Final = "*"

_SENT: Final = (
    "Authorization, Content-Type, Accept, If-None-Match, Idempotency-Key, Stream-Seq, Stream-TTL, Stream-Expires-At, "
    "Stream-Closed, Producer-Id, Producer-Epoch, Producer-Seq"
)
_READ: Final = (
    "Stream-Next-Offset, Stream-Cursor, Stream-Up-To-Date, Stream-Closed, Stream-TTL, Stream-Expires-At, "
    "Stream-SSE-Data-Encoding, Producer-Epoch, Producer-Seq, Producer-Expected-Seq, Producer-Received-Seq, ETag, "
    "Location, Retry-After"
)


@final
class Origins:
    """The origins whose pages are let in; none by default."""

    def __init__(self, listed: Collection[str] = ()) -> None:
        """``"*"`` is any."""
        self._listed = frozenset(listed)

    def __contains__(self, origin: str) -> bool:
        """Whether pages of this origin are let in."""
        return origin in self._listed or ANY in self._listed

    def headers(self, origin: str | None) -> dict[str, str]:
        """What lets a page of a listed origin read an answer; nothing for others.

        >>> Origins(["https://app.example"]).headers("https://evil.example")
        {'Vary': 'Origin'}
        """
        if not self._listed:
            return {}
        if ANY in self._listed:
            return {"Access-Control-Allow-Origin": ANY, "Access-Control-Expose-Headers": _READ}
        if origin is None or origin not in self._listed:
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": _READ}

    def options(self, methods: str) -> HttpAnswer:
        """The answer to OPTIONS. A browser heeds it only if its origin is let in by :meth:`headers`."""
        return HttpAnswer(
            HTTPStatus.NO_CONTENT,
            {
                "Allow": methods,
                "Access-Control-Allow-Methods": methods,
                "Access-Control-Allow-Headers": _SENT,
                "Access-Control-Max-Age": "600",
            },
        )
