"""Credentials of a server for the logs, nodes and stores that it opens, read from the files that its settings name."""

from __future__ import annotations

from collections.abc import Mapping

from strandline.node.flight.security import ClientSecurity, ServerSecurity
from strandline.serve.config.settings import Settings
from strandline.serve.parts.logs import Opening
from strandline.storage.env import Env


def access_of(settings: Settings, environment: Mapping[str, str], env: Env) -> Opening:
    """The access of a server: one set of tokens and certificates for HTTP and Flight."""
    given = settings.security
    server = ServerSecurity.load(
        certificate=given.cert, key=given.key, client_roots=given.client_ca, tokens=given.tokens, env=env
    )
    shown = {} if given.client_ca is None else {"certificate": given.cert, "key": given.key}
    client = ClientSecurity.load(roots=given.ca, token=given.token, env=env, **shown)
    return Opening(environment, env, server=server, client=client, flight=settings.flight.listen)
