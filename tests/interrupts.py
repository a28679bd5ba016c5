"""For tests with signals: interrupt a piece of work at each place where Python would run a signal's handler."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

_CHECKED = frozenset(
    dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD") if name in dis.opmap
)
"""Behind these instructions Python looks whether a signal came."""


class Interrupted(BaseException):
    """What the handler of the signal raises."""


class _Tracer:
    """For Python 3.11. Raises once, at the place with a number; counts the places in modules whose names begin so."""

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

    def start(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self)

    def stop(self) -> None:
        sys.settrace(self._before)


class _Monitor:
    """The same for Python 3.12 and newer, where a trace function does not see each instruction."""

    def __init__(self, place: int, within: str | tuple[str, ...]) -> None:
        self.left = place
        self._within = within
        self._thread = threading.get_ident()
        self._events = sys.monitoring.events.INSTRUCTION

    def start(self) -> None:
        sys.monitoring.use_tool_id(_TOOL, "interrupts")
        sys.monitoring.register_callback(_TOOL, self._events, self._at_instruction)
        sys.monitoring.set_events(_TOOL, self._events)

    def stop(self) -> None:
        sys.monitoring.set_events(_TOOL, 0)
        sys.monitoring.register_callback(_TOOL, self._events, None)
        sys.monitoring.free_tool_id(_TOOL)

    def _at_instruction(self, code: CodeType, offset: int) -> None:
        if threading.get_ident() != self._thread or offset not in _places(code) or self.left < 0:
            return
        if sys._getframe(1).f_globals.get("__name__", "").startswith(self._within):
            self.left -= 1
            if self.left < 0:
                raise Interrupted


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions behind those at which Python looks whether a signal came."""
    rows = list(dis.get_instructions(code))
    behind = {after.offset for row, after in itertools.pairwise(rows) if row.opcode in _CHECKED}
    return frozenset(behind | {row.argval for row in rows if row.opname == "JUMP_BACKWARD"})


_TOOL = 4
"""The number of a tool that is neither a debugger nor a profiler."""


@contextlib.contextmanager
def interrupted_by_a_signal(seconds: float = 0.2) -> Iterator[None]:
    """Interrupt the block by a signal after ``seconds``, and swallow what it raises."""

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
        tracer = _Tracer(place, within) if sys.version_info < (3, 12) else _Monitor(place, within)
        tracer.start()
        try:
            work()
        except Interrupted:
            pass
        finally:
            tracer.stop()
        if tracer.left >= 0:  # below zero also if it was raised in a __del__, which raises nothing
            return
        yield place
