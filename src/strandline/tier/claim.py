"""The cell that fences the tierers of a replicated log: the primary of the latest term writes the cold tier.

The slot of a tierer is in the primary's own log, and another primary has another log. So the primary of each term
claims the cold tier in the store that all of them reach, before it reads the events of segments; a primary of a lower
term finds that before it finishes a copy, or deletes anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, final
from uuid import UUID

from strandline.errors import AlreadyExists, CorruptData, Fenced, InvalidInput, NotFound, UnsupportedVersion
from strandline.formats.json.checked import decode_checked, encode_checked
from strandline.model.json_values import natural, read_record, stamp_fields
from strandline.model.stamp import OpId, Stamped
from strandline.storage.cell import StoreCell
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.store import ObjectStore

CLAIM_FILE: Final = "tierer.json"
FORMAT_VERSION: Final = 1
_KIND: Final = "strandline-tierer"


@dataclass(frozen=True, slots=True)
class TierClaim:
    """Who writes the cold tier of a log."""

    log_id: UUID
    term: int
    """The term of the primary that claimed it."""
    node: str
    """The primary's name."""


class ClaimCodec:
    """A claim as a cell's content."""

    def encode(self, state: Stamped[TierClaim]) -> bytes:
        """The bytes of a state."""
        claim = {**asdict(state.value), "log_id": str(state.value.log_id)}
        return encode_checked(_KIND, FORMAT_VERSION, {"min_reader": FORMAT_VERSION, **claim, **stamp_fields(state)})

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[TierClaim]:
        """The state in these bytes; damage is an error, never "unclaimed"."""
        try:
            fields = decode_checked(bytes(data), _KIND, FORMAT_VERSION)
            if natural(fields["min_reader"]) > FORMAT_VERSION:
                raise UnsupportedVersion(f"{where} was written by a newer version of strandline: upgrade this one.")
            return read_record(Stamped, fields, value=read_record(TierClaim, fields))
        except (ValueError, KeyError, InvalidInput) as error:
            raise CorruptData(f"{where} is damaged: {error}. Restore the object.") from error


@final
class ClaimCell:
    """The claim of one primary in its term, on the cold tier of its log."""

    def __init__(
        self,
        place: ObjectStore,
        path: str,
        claim: TierClaim,
        *,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """``claim`` is what this primary writes to the object ``path``; nothing is read or written yet."""
        self._claim = claim
        self._chance = chance
        self._cell: StoreCell[TierClaim] = StoreCell(place, path, ClaimCodec(), clock=clock, chance=chance)

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
        if known == self._claim:
            return known
        if known.term >= self._claim.term:
            raise self._fenced(known)
        return self._claim

    def check(self) -> None:
        """``Fenced`` unless the claim of this term is the latest."""
        try:
            known = self._cell.read().value
        except NotFound as error:
            raise Fenced(f"{self._cell.where} is gone: the cold tier has to be claimed again.") from error
        self._check_log(known)
        if known != self._claim:
            raise self._fenced(known)

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
