"""What Ctrl-C does where no command is under way. Imports nothing, so that it is there first."""

from __future__ import annotations

import os


def end_at_once(*_: object) -> None:
    """Ctrl-C before a command has begun, or after it has ended: nothing is under way that could be finished.

    An exception instead would be raised within whatever is being imported, and not every import passes it on.
    """
    os.write(2, b"interrupted\n")
    os._exit(130)
