"""Every public call with hostile arguments: refused in one sentence that names the argument, or accepted as documented.

Calls are found by inspection, so that a new one is tried as soon as it is public. What is written down here is how one
gets an instance of each public class, and what a valid argument of each annotation looks like: a public class, or an
annotation, that is not in these tables fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from pyiceberg.catalog.memory import InMemoryCatalog

import strandline as sl
from strandline import bulk, compat, followers, kv, node, snapshots, tier, values
from strandline import log as logs
from strandline.compat.v1.log import open_queue
from strandline.errors import InvalidInput, StrandlineError
from strandline.followers.run import follow
from strandline.kv.memory import MemoryKeyValueSubscription
from strandline.log.object.log import open_log
from strandline.log.object.slots import Hold, ObjectSlot
from strandline.log.topic.logs import LogTopic
from strandline.log.topic.memory import MemoryTopic, MemoryTopicSubscription
from strandline.log.topic.subscription import LogTopicSubscription
from strandline.model.arguments import LONGEST, kind_of, shown
from strandline.node.members.rules import RemoveNode
from strandline.spark.options import _KNOWN, parse_options
from strandline.storage.clock import CHANCE, CLOCK
from strandline.storage.disk import DISK
from strandline.storage.objects.urls import open_store
from strandline.storage.task_pool import ThreadPool

LONG = "\x1b[31m\n" * 1000
HOSTILE: list[Any] = [
    None, True, "", "x", "\ud800", -1, 0, 1.5, 2**63, 2**64, -(2**200), math.nan, math.inf, -math.inf,
    b"", b"\0", [], [None], {}, {"a": None}, (), object(), LONG, LONG[:12], lambda *_: None, int,
]  # fmt: skip
IN_CONTAINERS: list[Any] = [[None], {"a": None}, ()]
ARROW = {"pa.Array", "pa.Array | pa.ChunkedArray", "Columns"}
"""Values of codecs. These, protocols and what is in containers are left to the type checker."""
SECONDS_LIMIT = 60
"""So long may all calls of one class take together; a hang is noticed then."""

ROOMS = (sl, compat, kv, logs, logs.topic, node, snapshots, tier)
PUBLIC = {name: getattr(room, name) for room in ROOMS for name in room.__all__}
PUBLIC |= {made.__name__: made for made in (followers.AppendLogStore, followers.MemoryStore, followers.RocksStore)}
PUBLIC |= {made.__name__: made for made in (values.Json, values.MessagePack, values.Avro, values.Protobuf)}
PUBLIC |= {made.__name__: made for made in (values.Arrow, values.Raw, bulk.move_table, bulk.translate_cursor)}
GIVEN = {"Receipt", "Bounds", "Snapshot", "Update", "Op", "WriterId", "Message", "SegmentState", "PartitionDeleteState"}
"""Public names of what the package gives, which nobody makes."""

SERVERS = {
    "Primary",
    "Replica",
    "RunningNode",
    "NatsKeyValue",
    "RemoteLog",
    "MetadataManager",
    "Tierer",
    "Supervisor",
    "KafkaTopic",
    "PostgresSink",
}
"""What talks to servers or starts threads: tried only with what is refused before anything of that happens."""

CHECKS_ITSELF = {
    "AppendLogStore.get",
    "Limit.allows",
    "MemoryStore.get",
    "Prefix",
    "Producer.append",
    "Producer.produce",
    "PartitionDelete",
    "SegmentId",
    "SegmentMetadata",
    "SegmentUpdate",
    "TopicPartition",
    "RocksStore.get",
    "WriteAheadLog.append_many",
    "Tierer(log)",
    "attach(log)",
    "tiered(log)",
    "tiering(log)",
}
"""What refuses by sentences of its own: it is called for each record, or says more than a signature can."""

PASSED_ON = {"ingest(source_options)", "ingest(target_options)"}
"""Arguments of another call: Python itself refuses a name that is none of them."""


class Place:
    """A log with two records, and whatever else arguments can be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.log = sl.open("memory://" + uuid.uuid4().hex, create=True)
        with self.log.producer() as producer:
            producer.produce([b"1", b"2"]).result(30)
        self.cursor = self.log.start()
        self.table = pa.table({"key": [b"k"], "value": [b"v"]})

    def fresh(self) -> Path:
        self.number += 1
        return self.folder / str(self.number)

    def instance(self, name: str) -> Any:
        """An instance of a public class; one that was never opened, of what talks to servers."""
        if name in SERVERS:
            return object.__new__(PUBLIC[name])
        return instances(self)[name]()


