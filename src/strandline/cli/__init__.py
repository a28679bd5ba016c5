"""The ``strandline`` command line (docs/cli.md)."""

from __future__ import annotations

import signal
import sys

from strandline.cli.shared.interruption import end_at_once


def main() -> None:
    """Run the command line: the entry point of ``strandline``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not of a job that ignores it
        signal.signal(signal.SIGINT, end_at_once)
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("The command line needs the extra 'cli': pip install 'strandline[cli]'.", file=sys.stderr)
        sys.exit(1)
    from strandline.cli.app import app

    try:
        app(prog_name="strandline")
    except Exception:  # noqa: BLE001 - the last handler
        import traceback

        from strandline.cli.shared.text import escaped

        # A traceback, of --debug or of a bug, may contain untrusted names.
        sys.stderr.write(escaped(traceback.format_exc(), keep="\n"))
        sys.exit(1)
    except KeyboardInterrupt:  # a second one, while the first one was being handled
        end_at_once()
