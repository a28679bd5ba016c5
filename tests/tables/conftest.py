"""What tests of several kinds of tables need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import PostgresServer
from tests.servers import NoServer


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A real PostgreSQL server for the tests of a module; skips if it is not installed."""
    server = PostgresServer(within=str(tmp_path_factory.mktemp("postgres")))
    try:
        server.start()
    except NoServer as missing:
        pytest.skip(str(missing))
    with server:
        yield server
