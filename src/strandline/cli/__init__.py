"""The ``strandline`` command line (docs/cli.md)."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


def main() -> None:
    """Run the command line: the entry point of ``strandline``."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("The command line needs the extra 'cli': pip install 'strandline[cli]'.", file=sys.stderr)
        sys.exit(1)
    import traceback

    _let_arrow_forget_pandas()
    from strandline.cli.app import app
    from strandline.cli.shared.text import escaped

    try:
        app(prog_name="strandline")
    except Exception:  # noqa: BLE001 - the last handler
        # A traceback, of --debug or of a bug, may contain untrusted names.
        sys.stderr.write(escaped(traceback.format_exc(), keep="\n"))
        sys.exit(1)


class _NoPandas(MetaPathFinder):
    """Finds every module but pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Leave the module to other finders, unless it is pandas."""
        if name == "pandas":
            raise ImportError(name=name)


def _let_arrow_forget_pandas() -> None:
    """Keep pyarrow from importing pandas at its first array, which takes a third of the start of a command.

    pyarrow then takes no argument for a pandas object, and commands have none. It asks again where its result is one.
    """
    import pyarrow as pa

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)
