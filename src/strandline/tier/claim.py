"""The cell that fences the tierers of a replicated log: the primary of the latest term writes the cold tier.

The slot of a tierer is in the primary's own log, and another primary has another log. So the primary of each term
claims the cold tier in the store that all of them reach, before it reads the events of segments; a primary of a lower
term finds that before it finishes a copy.

A check is not enough before a deletion: a primary may be paused between the two while the next one claims the tier,
relies on the segment, and trims its own log. So segments are deleted only after they were noted in the cell by
compare-and-set. Either the note is first, and the next primary relies on no noted segment; or the claim is first, and
the note is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, final
from uuid import UUID

from strandline.errors import AlreadyExists, CorruptData, Fenced, NotFound
from strandline.model.arguments import Natural
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectStore
from strandline.tier.attachment import TierCellCodec

CLAIM_FILE: Final = "tierer.json"


@dataclass(frozen=True, slots=True)
class TierClaim:
    """The claim of the one writer of a log's cold tier."""

    log_id: UUID
    term: Natural
    """The term of the primary that claimed it."""
    node: str
    """The primary's name."""
    retired: tuple[UUID, ...] = ()
    """Segments that this primary or a former one deletes: no later primary relies on them."""


CLAIM_CODEC: Final = TierCellCodec("strandline-tierer", TierClaim, optional=("retired",))


@final
class ClaimCell:
    """The claim of one primary in its term, on the cold tier of its log."""

    def __init__(self, place: ObjectStore, path: str, claim: TierClaim, *, env: Env = SYSTEM) -> None:
        """``claim`` is what this primary writes to the object ``path``; nothing is read or written yet."""
        self._claim = claim
        self._chance = env.chance
        self._cell: StoreCell[TierClaim] = StoreCell(place, path, CLAIM_CODEC, env=env)

    def take(self) -> None:
        """Durably claim the cold tier for this term. Idempotent; ``Fenced`` if a primary of a later term has."""
        op = OpId(self._chance.uuid())
        try:
            self._cell.update(op, self._after)
        except NotFound:
            try:
                self._cell.create(op, self._claim)
            except AlreadyExists:  # another primary was faster
                self._cell.update(op, self._after)

    def retire(self, segments: Iterable[UUID]) -> None:
        """Durably note segments that this primary is about to delete, in place of those noted before.

        ``Fenced``, and nothing may be deleted, unless the claim of this term is the latest.
        """
        retired = tuple(segments)
        self._cell.update(OpId(self._chance.uuid()), lambda known: replace(self._own(known), retired=retired))

    def check(self) -> TierClaim:
        """The claim of this term; ``Fenced`` unless it is the latest."""
        try:
            return self._own(self._cell.read().value)
        except NotFound as error:
            raise Fenced(f"{self._cell.where} is gone: the cold tier has to be claimed again.") from error

    def _after(self, known: TierClaim) -> TierClaim:
        """This claim with the segments of the known one; ``Fenced`` if another primary of this or a later term has."""
        if not self._is_own(known) and known.term >= self._claim.term:
            raise self._fenced(known)
        return replace(self._claim, retired=known.retired)

    def _own(self, known: TierClaim) -> TierClaim:
        if not self._is_own(known):
            raise self._fenced(known)
        return known

    def _is_own(self, known: TierClaim) -> bool:
        if known.log_id != self._claim.log_id:
            raise CorruptData(
                f"{self._cell.where} is of log {known.log_id}, but this is log {self._claim.log_id}: restore the right "
                "object."
            )
        return replace(known, retired=()) == replace(self._claim, retired=())

    def _fenced(self, known: TierClaim) -> Fenced:
        return Fenced(
            f"{self._claim.node} leads in term {self._claim.term}, but {known.node} has written the cold tier in term "
            f"{known.term}: this node writes no segments. Let it follow that primary; or, if that one is gone for "
            "good, promote this node again, so that it leads in a later term."
        )
