"""A fork server for the processes of streaming sources: ``source_forkserver.py ADDRESS``, until standard input ends.

Spark starts a process for each query, which imports for a second what it then uses for a moment. This one imports it
once, uses nothing, and forks a child for each process that asks (``sitecustomize.py``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading

import pyspark.sql.streaming.python_streaming_source_runner as source
from sitecustomize import give_later

import strandline.spark.datasource.source
import strandline.tier.opening  # noqa: F401 - children have what a source imports when it needs it


def received(asking: socket.socket) -> tuple[dict, list[int]]:
    """What a process asks for, with its handles."""
    size, handles, _, _ = socket.recv_fds(asking, 4, 3)
    with asking.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(size, "big"))), handles


def be_source(asking: socket.socket) -> None:
    """Be the source that was asked for, until it is over or nobody asks any more."""
    order, (line, out, errors) = received(asking)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])

    def end_with_the_other() -> None:
        asking.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_the_other, daemon=True).start()
    give_later(socket.socket(fileno=line), os.environ["PYTHON_WORKER_FACTORY_SOCK_PATH"])
    with source.get_sock_file_to_executor(timeout=None) as file:
        source.main(file, file)


def serve(address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(address)
    listening.listen(16)
    print("ready", flush=True)
    while listening in select.select([listening, 0], [], [])[0]:
        asking, _ = listening.accept()
        if not os.fork():
            try:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                be_source(asking)
            finally:
                os._exit(0)  # nobody asks how it ended: Spark is told through its connection
        asking.close()


if __name__ == "__main__":
    serve(sys.argv[1])
