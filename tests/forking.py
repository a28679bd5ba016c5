"""For tests with forks: do something in a forked child, which must end."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable

from strandline.errors import UsedAcrossFork

PATIENCE = 120
"""Real seconds after which a child hangs."""


def in_a_child(work: Callable[[], object]) -> str:
    """Do this in a forked child; returns what it said, which is ``HANGS`` if it does not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(reading)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE)
            try:
                said = f"returned {work()!r}"
            except UsedAcrossFork as error:
                said = f"{type(error).__name__}: {error}"
            except BaseException:  # noqa: BLE001 - it is passed on
                said = traceback.format_exc()
            os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        said = told.read().decode()
    _, status = os.waitpid(child, 0)
    return "HANGS" if os.WIFSIGNALED(status) else said
