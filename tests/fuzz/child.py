"""Tries cases in a process of its own, with bounded memory and time: what it breaks is only itself.

Tells in lines of JSON which case begins, what came of each target, and what was found.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.fuzz.targets import Target, Try, case

_SMALLER_TRIES = 400
_SMALLER_SECONDS = 10.0


def tell(**what: Any) -> None:
    """One line, at once."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _used() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def _bounded(target: Target) -> Iterator[Try]:
    """The target, opened, in a process that may not take much more than it has."""
    with target.open() as attempt:
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_used() + target.memory, before[1]))
        try:
            yield attempt
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def run(target: Target, first: int, *, cases: int | None, seconds: float) -> bool:
    """Try ``cases`` cases from a seed on, or until the time is over; returns whether all passed."""
    seen: Counter[str] = Counter()
    until = time.monotonic() + seconds
    seed = first
    tell(target=target.name, seed=None)
    with _bounded(target) as attempt:
        while (cases is None or seed < first + cases) and time.monotonic() < until:
            tell(target=target.name, seed=seed)
            data = case(target, seed)
            found = _tried(target, attempt, data)
            if isinstance(found, BaseException):
                _tell_find(target, attempt, seed, data, found)
                return False
            seen[found] += 1
            seed += 1
    tell(target=target.name, cases=seed - first, outcomes=dict(seen), peak=_peak())
    return True


def try_input(target: Target, data: bytes) -> bool:
    """Try one input that was kept."""
    with _bounded(target) as attempt:
        tell(target=target.name, seed=None)
        found = _tried(target, attempt, data)
        if isinstance(found, BaseException):
            _tell_find(target, attempt, None, data, found, smaller=False)
            return False
    tell(target=target.name, cases=1, outcomes={found: 1}, peak=_peak())
    return True


def _tried(target: Target, attempt: Try, data: bytes) -> str | BaseException:
    # A hang may be in Arrow, where no signal reaches Python: this ends the process from another thread.
    faulthandler.dump_traceback_later(target.seconds, exit=True)
    try:
        return attempt(data)
    except BaseException as error:  # noqa: BLE001 - every one of them is a find
        return error
    finally:
        faulthandler.cancel_dump_traceback_later()


def _tell_find(
    target: Target, attempt: Try, seed: int | None, data: bytes, found: BaseException, *, smaller: bool = True
) -> None:
    trace = "".join(traceback.format_exception(found))[-3000:]
    small = _smaller(target, attempt, data, found) if smaller else data
    tell(
        target=target.name, seed=seed, find=f"{type(found).__name__}: {str(found)[:300]}", trace=trace, data=small.hex()
    )


def _smaller(target: Target, attempt: Try, data: bytes, found: BaseException) -> bytes:
    """The smallest input that was met with the same error: pieces are left out as long as that stays."""
    kind, until, tries = _kind(found), time.monotonic() + _SMALLER_SECONDS, _SMALLER_TRIES
    piece = len(data) // 2
    while piece and tries > 0 and time.monotonic() < until:
        at = 0
        while at < len(data) and tries > 0 and time.monotonic() < until:
            tries -= 1
            fewer = data[:at] + data[at + piece :]
            again = _tried(target, attempt, fewer)
            if isinstance(again, BaseException) and _kind(again) == kind:
                data = fewer
            else:
                at += piece
        piece //= 2
    return data


def _kind(error: BaseException) -> tuple[str, object]:
    frames = traceback.extract_tb(error.__traceback__)
    return type(error).__name__, (frames[-1].filename, frames[-1].lineno) if frames else None


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
