"""What all commands share: their common options, and how they end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import TracebackType
from typing import Annotated, Any, Final, ParamSpec, Self, TypeVar

import typer

import strandline as sl
from strandline.cli import show
from strandline.model.errors import NotALog, StrandlineError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The log: a folder, file://, s3://, gs:// or az://.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable output only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """End the command as a command should: an error is one sentence and status 1, Ctrl-C is quiet and status 130.

    With ``--debug`` an error keeps its traceback. A reader that closed our standard output (``| head``) is no error.
    """

    @wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> R:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes standard output once more at exit, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except (StrandlineError, OSError) as error:
            if _debug(options):
                raise
            show.error(error)
            raise typer.Exit(1) from None

    return run


class Interruption:
    """Ctrl-C for work that must be finished in order.

    The first one only ends what :meth:`items` gives: it breaks into the getting of an item, and never into what is
    done with one. A second one is an interrupt like any other.
    """

    def __init__(self) -> None:
        """Not asked yet."""
        self.asked = False
        self._getting = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def items(self, source: Iterable[T]) -> Iterator[T]:
        """The items of a source, until it ends or Ctrl-C is pressed."""
        iterator = iter(source)
        while not self.asked:
            try:
                self._getting = True
                item = next(iterator)
                self._getting = False
            except (StopIteration, KeyboardInterrupt):
                self._getting = False
                return
            yield item

    def _ask(self, *_: object) -> None:
        again, self.asked = self.asked, True
        if self._getting or again:
            self._getting = False
            raise KeyboardInterrupt


def open_log(url: str, *, create: bool = False, hint: str = "check the address") -> sl.ObjectLog:
    """The log at an address; if there is none, a sentence that speaks of options rather than of Python."""
    try:
        return sl.open(url, create=create)
    except NotALog as error:
        raise NotALog(f"There is no log at {url}: {hint}.") from error


def _debug(options: dict[str, Any]) -> bool:
    return bool(options.get("debug"))
