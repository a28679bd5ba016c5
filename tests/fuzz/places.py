"""Whole logs, folds and snapshots, of which one file was forged: whoever opens, reads, verifies or goes on hears of it.

What is forged is sealed again as its format does it, also where another file vouches for it by a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pyarrow as pa

import strandline as sl
from strandline.bulk.verifying import verify as verify_log
from strandline.compat.v1.log import open_queue
from strandline.errors import StrandlineError
from strandline.followers.stores.append_log import AppendLogStore
from strandline.log.object.log import open_log
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.verify import verify
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.records import record_batch, with_offsets
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import SeededChance
from strandline.testing.plain import PlainStore
from strandline.tier.opening import attach, tiered, tiering
from tests.formats.forging import reseal_batch, reseal_head, some_records
from tests.fuzz.formats import sealed_checked, sealed_frames
from tests.fuzz.mutation import Reseal, damage, in_place, json_damage, times, unchanged
from tests.fuzz.targets import Target, Try

_WRITER = WriterId(UUID(int=9))
_SOON = 20.0
_HERE = b"/@HERE@"
"""Stands for the folder in which a place is, in files that say so."""
_CHUNKED = 100
"""So many batches are listed that the head refers to a chunk."""


# --- making them -----------------------------------------------------------------------------------------------


def _make_object_log(folder: Path) -> None:
    store = PlainStore()  # a disk that syncs would take most of the time
    log = open_log(store, create=True, env=Env(chance=SeededChance(1)))
    with log.producer(linger=60) as producer:
        for number in range(_CHUNKED):
            producer.append(key=b"k%d" % number, value=b"v" * number)
            producer.flush(_SOON)
        producer.append_batch(pa.Table.from_batches([some_records(40), some_records(3)]))
    log.slots.create("billing", 3)
    _keep(store, folder)


def _keep(store: PlainStore, folder: Path) -> None:
    """The objects of a store as files, as a local store has them."""
    for info in store.list(""):
        (folder / info.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / info.path).write_bytes(store.get(info.path).data)


def _make_wal(folder: Path) -> None:
    with WalLog.open(str(folder), roll_bytes=2000, env=Env(chance=SeededChance(1))) as log:
        for number in range(12):
            log.append(some_records(number + 1), writer=_WRITER, number=number).result(_SOON)
        log.slots.create("billing", 3)


def _make_fold(folder: Path) -> None:
    log_id = UUID(int=7)
    with contextlib.closing(AppendLogStore.open(str(folder), env=Env(chance=SeededChance(1)))) as store:
        first = 0
        for count in (3, 1, 5):
            records = record_batch(
                timestamps=[1] * count,
                ops=[0] * count,
                keys=[b"k%d" % number for number in range(count)],
                values=[b"v"] * count,
            )
            store.apply(
                pa.Table.from_batches(with_offsets([records], first)),
                since=Cursor(log_id, first),
                upto=Cursor(log_id, first + count),
            )
            first += count


def _make_snapshot(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        _make_fold(Path(other) / "fold")
        with contextlib.closing(AppendLogStore.open(f"{other}/fold")) as store:
            store.export_to(str(folder))


def _make_tiered_log(folder: Path) -> None:
    """An object log with segments, one of which holds what the log itself has forgotten."""
    log = open_log(str(folder), create=True, retention="consumed", env=Env(chance=SeededChance(1)))
    with log.producer(linger=60) as producer:
        for number in range(12):
            producer.append(key=b"k%d" % number, value=b"v" * 50 * number)
            producer.flush(_SOON)
        attach(log, partitions=1)
        with tiering(log, target=1500, env=Env(chance=SeededChance(2))) as tierer:
            tierer.run_once(everything=True)
        log.trim()
        producer.append(value=b"hot")
    log.slots.create("billing", 3, retained_from=0)


def _make_node(folder: Path) -> None:
    with sl.node.Primary.open(folder, name="a") as primary:
        primary.append_values([b"one", b"two"])
        primary.register_replica("b")


def _make_queue(folder: Path) -> None:
    store = PlainStore()
    queue = open_queue(store, env=Env(chance=SeededChance(1)))
    with queue.producer(linger=60) as producer:
        for number in range(5):
            producer.produce([b"v" * number, b"w"], metadata=b"m")
            producer.flush(_SOON)
    _keep(store, folder)


def _look(batch: pa.RecordBatch) -> None:
    for column in batch.columns:
        (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()


# --- using them ------------------------------------------------------------------------------------------------


def _use_object_log(folder: Path) -> None:
    log = open_log(f"file://{folder}")
    log.bounds()
    for batch in log.read():
        _look(batch)
    log.slots.list()
    with log.producer() as producer:
        producer.append(value=b"more").result(_SOON)
    log.plan(log.start())


def _verify_object_log(folder: Path) -> None:
    for _ in verify_log(open_log(f"file://{folder}")).findings:
        pass


def _use_wal(folder: Path) -> None:
    with WalLog.open(str(folder), create=False) as log:
        log.bounds()
        for batch in log.read():
            _look(batch)
        log.slots.list()
        log.append(some_records(2), writer=_WRITER, number=12).result(_SOON)


def _read_wal(folder: Path) -> None:
    with sl.log.WalReader(str(folder)) as reader:
        for batch in reader.read():
            _look(batch)


def _verify_wal(folder: Path) -> None:
    verify(str(folder), env=SYSTEM)


def _use_tiered_log(folder: Path) -> None:
    with contextlib.closing(tiered(open_log(str(folder)))) as log:  # type: ignore[type-var]
        for batch in log.read():
            _look(batch)


def _tier(folder: Path) -> None:
    with tiering(open_log(str(folder))) as tierer:
        tierer.run_once(everything=True)


def _use_node(folder: Path) -> None:
    with sl.node.Primary.open(folder, name="a", create=False, timeout=5.0) as primary:
        primary.append_values([b"three"])


def _use_fold(folder: Path) -> None:
    with contextlib.closing(AppendLogStore.open(str(folder))) as store:
        store.position()
        list(store.range())


def _use_snapshot(folder: Path) -> None:
    with contextlib.closing(AppendLogStore.import_from(str(folder), f"{folder}.imported")) as store:
        list(store.range())


def _use_queue(folder: Path) -> None:
    queue = open_queue(f"file://{folder}")
    queue.bounds()
    for batch in queue.read():
        _look(batch)


# --- forging ---------------------------------------------------------------------------------------------------


def _reseal_of(name: str) -> Reseal:
    suffix = Path(name).suffix
    if name in ("head", "mark") or suffix in (".chunk", ".cut"):
        return reseal_head
    if suffix == ".batch":
        return reseal_batch
    if suffix == ".log":
        return sealed_frames
    return sealed_checked if name in ("slots.json", "cold.json") else unchanged


def _vouch(folder: Path, name: str) -> None:
    """Let a snapshot's manifest vouch for the file as it is now."""
    manifest = folder / "MANIFEST.json"
    if not name.startswith("data/") or not manifest.exists():
        return
    fields = json.loads(manifest.read_bytes())
    data = (folder / name).read_bytes()
    for row in fields["files"]:
        if f"data/{row['path']}" == name:
            row |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(fields))


