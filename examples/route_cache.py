"""A service that keeps routes in memory, in step with a log, and takes only what it missed when it is restarted.

Run it with ``python examples/route_cache.py [folder]``; it needs no extra. Kill it at any moment and run it again in
the same folder: it continues where its store is.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import strandline as sl

SECONDS = 60.0


class RouteCache(contextlib.AbstractContextManager["RouteCache"]):
    """Addresses by name. Reads are those of a dictionary; a thread keeps it in step while the cache is open."""

    def __init__(self, routes: sl.kv.LogKeyValue, folder: Path) -> None:
        """Load what the last run had applied, then follow from there."""
        self.store = sl.followers.AppendLogStore.open(str(folder))  # applied routes and the cursor, in one atomic write
        self.addresses = {key.decode(): value.decode() for key, value in self.store.range(b"route.")}
        self.loaded = len(self.addresses)
        self.watch = sl.Supervisor(routes, self.apply, scope=sl.kv.Prefix("route."), reader=routes, store=self.store)

    def __enter__(self) -> Self:
        """Begin to follow."""
        self.watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop following; what was applied is stored."""
        self.watch.close()
        self.store.close()

    def wait_for(self, cursor: sl.Cursor) -> None:
        """Block until everything below a cursor is applied."""
        self.watch.wait_until(lambda state: state.cursor == cursor, timeout=SECONDS)

    def apply(self, updates: Sequence[sl.kv.Update]) -> None:
        """Called by the watch with each batch, in order; the cursor moves when this has returned."""
        for update in updates:
            if update.op is sl.Op.PUT:
                self.addresses[update.key.decode()] = (update.value or b"").decode()
            else:
                self.addresses.pop(update.key.decode(), None)


def main(folder: Path) -> None:
    log = sl.open(f"file://{folder}/routes", create=True)
    routes = sl.kv.LogKeyValue(log)
    for day in (1, 2):
        # An operator changes routes, from any machine. The service does not run.
        for number in range(100):
            routes.put(f"route.{number}", f"10.0.{day}.{number}".encode())
        routes.delete("route.7")

        with RouteCache(routes, folder / "cache") as cache:
            cache.wait_for(log.end())
            print(f"Day {day}: {len(cache.addresses)} routes; {cache.loaded} were there from the last run.")
            print(f"  route.42 is {cache.addresses['route.42']}, route.7 is {cache.addresses.get('route.7', 'gone')}")

            routes.put("route.7", b"10.9.9.7")  # while it runs: the cache has it a moment later
            cache.wait_for(log.end())
            print(f"  route.7 is {cache.addresses['route.7']}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="strandline-routes-")))
