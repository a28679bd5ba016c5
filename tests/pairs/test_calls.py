"""What a kind of log cannot do is ``Unsupported``, with the reason: no public call is an ``AttributeError``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.compat.v1.log import QueueLog
from strandline.errors import StrandlineError, Unsupported, UnsupportedCall
from strandline.log.contract import Log
from strandline.log.lacking import OPTIONAL_CALLS
from strandline.log.memory import MemoryLog
from strandline.log.object.log import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.head import WriterId
from strandline.tier.read.tiered_log import TieredLog
from tests.pairs.kinds import KINDS, RECORDS, Opened

CLASSES = (ObjectLog, WalLog, WalReader, TieredLog, sl.node.Primary, sl.node.Replica, sl.node.RemoteLog, QueueLog)
INTERNAL = {
    *("add_value", "ahead", "append_copy", "check_value", "failed", "newest", "term", "view", "wait_past"),  # of a WAL
    *("trimmer", "manifest", "new_cell"),  # of a queue of version 1
    *("copies", "hot", "pieces", "unchecked_cold_tier"),  # of a log with a cold tier
    *("head", "name", "open", "security", "url"),
}
"""Public names that only the package itself uses, and constructors."""

WRITER = WriterId(UUID(int=7))
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "append": ((pa.table({"value": [b"more"]}),), {"writer": WRITER, "number": 0}),
    "append_at": ((RECORDS - 1,), {}),
    "append_batch": ((pa.table({"value": [b"more"]}),), {}),
    "append_value": ((b"more",), {}),
    "append_values": (([b"more"],), {}),
    "bytes_behind": ((0,), {}),
    "commit_watermark": ((1,), {}),
    "cursor_at": ((RECORDS,), {}),
    "end_of_term": ((0,), {}),
    "enforce": ((sl.log.SlotLimits(),), {}),
    "evolve_value": ((sl.values.Json(pa.schema({"id": pa.int64()})),), {}),
    "hold": ((RECORDS, 1.0), {}),
    "last_append": ((WRITER,), {}),
    "last_number": ((WRITER,), {}),
    "plan_resume": (("another", None), {}),
    "position_of": (("now",), {}),
    "register_replica": (("another",), {}),
    "set_retention": (("forever",), {}),
    "submit": ((pa.table({"value": [b"more"]}),), {}),
    "term_at": ((0,), {}),
    "unregister": (("another",), {}),
    "unregister_replica": (("another",), {}),
}
NOT_CALLED = {"plan", "wait", "trim", "promote", "add_node", "remove_node", "set_policy", "change_members"}
"""They need a cursor of the log, wait for other nodes, or their arguments differ between kinds: others test them."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_public_call_is_known_to_every_kind_of_log() -> None:
    found = set().union(*map(public, CLASSES)) - INTERNAL
    assert found == public(Log) | {"close"} | set(OPTIONAL_CALLS)


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


@pytest.mark.parametrize("name", sorted(public(Log) | set(OPTIONAL_CALLS)))
def test_a_call_works_or_is_refused_with_a_reason(opened: Opened, name: str) -> None:
    given, options = ARGUMENTS.get(name, ((), {}))
    try:
        found = getattr(opened.log, name)
        if callable(found) and name not in NOT_CALLED:
            found = found(*given, **options)
        if isinstance(found, sl.Producer):
            found.close()
    except UnsupportedCall as error:
        reason = str(error)
    except StrandlineError:
        reason = OPTIONAL_CALLS.get(name, "")  # of its own
    else:
        return
    assert reason.endswith(OPTIONAL_CALLS.get(name, ""))


def test_a_log_is_closed_by_a_block(opened: Opened) -> None:
    if type(opened.log).__name__ != "CommittedLog":  # the log for readers ends with its node
        with opened.log:
            pass


def test_an_unknown_name_is_an_attribute_error(opened: Opened) -> None:
    with pytest.raises(AttributeError) as raised:
        _ = opened.log.no_such_name
    assert not isinstance(raised.value, StrandlineError)


def test_a_property_that_fails_is_not_taken_for_a_missing_one() -> None:
    class Failing(MemoryLog):
        @property
        def value(self) -> Any:
            return self.no_such_name

    with pytest.raises(AttributeError, match="no_such_name") as raised:
        _ = Failing().value
    assert not isinstance(raised.value, Unsupported)
