"""The ``strandline`` command line (docs/cli.md)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line: the entry point of ``strandline``."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("The command line needs the extra 'cli': pip install 'strandline[cli]'.", file=sys.stderr)
        sys.exit(1)
    import traceback

    from strandline.cli.app import app
    from strandline.cli.shared.text import escaped

    try:
        app(prog_name="strandline")
    except Exception:  # noqa: BLE001 - the last handler
        # A traceback, of --debug or of a bug, may contain untrusted names.
        sys.stderr.write(escaped(traceback.format_exc(), keep="\n"))
        sys.exit(1)
