"""The cell that fences the tierers of a replicated log."""

from __future__ import annotations

from uuid import UUID

import pytest

from strandline.errors import CorruptData
from strandline.formats.json.checked import decode_checked, encode_checked
from strandline.model.stamp import Stamped
from strandline.tier.claim import CLAIM_CODEC, TierClaim

CLAIM = Stamped(TierClaim(UUID(int=1), 3, "a", (UUID(int=5), UUID(int=6))))


def without(*names: str) -> bytes:
    fields = decode_checked(CLAIM_CODEC.encode(CLAIM), "strandline-tierer", 1)
    return encode_checked("strandline-tierer", 1, {name: each for name, each in fields.items() if name not in names})


def test_a_claim_is_read_as_it_was_written() -> None:
    assert CLAIM_CODEC.decode(CLAIM_CODEC.encode(CLAIM), "here") == CLAIM


def test_a_claim_without_retired_segments_has_retired_none() -> None:
    assert CLAIM_CODEC.decode(without("retired"), "here").value == TierClaim(UUID(int=1), 3, "a")


@pytest.mark.parametrize("name", ["log_id", "term", "node"])
def test_a_claim_without_any_other_field_is_damaged(name: str) -> None:
    with pytest.raises(CorruptData, match=f"here is damaged: '{name}' is missing"):
        CLAIM_CODEC.decode(without(name), "here")