def instances(place: Place) -> dict[str, Callable[[], Any]]:
    """How one gets an instance of each public class."""
    return {
        "AppendLogStore": lambda: sl.followers.AppendLogStore.open(place.fresh()),
        "Artifacts": lambda: snapshots.Artifacts(f"memory://{uuid.uuid4().hex}"),
        "Batching": sl.followers.Batching,
        "ClientSecurity": node.ClientSecurity,
        "Consumer": lambda: sl.Consumer(place.log, trim_every=None),
        "Cursor": lambda: place.cursor,
        "DeltaSink": lambda: sl.DeltaSink(place.fresh()),
        "Exports": sl.followers.Exports,
        "FlowLimits": node.FlowLimits,
        "IcebergSink": lambda: sl.IcebergSink(catalog(place), "shop.orders"),
        "Json": lambda: sl.values.Json(pa.schema({"id": pa.int64()})),
        "Arrow": sl.values.Arrow,
        "BeforeAfter": lambda: sl.values.BeforeAfter(sl.values.Json(pa.schema({"id": pa.int64()}))),
        "Debezium": lambda: sl.values.Debezium(sl.values.Json(pa.schema({"id": pa.int64()}))),
        "Avro": lambda: sl.values.Avro(pa.schema({"id": pa.int64()})),
        "MessagePack": lambda: sl.values.MessagePack(pa.schema({"id": pa.int64()})),
        "Protobuf": lambda: sl.values.Protobuf(Timestamp),
        "Raw": sl.values.Raw,
        "Hold": lambda: place.log.hold(0, 60),
        "Limit": logs.Limit,
        "LogKeyValue": lambda: kv.LogKeyValue(place.log),
        "MemoryKeyValue": kv.MemoryKeyValue,
        "MemoryLog": logs.MemoryLog,
        "MemoryStore": sl.followers.MemoryStore,
        "MemoryTopic": lambda: logs.topic.MemoryTopic(1),
        "MemoryTopicSubscription": lambda: logs.topic.MemoryTopic(1).subscribe()[0],
        "LogTopic": lambda: logs.topic.open_wal_topic(place.fresh(), 1),
        "LogTopicSubscription": lambda: logs.topic.open_wal_topic(place.fresh(), 1).subscribe()[0],
        "MemoryKeyValueSubscription": lambda: kv.MemoryKeyValue().watch(),
        "NodeConfig": lambda: node.NodeConfig(folder=str(place.fresh()), name="a", lead=True),
        "ObjectLog": lambda: place.log,
        "ObjectSlot": lambda: claimed(place.log),
        "Prefix": lambda: kv.EVERYTHING,
        "Producer": place.log.producer,
        "QueueLog": lambda: sl.open(f"memory://{uuid.uuid4().hex}", format="queue-v1"),
        "SegmentId": lambda: segment_id(place),
        "SegmentMetadata": lambda: segment(place),
        "TopicPartition": lambda: segment_id(place).partition,
        "RocksStore": lambda: sl.followers.RocksStore.open(place.fresh()),
        "SqliteSink": lambda: sl.SqliteSink(place.fresh(), table="a"),
        "ServerSecurity": node.ServerSecurity,
        "TieredLog": lambda: with_cold_tier(place),
        "WalReader": lambda: logs.WalReader(written(place).log.folder),
        "WriteAheadLog": lambda: written(place),
    }


