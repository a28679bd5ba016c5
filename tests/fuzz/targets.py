"""What is fuzzed: a target makes hostile bytes out of chance, and tries them on something real."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from strandline.errors import CorruptData, UnsupportedVersion

Try = Callable[[bytes], str]
"""Tries an input, and says what came of it in a word. Whatever it raises is a find."""


@dataclass(frozen=True)
class Target:
    """One thing that takes what others wrote.

    A case is bytes, so that any of them can be kept, made smaller and tried again.
    """

    name: str
    make: Callable[[random.Random], bytes]
    open: Callable[[], AbstractContextManager[Try]]
    """What has to run or to exist meanwhile; gives what tries a case."""
    seconds: float = 20.0
    """A case that takes longer hangs."""
    memory: int = 1536 << 20
    """So much more than at the beginning may be taken."""


def case(target: Target, seed: int) -> bytes:
    """The input that a seed makes."""
    return target.make(random.Random(f"{target.name}/{seed}"))


def decoding(decode: Callable[[bytes], object]) -> Callable[[], AbstractContextManager[Try]]:
    """A decoder gives a value, or says that the bytes are damaged or of another version."""

    def attempt(data: bytes) -> str:
        try:
            decode(data)
        except (CorruptData, UnsupportedVersion) as error:
            return type(error).__name__
        return "fine"

    return lambda: nullcontext(attempt)
