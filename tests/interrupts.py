"""For tests with signals: interrupt a piece of work at each place where Python would run a signal's handler."""

from __future__ import annotations

import contextlib
import dis
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_CHECKED = frozenset(
    dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD") if name in dis.opmap
)
"""Behind these instructions Python looks whether a signal came."""


class Interrupted(BaseException):
    """What the handler of the signal raises."""


class _Tracer:
    """Raises once, at the place with a number; counts the places in modules whose names begin so."""

    def __init__(self, place: int, within: str | tuple[str, ...]) -> None:
        self.left = place
        self._within = within
        self._last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(self._within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            before = self._last.get(frame)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if before in _CHECKED:
                self.left -= 1
                if self.left < 0:
                    sys.settrace(None)
                    self._last.clear()
                    raise Interrupted
        elif event == "return":
            self._last.pop(frame, None)
        return self._in_frame


@contextlib.contextmanager
def interrupted_by_a_signal(seconds: float = 0.2) -> Iterator[None]:
    """A block that blocks, and that a signal interrupts after so many seconds: what it raises ends here."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
        raise AssertionError("it did not block")
    except Interrupted:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interruptions(work: Callable[[], object], *, within: str | tuple[str, ...] = "strandline.") -> Iterator[int]:
    """Do the work again and again, interrupted at the first place, at the second, …; the last time it is not.

    ``within`` is what the names of the modules begin with that are interrupted.

    The body of the loop runs after each time, and puts right what the next one needs.
    """
    for place in itertools.count():
        tracer, before = _Tracer(place, within), sys.gettrace()
        sys.settrace(tracer)
        try:
            work()
        except Interrupted:
            pass
        else:
            return
        finally:
            sys.settrace(before)
        yield place
