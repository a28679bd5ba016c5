"""The path of a read through a primary: the frames of this package between the caller and the log that answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from strandline.model.cursor import Limit
from strandline.node.api import Primary, Replica

WAIT = 120.0
_ANSWERS = ("WalLog.", "WalReading.", "_again_if_trimmed.", "WalSpan.fetch")
"""The log that answers, and the records that it planned: with the first frame there the path ends."""
_GUARDS = ("strandline.storage.fork_check", "strandline.model.arguments")
"""Around a public call: those of the log itself are not counted, and those of the primary are."""


class _Depth:
    """The most frames of this package between a caller and the log."""

    def __init__(self) -> None:
        self.most = 0
        self.asked = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_qualname.startswith(_ANSWERS):
            return
        before = frame.f_back
        while before is not None and _module(before) in _GUARDS:
            before = before.f_back
        passed = 0
        while before is not None and _module(before).startswith("strandline."):
            if before.f_code.co_qualname.startswith(_ANSWERS):
                return  # the log asks itself
            passed += 1
            before = before.f_back
        if before is not None and _module(before) == __name__:
            self.asked += 1
            self.most = max(self.most, passed)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@pytest.fixture(params=["local", "quorum(a,b)"])
def primary(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Primary]:
    """A primary with committed records."""
    with (
        Primary.open(tmp_path / "a", name="a", policy=request.param, poll_seconds=0.2) as primary,
        Replica.open(tmp_path / "b", primary.url, name="b", poll_seconds=0.2) as replica,
    ):
        assert replica.wait_until(lambda: replica.condition == "following", WAIT)
        primary.append_values([b"1", b"2"], timeout=WAIT).ensure()
        yield primary


@pytest.mark.parametrize("read", [
    lambda primary: primary.bounds(),
    lambda primary: primary.start(),
    lambda primary: primary.end(),
    lambda primary: primary.log_id,
    lambda primary: primary.cursor_at(1),
    lambda primary: primary.append_at(1),
    lambda primary: primary.position_of("now"),
    lambda primary: primary.plan(primary.start()),
    lambda primary: primary.plan(primary.start(), Limit(batches=1)),
    lambda primary: list(primary.read()),
    lambda primary: list(primary.read("beginning", upto=1, columns=["value"])),
])  # fmt: skip
def test_a_read_through_a_primary_passes_at_most_four_frames(primary: Primary, read: Callable[[Primary], Any]) -> None:
    read(primary)
    depth, before = _Depth(), sys.getprofile()
    sys.setprofile(depth)
    try:
        read(primary)
    finally:
        sys.setprofile(before)
    assert depth.asked
    assert depth.most <= 4
