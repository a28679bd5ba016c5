"""The trimmer of an object log: invalidates slots, moves the floor, deletes unneeded objects.

Whether an object may be deleted never depends on a clock: an unlisted object may go when its generation can no longer
be listed, a trimmed one when the floor has moved past it. Clocks only decide when.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from typing import Final

from strandline.errors import Contended, NotFound
from strandline.formats.object.head import decode_cut, encode_cut
from strandline.formats.object.identity import LogIdentity
from strandline.log.object.head.edits import (
    Outdated,
    StaleUpload,
    Trim,
    apply_trim,
    begin_trim_round,
    bounds_of,
    cut_size,
    end_trim_round,
    is_due,
    plan_cut,
    set_back,
)
from strandline.log.object.head.head_log import HeadListing
from strandline.log.object.head.index import (
    DeletedObject,
    Listed,
    MissingChunk,
    bytes_from,
    entries_from,
    is_listed,
    newest_first,
    objects_of,
    references_of,
)
from strandline.log.object.maintain.clocks import Clocks, compare_clocks
from strandline.log.object.slots import Members, SlotKeeper
from strandline.log.object.staging import FOLDER as STAGED
from strandline.log.object.staging import KEPT_SECONDS
from strandline.log.slots.rules import has_expired, invalidate, is_idle, is_suspect, reason_to_invalidate, suspect
from strandline.log.slots.slot_metrics import report_invalid
from strandline.log.slots.trimming import ColdTierProof, consumed_floor, proven, retained_first, trim_floor, trim_to
from strandline.model.cursor import SECOND
from strandline.model.head import Cut, Entry, Head, Trimmed
from strandline.model.retention import TIER_SLOT, MaxAge, SlotLimits, SlotState
from strandline.model.segments import COLD_FILE
from strandline.storage import metrics
from strandline.storage.objects.store import ObjectInfo
from strandline.storage.task_pool import side_by_side

GRACE: Final = 600.0
"""Seconds that trimmed objects are kept, for readers that have planned to read them."""

_LOGGER = logging.getLogger(__name__)
_TRIES: Final = 16
WORKERS: Final = 8
"""Number of objects that are deleted at the same time."""

_NAME: Final = re.compile(r"(?:batches|trimmed|chunks)/([0-9]{16})/[0-9a-f-]{32,64}\.(?:batch|cut|chunk)")
_CHUNK: Final = re.compile(r"chunks/[0-9]{16}/([0-9]{2})-([0-9]{20})-[0-9]{20}\.chunk")


@dataclass(slots=True)
class TrimResult:
    """Result of one trim, or of a dry run.

    ``trimmed_bytes`` are the bytes of the batches that it unlisted; they are deleted after the grace period.
    ``waiting`` counts earlier trims within their grace period. ``orphans`` were uploaded and never listed. ``clocks``
    is the result of the clock check; None if nothing was done.
    """

    floor: int = 0
    trimmed_records: int = 0
    trimmed_bytes: int = 0
    invalidated: list[SlotState] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)
    deleted: int = 0
    deleted_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    waiting: int = 0
    skipped: bool = False
    dry_run: bool = False
    clocks: Clocks | None = None


@dataclass(frozen=True, slots=True)
class Trimmer:
    """Trims one log and deletes its garbage. Any number may run at once, on any machine; each may crash at any time."""

    slots: SlotKeeper
    read_identity: Callable[[], LogIdentity]
    grace: float = GRACE
    """Seconds that trimmed objects are kept."""

    def run(
        self,
        *,
        pause: float = 0.0,
        dry_run: bool = False,
        everything: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> TrimResult:
        """One round: invalidate, trim, delete. ``on_progress`` is called with the number of objects deleted so far.

        Does nothing if a round began less than ``pause`` seconds ago. ``everything`` examines all generations
        again, not only those since the last round: for objects of uploads that arrived very late.
        """
        head, done = self.slots.read_head(), TrimResult(dry_run=dry_run)
        if not is_due(head.trim_began, self.slots.env.clock.now(), pause):
            done.floor, done.skipped = head.floor, True
            return done
        with metrics.timed(metrics.TRIM_SECONDS, self.slots.env.clock.monotonic):
            clocks = self._compare_clocks(head, done)
            self.trim(done, clocks)
            self._sweep(done, clocks, everything=everything, on_progress=on_progress or (lambda _: None))
        return done

    def _edit(self, edit: Callable[[Head], Head]) -> Head:
        return self.slots.head.update(self.slots.op(), edit, role="trimmer")

    def _compare_clocks(self, head: Head, done: TrimResult) -> Clocks:
        """Determine the time, and set back listing times that are certainly ahead of it."""
        clocks = compare_clocks(self.slots.store, head, env=self.slots.env, dry_run=done.dry_run)
        done.clocks = clocks
        for said in clocks.warnings():
            _LOGGER.warning("%s: %s", self.slots.store.url, said)
        if clocks.may_set_back and not done.dry_run:
            self._edit(lambda now: set_back(now, clocks.now()))
        return clocks

    def trim(self, done: TrimResult, clocks: Clocks) -> None:
        """Invalidate the slots that break a limit, then move the floor as far as policy and slots allow."""
        for _ in range(_TRIES):
            identity = self.read_identity()
            self._watch_holders(identity.limits, done, clocks.now())
            head = self.slots.read_head()
            # The head comes first: a slot that is created or moved after this read makes the trim fail.
            members = self._judged(head, identity.limits, done, clocks)
            done.floor = head.floor
            floor = trim_floor(members.states, members.pending)
            consumed = consumed_floor(members.states)
            policy = head.floor
            if clocks.may_expire or not isinstance(identity.retention, MaxAge):
                listing = HeadListing(head, self.slots.chunks, clocks.earliest())
                policy = listing.policy_start(identity.retention, consumed)
            wanted = trim_to(policy, floor)
            if wanted <= head.floor:  # slots may be below it, in the cold tier
                return
            upto = self._boundary(head, wanted)
            if upto <= head.floor or self._try_trim(head, members, upto, done, clocks):
                return
        raise Contended(
            f"{self.slots.head.where} changed at each of {_TRIES} tries to trim the log; nothing was trimmed."
        )

    def _try_trim(self, head: Head, members: Members, upto: int, done: TrimResult, clocks: Clocks) -> bool:
        cut = plan_cut(head, upto)
        size = self._size(head, cut)
        if not done.dry_run:
            trim = Trim(
                cut,
                f"trimmed/{head.generation:016d}/{self.slots.env.chance.uuid().hex}.cut",
                head.generation,
                members.membership,
            )
            self.slots.store.put(trim.location, encode_cut(cut))
            try:
                self._edit(lambda now: apply_trim(now, trim, clocks.now()))
            except (Outdated, StaleUpload):
                return False
        done.floor = upto
        done.trimmed_records += cut.upto - cut.since
        done.trimmed_bytes += size
        return True

    def _size(self, head: Head, cut: Cut) -> int:
        """The bytes of the batches of a cut; about that if another trimmer has deleted a chunk meanwhile."""
        try:
            return bytes_from(head, cut.since, self.slots.chunks) - bytes_from(head, cut.upto, self.slots.chunks)
        except MissingChunk:
            return cut_size(cut)

    def _boundary(self, head: Head, offset: int) -> int:
        """The offset, or the first offset of the batch that holds it: batches are trimmed whole."""
        entry = next(entries_from(head, offset, self.slots.chunks), None)
        return head.next_offset if entry is None else entry.first

    def _watch_holders(self, limits: SlotLimits, done: TrimResult, now: int) -> None:
        """Mark slots whose holders may be gone with the time of that finding, and end expired holds."""
        for state in self.slots.members(self.slots.read_head()).states:
            if has_expired(state, now):
                if done.dry_run or self.slots.expire(state.name, now):
                    done.expired.append(state.name)
            elif state.name != TIER_SLOT and is_suspect(state, limits, now) and not done.dry_run:
                with contextlib.suppress(NotFound):  # a hold that its reader has released
                    self.slots.cell(state.name).update(self.slots.op(), partial(suspect, judged=state, now=now))

    def _judged(self, head: Head, limits: SlotLimits, done: TrimResult, clocks: Clocks) -> Members:
        """The remaining slots, after those that break a limit were durably invalidated."""
        members = self.slots.members(head)
        now, states = clocks.now(), []
        members = replace(members, states=self._proven(head, members.states))
        first = retained_first(members.states, head.floor)
        for state in members.states:
            behind = bytes_from(head, max(state.position, head.floor), self.slots.chunks) if limits.lag_bytes else 0
            reason = reason_to_invalidate(
                state, first=first, behind=behind, limits=limits, is_idle=is_idle(state, limits, now)
            )
            if reason is not None:
                edit = partial(invalidate, judged=state, reason=reason, now=now)
                judged = edit(state) if done.dry_run else self.slots.cell(state.name).update(self.slots.op(), edit)
                if judged.invalid is not None:
                    done.invalidated.append(judged)
                    if not done.dry_run:
                        report_invalid(judged, self.slots.store.url, behind, _LOGGER)
                states.append(judged)
            elif not (done.dry_run and has_expired(state, now)):
                states.append(state)
        return replace(members, states=states)

    def _proven(self, head: Head, states: list[SlotState]) -> list[SlotState]:
        """The slots without a tierer's position that belongs to another history: the log may have been restored."""

        def fingerprint_at(offset: int) -> int | None:
            before = next(entries_from(head, offset - 1, self.slots.chunks), None)
            return None if before is None else before.fingerprint

        copied = ColdTierProof(bounds_of(head), self._is_tiered, fingerprint_at)
        return proven(states, copied)

    def _is_tiered(self) -> bool:
        """Whether the log has a cold tier, and its tierer's slot, which the head does not list, was never dropped."""
        return any(self.slots.store.list(COLD_FILE)) and not self.slots.was_dropped(TIER_SLOT)

    def _sweep(self, done: TrimResult, clocks: Clocks, *, everything: bool, on_progress: Callable[[int], None]) -> None:
        """Delete objects that can never be listed, and objects that were trimmed a grace period ago."""

        def begin(head: Head) -> Head:
            now = clocks.now()
            return begin_trim_round(head, now, listed=now if clocks.keeps_time else 0)

        # From here on nothing of an older generation can be listed: what is unlisted now stays unlisted.
        head = begin(self.slots.read_head()) if done.dry_run else self._edit(begin)
        low = 0 if everything else head.swept_generation
        cuts = self._cuts(head)
        garbage = [*self._garbage(head, cuts, low), *self._abandoned(clocks)]
        if garbage:
            self.slots.read_head()  # raises if the log was deleted: some of it may be of one that was made there since
        done.orphans = len(garbage)
        done.orphan_bytes = sum(item.size for item in garbage)
        self._delete([DeletedObject(item.path, 0, item.size) for item in garbage], done, on_progress)
        if not done.dry_run:
            metrics.ORPHANS_DELETED.inc(done.orphans)
            metrics.ORPHAN_BYTES_DELETED.inc(done.orphan_bytes)
        finished = []
        for gone, cut in takewhile(lambda item: item[0].at + self.grace * SECOND <= clocks.now(), cuts):
            # In order: a later cut may delete a chunk through which an earlier one finds its batches.
            if cut is not None:
                for group in objects_of(cut, self.slots.chunks):
                    self._delete(group, done, on_progress)
            self._delete([DeletedObject(gone.location, 0, 0)], done, on_progress)
            finished.append(gone.location)
        done.waiting = len(cuts) - len(finished)
        if not done.dry_run:
            swept, ended = head.min_generation, frozenset(finished)
            self._edit(lambda now: end_trim_round(now, swept, ended))

    def _cuts(self, head: Head) -> list[tuple[Trimmed, Cut | None]]:
        """The trims whose objects are not all deleted yet, oldest first; None for one that another trimmer ended."""
        cuts: list[tuple[Trimmed, Cut | None]] = []
        for gone in head.trimmed:
            cut = None
            with contextlib.suppress(NotFound):
                data = self.slots.store.get(gone.location).data
                cut = decode_cut(data, f"{self.slots.store.url}/{gone.location}")
            cuts.append((gone, cut))
        return cuts

    def _garbage(self, head: Head, cuts: list[tuple[Trimmed, Cut | None]], low: int) -> Iterator[ObjectInfo]:
        high = head.min_generation
        known = [cut for _, cut in cuts if cut is not None]
        listed = {gone.location for gone in head.trimmed}
        listed.update(self._recent(references_of(head), head.tail, head.floor, low))
        for cut in known:
            # A cut with an interrupted deletion has lost its oldest chunks, and so the batches below those.
            with contextlib.suppress(MissingChunk):
                listed.update(self._recent(cut.chunks, cut.entries, cut.since, low))
        for folder in ("batches", "trimmed"):
            yield from (item for item in self._of_generations(folder, low, high) if item.path not in listed)
        if low == 0:  # a full round also finds holds of readers that died
            yield from self._ended_holds(head)
        roots = [references_of(head), *(cut.chunks for cut in known)]
        for item in self._of_generations("chunks", low, high):
            if not any(self._has_chunk(item.path, root) for root in roots):
                yield item

    def _abandoned(self, clocks: Clocks) -> Iterator[ObjectInfo]:
        """Staged objects of jobs that have staged nothing for a day; such a job then fails, and can be repeated."""
        if not clocks.may_expire:
            return
        before = clocks.earliest() - KEPT_SECONDS * SECOND
        for _, group in groupby(self.slots.store.list(STAGED), key=lambda item: item.path.rpartition("/")[0]):
            items = list(group)
            if max(item.modified for item in items) < before:
                yield from items

    def _ended_holds(self, head: Head) -> Iterator[ObjectInfo]:
        for item in self.slots.store.list("slots/hold-"):
            name = item.path.removeprefix("slots/").removesuffix(".json")
            if name not in head.slots and self.slots.was_dropped(name):
                yield item

    def _recent(self, references: Listed, entries: Iterable[Entry], since: int, low: int) -> Iterator[str]:
        """The listed objects of generation ``low`` and above.

        While one generation is current, only objects of it and of the one before can be listed. So an entry that is
        two generations older than ``low`` was listed before ``low`` was current, and so were all entries before it.
        """
        for entry in newest_first(references, entries, since, self.slots.chunks):
            generation = _generation(entry.location)
            if generation is None or generation < low - 1:
                return
            if generation >= low:
                yield entry.location

    def _has_chunk(self, path: str, root: Listed) -> bool:
        name = _CHUNK.fullmatch(path)
        try:
            return name is None or is_listed(path, int(name[1]), int(name[2]), root, self.slots.chunks)
        except MissingChunk:
            return True  # unknown is not garbage

    def _of_generations(self, folder: str, low: int, high: int) -> Iterator[ObjectInfo]:
        """The objects of generations ``low`` up to ``high``; names sort by generation."""
        for item in self.slots.store.list(f"{folder}/", start_after=f"{folder}/{low:016d}"):
            generation = _generation(item.path)
            if generation is not None and generation >= high:
                return
            if generation is not None:
                yield item

    def _delete(self, group: list[DeletedObject], done: TrimResult, on_progress: Callable[[int], None]) -> None:
        size = sum(gone.size for gone in group)
        if not done.dry_run:
            paths = [gone.path for gone in group]
            side_by_side(self.slots.store.delete, paths, threads=WORKERS, name="strandline-trim")
            if any(gone.records for gone in group):  # else orphans, a chunk or a record of a trim
                metrics.BATCHES_TRIMMED.inc(len(group))
                metrics.RECORDS_TRIMMED.inc(sum(gone.records for gone in group))
                metrics.BYTES_TRIMMED.inc(size)
        done.deleted += len(group)
        done.deleted_bytes += size
        on_progress(done.deleted)


def _generation(path: str) -> int | None:
    """The generation in an object's name; None for other names, whose objects are never deleted."""
    name = _NAME.fullmatch(path)
    return None if name is None else int(name[1])
