"""A program that starts watchers to be killed: ``python -m tests.followers.watch.watchers`` forks one for each line.

It imports everything once and uses nothing, so that a watcher is there in milliseconds. Each line is JSON: the kind of
key-value store, its address, the store's folder and the prefixes to watch; without prefixes it follows the log instead.
The answer is the new process's number. A watcher adds a line to its notes whenever its cursor has moved: the cursor,
and a digest of all that its store holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pyarrow as pa

import strandline as sl
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.watch.api import watch_applied
from strandline.kv.log import LogKeyValue
from strandline.kv.nats.bucket import NatsKeyValue
from strandline.model.keyed import Prefix

PATIENCE = 120.0


def digest(pairs: Iterable[tuple[bytes, bytes]]) -> str:
    """A short hash of a whole state."""
    hashed = hashlib.sha256()
    for key, value in pairs:
        hashed.update(b"%d:%s%d:%s" % (len(key), key, len(value), value))
    return hashed.hexdigest()


def open_log(job: dict[str, Any]) -> Any:
    """The log: an object log, another process's write-ahead log, a node's, or a replica's in this process."""
    match job["kind"]:
        case "wal":
            return sl.log.WalReader(job["address"])
        case "node":
            return sl.node.RemoteLog(job["address"])
        case "replica":
            replica = sl.node.Replica.open(f"{job['store']}-node", job["address"], timeout=5.0, poll_seconds=0.1)
            return replica.reading(max_staleness=PATIENCE, timeout=PATIENCE)
    return sl.open(job["address"])


def open_kv(job: dict[str, Any]) -> Any:
    if job["kind"] != "nats":
        return LogKeyValue(open_log(job))
    url, _, name = job["address"].rpartition("/")
    return NatsKeyValue.connect(url, name)


@dataclass
class Noted:
    """A store that reports its cursor after each batch."""

    store: AppendLogStore
    note: Callable[[sl.Cursor], None]

    def cursor(self, log_id: UUID) -> sl.Cursor | None:
        return self.store.cursor(log_id)

    def apply(self, records: pa.Table, *, since: sl.Cursor, upto: sl.Cursor) -> None:
        self.store.apply(records, since=since, upto=upto)
        self.note(upto)


def watch(job: dict[str, Any]) -> None:
    """Watch or follow until killed."""
    store = AppendLogStore.open(job["store"], sync=False, compact_after=2_000)
    with open(job["notes"], "a", buffering=1) as notes:

        def note(cursor: sl.Cursor) -> None:
            notes.write(f"{cursor.next} {digest(store.range())}\n")

        position = store.position()
        if position.cursor is not None and position.resync is None:
            note(position.cursor)
        if not job["scope"]:
            sl.follow(open_log(job), Noted(store, note))
        kv = open_kv(job)
        watch_applied(kv, ignore, scope=Prefix(*job["scope"]), reader=kv, store=store, on_applied=note)


def ignore(batch: object) -> None:
    """Do nothing: the tests read the store."""


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the killed
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                watch(json.loads(line))
            except BaseException:  # noqa: BLE001 - told, before it ends
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)  # a watcher of these ends only by being killed
        print(child, flush=True)


if __name__ == "__main__":
    main()
