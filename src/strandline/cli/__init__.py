"""The command line: what ``strandline`` does in a shell (docs/cli.md)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; what ``strandline`` in a shell starts."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("The command line needs the extra 'cli': pip install 'strandline[cli]'.", file=sys.stderr)
        sys.exit(1)
    from strandline.cli.app import app

    app(prog_name="strandline")
