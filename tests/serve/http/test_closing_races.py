"""Closing a stream beside appends to it: what was acknowledged is in the stream, and nothing follows the end."""

import threading

import pytest

from tests.serve.http.client import TEXT, served

WRITERS = 4
MOST = 400


@pytest.mark.parametrize("root", ["memory://closing-races", "wal"])
@pytest.mark.parametrize("with_body", [True, False])
def test_an_append_beside_the_close_is_below_the_end_or_refused(root, with_body, tmp_path):
    with served(f"wal://{tmp_path}/streams" if root == "wal" else f"{root}-{with_body}") as http:
        assert http.put("orders").status == 201
        acknowledged, refused = [[] for _ in range(WRITERS)], [None] * WRITERS
        enough = threading.Semaphore(0)

        def write(writer):
            for number in range(MOST):
                text = f"{writer}.{number};"
                if writer % 2:  # a producer repeats what it does not know; the others do not
                    answer = http.append_as("orders", f"w{writer}", 0, number, text.encode())
                else:
                    answer = http.post("orders", text.encode())
                if answer.status == 409:
                    refused[writer] = answer
                    return
                assert answer.status in (200, 204), answer
                acknowledged[writer].append(text)
                enough.release()

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert enough.acquire(timeout=60)
        closed = http.post("orders", b"end;" if with_body else None, headers={**TEXT, "Stream-Closed": "true"})
        for thread in threads:
            thread.join(60)
        assert closed.status == 204
        assert closed["Stream-Closed"] == "true"
        read = http.get("orders", offset="-1")
        entries = [f"{entry};" for entry in read.body.decode().split(";")[:-1]]
        assert read["Stream-Closed"] == "true"
        assert read.next == closed.next
        if with_body:
            assert entries.pop() == "end;"
        for writer in range(WRITERS):
            assert [entry for entry in entries if entry.startswith(f"{writer}.")] == acknowledged[writer]
            assert refused[writer]["Stream-Closed"] == "true"
            assert refused[writer].next == closed.next
