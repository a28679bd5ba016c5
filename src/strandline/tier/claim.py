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
from strandline.tier.cell_codec import TierCellCodec

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

    def is_of(self, other: TierClaim) -> bool:
        """Whether both are of one primary, in one term."""
        return replace(self, retired=()) == replace(other, retired=())

    def after(self, known: TierClaim) -> TierClaim | None:
        """This claim after the known one, with its retired segments; None if a primary of a later term has claimed.

        >>> first, second = (TierClaim(UUID(int=1), term, "a") for term in (1, 2))
        >>> second.after(replace(first, retired=(UUID(int=5),))).retired
        (UUID('00000000-0000-0000-0000-000000000005'),)
        >>> first.after(second) is None
        True
        """
        if not self.is_of(known) and known.term >= self.term:
            return None
        return replace(self, retired=known.retired)


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

    def _after(self, known: TierClaim) -> TierClaim:
        self._check_log(known)
        claim = self._claim.after(known)
        if claim is None:
            raise self._fenced(known)
        return claim

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

    def _own(self, known: TierClaim) -> TierClaim:
        self._check_log(known)
        if not self._claim.is_of(known):
            raise self._fenced(known)
        return known

    def _check_log(self, known: TierClaim) -> None:
        if known.log_id != self._claim.log_id:
            raise CorruptData(
                f"{self._cell.where} is of log {known.log_id}, but this is log {self._claim.log_id}: restore the right "
                "object."
            )

    def _fenced(self, known: TierClaim) -> Fenced:
        return Fenced(
            f"{self._claim.node} leads in term {self._claim.term}, but {known.node} has written the cold tier in term "
            f"{known.term}: this node writes no segments. Let it follow that primary; or, if that one is gone for "
            "good, promote this node again, so that it leads in a later term."
        )