def _at(home: Path, name: str, content: bytes) -> bytes:
    """A file as it is in this folder: some say where they are."""
    if _HERE not in content:
        return content
    return _reseal_of(name)(content.replace(_HERE, str(home).encode()))


class Place:
    """A folder that is made once, and for each case copied, forged and used."""

    def __init__(self, name: str, make: Callable[[Path], None], *uses: Callable[[Path], None]) -> None:
        self.name = name
        self._make = make
        self._uses = uses
        self._files: dict[str, bytes] | None = None

    @property
    def files(self) -> dict[str, bytes]:
        if self._files is None:
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder) / "home"
                self._make(home)
                found = sorted(
                    path for path in home.rglob("*") if path.is_file() and path.name not in ("lock", "node.lock")
                )
                self._files = {
                    str(path.relative_to(home)): path.read_bytes().replace(str(home).encode(), _HERE) for path in found
                }
        return self._files

    def forged(self, chance: random.Random) -> bytes:
        """A case: how it is used, the name of a file, and what is in it now."""
        kinds: dict[str, list[str]] = {}
        for name in self.files:
            if name.startswith("cold/events/") and name.endswith(".batch"):
                continue  # its name is another one each time that it is made, and a case has to be the same
            kinds.setdefault(Path(name).suffix or name, []).append(name)
        name = chance.choice(kinds[chance.choice(sorted(kinds))])
        data = bytearray(self.files[name])
        is_json = name.endswith(".json") and data.startswith(b"{")
        if is_json and chance.random() < 0.7:
            data = bytearray(json_damage(bytes(data), chance))
        else:
            for _ in range(times(chance)):
                if data and chance.random() < 0.5:
                    in_place(data, chance)
                else:
                    damage(data, chance, bytes(data), is_text=is_json)
        made = _reseal_of(name)(bytes(data)) if chance.random() < 0.95 else bytes(data)
        return b"\0".join((b"%d" % chance.randrange(len(self._uses)), name.encode(), made))

    def lay(self, home: Path, case: bytes) -> int:
        """Put everything into a folder, forged as a case says; returns how it is to be used."""
        use, name, data = case.split(b"\0", 2) if case.count(b"\0") > 1 else (b"0", b"", b"")
        for path, content in self.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_bytes(_at(home, path, content))
        if name.decode(errors="replace") in self.files:
            (home / name.decode()).write_bytes(_at(home, name.decode(), data))
            _vouch(home, name.decode())
        return int(use) % len(self._uses) if use.isdigit() else 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[Try]:
        with tempfile.TemporaryDirectory() as root:
            count = 0
            self.files  # noqa: B018 - made before memory is bounded, and time counts

            def attempt(case: bytes) -> str:
                nonlocal count
                count += 1
                home = Path(root) / f"{count}"
                use = self.lay(home, case)
                try:
                    self._uses[use](home)
                except StrandlineError as error:
                    return type(error).__name__
                finally:
                    shutil.rmtree(home)
                    shutil.rmtree(f"{home}.imported", ignore_errors=True)
                return "fine"

            yield attempt

    def target(self) -> Target:
        return Target(self.name, self.forged, self.opened, seconds=60.0)


PLACES = (
    Place("object-log", _make_object_log, _use_object_log, _verify_object_log),
    Place("wal-folder", _make_wal, _use_wal, _read_wal, _verify_wal),
    Place("fold", _make_fold, _use_fold),
    Place("snapshot", _make_snapshot, _use_snapshot),
    Place("queue", _make_queue, _use_queue),
    Place("tiered-log", _make_tiered_log, _use_tiered_log, _tier),
    Place("node-folder", _make_node, _use_node),
)
TARGETS = tuple(place.target() for place in PLACES)
