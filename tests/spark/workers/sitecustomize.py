"""Python processes of Spark that start quickly: Python imports this file first, because its folder is on their path.

PySpark comes from the packages, where it is compiled, and not from Spark's own archive, where each process compiles it
again: that takes three times as long as all else that such a process does.

Spark gives the process of a streaming source ten seconds to connect, which cannot be changed. On a busy machine the
imports take longer. So the connection is made before them.
"""

from __future__ import annotations

import os
import socket
import sys

sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]


def connect_early(address: str) -> None:
    """Connect now; who connects to this address later is given this connection."""
    early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    early.connect(address)
    connect = socket.socket.connect

    def given(self: socket.socket, to: object) -> None:
        if to == address:
            os.dup2(early.fileno(), self.fileno())
            early.close()
            socket.socket.connect = connect
        else:
            connect(self, to)

    socket.socket.connect = given


if "PYTHON_WORKER_FACTORY_SOCK_PATH" in os.environ:
    connect_early(os.environ["PYTHON_WORKER_FACTORY_SOCK_PATH"])
