"""Staged appends: many processes write batch objects, and one lists all of them in one conditional write.

For appends that are larger than one process, such as a Spark job. A staged object is outside the folders of the log's
generations, so that a trim in between does not make it stale. The process that commits copies it there, which
the store does by itself, and lists the copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar
from uuid import UUID

import pyarrow as pa

from strandline.errors import Contended, InvalidInput, NotFound, OutcomeUnknown, OutOfOrder
from strandline.formats.arrow.block import Compression
from strandline.log.object.head.edits import BatchListing, Group, StaleUpload
from strandline.log.object.head.index import MissingChunk, StoredChunks, entries_from
from strandline.log.object.upload import RESOLVES, Lister, ObjectDraft
from strandline.log.writers.source import advancing, is_of_run, is_source, member_of
from strandline.model.head import Head, Receipt, SourceProof, WriterId, proven
from strandline.model.records import MAX_BATCH_RECORDS
from strandline.storage.env import SYSTEM, Env
from strandline.storage.metrics import count_written
from strandline.storage.objects.store import ObjectStore, copy_object
from strandline.storage.task_pool import side_by_side

FOLDER: Final = "staged/"
"""Folder of staged objects; each job has its own in it."""

KEPT_SECONDS: Final = 86400
"""How long a staged object is kept if its job neither commits nor discards it."""

BATCH_BYTES: Final = 64 << 20
"""Size of a staged batch in memory, before compression."""

MOST_BATCHES: Final = 1 << 16
"""How many batches one commit can list: all of them are in the head for a moment."""

R = TypeVar("R")

_UPLOADS: Final = 2
_COPIES: Final = 16


@dataclass(frozen=True, slots=True)
class StagedAppend:
    """One append of many processes to an object log. Picklable; ``write`` anywhere, ``commit`` in one place.

    Either all records of a commit are in the log, in the order of the given batches, or none. A commit that is
    repeated, from any process and with any batches, changes nothing, as long as the log remembers ``writer``: if that
    is the id of a source (see :mod:`strandline.log.writers.source`), the position of its last commit is kept for good;
    any other id is for one commit, and forgotten after several hundred other writers.
    """

    store: ObjectStore
    log_id: UUID
    writer: WriterId
    job: str
    """Name of this attempt, unique; its folder."""
    compression: Compression = Compression.LZ4
    run: str = ""
    """Identifies the run that repeats a failed commit, for :meth:`listed_by_this_run`: runs may share a writer."""
    env: Env = SYSTEM

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[BatchListing]:
        """Store records in the stored schema as batch objects that nothing lists yet; durable when it returns."""
        member = member_of(self.writer, self.env.chance.uuid().int, self.run)
        pending: deque[Future[BatchListing]] = deque()
        stored: list[BatchListing] = []
        with ThreadPoolExecutor(_UPLOADS, "strandline-stage") as pool:
            for number, draft in enumerate(self._drafts(batches)):
                pending.append(pool.submit(self._put, draft, member, number))
                del draft
                while len(pending) > _UPLOADS:  # back-pressure: two uploads, and the batch being built
                    stored.append(pending.popleft().result())
            stored.extend(upload.result() for upload in pending)
        return stored

    def _drafts(self, batches: Iterable[pa.RecordBatch]) -> Iterator[ObjectDraft]:
        draft = ObjectDraft(compression=self.compression)
        for batch in batches:
            too_long = draft.count + batch.num_rows > MAX_BATCH_RECORDS
            if draft.count and (too_long or draft.plain + batch.nbytes > BATCH_BYTES):
                yield draft
                draft = ObjectDraft(compression=self.compression)
            if batch.num_rows:
                draft.add([batch])
        if draft.count:
            yield draft

    def _put(self, draft: ObjectDraft, member: WriterId, number: int) -> BatchListing:
        sealed = draft.sealed(member, number)
        location = f"{FOLDER}{self.job}/{self.env.chance.uuid().hex}.batch"
        self.store.put(location, sealed.parts)
        count_written(sealed.listing.count, sealed.listing.size)
        return replace(sealed.listing, location=location)

    def stage_numbered(self, records: pa.Table, number: int, upto: int) -> BatchListing:
        """Store records as one batch that nothing lists yet: those of the source's positions from ``number`` on."""
        draft = ObjectDraft(compression=self.compression)
        draft.add(records.combine_chunks().to_batches())
        return self._put(draft, advancing(self.writer, upto - number), number)

    def commit_numbered(self, batches: Sequence[BatchListing], *, upto: int, proof: SourceProof | None = None) -> int:
        """List such batches, which follow each other up to position ``upto``; returns how many records it has listed.

        Those that the log has already are left out; ``OutOfOrder`` if it has the source up to a position at which none
        of them begins. ``proof`` is that of the source at ``upto``, or at a later position.
        """
        if not batches:
            return 0
        batches = [*batches[:-1], replace(batches[-1], writer=proven(batches[-1].writer, proof))]
        lister = Lister(self.store, self.log_id, env=self.env)
        since = lister.cell.read().value.next_offset
        tried: list[BatchListing] = []

        def done(head: Head) -> int | None:
            last = head.writers.get(self.writer)
            return None if last is None or last.number < upto else self._count_listed(head, since, tried)

        def enlist(copies: list[BatchListing], _: Head) -> int:
            tried.extend(copies)
            return lister.enlist_all(copies)

        return self._listed(lister, batches, done, enlist)

    def _listed(
        self,
        lister: Lister,
        batches: Sequence[BatchListing],
        done: Callable[[Head], R | None],
        enlist: Callable[[list[BatchListing], Head], R | None],
    ) -> R:
        """Copy the batches to where a head lists them, and list them, until either result is known."""
        if len(batches) > MOST_BATCHES:
            raise InvalidInput(
                f"One commit lists at most {MOST_BATCHES:,} batches, and this has {len(batches):,}: write in several "
                "jobs, or with fewer and larger partitions."
            )
        for attempt in range(1, RESOLVES + 1):
            head = lister.cell.read().value
            if (result := done(head)) is not None:
                return result
            copies = self._copied(batches, head.generation)
            try:
                if (result := enlist(copies, head)) is not None:
                    return result
            except StaleUpload:
                continue
            except OutcomeUnknown:
                if attempt == RESOLVES:
                    raise
        raise Contended(f"{self.store.url} was trimmed at each of {RESOLVES} tries; nothing was listed. Try again.")

    def _count_listed(self, head: Head, since: int, tried: Sequence[BatchListing]) -> int:
        """The records of those batches that are listed at ``since`` or behind it; none if they are trimmed already."""
        ours = {batch.location for batch in tried}
        if not ours:
            return 0
        with suppress(MissingChunk):
            entries = entries_from(head, max(since, head.floor), StoredChunks(self.store))
            return sum(entry.count for entry in entries if entry.location in ours)
        return 0

    def commit(
        self, batches: Sequence[BatchListing], *, since: int | None = None, upto: int = 1, expect: int | None = None
    ) -> Receipt:
        """List staged batches in this order, and advance the writer's position to ``upto``, all or nothing.

        Nothing happens if the position is ``upto`` or past it already: the receipt is that of the commit which
        reached it, without an offset if there was a later one. ``since`` is the position from which it advances;
        ``OutOfOrder`` if the log has another one; None: from any. ``expect``: only if the log ends there, else
        ``ExpectationFailed``. Without batches nothing is remembered either. A writer of one commit has the positions
        0 and 1.
        """
        lister = Lister(self.store, self.log_id, env=self.env)

        def done(head: Head) -> Receipt | None:
            return self._receipt(head, batches, since, upto)

        def enlist(copies: list[BatchListing], head: Head) -> Receipt | None:
            number = self._position(head, since, upto)
            writer = advancing(self.writer, upto - number) if is_source(self.writer) else self.writer
            return done(lister.enlist_group(Group(writer, number, copies, expect)))

        return self._listed(lister, batches, done, enlist)

    def _position(self, head: Head, since: int | None, upto: int) -> int:
        last = head.writers.get(self.writer)
        if last is None:
            # A source may begin at any position. One below ``upto``, since the advance has fewer bits than a position.
            return (upto - 1 if is_source(self.writer) else 0) if since is None else since
        if since is not None and since != last.number:
            raise OutOfOrder(
                f"{self.store.url} has this source up to position {last.number}, and the append begins at {since}: "
                "another job appends it, too, or the log lost its end. Nothing was appended."
            )
        return last.number

    def _receipt(self, head: Head, batches: Sequence[BatchListing], since: int | None, upto: int) -> Receipt | None:
        """The receipt of the commit up to a position, if the log has it, or if there is nothing to commit."""
        last = head.writers.get(self.writer)
        reached = 0 if last is None else last.number + (not is_source(self.writer))
        if last is not None and reached >= upto:
            return Receipt(last.first if reached == upto else None, last.count if reached == upto else 0)
        self._position(head, since, upto)  # refuses another one, before anything is copied
        return None if batches else Receipt(None, 0)

    def listed_by_this_run(self, receipt: Receipt) -> bool:
        """Whether the batches of a receipt are of this run; True if the log no longer has them."""
        head = Lister(self.store, self.log_id, env=self.env).cell.read().value
        if receipt.first is None or receipt.first < head.floor:
            return True
        with suppress(MissingChunk):  # trimmed since
            entry = next(entries_from(head, receipt.first, StoredChunks(self.store)))
            return is_of_run(entry.writer, self.run)
        return True

    def _copied(self, batches: Sequence[BatchListing], generation: int) -> list[BatchListing]:
        def copied(batch: BatchListing) -> BatchListing:
            location = f"batches/{generation:016d}/{self.env.chance.uuid().hex}.batch"
            try:
                copy_object(self.store, batch.location, location)
            except NotFound as error:
                raise NotFound(
                    f"The staged object {self.store.url}/{batch.location} is gone: its job took longer than a day, "
                    "was discarded, or its tasks have a disk of their own. Nothing was appended: run the job again."
                ) from error
            return replace(batch, location=location, generation=generation)

        return side_by_side(copied, batches, threads=_COPIES, name="strandline-copy")

    def discard(self, batches: Sequence[BatchListing] | None = None) -> None:
        """Delete staged batches that were copied or are not needed; None: all batches of the job.

        A trim does that, too, a day later.
        """
        if batches is None:
            paths = [item.path for item in self.store.list(f"{FOLDER}{self.job}/")]
        else:
            paths = [batch.location for batch in batches]
        side_by_side(self.store.delete, paths, threads=_COPIES, name="strandline-copy")
