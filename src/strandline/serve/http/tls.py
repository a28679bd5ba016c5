"""TLS of the HTTP server: the certificate is renewed while connections are made."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any, final


@final
class ServerTls:
    """The TLS of a server. Each handshake takes the certificate and the key that were last loaded together.

    They are loaded into a context of their own: loaded into the one in use, a certificate whose key is not there yet
    would be presented without a key, and every handshake refused until it is.
    """

    def __init__(self, certificate: str, key: str, client_roots: str | None = None) -> None:
        """Paths of PEM files; ``OSError`` if they cannot be used. With roots, callers need a certificate of those."""
        self._paths = (certificate, key)
        self._client_roots = client_roots
        self._newest = self.context = self._loaded()
        self.context.sni_callback = self._take_newest

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._paths)
        if self._client_roots is not None:
            context.load_verify_locations(self._client_roots)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _take_newest(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake, also of a caller that names no server."""
        del name, context
        connection.context = self._newest

    def renew(self) -> None:
        """New connections take what the files hold now; files that do not belong together change nothing."""
        with contextlib.suppress(OSError):  # one of them is being replaced: at the next look
            self._newest = self._loaded()
