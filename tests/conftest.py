"""Fixtures for every folder: real servers, one of each per run, and places on them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from strandline.storage.objects.store import ObjectStore
from strandline.storage.objects.urls import open_store
from strandline.testing.plugin import SUITES
from tests.certificates import make_certificates
from tests.matrix_cases import examples, thin_contracts
from tests.postgres import PostgresServer
from tests.proxy import FaultyProxy
from tests.servers import BUCKET, AzureServer, KafkaServer, NatsServer, S3Server, Server, fresh_prefix, started

if TYPE_CHECKING:
    from tests.node.processes import Nest

# The suites are not test files by name; their failures should tell as much as those of tests. Here, before anything
# imports one of them.
pytest.register_assert_rewrite("tests.contracts", *(f"strandline.testing.{suite}" for suite in SUITES))

# A shell that starts something in the background lets it ignore Ctrl-C, and so all that it starts in turn: the programs
# that tests interrupt would not hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, or takes to be made, says more of the machine than of the code. CI tries more of them.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100)
)
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the matrix what the default suite shows on something else.

    Azure's emulator takes seconds to start, and S3 stands for remote stores; contracts: :func:`thin_contracts`.
    """
    for item in items:
        if "azure_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.matrix)
    thin_contracts(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Give all tests that lack the same server one place, so that the summary tells it in one line."""
    if report.skipped and isinstance(report.longrepr, tuple) and "no server:" in report.longrepr[2]:
        report.longrepr = ("tests/servers.py", 1, report.longrepr[2])


def _running(server: Server) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, started(server):
        # What the environment of a developer says about a real cloud is not meant for this server.
        for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_")) and name != "AWS_CA_BUNDLE"]:
            patch.delenv(name)
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """A real S3 server with the bucket ``tests``; skips if it is not installed."""
    yield from _running(S3Server())


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Server]:
    """The emulator of Azure Blob Storage with the container ``tests``; skips if it is not installed."""
    yield from _running(AzureServer())


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """An empty place on the S3 server; ``s3_server.options`` open it."""
    return s3_server.url(BUCKET, fresh_prefix())


@pytest.fixture
def s3_place(s3_server: S3Server) -> Callable[[], ObjectStore]:
    """Empty stores on the S3 server, a new one at each call, as users open them."""
    return lambda: open_store(s3_server.url(BUCKET, fresh_prefix()), s3_server.options)


@pytest.fixture
def azure_place(azure_server: AzureServer) -> Callable[[], ObjectStore]:
    """Empty stores on the Azure emulator, a new one at each call, as users open them."""
    return lambda: open_store(azure_server.url(BUCKET, fresh_prefix()), azure_server.options)


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    """A line to the S3 server that the test may cut."""
    with FaultyProxy("127.0.0.1", s3_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """A real NATS server with JetStream; skips if it is not installed. A test that stops one starts its own."""
    with started(NatsServer()) as server:
        yield server


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """What a client of the NATS server connects to."""
    return nats_server.url


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """A real Kafka broker; skips if it is not installed. A test that stops one starts its own."""
    with started(KafkaServer()) as server:
        yield server


@pytest.fixture(scope="session")
def nest() -> Iterator[Nest]:
    """A process that starts nodes as processes of their own; it imports everything once for all of them."""
    from tests.node.processes import Nest

    with Nest() as nest:
        yield nest


@pytest.fixture(scope="session")
def certificate_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys of nodes and of who connects to them."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A real PostgreSQL server for the tests of a module; skips if it is not installed."""
    with started(PostgresServer(within=str(tmp_path_factory.mktemp("postgres")))) as server:
        yield server


@pytest.fixture
def unsynced(monkeypatch):
    """Do not sync files: for tests in which many processes die, but not the machine."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
