"""A program that starts watchers to be killed: ``python -m tests.follow.watchers`` forks one for each line it reads.

It imports everything once and uses nothing, so that a watcher is there in milliseconds. Each line is JSON: the kind of
key-value store, its address, the store's folder and the prefixes to watch. The answer is the new process's number. A
watcher adds a line to its notes whenever its cursor has moved: the cursor, and a digest of all that its store holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import strandline as sl
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.watch.api import watch_applied
from strandline.kv.log import LogKeyValue
from strandline.kv.nats.bucket import NatsKeyValue
from strandline.model.keyed import Prefix


def digest(pairs: Iterable[tuple[bytes, bytes]]) -> str:
    """One short text for a whole state."""
    hashed = hashlib.sha256()
    for key, value in pairs:
        hashed.update(b"%d:%s%d:%s" % (len(key), key, len(value), value))
    return hashed.hexdigest()


def open_kv(kind: str, address: str) -> Any:
    if kind == "log":
        return LogKeyValue(sl.open(address))
    url, _, name = address.rpartition("/")
    return NatsKeyValue.connect(url, name)


def watch(job: dict[str, Any]) -> None:
    """Watch until killed."""
    kv = open_kv(job["kind"], job["address"])
    store = AppendLogStore.open(job["store"], sync=False, compact_after=2_000)
    with open(job["notes"], "a", buffering=1) as notes:

        def note(cursor: sl.Cursor) -> None:
            notes.write(f"{cursor.next} {digest(store.range())}\n")

        position = store.position()
        if position.cursor is not None and position.resync is None:
            note(position.cursor)
        watch_applied(kv, ignore, scope=Prefix(*job["scope"]), reader=kv, store=store, on_applied=note)


def ignore(batch: object) -> None:
    """The store is what is looked at."""


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the killed
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                watch(json.loads(line))
            finally:
                os._exit(1)  # a watcher of these ends only by being killed
        print(child, flush=True)


if __name__ == "__main__":
    main()