FUNCTIONS = {"follow": follow, "open of a log": open_log, "open of a queue": open_queue}
"""Functions that are not found under their own names: a room is called the same, or another takes their settings."""
FURTHER: dict[str, type] = {
    "Hold": Hold,
    "ObjectSlot": ObjectSlot,
    "MemoryKeyValueSubscription": MemoryKeyValueSubscription,
    "MemoryTopicSubscription": MemoryTopicSubscription,
    "LogTopic": LogTopic,
    "LogTopicSubscription": LogTopicSubscription,
}
"""What public calls give, and is called in turn."""


def catalog(place: Place) -> InMemoryCatalog:
    return InMemoryCatalog("door", warehouse=f"file://{place.fresh()}")


def segment_id(place: Place) -> tier.SegmentId:
    return tier.SegmentId(tier.TopicPartition("a", place.log.log_id, 0), uuid.UUID(int=1))


def segment(place: Place) -> tier.SegmentMetadata:
    return tier.SegmentMetadata(
        segment=segment_id(place), start=0, end=9, terms=((0, 0),), size=1,
        broker=0, max_timestamp=0, event_timestamp=0,
    )  # fmt: skip


def claimed(log: Any) -> Any:
    if "door" not in {state.name for state in log.slots.list()}:
        log.slots.create("door", 0)
    return log.slots.claim("door", "me")


def with_cold_tier(place: Place) -> Any:
    with contextlib.suppress(StrandlineError):
        tier.attach(place.log, f"memory://{uuid.uuid4().hex}")
    return tier.tiered(place.log)


def written(place: Place) -> Any:
    wal = compat.WriteAheadLog.open(place.fresh(), background=False)
    wal.append(b"1")
    return wal


def stopped() -> threading.Event:
    stop = threading.Event()
    stop.set()
    return stop


def examples(place: Place) -> dict[str, Callable[[], Any]]:
    """What can be given where a parameter is annotated so."""
    return {
        "Address": lambda: str(place.fresh()),
        "Cursor": lambda: place.cursor,
        "Change": lambda: RemoveNode("a"),
        "Disk": lambda: DISK,
        "Clock": lambda: CLOCK,
        "Chance": lambda: CHANCE,
        "Key": lambda: b"k",
        "Limit": logs.Limit,
        "Annotated": lambda: place.log,
        "Any": lambda: place.log,
        "Log": lambda: place.log,
        "LogReading": lambda: place.log,
        "IngestedLog": lambda: place.log,
        "TargetLog": lambda: place.log,
        "ObjectStore": lambda: open_store("memory://"),
        "Prefix": lambda: kv.EVERYTHING,
        "RecordSource": lambda: place.table,
        "Scope": lambda: kv.EVERYTHING,
        "Sink": sl.followers.MemoryStore,
        "Start": lambda: "retained",
        "Store": sl.followers.MemoryStore,
        "TaskPool": lambda: ThreadPool(1),
        "UUID": lambda: place.log.log_id,
        "Watcher": kv.MemoryKeyValue,
        "WriterId": uuid.uuid4,
        "bool": lambda: False,
        "bytes": lambda: b"v",
        "int": lambda: 0,
        "Natural": lambda: 0,
        "Positive": lambda: 1,
        "Signed": lambda: 0,
        "BatchSequence": lambda: 0,
        "Timeout": lambda: 0.0,
        "Duration": lambda: 1.0,
        "HoldSeconds": lambda: 1.0,
        "float": lambda: 0.0,
        "str": lambda: "a",
        "Named": lambda: "a",
        "Secret": lambda: "dbname=a",
        "Prose": lambda: "a",
        "AddressText": lambda: str(place.fresh()),
        "Callable": lambda: lambda *_: None,
        "Mapping": dict,
        "Sequence": list,
        "Iterable": list,
        "tuple": lambda: ("127.0.0.1", 0),
        "tuple[tuple[int, int], ...]": lambda: ((0, 0),),
        "pa.Table": lambda: place.table,
        "Tierable": lambda: place.log,
        "H": lambda: place.log,
        "ConsumerSource": lambda: place.log,
        "StoreKind": lambda: sl.followers.AppendLogStore,
        "Artifacts": lambda: snapshots.Artifacts("memory://"),
        "Descriptor": lambda: sl.Consumer(place.log, slot="seen", trim_every=None).next_descriptors(1)[0],
        "pa.Array": lambda: pa.array([b"k"]),
        "KeyVersion": lambda: 0,
        "NodeConfig": lambda: node.NodeConfig(folder=str(place.fresh()), name="a", lead=True),
        "MetadataManager": lambda: object.__new__(tier.MetadataManager),
        "RunningNode": lambda: object.__new__(node.RunningNode),
        "Topic": lambda: MemoryTopic(1),
        "TopicPartition": lambda: segment_id(place).partition,
        "SegmentId": lambda: segment_id(place),
        "SegmentState": lambda: tier.SegmentState.COPY_FINISHED,
        "PartitionDeleteState": lambda: tier.PartitionDeleteState.MARKED,
        "StopEvent": stopped,
        "threading.Event": stopped,
    }


