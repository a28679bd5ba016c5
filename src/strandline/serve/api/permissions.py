"""Who may call over HTTP: the tokens of Flight, read again when their file changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, final

from strandline.errors import StrandlineError
from strandline.node.flight.security import (
    APPENDERS,
    HEADER,
    READERS,
    Grant,
    Role,
    ServerSecurity,
    check_listening,
    is_loopback,
)
from strandline.serve.config.values import Listen
from strandline.serve.http.access import Access, Denied
from strandline.serve.http.origins import Origins

REREAD_SECONDS: Final = 5.0
_NONE: Final = Origins()
_LOGGER: Final = logging.getLogger("strandline.serve")
_ROLES: Final = {
    Access.READ: READERS,
    Access.APPEND: APPENDERS,
    Access.CONSUME: (Role.CLIENT, Role.ADMIN, Role.CONSUME),
    Access.ADMIN: (Role.ADMIN,),
}


@final
class Permissions:
    """Decides on requests. Without tokens everybody may do everything: then only this machine can connect.

    With certificates of callers and no tokens, each caller that has one is a client.
    """

    def __init__(self, security: ServerSecurity, origins: Origins = _NONE) -> None:
        """``origins`` are those whose pages may send requests also where no token is needed."""
        self._security, self._origins = security, origins
        self._unread = ""

    def __repr__(self) -> str:
        return "Permissions(…)"

    def strange(self, headers: Mapping[str, str]) -> Denied | None:
        """Why a request that needs no token is refused: a page of another origin in a browser may have sent it.

        A browser on this machine, or one with a certificate, sends what any page asks for. It names the page's origin,
        and a page whose name was made to lead to this machine has that name as the host.
        """
        if self._security.tokens is not None:
            return None
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if host and self._security.client_roots is None and not is_loopback(name):
            return Denied(
                HTTPStatus.FORBIDDEN,
                "Without tokens this server answers only requests to 127.0.0.1, [::1] or localhost: give it tokens.",
            )
        if origin is not None and origin.lower().partition("://")[2] != host and origin not in self._origins:
            return Denied(
                HTTPStatus.FORBIDDEN,
                "Without tokens this server answers no pages of other origins: list this one in origins of [http].",
            )
        return None

    def denied(self, headers: Mapping[str, str], access: Access, log: str = "", slot: str = "") -> Denied | None:
        """None if the caller may do this; ``log`` is empty for what is of no log, ``slot`` names a consumer."""
        grant = self.grant(headers)
        if isinstance(grant, Denied) or grant is None:
            return grant
        here = grant.on(log) if log else grant
        if here.may(*_ROLES[access]) or (access is Access.CONSUME and slot and here.may_consume(slot)):
            return None
        what = f"the log {log!r}" if log else "this server"
        return Denied(
            HTTPStatus.FORBIDDEN,
            f"{grant.name!r} may not do this: it takes the role {access} on {what}. Use another token.",
        )

    def denied_all(self, headers: Mapping[str, str]) -> Denied | None:
        """None for a known caller, who is told only of the logs that it :meth:`sees`."""
        grant = self.grant(headers)
        return grant if isinstance(grant, Denied) else None

    def grant(self, headers: Mapping[str, str]) -> Grant | Denied | None:
        """What the caller may; None if everybody may do everything."""
        tokens = self._security.tokens
        if tokens is None:
            is_open = self._security.client_roots is None
            return None if is_open else Grant("certificate", frozenset({Role.CLIENT}))
        given = headers.get(HEADER)
        found = tokens.find({HEADER: [given]} if given is not None else {})
        if found is not None:
            return found
        return Denied(HTTPStatus.UNAUTHORIZED, "This server takes a token: send it as 'Authorization: Bearer TOKEN'.")

    def sees(self, headers: Mapping[str, str], log: str) -> bool:
        """Whether the caller may know of a log."""
        grant = self.grant(headers)
        return grant is None or (isinstance(grant, Grant) and bool(grant.on(log).roles))

    def reread(self) -> None:
        """Read the tokens again; files that cannot be read change nothing."""
        if self._security.reread is None:
            return
        try:
            security = self._security.reread()
        except StrandlineError as error:
            if str(error) != self._unread:
                _LOGGER.warning("HTTP goes on with its former certificate and tokens: %s", error)
            self._unread = str(error)
            return
        self._unread = ""
        if security != self._security:
            self._security = security
            _LOGGER.info("HTTP uses the certificate and tokens that were written meanwhile.")


def check_http(listen: Listen, security: ServerSecurity) -> None:
    """Refuse to listen for other machines without TLS and authentication."""
    check_listening(listen.place[0], security, insecure=False, who="A server")
