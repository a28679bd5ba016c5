"""Costs stay flat: appending and planning with 100,000 entries listed beside logs with few."""

from __future__ import annotations

import os
from statistics import fmean, median
from uuid import UUID

import strandline as sl
from benchmarks.harness import Result, in_turns, scratch
from strandline.formats.object.head import HeadCodec, encode_chunk
from strandline.log.object import ObjectLog
from strandline.log.object.head.edits import BatchListing, apply_spills, list_batches, plan_spills
from strandline.log.object.head.index import chunk_path
from strandline.model.head import WriterId
from strandline.model.records import record_batch
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.objects.local import LocalStore

_FEW = 10
_MANY = 100_000
_APPENDS = 400


def filled(folder: str, entries: int) -> ObjectLog:
    """A log that lists so many batches, as real appends would have; the batches themselves are not there."""
    log = sl.open(folder, create=True)
    store = LocalStore(folder)
    writer = WriterId(UUID(int=1))
    head = log.head()
    for number in range(entries):
        listing = BatchListing(f"batches/{0:016d}/{number:032x}.batch", 0, 100, 12_000, 1, 2, writer, number, 0)
        spills = plan_spills(head)
        for spill in spills:
            path = os.path.join(folder, chunk_path(spill.reference, spill.level))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(encode_chunk(spill.items, spill.level))
        head = apply_spills(list_batches(head, [listing], number), spills)
    final = head
    StoreCell(store, "head", HeadCodec()).update(OpId(UUID(int=2)), lambda _: final)
    return sl.open(folder)


def _append_cost(folder: str) -> Result:
    """The mean, spills included: one large log, and many small ones that get ten appends each."""
    row = record_batch(timestamps=[1], ops=[0], keys=[b"k"], values=[b"v" * 100])
    small = [filled(f"{folder}/small-{number}", _FEW) for number in range(_APPENDS // _FEW)]
    large = filled(f"{folder}/large", _MANY)
    writer = WriterId(UUID(int=2))
    times: list[list[float]] = [[], []]
    for number in range(_APPENDS):
        turn = in_turns(
            [
                lambda number=number: small[number // _FEW].append(row, writer=writer, number=number % _FEW).result(),
                lambda number=number: large.append(row, writer=writer, number=number).result(),
            ],
            1,
        )
        for side in (0, 1):
            times[side] += turn[side]
    beside = f"{_FEW} to {2 * _FEW} entries, local disk, mean {fmean(times[0]) * 1e3:.2f} ms"
    return Result("append_100k_entries", fmean(times[1]) / fmean(times[0]), "ratio", "<= 1.3", beside)


def _plan_last(log: ObjectLog) -> None:
    end = log.end()
    if len(log.plan(end.at(end.next - 100 * 100))) != 100:
        raise AssertionError("the plan does not hold the last hundred entries")


def _plan_costs(folder: str) -> list[Result]:
    large, small = filled(f"{folder}/plan-large", _MANY), filled(f"{folder}/plan-small", 100)
    for log in (large, small):
        _plan_last(log)
    warm = in_turns([lambda: _plan_last(large), lambda: _plan_last(small)], 300)
    cold = in_turns([lambda: _plan_last(sl.open(large.url)), lambda: _plan_last(sl.open(small.url))], 100)
    beside = f"100 entries in all, {median(warm[1]) * 1e3:.2f} ms"
    return [
        Result("plan_last_100_of_100k", median(warm[0]) / median(warm[1]), "ratio", "<= 2", beside),
        Result(
            "open_and_plan_last_100_of_100k", median(cold[0]) / median(cold[1]), "ratio", "", "the same, from nothing"
        ),
    ]


def run() -> list[Result]:
    with scratch() as folder:
        return [_append_cost(folder), *_plan_costs(folder)]
