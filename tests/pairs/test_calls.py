"""What a kind of log cannot do raises at that log: its own ``Unsupported`` with the reason, or Python's error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import StrandlineError, Unsupported
from strandline.log.contract import Log
from strandline.log.memory import MemoryLog
from strandline.log.read.value_format import named_codec
from strandline.model.head import WriterId
from tests.pairs.log_kinds import KINDS, RECORDS, Opened

WRITER = WriterId(UUID(int=7))
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "append": ((pa.table({"value": [b"more"]}),), {"writer": WRITER, "number": 0}),
    "cursor_at": ((RECORDS,), {}),
    "ended": ((RECORDS,), {}),
    "position_of": (("now",), {}),
}
NOT_CALLED = {"plan", "wait"}
"""They need a cursor of the log, or wait: others test them."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.fixture(scope="module", params=[*KINDS, "memory", "readers"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "memory":
            yield Opened(MemoryLog(), "", folder).fill()
        elif request.param == "readers":
            leads = KINDS["primary"].make(folder, stack)
            yield Opened(leads.log.reading(), leads.url, folder)
        else:
            yield KINDS[request.param].make(folder, stack)


@pytest.mark.parametrize("name", sorted(public(Log)))
def test_a_call_of_the_contract_works_or_is_refused(opened: Opened, name: str) -> None:
    given, options = ARGUMENTS.get(name, ((), {}))
    try:
        found = getattr(opened.log, name)
        if callable(found) and name not in NOT_CALLED:
            found = found(*given, **options)
        if isinstance(found, sl.Producer):
            found.close()
    except StrandlineError:
        assert name in {"append", "producer", "seal", "slots"}


def test_the_value_format_is_known_or_refused_with_the_reason(opened: Opened) -> None:
    if hasattr(opened.log, "value"):
        assert named_codec(opened.log) is None
    else:
        with pytest.raises(Unsupported, match=r"Give the codec to producers, sinks and readers\.$"):
            named_codec(opened.log)


def test_a_log_is_closed_by_a_block(opened: Opened) -> None:
    if type(opened.log).__name__ != "CommittedLog":  # the log for readers ends with its node
        with opened.log:
            pass


def test_an_unknown_name_is_an_attribute_error(opened: Opened) -> None:
    with pytest.raises(AttributeError) as raised:
        _ = opened.log.no_such_name
    assert not isinstance(raised.value, StrandlineError)
