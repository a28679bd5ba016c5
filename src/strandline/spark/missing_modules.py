"""Modules that the Python of Spark's executors lacks: which module, and which Python that is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Final

from strandline.errors import MissingExtra, StrandlineError, printable

_MISSING: Final = re.compile(r"^(?:\S*\.)?ModuleNotFoundError: No module named '([^'\n]+)'", re.MULTILINE)
_MOST_SHOWN: Final = 3
_PAGE: Final = "'Where Spark runs' (docs/spark-clusters.md)"


def missing_module(error: BaseException) -> str | None:
    r"""The module that a Python worker could not import, out of the text of Spark's error; None if it has none.

    >>> missing_module(RuntimeError("Traceback (most recent call last):\nModuleNotFoundError: No module named 'a.b'"))
    'a.b'
    """
    found = _MISSING.findall(str(error))
    return str(found[-1]) if found else None


def describing_task() -> Callable[[bytes], bytes]:
    """A task that describes the Python that runs it, and whether that has the module in its item.

    It is pickled by value, since it is no name of a module, and imports only the standard library: so it runs where
    this package is missing, too.
    """

    def described(module: bytes) -> bytes:
        import importlib.util
        import json
        import platform
        import sys

        has = importlib.util.find_spec(module.decode().partition(".")[0]) is not None
        found = f"{sys.executable} (Python {platform.python_version()}) on {platform.node()}"
        return json.dumps([has, found]).encode()

    return described


def located(error: StrandlineError) -> StrandlineError:
    """The error that a task met; a missing extra says that it is missing in the Python of this executor."""
    if not isinstance(error, MissingExtra):
        return error
    _, here = json.loads(describing_task()(b"json"))
    return MissingExtra(f"{error} That is to be done for the Python of Spark's executors, {here}; see {_PAGE}.")


def lacking(module: str, answers: Iterable[bytes]) -> MissingExtra:
    """The error about a module that executors lack; ``answers`` are those of :func:`describing_task`, if it ran."""
    described = [json.loads(answer) for answer in answers]
    without = sorted({str(found) for has, found in described if not has})
    which = without or sorted({str(found) for _, found in described})
    more = f" and {len(which) - _MOST_SHOWN} more" if len(which) > _MOST_SHOWN else ""
    where = f": {', '.join(which[:_MOST_SHOWN])}{more}" if which else ""
    return MissingExtra(
        f"The Python of Spark's executors lacks the module {printable(module)!r}, and nothing of the job was "
        f"committed{where}. Install it there, or let PYSPARK_PYTHON name a Python that has it; see {_PAGE}."
    )
