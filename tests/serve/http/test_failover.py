"""A stream whose log is replicated: its clients append and read on while the primary is killed and another promoted."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline.node.flight.client.remote_log import RemoteLog
from strandline.serve.http.app import LogEntry
from strandline.serve.http.limits import HttpLimits
from strandline.storage.env import SYSTEM
from tests.node.processes import ClusterOfProcesses, Nest
from tests.serve.http.client import Answer, Client, served

pytestmark = pytest.mark.matrix


@pytest.fixture
def cluster(nest: Nest, tmp_path: Path) -> Iterator[ClusterOfProcesses]:
    with ClusterOfProcesses(nest, tmp_path) as made:
        yield made


class Clients:
    """Producers and readers of one stream, each in a thread; what goes wrong in one of them is raised at the end."""

    def __init__(self, server: Client) -> None:
        self.http = server
        self.appended: dict[str, int] = {}
        """Records of each producer that the server has acknowledged."""
        self.received: dict[str, list[bytes]] = {}
        self.refused: list[int] = []
        """Statuses of requests that had to be sent again."""
        self.stop = threading.Event()
        """Producers end."""
        self.wanted: int | None = None
        """Readers end when they have that many records."""
        self._failed: list[BaseException] = []

    def start(self, act: Callable[[str], None], *names: str) -> list[threading.Thread]:
        def guarded(name: str) -> None:
            try:
                act(name)
            except BaseException as error:  # noqa: BLE001 - raised by the test's own thread
                self._failed.append(error)

        threads = [threading.Thread(target=guarded, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        return threads

    def check(self) -> None:
        assert not self._failed, self._failed

    def _must_come_again(self, answer: Answer) -> None:
        """An answer that is none says that the same request may be sent again, and when."""
        assert (answer.status, answer["Retry-After"]) in [(503, "1"), (429, "1")], answer
        self.refused.append(answer.status)
        SYSTEM.clock.sleep(0.05)

    def produce(self, name: str) -> None:
        """Append one record after another, each until it is acknowledged."""
        self.appended[name] = 0
        while not self.stop.is_set():
            sequence = self.appended[name]
            answer = self.append(name, sequence)
            if answer.status in (200, 204):
                self.appended[name] = sequence + 1
            else:
                self._must_come_again(answer)

    def append(self, name: str, sequence: int) -> Answer:
        body, kind = f"{name}{sequence};".encode(), {"Content-Type": "application/octet-stream"}
        return self.http.append_as("orders", name, 0, sequence, body, headers=kind)

    def is_done(self, name: str) -> bool:
        return self.wanted is not None and len(self.received[name]) >= self.wanted

    def _take(self, name: str, content: bytes) -> None:
        self.received[name] += content.split(b";")[:-1]

    def poll(self, name: str) -> None:
        """Read by long polls."""
        offset, self.received[name] = "-1", []
        while not self.is_done(name):
            answer = self.http.get("orders", offset=offset, live="long-poll")
            if answer.status in (200, 204):
                self._take(name, answer.body)
                offset = answer.next
            else:
                self._must_come_again(answer)

    def listen(self, name: str) -> None:
        """Read by events, and come back with the last offset whenever they end."""
        offset, data, self.received[name] = "-1", b"", []
        while not self.is_done(name):
            connection = http.client.HTTPConnection("127.0.0.1", self.http.port, timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", f"/v1/stream/orders?offset={offset}&live=sse")
                answer = connection.getresponse()
                if answer.status != 200:
                    headers = {key.lower(): value for key, value in answer.getheaders()}
                    self._must_come_again(Answer(answer.status, headers, answer.read()))
                    continue
                for kind, text in events_of(answer):
                    if kind == "data":
                        data = base64.b64decode(text)
                    else:  # what was received counts from here on: a reader that comes back names this offset
                        self._take(name, data)
                        offset, data = json.loads(text)["streamNextOffset"], b""
                    if self.is_done(name):
                        return


def events_of(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    """The kind and the text of each event until they end, also in the middle of one."""
    kind, text = "", ""
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        while line := answer.readline().decode():
            word, _, rest = line.rstrip("\n").partition(":")
            if word == "event":
                kind, text = rest.strip(), ""
            elif word == "data":
                text += rest
            elif not word:
                yield kind, text


def test_clients_of_a_server_are_not_told_of_a_failover_and_nothing_is_lost_or_doubled(
    serve: Any, cluster: ClusterOfProcesses
) -> None:
    cluster.begin()
    running = serve(f'[logs.orders]\naddress = "{cluster.url}"\n')
    running.until_ready()
    go_through_failovers(cluster, Clients(Client(int(running.url.rpartition(":")[2]))), is_told=False)


def test_clients_that_are_told_to_come_again_during_a_failover_lose_and_double_nothing(
    cluster: ClusterOfProcesses,
) -> None:
    cluster.begin()
    limits = HttpLimits(long_poll_seconds=1.0)
    with (
        RemoteLog(cluster.url, failover_timeout=0.3) as log,  # before anybody is promoted
        served(logs={"orders": LogEntry(log)}, limits=limits) as http_client,
    ):
        go_through_failovers(cluster, Clients(http_client), is_told=True)


def go_through_failovers(cluster: ClusterOfProcesses, clients: Clients, *, is_told: bool) -> None:
    """Kill the primary twice, and promote another node; with ``is_told`` only after a request was refused."""
    producers = clients.start(clients.produce, "p", "q")
    readers = [*clients.start(clients.poll, "polls"), *clients.start(clients.listen, "listens")]

    def until(condition: Callable[[], object]) -> None:
        cluster.until(lambda: clients.check() or condition(), "clients go on")

    def until_appended(more: int) -> None:
        wanted = {name: clients.appended.get(name, 0) + more for name in ("p", "q")}
        until(lambda: all(clients.appended.get(name, 0) >= count for name, count in wanted.items()))

    until_appended(10)
    for _ in range(2):
        leader, before = cluster.leader(), len(clients.refused)
        cluster.kill(leader)
        if is_told:
            until(lambda before=before: len(clients.refused) > before + 3)
        cluster.promote(*(name for name in cluster.names if name != leader))
        until_appended(10)
        cluster.start(leader)
        cluster.settled()
    clients.stop.set()
    until(lambda: not any(thread.is_alive() for thread in producers))
    clients.wanted = sum(clients.appended.values())
    # One record more wakes readers that have all others, and are told only now how many there are.
    assert clients.append("last", 0).status == 200
    until(lambda: not any(thread.is_alive() for thread in readers))
    stored = clients.http.get("orders", offset="-1").body.split(b";")[:-1]
    for name, count in clients.appended.items():
        own = [record for record in stored if record.startswith(name.encode())]
        assert own == [f"{name}{number}".encode() for number in range(count)]
    for name, found in clients.received.items():
        assert len(found) >= clients.wanted
        assert found == stored[: len(found)], f"{name} did not receive what is stored"
    print(f"{len(stored)} records, {len(clients.refused)} requests were sent again: {sorted({*clients.refused})}")