NEVER_SEEN = object()
ENDS = {"stop", "upto"}
"""Arguments that let a call end which would go on for ever: given unless they are what is tried."""
BLOCKS = {*ENDS, "timeout", "pause"}
"""Arguments by which a call may last: tried only with what is refused."""


def valid(parameter: inspect.Parameter, place: Place) -> Any:
    known = examples(place)
    for part in re.split(r" \| (?![^\[]*\])", str(parameter.annotation)):
        if (make := known.get(part) or known.get(part.partition("[")[0])) is not None:
            return make()
    return NEVER_SEEN


def admits(annotation: str, value: Any) -> bool:  # noqa: PLR0911 - one answer for each kind of value
    """Whether a signature says that such a value may be given, going by its text alone."""
    words = re.findall(r"[A-Za-z_.]+", annotation)
    names = {*words, *(word.rpartition(".")[2] for word in words)}
    texts = {
        "str",
        "Address",
        "AddressText",
        "ConsumerSource",
        "Start",
        "Named",
        "Prose",
        "Secret",
        "Key",
        "Resume",
        "Literal",
    }
    times = {"float", "Timeout", "Duration", "HoldSeconds"}
    numbers = {*times, "int", "Natural", "Start", "Positive", "Signed", "BatchSequence", "KeyVersion"}
    if names & {"Any", "object"} and "Mapping" not in names and "Callable" not in names:
        return True
    match value:
        case None:
            return "None" in names or "Resume" in names
        case bool():
            return "bool" in names
        case str():
            is_text = bool(names & texts) and "Literal" not in names and value != "\ud800"
            return is_text and (len(value) <= 4096 or bool(names & {"Prose", "Key"}))
        case int() | float():
            is_whole = isinstance(value, int) or bool(names & times)
            least = -LONGEST if names & {"Signed", "BatchSequence", "Timeout", "KeyVersion"} else 0
            most = 2**64 - 1 if "LARGEST_FINGERPRINT" in names else 2**63 - 1 if isinstance(value, int) else LONGEST
            return bool(names & numbers) and is_whole and least <= value <= most
        case bytes():
            return bool(names & {"bytes", "Key"})
        case list():
            return bool(names & {"Sequence", "Iterable", "list"}) and (value == [] or "str" not in names)
        case dict():
            return "Iterable" in names or ("Mapping" in names and (value == {} or "Any" in names))
        case tuple():
            return bool(names & {"Sequence", "Iterable"})
        case type():
            return bool(names & {"Callable", "OnProgress", "type"})
    return callable(value) and bool(names & {"Callable", "OnProgress"})


