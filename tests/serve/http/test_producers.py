"""Idempotent producers: each append once, whatever ends between its commit and its answer, over several servers."""

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import strandline as sl
from strandline.serve.http.stream import Stream
from strandline.serve.http.streams import StreamRoot
from strandline.storage.objects.local import LocalStore
from strandline.testing.faulty import Faults, FaultyStore
from tests.serve.http.client import Client, served

_KILLED = """
    import os, signal, sys, threading
    from strandline.serve.http.app import create_app
    from strandline.serve.http.server import serving
    from strandline.serve.http.stream import Stream
    from strandline.serve.http.streams import StreamRoot

    append, left = Stream._append_once, int(sys.argv[2])

    def append_and_die(stream, *args):
        global left
        receipt = append(stream, *args)
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return receipt

    Stream._append_once = append_and_die
    with serving(create_app({}, StreamRoot(sys.argv[1])), "127.0.0.1", 0) as port:
        print(port, flush=True)
        threading.Event().wait()
"""


@pytest.fixture(params=["file", "wal"])
def root(request, tmp_path):
    return f"{request.param}://{tmp_path}/streams"


@pytest.mark.parametrize(
    "appended", [0, pytest.param(1, marks=pytest.mark.matrix), pytest.param(3, marks=pytest.mark.matrix)]
)
def test_a_retry_after_a_kill_between_commit_and_answer_is_a_duplicate_on_another_server(root, appended):
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), root, str(appended)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        http = Client(int(killed.stdout.readline()))
        http.put("orders")
        for sequence in range(appended):
            assert http.append_as("orders", "p", 4, sequence, b"%d" % sequence).status == 200
        with pytest.raises(OSError):
            http.append_as("orders", "p", 4, appended, b"%d" % appended)
        assert killed.wait() == -signal.SIGKILL
    with served(root) as http:
        again = http.append_as("orders", "p", 4, appended, b"%d" % appended)
        assert (again.status, again["Producer-Seq"]) == (204, str(appended))
        stale = http.append_as("orders", "p", 3, 0, b"stale")
        assert (stale.status, stale["Producer-Epoch"]) == (403, "4")
        gap = http.append_as("orders", "p", 4, appended + 2, b"gap")
        assert (gap.status, gap["Producer-Expected-Seq"]) == (409, str(appended + 1))
        assert http.append_as("orders", "p", 4, appended + 1, b"!").status == 200
        assert http.get("orders").body == b"".join(b"%d" % number for number in range(appended + 1)) + b"!"


def test_a_close_whose_answer_was_lost_is_a_duplicate(root):
    with served(root) as http:
        http.put("orders")
        assert http.append_as("orders", "p", 0, 0, b"last", Stream_Closed="true").status == 200
    with served(root) as http:
        again = http.append_as("orders", "p", 0, 0, b"last", Stream_Closed="true")
        assert (again.status, again["Stream-Closed"]) == (204, "true")
        assert http.append_as("orders", "p", 0, 1, b"more").status == 409
        assert http.append_as("orders", "other", 0, 0, b"more").status == 409
        assert http.get("orders").body == b"last"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 6))])
def test_lost_answers_of_the_store_double_nothing(tmp_path, seed):
    faults = Faults(before=0.05, after=0.1, late=0.05)
    stores = {}

    def opener(address, *, content_type):
        store = LocalStore(address.removeprefix("file://"))
        return sl.open(stores.setdefault(address, FaultyStore(store, seed=seed, faults=faults)))

    place = f"file://{tmp_path}/streams"
    with served(place) as http:
        http.put("orders")
    with served(StreamRoot(place, opener=opener)) as http:
        done = 0
        for number in range(15):
            for _ in range(200):
                if (status := http.append_as("orders", "p", 0, number, b"%d," % number).status) in (200, 204):
                    done += 1
                    break
                assert status in (429, 500, 503), status
        assert done == 15
    with served(place) as http:
        assert http.get("orders").body == b"".join(b"%d," % number for number in range(15))


def test_an_epoch_that_is_fenced_while_its_request_waits_appends_nothing(tmp_path, monkeypatch):
    root, judged, fenced = f"file://{tmp_path}/streams", threading.Event(), threading.Event()
    append = Stream._append_once

    def waits(stream, writer, number, wanted, expect):
        if wanted.producer.epoch == 0 and wanted.producer.sequence == 1:
            judged.set()
            assert fenced.wait(60)
        return append(stream, writer, number, wanted, expect)

    with served(root) as one, served(root) as other:
        one.put("orders")
        one.append_as("orders", "p", 0, 0, b"a")
        monkeypatch.setattr(Stream, "_append_once", waits)
        answers = []
        zombie = threading.Thread(target=lambda: answers.append(one.append_as("orders", "p", 0, 1, b"zombie")))
        zombie.start()
        assert judged.wait(60)
        assert other.append_as("orders", "p", 1, 0, b"b").status == 200
        fenced.set()
        zombie.join()
        assert (answers[0].status, answers[0]["Producer-Epoch"]) == (403, "1")
        assert other.get("orders").body == b"ab"


def test_the_same_append_through_two_servers_at_once_is_one(tmp_path):
    root = f"file://{tmp_path}/streams"
    with served(root) as one, served(root) as other:
        one.put("orders")
        for sequence in range(8):
            statuses, start = [], threading.Barrier(2)

            def append(http, sequence=sequence, statuses=statuses, start=start):
                start.wait()
                statuses.append(http.append_as("orders", "p", 0, sequence, b"%d" % sequence).status)

            threads = [threading.Thread(target=append, args=(http,)) for http in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(statuses) in ([200, 204], [200, 200])
        assert one.get("orders").body == b"01234567"


def test_what_was_acknowledged_while_the_stream_was_closed_is_below_its_end(root):
    with served(root) as http:
        http.put("orders")
        taken, refused = [], []

        def append(name):
            for number in range(20):
                text = f"{name}{number},".encode()
                answer = http.post("orders", text)
                (taken if answer.status == 204 else refused).append((text, answer))

        threads = [threading.Thread(target=append, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        while len(taken) < 5:
            pass
        closed = http.post("orders", b"end,", Stream_Closed="true")
        for thread in threads:
            thread.join()
        assert (closed.status, closed["Stream-Closed"]) == (204, "true")
        body = http.get("orders")
        assert sorted(body.body.split(b",")[:-1]) == sorted([text[:-1] for text, _ in taken] + [b"end"])
        assert body.body.endswith(b"end,")
        assert (body["Stream-Closed"], body.next) == ("true", closed.next)
        for _, answer in refused:
            assert (answer.status, answer["Stream-Closed"], answer.next) == (409, "true", closed.next)
