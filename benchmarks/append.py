"""Appending: whole batches beside a raw durable put, and single records from one thread and from four."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median

import obstore
from obstore.store import LocalStore as RawStore

import strandline as sl
from benchmarks.harness import Result, in_turns, ratio_of_medians, scratch
from strandline.model.records import record_batch


def _table(size: int) -> object:
    rows = size // 113
    return record_batch(
        timestamps=range(rows),
        ops=bytes(rows),
        keys=[b"%012d" % row for row in range(rows)],
        values=[os.urandom(80)] * rows,
    )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def batches() -> list[Result]:
    results = []
    for mebibytes in (8, 32):
        table = _table(mebibytes << 20)
        with scratch() as folder:
            log = sl.open(f"{folder}/log", create=True)
            raw, payload, number = (
                RawStore(f"{folder}/raw", mkdir=True),
                os.urandom(mebibytes << 20),
                iter(range(10**9)),
            )

            def put(raw=raw, payload=payload, number=number, folder=folder) -> None:
                name = f"{next(number)}.bin"
                obstore.put(raw, name, payload)
                _fsync(Path(folder, "raw", name))
                _fsync(Path(folder, "raw"))

            with log.producer(compression="none") as producer:

                def append(producer=producer, table=table) -> None:
                    handle = producer.append_batch(table)
                    producer.flush()
                    handle.result()

                in_turns([append, put], 2)
                ours, theirs = in_turns([append, put], 15)
        results.append(
            Result(
                f"append_batch_{mebibytes}MiB",
                1 / ratio_of_medians(ours, theirs),
                "ratio",
                ">= 0.6",
                f"obstore put + fsync file and folder at {mebibytes / median(theirs):,.0f} MiB/s",
            )
        )
    return results


def _singles(threads: int, records: int) -> float:
    """Appended, durable and listed records per second."""
    key, value = b"12345678", b"v" * 92
    with scratch() as folder:
        log = sl.open(folder, create=True)
        with log.producer() as producer:

            def work() -> None:
                append = producer.append
                for _ in range(records // threads):
                    append(key=key, value=value)

            workers = [threading.Thread(target=work) for _ in range(threads)]
            began = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            producer.flush()
            return records / (time.perf_counter() - began)


def _locked_lists(records: int) -> float:
    """A yardstick for the machine: appending key and value to two lists under a lock, and nothing else, per second."""
    lock, keys, values = threading.Lock(), [], []
    key, value = b"12345678", b"v" * 92
    began = time.perf_counter()
    for _ in range(records):
        with lock:
            keys.append(key)
            values.append(value)
    return records / (time.perf_counter() - began)


def singles() -> list[Result]:
    one, four, bare = [], [], []
    for _ in range(5):
        bare.append(_locked_lists(500_000))
        one.append(_singles(1, 500_000))
        four.append(_singles(4, 500_000))
    yardstick = f"two lists under a lock, in memory, at {median(bare):,.0f}/s"
    return [
        Result("append_single_1_thread", median(one), "records/s", ">= 500000", f"100 bytes, durable; {yardstick}"),
        Result("append_single_1_thread_best", max(one), "records/s", "", "the best of five"),
        Result("append_single_4_threads", median(four) / median(one), "ratio", ">= 0.8", "one thread"),
    ]