def doors() -> Iterator[tuple[str, str, str]]:
    """Every public call: the class that it belongs to (or itself), its name, and its method's name (or "")."""
    for name, thing in PUBLIC.items():
        if inspect.isfunction(thing):
            yield name, name, ""
        elif inspect.isclass(thing) and name not in GIVEN and not getattr(thing, "_is_protocol", False):
            yield from methods(name, thing)
    for name in FUNCTIONS:
        yield name, name, ""
    for name, thing in FURTHER.items():
        yield from methods(name, thing)


def methods(name: str, thing: type) -> Iterator[tuple[str, str, str]]:
    if name in PUBLIC and not (inspect.getdoc(thing.__init__) or "").startswith("Use :"):
        yield name, name, "__init__"
    for method in dir(thing):
        found = inspect.getattr_static(thing, method)
        if not method.startswith("_") and inspect.isfunction(getattr(found, "__func__", found)):
            yield name, f"{name}.{method}", method


DOORS: dict[str, list[tuple[str, str]]] = {}
for _owner, _call, _method in doors():
    DOORS.setdefault(_owner, []).append((_call, _method))


def how_to_call(owner: str, call: str, method: str, place: Place) -> Callable[..., Any]:
    if not method:
        return FUNCTIONS.get(call) or PUBLIC[call]
    kind = FURTHER.get(owner) or PUBLIC[owner]
    if method == "__init__":
        return kind
    found = inspect.getattr_static(kind, method)
    return getattr(kind if isinstance(found, classmethod | staticmethod) else place.instance(owner), method)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [without_option(one) for one in inspect.signature(function).parameters.values() if one.kind in named]


def without_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter without the description that the type of a node's setting has for the command line."""
    described = re.fullmatch(r"(?:typing\.)?Annotated\[(.*?), Option\(.*", str(parameter.annotation), re.DOTALL)
    return parameter if described is None else parameter.replace(annotation=described[1])


def annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the annotations of a call."""
    return inspect.unwrap(function.__init__ if isinstance(function, type) else getattr(function, "__func__", function))


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> BaseException | None:
    try:
        given = function(**arguments)
        if inspect.iscoroutine(given):
            asyncio.run(asyncio.wait_for(given, 0.01))
        elif isinstance(given, Iterator):
            next(given, None)
        elif hasattr(given, "close") and not isinstance(given, logs.ObjectLog):
            given.close()
    except BaseException as error:  # noqa: BLE001 - which one it is, is the question
        return error
    return None


def fault(  # noqa: PLR0911 - one answer for each case
    call: str, parameter: inspect.Parameter, value: Any, error: BaseException | None, *, is_checked: bool
) -> str | None:
    """What is wrong with how a call took an argument; None if nothing is. The others are left to the type checker."""
    what = f"{call}({parameter.name}={shown(value)})"
    if not is_checked:
        return None
    checks_itself = bool({call, f"{call}({parameter.name})"} & CHECKS_ITSELF)
    if checks_itself and isinstance(error, TypeError) and "is not iterable" in str(error):
        return None
    if f"{call}({parameter.name})" in PASSED_ON and isinstance(error, TypeError):
        return None if "unexpected keyword argument" in str(error) else f"{what}: {error}"
    if admits(str(parameter.annotation), value):
        if error is None or isinstance(error, TimeoutError):
            return None
        if not isinstance(error, StrandlineError):
            return f"{what}: {type(error).__name__}: {str(error)[:120]!r}"
    elif error is None:
        return None if checks_itself else f"{what} was accepted, and is no {parameter.annotation}"
    elif not isinstance(error, InvalidInput) or (not checks_itself and f"{parameter.name} is " not in str(error)):
        return f"{what}: {type(error).__name__}: {str(error)[:200]!r}"
    sentence = str(error)
    if not sentence.isprintable() or not sentence.endswith(".") or len(sentence) > 600:
        return f"{what} is refused by what is no sentence: {sentence[:200]!r} ({len(sentence)} characters)"
    return None


def try_all(owner: str, place: Place, found: list[str]) -> None:
    try:
        for call, method in DOORS[owner]:
            found += tried(owner, call, method, place)
    except BaseException as error:  # noqa: BLE001 - this is a thread's end
        found.append(f"{owner}: {error!r}")


def tried(owner: str, call: str, method: str, place: Place) -> Iterator[str]:
    function = how_to_call(owner, call, method, place)
    parameters = parameters_of(function)
    for parameter in parameters:
        hint = inspect.get_annotations(annotated(function), eval_str=True).get(parameter.name)
        is_known = kind_of(hint) is not None and parameter.annotation not in ARROW
        for value in HOSTILE:
            is_checked = is_known and value not in IN_CONTAINERS
            may_begin = not is_checked or admits(str(parameter.annotation), value)
            if may_begin and (owner in SERVERS or parameter.name in BLOCKS):
                continue
            arguments = {
                other.name: valid(other, place)
                for other in parameters
                if (other.default is other.empty or other.name in ENDS) and other is not parameter
            }
            if missing := [name for name, given in arguments.items() if given is NEVER_SEEN]:
                yield (f"{call}: say in examples() what {missing} can be")
                continue
            error = outcome(function, arguments | {parameter.name: value})
            if trouble := fault(call, parameter, value, error, is_checked=is_checked):
                yield trouble


@pytest.mark.parametrize("owner", DOORS)
def test_a_hostile_argument_is_refused_at_the_door_or_accepted_as_documented(
    owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path)
    found: list[str] = []
    worker = threading.Thread(target=try_all, args=(owner, place, found), daemon=True)
    worker.start()
    worker.join(SECONDS_LIMIT)
    assert not worker.is_alive(), f"a call of {owner} hangs"
    assert not found, "\n".join(found)
    assert [value for batch in place.log.read() for value in batch["value"].to_pylist()][:2] == [b"1", b"2"]


@pytest.mark.parametrize("option", _KNOWN)
def test_an_option_of_the_data_source_is_refused_in_one_sentence_or_meant(option: str) -> None:
    for value in ("", "x", "-1", "1e9", "nan", "inf", str(2**63), "9" * 5000, "\ud800", LONG):
        error = outcome(lambda: parse_options({"path": "file:///orders", option: value}), {})  # noqa: B023 - called at once
        assert error is None or isinstance(error, InvalidInput)
        is_text = option in ("keyPrefix", "keyPrefixHex", "slot")
        is_known = (option == "path" and len(value) < 100) or (option, value) == ("logFormat", "")
        assert error is not None or is_text or is_known
        assert str(error).isprintable()
        assert len(str(error)) < 600


@pytest.mark.parametrize("timeout", ["x", math.nan, math.inf, True], ids=repr)
def test_the_time_to_wait_for_a_handle_is_checked_before_it_is_waited(timeout: Any, tmp_path: Path) -> None:
    producer = sl.open("memory://" + uuid.uuid4().hex, create=True).producer(linger=60)
    with producer, pytest.raises(InvalidInput, match="timeout is a number of seconds"):
        producer.append(value=b"1").result(timeout)
    with compat.WriteAheadLog.open(tmp_path / "log") as wal, pytest.raises(InvalidInput, match="timeout is a number"):
        wal.submit(b"1").result(timeout)


def test_possible_secrets_are_not_repeated() -> None:
    for call in (
        lambda: node.ClientSecurity(token="hidden\ud800"),
        lambda: sl.open("s3://key:hidden@bucket/\ud800"),
        lambda: sl.open("memory://x", options={"aws_secret_access_key": "hidden\nkey"}),
    ):
        with pytest.raises(InvalidInput) as refused:
            call()
        assert "hidden" not in str(refused.value)
