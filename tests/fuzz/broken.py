"""Targets that are broken on purpose: the fuzzer must find each of them. They are in no group."""

from __future__ import annotations

import ctypes
import random
from contextlib import AbstractContextManager, nullcontext

from tests.fuzz.targets import Target, Try

TRIGGER = b"!"


def _broken(name: str, attempt: Try) -> Target:
    def make(chance: random.Random) -> bytes:
        return chance.randbytes(8) + (TRIGGER if chance.random() < 0.2 else b"") + chance.randbytes(8)

    def on_trigger(data: bytes) -> str:
        return attempt(data) if TRIGGER in data else "fine"

    def opened() -> AbstractContextManager[Try]:
        return nullcontext(on_trigger)

    return Target(name, make, opened, seconds=2.0, memory=256 << 20)


def _raise(data: bytes) -> str:
    raise OverflowError(f"{len(data)} bytes")


def _crash(_: bytes) -> str:
    return str(ctypes.string_at(0))


def _hang(_: bytes) -> str:
    while True:
        pass


def _devour(_: bytes) -> str:
    return str(len(bytearray(1 << 30)))


TARGETS = (
    _broken("broken-raises", _raise),
    _broken("broken-crashes", _crash),
    _broken("broken-hangs", _hang),
    _broken("broken-devours", _devour),
    _broken("broken-not", lambda _: "fine"),
)
