"""A job queue: any number of services append jobs, one worker at a time takes them, in order, and acknowledges them.

Run it with ``python examples/job_queue.py [folder]``; it needs no extra. A worker that dies leaves its jobs to the
next one; one that only seemed dead is fenced.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

import strandline as sl


def work(job: bytes | None) -> int:
    """The job itself. It may be done twice if a worker dies before it has acknowledged: make it idempotent."""
    return len(json.loads(job or b"{}")["text"])


def main(folder: Path) -> None:
    # 1. A batch is deleted when every slot has passed it: the log is a queue.
    url = f"file://{folder}/jobs"
    with sl.open(url, create=True, retention="consumed") as log, log.producer() as producer:
        for number in range(6):
            jobs = [json.dumps({"id": number * 10 + each, "text": "x" * each}).encode() for each in range(10)]
            producer.produce(jobs, metadata=b"from the shop")
            producer.flush()  # a batch for each, to have several

    # 2. The first worker does three batches, and dies before it has acknowledged the third.
    first = sl.Consumer(url, slot="workers")
    taken = list(islice(first, 3))
    for batch in taken:
        print(f"first worker: {len(batch.values)} jobs, {sum(map(work, batch.values))} letters")
    first.ack_through(taken[1].sequence)  # durable when it returns

    # 3. The next one gets the third batch again, and all others.
    with sl.Consumer(url, slot="workers") as second:
        for batch in second:
            print(f"second worker: {len(batch.values)} jobs, {sum(map(work, batch.values))} letters")
            second.ack(batch.sequence)  # durable every hundred, and when it is closed
        second.flush()
        print(f"left: {len(second)} batches")

        # 4. The first one was only slow. It cannot acknowledge any more what the second one has done.
        try:
            first.ack_through(taken[2].sequence)
        except sl.errors.Fenced:
            print("first worker: fenced")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="strandline-jobs-")))
