"""Python processes of Spark that start quickly: Python imports this file first, because its folder is on their path.

PySpark comes from the packages, where it is compiled, and not from Spark's own archive, where each process compiles it
again: that takes three times as long as all else that such a process does.

Spark gives the process of a streaming source ten seconds to connect, which cannot be changed. On a busy machine the
imports take longer. So the connection is made before them. Then the fork server, if there is one, has a child for it
that has imported everything (``source_forkserver.py``); this process lives as long as that child.
"""

from __future__ import annotations

import os
import socket
import sys

sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]

ADDRESS = os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH")
SERVER = os.environ.get("STRANDLINE_TESTS_FORK_SERVER")
SOURCE = "pyspark.sql.streaming.python_streaming_source_runner"


def connected(address: str) -> socket.socket:
    """A connection to Spark."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(address)
    return line


def give_later(line: socket.socket, address: str) -> None:
    """Whoever connects to this address is given this connection."""
    connect = socket.socket.connect

    def given(self: socket.socket, to: object) -> None:
        if to == address:
            os.dup2(line.fileno(), self.fileno())
            line.close()
            socket.socket.connect = connect
        else:
            connect(self, to)

    socket.socket.connect = given


def leave_to_a_child(line: socket.socket, server: str) -> None:
    """Let a child of the fork server be the source, and end as it ends; it ends if this process does."""
    import json

    asking = connected(server)
    order = json.dumps({"environment": dict(os.environ), "folder": os.getcwd()}).encode()
    socket.send_fds(asking, [len(order).to_bytes(4, "big")], [line.fileno(), 1, 2])
    asking.sendall(order)
    line.close()
    asking.recv(1)  # nothing is ever sent: it ends with the child
    os._exit(0)


if ADDRESS is not None:
    early = connected(ADDRESS)
    if SERVER is not None and SOURCE in sys.orig_argv:
        leave_to_a_child(early, SERVER)
    give_later(early, ADDRESS)
