"""A ledger on three nodes: each transfer is on two disks before it is confirmed, and the loss of a node loses none.

Run it with ``python examples/replicated_ledger.py [folder]``, in a new folder; it needs the extra ``server``.
The nodes are in one process here; on three machines each is ``strandline node run``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import strandline as sl

SECONDS = 60.0


def transfer(ledger: sl.node.Primary, source: str, target: str, amount: int) -> None:
    """Record a transfer; returns when it is on a quorum of disks, and raises if that is not known."""
    entry = json.dumps({"from": source, "to": target, "amount": amount}).encode()
    ledger.append_values([entry], timeout=SECONDS).ensure()


def balances(log: sl.Log) -> dict[str, int]:
    """What every account has, by the whole ledger."""
    total: Counter[str] = Counter()
    for batch in log.read():
        for entry in map(json.loads, batch.column("value").to_pylist()):
            total[entry["from"]] -= entry["amount"]
            total[entry["to"]] += entry["amount"]
    return dict(sorted(total.items()))


def main(folder: Path) -> None:
    # 1. Three nodes, which find each other by a lease: one small object in a bucket, here in a folder.
    shared: dict[str, Any] = {"lease": f"file://{folder}/lease", "policy": "quorum(a,b,c)"}
    a = sl.node.Primary.open(f"{folder}/a", name="a", **shared)
    b = sl.node.Replica.open(f"{folder}/b", name="b", nodes={"a": a.url}, **shared)
    c = sl.node.Replica.open(f"{folder}/c", name="c", nodes={"a": a.url, "b": b.url}, **shared)
    for replica in (b, c):
        replica.reading(max_staleness=SECONDS, timeout=SECONDS)  # it has bootstrapped, and follows

    # 2. Transfers, each confirmed by two of three disks.
    for number in range(20):
        transfer(a, "bank", f"customer-{number % 3}", 10 + number)
    before = balances(a.reading())
    print(f"a leads: {before}")

    # 3. The primary is lost. Another node takes over; alone, it would refuse, as confirmed transfers might be missing.
    a.close()
    primary = c.promote()
    after = balances(primary.reading())
    print(f"c leads in term {primary.topology().term}: nothing is lost: {after == before}")

    # 4. The ledger goes on, with the two nodes that are left.
    transfer(primary, "customer-0", "customer-1", 5)
    total = balances(primary.reading())
    print(f"customer-1 has {total['customer-1']}, and all accounts add up to {sum(total.values())}")
    b.close()
    primary.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="strandline-ledger-")))
